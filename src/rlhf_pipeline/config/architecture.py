"""What a family of Hugging Face models calls its fields, read from the source of its configuration class.

transformers stores a field that it does not know and goes on, so a typo would build another model in silence. Importing it
tells the names too, but takes two seconds, on every command; its source takes milliseconds.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FROM_TOKENIZER = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")
"""Fields of every family that are the tokenizer's to decide."""


@dataclass(frozen=True)
class Family:
    """The fields of one `model_type`."""

    model_type: str
    defaults: Mapping[str, Any]
    """Every field with its default; None also where the default is no plain literal."""
    aliases: Mapping[str, str]
    """Standard names to the family's own: GPT-2's `n_positions` is `max_position_embeddings` elsewhere."""

    def given(self, architecture: Mapping[str, Any]) -> dict[str, Any]:
        """The architecture's fields under the family's own names, without those that are null and no field of it: null
        takes back what another environment gave for another family.

        Raises:
            ValueError: a field is not the family's, is the tokenizer's, or is given under both of its names.
        """
        wanted = {
            name: value
            for name, value in architecture.items()
            if value is not None or name in self.defaults
        }
        known = [field for field in self.defaults if field not in FROM_TOKENIZER]
        if unknown := [
            name for name in wanted if self.aliases.get(name, name) not in self.defaults
        ]:
            named = ", ".join(
                f"{name}{suggestion(name, [*known, *self.aliases])}" for name in unknown
            )
            raise ValueError(
                f"{self.model_type} has no field {named}; known are {', '.join(known)}; set to null what another "
                "environment gives"
            )
        fields: dict[str, Any] = {}
        for name, value in wanted.items():
            own = self.aliases.get(name, name)
            if own in FROM_TOKENIZER:
                raise ValueError(
                    f"{name} comes from the tokenizer; leave it out (base_model.vocab_size sets its size)"
                )
            if own in fields:
                raise ValueError(
                    f"{own} is given twice, as {own} and under another name; set one of them to null"
                )
            fields[own] = value
        return fields

    def value(self, architecture: Mapping[str, Any], name: str) -> Any:
        """What a model of this architecture has as `name` (a standard name), given or by default; None if no such field."""
        own = self.aliases.get(name, name)
        return architecture.get(own, self.defaults.get(own))


@cache
def find_family(model_type: str) -> Family:
    """The family of that `model_type`; raise `ValueError` if transformers has none."""
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
            f"model_type {model_type} is none that transformers has{suggestion(model_type, known)}"
        )
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.ClassDef):
            constants, fields = _assignments(node)
            if constants.get("model_type") == model_type:
                return Family(model_type, fields, constants.get("attribute_map", {}))
    raise ValueError(f"model_type {model_type} has no configuration class in {source}")


def _assignments(node: ast.ClassDef) -> tuple[dict[str, Any], dict[str, Any]]:
    """Constants of a configuration class and, by their annotation, its fields."""
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


def suggestion(name: str, known: Iterable[str]) -> str:
    """The known name that is nearest to an unknown one, as a part of an error message; empty if none is near."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f" (did you mean {close[0]}?)" if close else ""
