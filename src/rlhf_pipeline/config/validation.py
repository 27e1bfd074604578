"""The faults of a parameter block in words: what was found, what is expected."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rlhf_pipeline.config.block import Block
from rlhf_pipeline.errors import suggestion, without_secrets

_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "date": "a date like 2024-07-26",
    "list": "a list",
    "tuple": "a list",
    "dict": "parameters by name",
    "model": "parameters by name",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:g}",
    "finite_number": "a finite number",
    "literal_error": "{expected}",
    "string_too_short": "at least {min_length} characters",
    "string_pattern_mismatch": "text that matches {pattern}",
    "too_short": "at least {min_length} values",
    "too_long": "at most {max_length} values",
}
"""What is expected, by pydantic's name of an error or the name before its first underscore."""


def validated(name: str, block: type[Block], value: Any) -> tuple[Block | None, list[str]]:
    """The parameter block `name`, or None with its faults, one line each."""
    try:
        return block.model_validate(value), []
    except ValidationError as error:
        places = [detail["loc"] for detail in error.errors()]
        # A list whose item is invalid also counts as too short.
        found = [
            _fault(name, block, detail)
            for index, detail in enumerate(error.errors())
            if detail["type"] != "too_short"
            or not any(place[: len(detail["loc"])] == detail["loc"] for place in places[:index])
        ]
        return None, list(dict.fromkeys(found))


def _fault(name: str, block: type[Block], detail: ErrorDetails) -> str:
    # The names of alternatives in a union look like "literal[...]" or "list[str]".
    parts = [part for part in detail["loc"] if not re.search(r"\W", str(part))]
    place = ".".join([name, *map(str, parts)])
    kind, value = detail["type"], detail["input"]
    if kind == "missing":
        return f"{place}: missing. Fix: set it"
    if kind == "extra_forbidden":
        known = _fields(block, parts[:-1])
        listed = f"; the parameters there are {', '.join(known)}" if known else ""
        return f"{place}: unknown parameter{suggestion(str(parts[-1]), known) or listed}"
    expected = _EXPECTED.get(kind) or _EXPECTED.get(kind.partition("_")[0])
    found = without_secrets(repr(value))
    if expected is None or kind == "value_error":
        message = detail["msg"].removeprefix("Value error, ")
        is_shown = not (isinstance(value, Mapping) or message.startswith("found "))
        return f"{place}: {message}" + (f" (found {found})" if is_shown else "")
    return f"{place}: found {found}, expected {expected.format(**detail.get('ctx', {}))}"


def _fields(block: type[Block], parts: Sequence[str | int]) -> list[str]:
    """The fields of the block at a place; empty if the place has several kinds of blocks."""
    for part in parts:
        if isinstance(part, str):
            field = block.model_fields.get(part)
            blocks = [] if field is None else list(_blocks(field.annotation))
            if len(blocks) != 1:
                return []
            block = blocks[0]
    return list(block.model_fields)


def _blocks(annotation: Any) -> Iterator[type[Block]]:
    """The blocks in a type such as `tuple[SourceConfig, ...] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, Block):
        yield annotation
    for argument in get_args(annotation):
        yield from _blocks(argument)
