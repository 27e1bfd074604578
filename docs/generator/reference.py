"""Reference pages: parameters from their pydantic models, commands from click."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import click
import yaml

from rlhf_pipeline.cli import cli
from rlhf_pipeline.config.block import OPERATIONAL, Block
from rlhf_pipeline.pipelines.table import parameter_blocks

BASE = Path(__file__).parents[2] / "conf" / "base"
BOUNDS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}


def parameters() -> str:
    """A section for each parameter block, with a table of its fields."""
    places: dict[type[Block], list[str]] = {}
    for name, block in parameter_blocks().items():
        visit(block, name, places)
    published = base_values()
    shared = Counter(where[0] for where in places.values())
    names = {
        block.__name__: where[0] if len(where) == shared[where[0]] == 1 else words(block)
        for block, where in places.items()
    }
    return "\n".join(
        line for block, where in places.items() for line in section(block, where, names, published)
    )


def visit(block: type[Block], place: str, places: dict[type[Block], list[str]]) -> None:
    """Note where a block occurs, and the blocks of its fields."""
    places.setdefault(block, []).append(place)
    for name, field in block.model_fields.items():
        is_list = "tuple" in str(field.annotation) or "list" in str(field.annotation)
        for inner in blocks_in(field.annotation):
            visit(inner, f"{place}.{name}{'[]' if is_list else ''}", places)


def blocks_in(annotation: Any) -> Iterator[type[Block]]:
    """The parameter blocks that a type contains."""
    if inspect.isclass(annotation) and issubclass(annotation, Block):
        yield annotation
    for inner in get_args(annotation):
        yield from blocks_in(inner)


def words(block: type[Block]) -> str:
    """The name of a class in words: `Frozen DeepSpeed` of FrozenDeepSpeedConfig."""
    text = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", block.__name__.removesuffix("Config"))
    text = text.replace("Deep Speed", "DeepSpeed").replace("Lo RA", "LoRA")
    return text[0] + re.sub(r"\b[A-Z](?=[a-z]+\b)", lambda m: m[0].lower(), text[1:])


def section(
    block: type[Block], places: list[str], names: Mapping[str, str], published: Mapping[str, Any]
) -> Iterator[str]:
    """The table of one block."""
    top = len(places) == 1 and "." not in places[0]
    name = names[block.__name__]
    name = f"`{name}`" if name == places[0] else name
    yield from ("", f"{'##' if top else '###'} {name}", "", inspect.cleandoc(block.__doc__ or ""))
    if name != f"`{places[0]}`":
        yield from ("", f"In {', '.join(f'`{place}`' for place in places)}.")
    yield from ("", "| parameter | type | default | meaning |", "|---|---|---|---|")
    schema = block.model_json_schema(by_alias=True)
    for field, given in schema["properties"].items():
        cells = (
            f"`{field}`",
            type_of(given, names),
            default_of(block, field, given, places, published),
            meaning_of(block, field, given),
        )
        yield f"| {' | '.join(' '.join(cell.split()).replace('|', '&#124;') for cell in cells)} |"


def type_of(schema: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """A JSON schema in words, with links to the sections of blocks."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[block](#{anchor(names[name])})" if name in names else name
    if "anyOf" in schema or "oneOf" in schema:
        kinds = [type_of(each, names) for each in schema.get("anyOf") or schema["oneOf"]]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{each}`" for each in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "any")
    if kind == "null":
        return "`null`"
    if kind == "array":
        items = schema.get("items") or {}
        return f"list of {type_of(items, names)}" if items else "list"
    if kind == "object":
        return "mapping"
    bounds = [f"{sign} {schema[key]:g}" for key, sign in BOUNDS.items() if key in schema]
    return " ".join([kind, ", ".join(bounds)]).strip()


def anchor(heading: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def default_of(
    block: type[Block],
    field: str,
    given: Mapping[str, Any],
    places: list[str],
    published: Mapping[str, Any],
) -> str:
    """The default of the class, and the values of conf/base that differ."""
    required = block.model_fields[field].is_required() if field in block.model_fields else False
    default = given.get("default")
    own = "required" if required else f"`{short(default)}`"
    if isinstance(default, Mapping):
        own = "its defaults"
    found = {place: value_at(published, f"{place}.{field}") for place in places}
    found = {
        p: v for p, v in found.items() if not isinstance(v, Mapping) and v not in (None, default)
    }
    if len(places) == 1 and found:
        return f"`{short(found[places[0]])}`"
    return "; ".join([own, *(f"`{short(value)}` in `{place}`" for place, value in found.items())])


def short(value: Any) -> str:
    """A value as in YAML."""
    return (
        yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()
    )


def meaning_of(block: type[Block], field: str, given: Mapping[str, Any]) -> str:
    """The docstring under the field."""
    mark = " Not part of the recipe." if given.items() >= OPERATIONAL.items() else ""
    text = given.get("description") or ""
    if not text and (found := next(blocks_in(block.model_fields[field].annotation), None)):
        text = inspect.cleandoc(found.__doc__ or "").split("\n\n")[0]
    return text + mark


def base_values() -> dict[str, Any]:
    """The parameters of conf/base."""
    files = sorted(BASE.glob("parameters*.yml"))
    return {k: v for file in files for k, v in (yaml.safe_load(file.read_text()) or {}).items()}


def value_at(values: Mapping[str, Any], path: str) -> Any:
    """A value by its dotted name, or None."""
    found: Any = values
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def commands() -> str:
    """A section for each command."""
    rlhf = cli.commands["rlhf"]
    assert isinstance(rlhf, click.Group)
    context = click.Context(rlhf)
    each: dict[str, click.Command] = {"kedro run": cli.commands["run"]}
    for name in rlhf.list_commands(context):
        if command := rlhf.get_command(context, name):
            each[f"kedro rlhf {name}"] = command
    return "\n".join(line for name, command in each.items() for line in usage(name, command))


def usage(name: str, command: click.Command) -> Iterator[str]:
    """The usage, help and options of one command."""
    context = click.Context(command, info_name=name)
    pieces = [p for p in command.collect_usage_pieces(context) if p != "[OPTIONS]"]
    yield from (
        "",
        f"## `{name}`",
        "",
        "```text",
        " ".join([name, *pieces, "[OPTIONS]"]),
        "```",
        "",
    )
    yield inspect.cleandoc(command.help or "").replace("\b\n", "")
    yield from ("", "| option | meaning |", "|---|---|")
    for parameter in command.get_params(context):
        if record := parameter.get_help_record(context):
            option, meaning = (" ".join(part.split()).replace("|", "&#124;") for part in record)
            yield f"| `{option}` | {meaning} |"
