"""The base model, and the fields of its family, read from the source of transformers.

transformers silently accepts unknown fields, and importing it would slow down every command.
"""

import ast
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, field_validator

from rlhf_pipeline.config.block import Block
from rlhf_pipeline.errors import ConfigError, suggestion

TEMPLATE_DATE = date(2024, 7, 26)
"""The date in the template of Llama 3.1 where no clock is at hand."""

COMMIT, BYTES = "commit", "bytes"
"""Names of the digest of a base model: its commit on the hub, or its local bytes."""

FROM_TOKENIZER = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")
"""Fields of every family that the tokenizer determines."""


@dataclass(frozen=True)
class Family:
    """The fields of one `model_type`."""

    model_type: str
    defaults: Mapping[str, Any]
    """Default of every field; None if the default is not a literal."""
    aliases: Mapping[str, str]
    """The family's names by standard names: `max_position_embeddings` is GPT-2's `n_positions`."""

    def resolve(self, architecture: Mapping[str, Any]) -> dict[str, Any]:
        """The fields under the family's own names. Unknown ones that are null are left out;
        ValueError for others, those that the tokenizer determines, and those under two names."""
        fields: dict[str, Any] = {}
        unknown = []
        for name, value in architecture.items():
            own = self.aliases.get(name, name)
            if value is None and name not in self.defaults:
                continue
            if own not in self.defaults:
                unknown.append(name)
            elif own in FROM_TOKENIZER:
                raise ValueError(
                    f"found {name}, expected no field that the tokenizer determines. "
                    "Fix: remove it; base_model.vocab_size sets the vocabulary size"
                )
            elif own in fields:
                raise ValueError(
                    f"found {own} twice, under both of its names, expected one value. "
                    "Fix: set one of them to null"
                )
            fields[own] = value
        if unknown:
            known = [field for field in self.defaults if field not in FROM_TOKENIZER]
            names = [*known, *self.aliases]
            named = ", ".join(f"{name}{suggestion(name, names)}" for name in unknown)
            raise ValueError(
                f"found {named}, expected fields of {self.model_type}: {', '.join(known)}. "
                "Fix: correct the name, or set a field of another environment to null"
            )
        return fields

    def value(self, config: Mapping[str, Any], *names: str) -> Any:
        """What a configuration, or else the family, has under one of these standard names or the
        family's own name; None if neither has any, or the configuration has null alone."""
        names += tuple(self.aliases[name] for name in names if name in self.aliases)
        for fields in (config, self.defaults):
            if given := [fields[name] for name in names if name in fields]:
                return next((value for value in given if value is not None), None)
        return None


@cache
def find_family(model_type: str) -> Family:
    """The family of a `model_type`; raises `ValueError` if transformers has none."""
    package = find_spec("transformers")
    assert package is not None and package.origin is not None, "transformers is a dependency"
    models = Path(package.origin).parent / "models"
    folder = model_type.replace("-", "_").removesuffix("_text")  # of a family with images, too
    source = models / folder / f"configuration_{folder}.py"
    if not source.is_file():
        known = [path.parent.name for path in models.glob("*/configuration_*.py")]
        raise ValueError(
            f"found model_type {model_type}{suggestion(model_type, known)}, "
            "expected a model type of transformers"
        )
    for node in ast.parse(source.read_text()).body:
        constants, fields = dict[str, Any](), dict[str, Any]()
        for statement in getattr(node, "body", ()):
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)]):
                    constants[name] = _literal(statement.value)
                case ast.AnnAssign(target=ast.Name(id=name)) if not name.startswith("_"):
                    fields[name] = _literal(statement.value)
        if constants.get("model_type") == model_type:
            return Family(model_type, fields, constants.get("attribute_map", {}))
    raise ValueError(f"found no configuration class of model_type {model_type} in {source}")


def _literal(node: ast.expr | None) -> Any:
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


def reader(config: Mapping[str, Any]) -> Callable[..., Any]:
    """`Family.value` of a configuration, by its family; a model with its own code has none."""
    name = str(config.get("model_type"))
    try:
        family = find_family(name)
    except ValueError:
        family = Family(name, {}, {})
    return partial(family.value, config)


