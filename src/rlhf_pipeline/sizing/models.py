"""Published base models by short name: where they are, and the fields of their config.json.

Source: config.json of each repository on the Hugging Face hub; for OPT-175B and BLOOM also table 1
of Zhang et al. 2022 and table 3 of Le Scao et al. 2022.
"""

import json
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


def _opt() -> Iterator[tuple[str, PublishedModel]]:
    for size, hidden, layers, heads in (
        ("125m", 768, 12, 12),
        ("350m", 1024, 24, 16),
        ("1.3b", 2048, 24, 32),
        ("2.7b", 2560, 32, 32),
        ("6.7b", 4096, 32, 32),
        ("13b", 5120, 40, 40),
        ("30b", 7168, 48, 56),
        ("66b", 9216, 64, 72),
        ("175b", 12288, 96, 96),
    ):
        config = {
            "model_type": "opt",
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "ffn_dim": 4 * hidden,
            "max_position_embeddings": 2048,
            "vocab_size": 50272,
            "word_embed_proj_dim": 512 if size == "350m" else hidden,
        }
        yield f"opt-{size}", PublishedModel(f"facebook/opt-{size}", config)


def _bloom() -> Iterator[tuple[str, PublishedModel]]:
    for name, hidden, layers, heads in (
        ("bloom-560m", 1024, 24, 16),
        ("bloom-1b7", 2048, 24, 16),
        ("bloom-3b", 2560, 30, 32),
        ("bloom-7b1", 4096, 30, 32),
        ("bloom", 14336, 70, 112),
    ):
        config = {
            "model_type": "bloom",
            "hidden_size": hidden,
            "n_layer": layers,
            "n_head": heads,
            "vocab_size": 250880,
        }
        yield name, PublishedModel(f"bigscience/{name}", config)


def _gated() -> Iterator[tuple[str, PublishedModel]]:
    """Families with a gate, and with key-value heads shared by groups of queries."""
    for name, path, family, hidden, intermediate, layers, heads, shared, vocab, tied, positions in (
        ("llama-2-7b", "meta-llama/Llama-2-7b-hf", "llama", 4096, 11008, 32, 32, 32, 32000, 0, 4),
        ("llama-2-13b", "meta-llama/Llama-2-13b-hf", "llama", 5120, 13824, 40, 40, 40, 32000, 0, 4),
        ("llama-2-70b", "meta-llama/Llama-2-70b-hf", "llama", 8192, 28672, 80, 64, 8, 32000, 0, 4),
        ("llama-3-8b", "meta-llama/Meta-Llama-3-8B", "llama", 4096, 14336, 32, 32, 8, 128256, 0, 8),
        (
            "llama-3-70b", "meta-llama/Meta-Llama-3-70B",
            "llama", 8192, 28672, 80, 64, 8, 128256, 0, 8,
        ),
        (
            "mistral-7b", "mistralai/Mistral-7B-v0.1",
            "mistral", 4096, 14336, 32, 32, 8, 32000, 0, 32,
        ),
        ("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B", "qwen2", 896, 4864, 24, 14, 2, 151936, 1, 32),
        ("qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B", "qwen2", 1536, 8960, 28, 12, 2, 151936, 1, 32),
        ("qwen2.5-3b", "Qwen/Qwen2.5-3B", "qwen2", 2048, 11008, 36, 16, 2, 151936, 1, 32),
        ("qwen2.5-7b", "Qwen/Qwen2.5-7B", "qwen2", 3584, 18944, 28, 28, 4, 152064, 0, 32),
        ("qwen2.5-14b", "Qwen/Qwen2.5-14B", "qwen2", 5120, 13824, 48, 40, 8, 152064, 0, 32),
        ("qwen2.5-32b", "Qwen/Qwen2.5-32B", "qwen2", 5120, 27648, 64, 40, 8, 152064, 0, 32),
        ("qwen3-0.6b", "Qwen/Qwen3-0.6B-Base", "qwen3", 1024, 3072, 28, 16, 8, 151936, 1, 32),
        ("qwen3-1.7b", "Qwen/Qwen3-1.7B-Base", "qwen3", 2048, 6144, 28, 16, 8, 151936, 1, 32),
        ("qwen3-4b", "Qwen/Qwen3-4B-Base", "qwen3", 2560, 9728, 36, 32, 8, 151936, 1, 32),
        ("qwen3-8b", "Qwen/Qwen3-8B-Base", "qwen3", 4096, 12288, 36, 32, 8, 151936, 0, 32),
        ("qwen3-14b", "Qwen/Qwen3-14B-Base", "qwen3", 5120, 17408, 40, 40, 8, 151936, 0, 32),
    ):  # fmt: skip
        config = {
            "model_type": family,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": shared,
            "vocab_size": vocab,
            "tie_word_embeddings": bool(tied),
            "max_position_embeddings": 1024 * positions,
        }
        yield name, PublishedModel(path, config | ({"head_dim": 128} if family == "qwen3" else {}))


MODELS: Mapping[str, PublishedModel] = dict([*_opt(), *_bloom(), *_gated()])


def find_model(name: str) -> PublishedModel:
    """The model of a short name; raise ConfigError if there is none."""
    if name not in MODELS:
        raise ConfigError(
            f"model: found {name!r}{suggestion(name, MODELS)}, expected one of {', '.join(MODELS)}"
        )
    return MODELS[name]


def published(path: str) -> PublishedModel | None:
    """The model of an id on the hub, or its base model, of equal size; None if neither is known."""
    base = path.removesuffix("-Base").removesuffix("-Instruct")
    return next((m for m in MODELS.values() if m.path.removesuffix("-Base") == base), None)


def base_model_shape(config: BaseModelConfig) -> Shape | None:
    """The sizes of the base model; None if nothing on this machine says them.

    They are in its architecture, in its .gguf file, in the config.json of its folder, or in the
    table of published models. Raises ConfigError if the model is a mixture of experts, or a size is
    missing.
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
