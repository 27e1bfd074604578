"""The base of every parameter block: strict, frozen, documented field by field."""

import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar, get_args, get_origin

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

from rlhf_pipeline.errors import suggestion

Precision = Literal["fp32", "bf16"]
Quantization = Literal["nf4"]
Kernels = Literal["liger", "compile"]

Own = TypeVar("Own", bound="Block")

RECIPE = "recipe"
"""Context of a dump without operational fields."""
OPERATIONAL: dict[str, Any] = {"operational": True}
"""Mark of an operational field in the JSON schema."""

ELSEWHERE = ("split.", "base_model.", "root")
"""How absolute places in `words.toml` begin."""


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

    def _given_but_unused(self, why: str) -> Iterator[str]:
        for name in self.unused:
            if getattr(self, name) != type(self).model_fields[name].default:
                yield f"{name}: found a value, expected none: {why}. Fix: remove {name}"

    def _fault(self, place: str, expected: str, fix: str = "") -> str:
        """What the parameter at a place of this block is, and what is expected instead."""
        value = attrgetter(place)(self)
        found = "a block" if isinstance(value, Block) else value
        return f"{place}: found {found}, expected {expected}" + (f". Fix: {fix}" if fix else "")

    @model_validator(mode="before")
    @classmethod
    def _over_defaults(cls, given: Any) -> Any:
        """An inner block is a layer over the default that this class has for it."""
        if not isinstance(given, Mapping):
            return given
        defaults = {name: field.default for name, field in cls.model_fields.items()}
        return {name: _layered(defaults.get(name), value) for name, value in given.items()}

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


def _layered(default: Any, given: Any) -> Any:
    """A value over the default of its field: a block by its fields, another value as a whole."""
    if not (isinstance(default, Block) and isinstance(given, Mapping)):
        return given
    layer = {name: getattr(default, name) for name in default.model_fields_set}
    return layer | {name: _layered(layer.get(name), value) for name, value in given.items()}


def operational(default: Any, **kwargs: Any) -> Any:
    """A field that does not change the result (log interval, port), and so no fingerprint."""
    return Field(default, json_schema_extra=OPERATIONAL, **kwargs)


def nearest(value: int, allowed: Iterable[int]) -> str:
    """The two allowed numbers that are nearest to a value, such as "6 or 8"."""
    return " or ".join(map(str, sorted(sorted(allowed, key=lambda one: abs(one - value))[:2])))


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
FIXES = {"'fp16'": "use bf16, or fp32 on GPUs older than Ampere"}
"""What to use instead of a value that earlier versions had."""


def validated(name: str, block: type[Own], value: Any) -> tuple[Own | None, list[str]]:
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
    # The names of alternatives in a union look like "literal[...]", "list[str]" or "str".
    parts = [part for part in detail["loc"] if not re.search(r"\W|^str$", str(part))]
    place = ".".join([name, *map(str, parts)])
    kind, value = detail["type"], detail["input"]
    if kind == "missing":
        return f"{place}: missing. Fix: set it"
    if kind == "extra_forbidden":
        known = _fields(block, parts[:-1])
        listed = f"; the parameters there are {', '.join(known)}" if known else ""
        return f"{place}: unknown parameter{meant(str(parts[-1]), known) or listed}"
    expected = _EXPECTED.get(kind) or _EXPECTED.get(kind.partition("_")[0])
    found = repr(value)
    if expected is None or kind == "value_error":
        message = detail["msg"].removeprefix("Value error, ")
        inner = message.partition(":")[0]
        if inner.partition(".")[0] in _fields(block, parts):
            return f"{place}.{message}"
        is_shown = not (isinstance(value, Mapping) or message.startswith("found "))
        return f"{place}: {message}" + (f" (found {found})" if is_shown else "")
    expected = expected.format(**detail.get("ctx", {}))
    fix = FIXES.get(found) if kind == "literal_error" else None
    return f"{place}: found {found}, expected {expected}" + (f". Fix: {fix}" if fix else "")


def meant(word: str, known: Mapping[str, Any]) -> str:
    """What an unknown parameter may mean, such as " (did you mean kl.coef?)", by `words.toml` and
    the types of the known parameters."""
    words = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
    for name in (*words.get(word.lower(), ()), word):
        if " " in name:
            return f"; {name}"
        if place := name if name.startswith(ELSEWHERE) else _place(name, known):
            return f" (did you mean {place}?)"
    return suggestion(word, known)


def _place(name: str, known: Mapping[str, Any]) -> str | None:
    """The place of a parameter in one of the known types, or in a block inside them."""
    first, _, rest = name.partition(".")
    if first in known and not rest:
        return name
    if first in known:
        inner_blocks = blocks_in(known[first])
        return name if any(_place(rest, _fields(each, ())) for each in inner_blocks) else None
    for field, kind in known.items():
        blocks = [] if get_origin(kind) in (tuple, list) else [*blocks_in(kind)]
        if len(blocks) == 1 and (inner := _place(name, _fields(blocks[0], ()))):
            return f"{field}.{inner}"
    return None


def _fields(block: type[Block], parts: Sequence[str | int]) -> dict[str, Any]:
    """The types of the fields at a place; none if the place has several kinds of blocks."""
    for part in parts:
        if isinstance(part, str):
            field = block.model_fields.get(part)
            blocks = [] if field is None else list(blocks_in(field.annotation))
            if len(blocks) != 1:
                return {}
            block = blocks[0]
    return {name: field.annotation for name, field in block.model_fields.items()}


def blocks_in(annotation: Any) -> Iterator[type[Block]]:
    """The blocks in a type such as `tuple[SourceConfig, ...] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, Block):
        yield annotation
    for argument in get_args(annotation):
        yield from blocks_in(argument)
