"""What parameters mean, from their classes and conf/base: for the terminal, and for the manual."""

import re
from collections.abc import Mapping
from types import NoneType
from typing import Any, NamedTuple, NoReturn

import click
import yaml
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from rlhf_pipeline.commands.command import Command, plain_table
from rlhf_pipeline.config.block import OPERATIONAL, Block, blocks_in
from rlhf_pipeline.config_loader import PACKAGED
from rlhf_pipeline.errors import ConfigError, suggestion
from rlhf_pipeline.pipelines.table import parameter_blocks

BOUNDS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}


class Parameter(NamedTuple):
    """One parameter of a block."""

    name: str
    default: Any
    """As JSON; `PydanticUndefined` if the user must set it. Of a block: what its class has not."""
    type: str
    meaning: str

    def __str__(self) -> str:
        """The default as a line of YAML."""
        if self.default is PydanticUndefined:
            return f"{self.name}:"
        text = yaml.safe_dump(self.default, default_flow_style=True, width=1000, sort_keys=False)
        text = text.removesuffix("...\n").strip()
        return f"{self.name}: {text}".replace("e-0", "e-")


class Part(NamedTuple):
    """A block at a place of the parameters."""

    place: str
    block: type[Block]
    given: Mapping[str, Any]
    """The values that the place has instead of the defaults of the class."""

    @property
    def summary(self) -> str:
        """The beginning of the docstring."""
        return re.split(r"(?<! al)\. |: ", self.block.document())[0].rstrip(".")

    def parameters(self) -> list[Parameter]:
        """All parameters that a user can set."""
        properties = self.block.model_json_schema()["properties"]
        return [
            Parameter(name, _default(field, self.given.get(name)), *_words(field, properties[name]))
            for name, field in self.block.model_fields.items()
            if name not in self.block.unused and field.annotation is not NoneType
        ]

    def inside(self, name: str) -> list["Part"]:
        """The blocks that one parameter can have."""
        field = self.block.model_fields[name]
        given = _default(field, self.given.get(name))
        given = given if isinstance(given, Mapping) else {}
        return [Part(f"{self.place}.{name}", each, given) for each in blocks_in(field.annotation)]


@click.command(cls=Command)
@click.argument("place", metavar="[BLOCK]", required=False)
def params(console: Console, place: str | None) -> None:
    """Show the parameters of BLOCK, such as ppo.sampling, with their defaults and meanings.

    Without BLOCK, list the blocks.
    """
    if place is None:
        table = plain_table("block")
        table.add_column("")
        for part in top_parts():
            table.add_row(f"[bold]{part.place}", part.summary)
        console.print(table)
        return
    for part, chosen in _find(place):
        console.print(Text(part.place, "bold cyan"), Text(part.block.document()))
        for each in chosen:
            line = Text.assemble("  ", (str(each), "bold"), "  ", (each.type, "dim"))
            console.print(line, Padding(Text(each.meaning), (0, 0, 0, 6), expand=False), sep="\n")
        if len(chosen) > 1 and any("block" in each.type for each in chosen):
            console.print(f"[dim]kedro rlhf params {part.place}.NAME shows a block of these.")


def top_parts() -> list[Part]:
    """The top-level blocks, with the values of conf/base."""
    files = sorted((PACKAGED / "base").glob("parameters*.yml"))
    base = {k: v for file in files for k, v in yaml.safe_load(file.read_text("utf-8")).items()}
    return [Part(name, block, base.get(name) or {}) for name, block in parameter_blocks().items()]


def _find(place: str) -> list[tuple[Part, list[Parameter]]]:
    """The blocks at a place with their parameters, or with the one that the place names.

    Raises ConfigError for an unknown name.
    """
    first, *names = place.split(".")
    parts = [part for part in top_parts() if part.place == first]
    if not parts:
        _refuse("BLOCK", first, [part.place for part in top_parts()])
    for index, name in enumerate(names):
        found = [(part, each) for part in parts for each in part.parameters() if each.name == name]
        if not found:
            _refuse(parts[0].place, name, [each.name for p in parts for each in p.parameters()])
        inner = [each for part, _ in found for each in part.inside(name)]
        if not inner and names[index + 1 :]:
            raise ConfigError(f"{place}: found no block at {parts[0].place}.{name}, expected one")
        if not inner:
            return [(part, [each]) for part, each in found]
        parts = inner
    return [(part, part.parameters()) for part in parts]


def _refuse(place: str, name: str, known: list[str]) -> NoReturn:
    hint = suggestion(name, known) or f": {', '.join(dict.fromkeys(known))}"
    raise ConfigError(f"{place}: found {name!r}, expected the name of a parameter{hint}")


def _default(field: FieldInfo, given: Any) -> Any:
    """The default of a field, or what is given instead of it or of its parts."""
    default = field.default
    if isinstance(default, Block):
        default = default.model_dump(mode="json", exclude_defaults=True)
    elif default is not PydanticUndefined:
        default = to_jsonable_python(default, exclude_none=True)
    if isinstance(default, Mapping) and isinstance(given, Mapping):
        return {**default, **given}
    return default if given is None else given


def _words(field: FieldInfo, schema: Mapping[str, Any]) -> tuple[str, str]:
    """Type and meaning of a field."""
    text = " ".join(str(schema.get("description", "")).split())
    if not text and (inner := next(blocks_in(field.annotation), None)):
        text = " ".join(inner.document().split())
    outside = "; not in the recipe" if field.json_schema_extra == OPERATIONAL else ""
    return _type(schema) + outside, text.replace("None:", "null:")


def _type(schema: Mapping[str, Any]) -> str:
    """A JSON schema in words."""
    if "$ref" in schema:
        return "block"
    if either := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(map(_type, either)))
    if values := schema.get("enum") or ([schema["const"]] if "const" in schema else None):
        return ", ".join(f"`{each}`" for each in values)
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema['items'])}" if schema.get("items") else "list"
    bounds = ", ".join(f"{sign} {schema[key]:g}" for key, sign in BOUNDS.items() if key in schema)
    names = {"null": "`null`", "boolean": "true or false", "string": "text", "object": "mapping"}
    return f"{names.get(kind, kind)} {bounds}".strip()
