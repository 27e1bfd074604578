"""What parameters mean, from their classes and conf/base: for the terminal, and for the manual."""

import re
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, NamedTuple

import click
import yaml
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from rlhf_pipeline.commands.command import Command, plain_table
from rlhf_pipeline.config.block import OPERATIONAL, Block, blocks_in
from rlhf_pipeline.errors import ConfigError, suggestion
from rlhf_pipeline.kedro_run.config_loader import PACKAGED
from rlhf_pipeline.pipelines.table import parameter_blocks

BOUNDS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
TYPES = {"null": "`null`", "boolean": "true or false", "string": "text", "object": "mapping"}

_SENTENCE = re.compile(r"(?<! al)\.(?: |$)|: ")
"""The end of the first sentence of a docstring, or of what stands before its colon."""


class Parameter(NamedTuple):
    """A parameter at its place; a top-level block is one, too."""

    place: str
    default: Any
    """As JSON; `PydanticUndefined` if the user must set it. Of a block: what its class has not."""
    values: str
    meaning: str
    blocks: Sequence[type[Block]]
    """The kinds of blocks that it can be."""

    def __str__(self) -> str:
        """The name and the default as a line of YAML."""
        name, text = self.place.rpartition(".")[2], ""
        if self.default is not PydanticUndefined:
            style = {"default_flow_style": True, "sort_keys": False, "width": 1000}
            text = yaml.safe_dump(self.default, **style).removesuffix("...\n")
        return f"{name}: {text}".replace("e-0", "e-").strip()

    def inside(self, block: type[Block]) -> list["Parameter"]:
        """What the user can set in it if it is this kind of block."""
        given = self.default if isinstance(self.default, Mapping) else {}
        schema, found = block.model_json_schema()["properties"], []
        for name, field in block.model_fields.items():
            if name in block.unused or field.annotation is NoneType:
                continue
            blocks = list(blocks_in(field.annotation))
            words = (field.description or document(blocks[0])).replace("None:", "null:")
            outside = "; not in the recipe" if field.json_schema_extra == OPERATIONAL else ""
            place, kind = f"{self.place}.{name}", _type(schema[name]) + outside
            default = _default(field, given.get(name))
            found.append(Parameter(place, default, kind, " ".join(words.split()), blocks))
        return found


@click.command(cls=Command)
@click.argument("place", metavar="[BLOCK]", required=False)
def params(console: Console, place: str | None) -> None:
    """Show the parameters of BLOCK, such as ppo.sampling, with their defaults and meanings.

    Without BLOCK, list the blocks.
    """
    if place is None:
        table = plain_table("block")
        table.add_column("")
        for each in top_level():
            table.add_row(f"[bold]{each.place}", each.meaning)
        console.print(table)
        return
    for found in _found(place):
        sections = [(document(block), found.inside(block)) for block in found.blocks]
        for text, rows in sections or [("", [found])]:
            console.print(Text.assemble((found.place, "bold cyan"), "  ", text))
            for each in rows:
                console.print(Text.assemble("  ", (str(each), "bold"), "  ", (each.values, "dim")))
                console.print(Padding(Text(each.meaning), (0, 0, 0, 6), expand=False))


def top_level() -> list[Parameter]:
    """The top-level blocks, with the values of conf/base and the beginnings of their docstrings."""
    files = sorted((PACKAGED / "base").glob("parameters*.yml"))
    base = {k: v for file in files for k, v in yaml.safe_load(file.read_text("utf-8")).items()}
    return [
        Parameter(name, base.get(name), "block", _SENTENCE.split(document(block))[0], [block])
        for name, block in parameter_blocks().items()
    ]


def document(block: type[Block]) -> str:
    """The first paragraph of the docstring of a class."""
    return " ".join((block.__doc__ or "").split("\n\n")[0].split())


def _found(place: str) -> list[Parameter]:
    """The parameters at a place, of which kinds of blocks may have several; ConfigError if none."""
    found, inside = list[Parameter](), top_level()
    for name in place.split("."):
        known = [each.place.rpartition(".")[2] for each in inside]
        if name not in known:
            hint = suggestion(name, known) or f": {', '.join(dict.fromkeys(known)) or 'none'}"
            kind = "a parameter" if found else "a block"
            raise ConfigError(f"{place}: found {name!r}, expected {kind}{hint}")
        found = [each for each, its in zip(inside, known, strict=True) if its == name]
        inside = [inner for each in found for kind in each.blocks for inner in each.inside(kind)]
    return found


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
    return f"{TYPES.get(kind, kind)} {bounds}".strip()
