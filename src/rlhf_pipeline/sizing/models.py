"""Published base models by short name (`models.toml`), and the sizes of the configured one."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_pipeline.config.base_model import BaseModelConfig
from rlhf_pipeline.errors import ConfigError, suggestion
from rlhf_pipeline.sizing.shape import Shape


@dataclass(frozen=True)
class PublishedModel:
    """A model on the hub."""

    path: str
    """Its id."""
    config: Mapping[str, Any]

    @property
    def shape(self) -> Shape:
        return Shape.of(self.config)


TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
INSTRUCT: Mapping[str, str] = TABLE.pop("instruct")
"""The id on the hub of the chat model that was made from a base model, by its short name."""


def _published() -> Iterator[tuple[str, PublishedModel]]:
    for family, found in TABLE.items():
        for name, path, *values in found["models"]:
            sizes = dict(zip(found["columns"], values, strict=True))
            config = {"model_type": family, **found.get("shared", {}), **sizes}
            yield name, PublishedModel(path, config)


MODELS: Mapping[str, PublishedModel] = dict(_published())


def find_model(name: str) -> PublishedModel:
    """The model of a short name; raise ConfigError if there is none."""
    if name not in MODELS:
        raise ConfigError(
            f"model: found {name!r}{suggestion(name, MODELS)}, expected one of {', '.join(MODELS)}"
        )
    return MODELS[name]


def published(path: str) -> PublishedModel | None:
    """The model of an id on the hub, or the base model that it was made from; None if not known."""
    return next((m for name, m in MODELS.items() if path in (m.path, INSTRUCT.get(name))), None)


def base_model_shape(config: BaseModelConfig) -> Shape | None:
    """The sizes of the base model, in its architecture, its .gguf file, the config.json of its
    folder, or the table of published models; None if nothing on this machine says them.

    Raises ConfigError if the model is a mixture of experts, or a size is missing.
    """
    if config.architecture is not None:
        return Shape.of(config.architecture, vocab_size=config.vocab_size)
    path = str(config.path)
    if config.is_gguf and Path(path).is_file():
        return Shape.of(gguf_config(Path(path)))
    file = Path(path) / "config.json"
    if file.is_file():
        return Shape.of(json.loads(file.read_text()))
    model = published(path)
    return None if model is None else model.shape


GGUF_FIELDS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
}
"""Fields of config.json, and their names in llama.cpp's format after the architecture's."""


def gguf_config(file: Path) -> dict[str, Any]:
    """The sizes in a `.gguf` file as fields of a config.json. Its weights are not read."""
    from gguf import GGUFReader

    reader = GGUFReader(file)
    family = reader.fields["general.architecture"].contents()
    found = {name: reader.fields.get(f"{family}.{key}") for name, key in GGUF_FIELDS.items()}
    return {
        "model_type": family,
        "vocab_size": len(reader.fields["tokenizer.ggml.tokens"].data),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
    } | {name: field.contents() for name, field in found.items() if field is not None}
