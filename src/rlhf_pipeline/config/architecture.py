"""Field names of a Hugging Face model family, parsed from the source of its configuration class.

transformers silently accepts unknown fields, so a typo would build another model. Importing
transformers would take two seconds on every command; parsing the source takes milliseconds.
"""

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhf_pipeline.errors import ConfigError, suggestion

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
        """Return the fields under the family's own names.

        Unknown fields that are null are left out: null unsets a field that another environment sets
        for another family. Raises ValueError if a field is unknown, is determined by the tokenizer,
        or is set under two names.
        """
        wanted = {
            name: value
            for name, value in architecture.items()
            if value is not None or name in self.defaults
        }
        known = [field for field in self.defaults if field not in FROM_TOKENIZER]
        names = [*known, *self.aliases]
        unknown = [name for name in wanted if self.aliases.get(name, name) not in self.defaults]
        if unknown:
            named = ", ".join(f"{name}{suggestion(name, names)}" for name in unknown)
            raise ValueError(
                f"found {named}, expected fields of {self.model_type}: {', '.join(known)}. "
                "Fix: correct the name, or set a field of another environment to null"
            )
        fields: dict[str, Any] = {}
        for name, value in wanted.items():
            own = self.aliases.get(name, name)
            if own in FROM_TOKENIZER:
                raise ValueError(
                    f"found {name}, expected no field that the tokenizer determines. "
                    "Fix: remove it; base_model.vocab_size sets the vocabulary size"
                )
            if own in fields:
                raise ValueError(
                    f"found {own} twice, under both of its names, expected one value. "
                    "Fix: set one of them to null"
                )
            fields[own] = value
        return fields

    def value(self, architecture: Mapping[str, Any], name: str) -> Any:
        """Return the value of a field by its standard name; None if the family lacks the field."""
        own = self.aliases.get(name, name)
        return architecture.get(own, self.defaults.get(own))


@cache
def find_family(model_type: str) -> Family:
    """Return the family of a `model_type`; raise `ValueError` if transformers has none."""
    package = find_spec("transformers")
    assert package is not None and package.origin is not None, "transformers is a dependency"
    models = Path(package.origin).parent / "models"
    folder = model_type.replace("-", "_")
    source = models / folder / f"configuration_{folder}.py"
    if not source.is_file():
        known = [
            path.name
            for path in models.iterdir()
            if (path / f"configuration_{path.name}.py").is_file()
        ]
        raise ValueError(
            f"found model_type {model_type}{suggestion(model_type, known)}, "
            "expected a model type of transformers"
        )
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.ClassDef):
            constants, fields = _assignments(node)
            if constants.get("model_type") == model_type:
                return Family(model_type, fields, constants.get("attribute_map", {}))
    raise ValueError(f"found no configuration class of model_type {model_type} in {source}")


def positions(architecture: Mapping[str, Any]) -> int | None:
    """The maximum number of tokens of a model configuration; None if unlimited or not known."""
    try:
        family = find_family(str(architecture.get("model_type")))
    except ValueError:  # a model with its own code
        return architecture.get("max_position_embeddings")
    found: int | None = family.value(architecture, "max_position_embeddings")
    return found


def positions_in(folder: Path) -> int | None:
    """`positions` of the model saved in a folder; None without a config.json.

    Raises ConfigError if config.json is not JSON.
    """
    file = folder / "config.json"
    if not file.is_file():
        return None
    try:
        return positions(json.loads(file.read_text()))
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{file}: found {error}, expected JSON. Fix: save the model again with save_pretrained"
        ) from error


def _assignments(node: ast.ClassDef) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the constants of a configuration class, and its annotated fields."""
    constants: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    for statement in node.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                constants[name] = _literal(value)
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=value):
                is_field = not name.startswith("_") and "ClassVar" not in ast.unparse(annotation)
                (fields if is_field else constants)[name] = _literal(value)
    return constants, fields


def _literal(node: ast.expr | None) -> Any:
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None
