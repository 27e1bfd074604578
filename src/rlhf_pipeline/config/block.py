"""The base of every parameter block: strict, frozen, documented field by field."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, ClassVar, Literal, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializationInfo,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic_core import ErrorDetails

from rlhf_pipeline.errors import suggestion, without_secrets

Precision = Literal["fp32", "bf16", "fp16"]
Quantization = Literal["nf4"]
Kernels = Literal["liger", "compile"]


RECIPE = "recipe"
"""Context of a dump without operational fields."""
OPERATIONAL: dict[str, Any] = {"operational": True}
"""Mark of an operational field in the JSON schema."""


class Block(BaseModel):
    """Parameters, validated by one class in YAML, Kedro nodes and `job.json`: no unknown keys, no
    changes.

    The docstring under a field (meaning, unit, default) becomes its description in the JSON schema.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    unused: ClassVar[Collection[str]] = ()
    """Inherited fields that the block refuses, which no list of parameters names."""

    def recipe(self) -> dict[str, Any]:
        """All values that can change the result, as JSON types, without operational fields."""
        return self.model_dump(mode="json", context=RECIPE)

    def _faults(self) -> Iterator[str]:
        """Why values that are valid alone do not fit each other. The user sees the first reason."""
        yield from ()

    def _fault(self, place: str, expected: str, fix: str = "") -> str:
        """What the parameter at a place of this block is, and what is expected instead."""
        value = attrgetter(place)(self)
        found = "a block" if isinstance(value, Block) else value
        return f"{place}: found {found}, expected {expected}" + (f". Fix: {fix}" if fix else "")

    @model_validator(mode="after")
    def _fit(self) -> Self:
        for fault in self._faults():
            raise ValueError(fault)
        return self

    @model_serializer(mode="wrap")
    def _dumped(self, dump: Callable[..., Any], info: SerializationInfo) -> Any:
        values, fields = dump(self), type(self).model_fields
        if info.context != RECIPE:
            return values
        return {k: v for k, v in values.items() if fields[k].json_schema_extra != OPERATIONAL}


def operational(default: Any, **kwargs: Any) -> Any:
    """A field that does not change the result (log interval, port), and so no fingerprint."""
    return Field(default, json_schema_extra=OPERATIONAL, **kwargs)


def leaves(parameters: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """The values of nested mappings by dotted name, in order, lists and empty mappings included."""
    found: list[tuple[str, Any]] = []
    for name, value in parameters.items():
        path = f"{prefix}{name}"
        is_inner = isinstance(value, Mapping) and value
        found += leaves(value, f"{path}.") if is_inner else [(path, value)]
    return found


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
            _line(name, block, detail)
            for index, detail in enumerate(error.errors())
            if detail["type"] != "too_short"
            or not any(place[: len(detail["loc"])] == detail["loc"] for place in places[:index])
        ]
        return None, list(dict.fromkeys(found))


def _line(name: str, block: type[Block], detail: ErrorDetails) -> str:
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
            blocks = [] if field is None else list(blocks_in(field.annotation))
            if len(blocks) != 1:
                return []
            block = blocks[0]
    return list(block.model_fields)


def blocks_in(annotation: Any) -> Iterator[type[Block]]:
    """The blocks in a type such as `tuple[SourceConfig, ...] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, Block):
        yield annotation
    for argument in get_args(annotation):
        yield from blocks_in(argument)