def positions(config: Mapping[str, Any] | None) -> int | None:
    """The maximum number of tokens of a model configuration; None if unlimited or not known."""
    return reader(config or {})("max_position_embeddings")


def saved_config(folder: Path) -> dict[str, Any] | None:
    """The config.json in a folder; None if there is none, ConfigError if it is no JSON."""
    file = folder / "config.json"
    try:
        return dict(json.loads(file.read_bytes())) if file.is_file() else None
    except ValueError as error:
        raise ConfigError(
            f"{file}: found {error}, expected JSON. Fix: save the model again with save_pretrained"
        ) from error


class BaseModelConfig(Block):
    """The model that all stages start from. Set `path`, or `architecture` with `vocab_size`."""

    # A refused path or an unknown field may contain a secret.
    model_config = ConfigDict(hide_input_in_errors=True)

    path: str | None = None
    """A causal language model with its tokenizer: a Hugging Face id (`facebook/opt-350m`) or a
    local folder. None: build a model from `architecture`."""
    revision: str | None = None
    """Branch, tag or commit of `path` on the hub; only a commit makes a run repeatable. None: the
    newest commit of the default branch."""
    trust_remote_code: bool = False
    """Execute the Python code in `path` (`auto_map`) with all your rights in every stage: read it
    and pin `revision` first. False: refuse a model whose type transformers does not know."""
    unpickle_weights: bool = False
    """Read the tensors of `pytorch_model.bin` (`weights_only`) if `path` has no safetensors."""
    template_date: date = TEMPLATE_DATE
    """The date (year-month-day) that chat templates render in place of today's."""
    architecture: dict[str, Any] | None = None
    """Fields of a Hugging Face configuration with `model_type` (`llama`, `opt`, ...) for a model
    with random weights, on small data. Null unsets a field that another environment sets."""
    vocab_size: int | None = Field(default=None, ge=300)
    """Size of the byte-level BPE vocabulary that a built model learns from the sources' texts."""

    @property
    def configuration(self) -> Mapping[str, Any] | None:
        """The fields of a built or local model; None for a model on the hub."""
        if self.architecture is not None:
            return self.architecture | {"vocab_size": self.vocab_size}
        return saved_config(Path(str(self.path)))

    @field_validator("architecture")
    @classmethod
    def _known_fields(cls, architecture: dict[str, Any] | None) -> dict[str, Any] | None:
        if architecture is None:
            return None
        if not isinstance(model_type := architecture.get("model_type"), str):
            raise ValueError(
                f"found model_type {model_type!r}, expected a name. "
                "Fix: set it to a model type of Hugging Face, such as llama or opt"
            )
        fields = {name: value for name, value in architecture.items() if name != "model_type"}
        family = find_family(model_type)
        architecture = {"model_type": model_type, **family.resolve(fields)}
        heads = family.value(architecture, "num_attention_heads")
        shared = family.value(architecture, "num_key_value_heads")
        if isinstance(heads, int) and isinstance(shared, int) and (shared < 1 or heads % shared):
            raise ValueError(
                f"num_key_value_heads: found {shared}, expected a divisor of num_attention_heads "
                f"{heads}. Fix: set it to {heads}, or to a smaller divisor for grouped queries"
            )
        return architecture

    @field_validator("path")
    @classmethod
    def _no_url(cls, path: str | None) -> str | None:
        if path is not None and "://" in path:
            raise ValueError(
                "found a URL, expected a Hugging Face id or a folder. "
                "Fix: use an id, and set the hub's token as HF_TOKEN in the environment"
            )
        return str(Path(path).expanduser()) if path is not None and path.startswith("~") else path

    def _faults(self) -> Iterator[str]:
        if self.path is not None and self.architecture is not None:
            yield "found both path and architecture, expected one. Fix: set the other one to null"
        if self.path is None and (self.trust_remote_code or self.unpickle_weights):
            yield (
                "found trust_remote_code or unpickle_weights without path, expected path. "
                "Fix: set path, or set both to false"
            )
        if self.path is None and (self.architecture is None or self.vocab_size is None):
            yield (
                "found neither path nor architecture with vocab_size, expected one of them. "
                "Fix: set path to a Hugging Face id or a folder, or set both others to build a "
                "model"
            )
