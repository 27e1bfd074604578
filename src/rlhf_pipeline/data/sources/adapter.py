"""The declaration of a source, and how its rows become records, also by a map of columns."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from rlhf_pipeline.config.split import ColumnMap, SourceConfig
from rlhf_pipeline.data.records import Example, Message, Record, Role, Text, Unused

Row = dict[str, Any]
"""A row of a file or of the hub: column -> value. Nested columns are lists and dicts."""
Kind = Literal["comparisons", "demonstrations", "prompts", "text", "any"]
CONVERTED = "refs/convert/parquet"
"""Branch with the hub's own Parquet conversion of a repository, which needs no loading script."""

T = TypeVar("T")
Rows = Iterable[tuple[str, Row | Unused]]
Records = Iterator[tuple[str, Record | Unused]]
"""Places with their rows, some of them broken, and with the records made of them."""


class MalformedRowError(Exception):
    """A row cannot be parsed, for this reason."""


class SkippedRowError(Exception):
    """A sound row contains nothing to learn from, such as a tie, for this reason."""


@dataclass(frozen=True)
class Source:
    """A registry entry. A column map, or one of `parse`, `assemble`, `generate`, makes records."""

    name: str
    """The data set's name on the Hugging Face hub, or a name of this project."""
    kind: Kind
    """What its records are. "any": the configuration decides."""
    description: str = ""
    """One line about the data; that of our own sources is in docs/data.md."""
    columns: tuple[str, ...] | ColumnMap = ()
    """The columns that a function reads, or a map that makes records without one."""
    parse: Callable[[Row], Record] | None = None
    """From a row to its record; it raises MalformedRowError or SkippedRowError."""
    assemble: Callable[[Rows], Records] | None = None
    """For records that span several rows: from placed rows to placed records."""
    generate: Callable[[SourceConfig, int], Records] | None = None
    """For sources without files: from configuration and seed to placed records."""
    accepts: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """For sources without files: the values of `split` and `subset` that it knows."""
    revision: str | None = None
    """Default revision on the hub, such as CONVERTED. None: the main branch."""
    subset: str | None = None
    split: str = "train"
    """Default split on the hub, or of a saved DatasetDict."""
    local_only: bool = False
    """Whether it is not on the hub, so that `path` must be set."""
    extra: tuple[str, ...] = ()
    """The keys of `Example.extra`, if its examples have any."""
    libraries: tuple[str, ...] = ()
    """Libraries of the extra `gym` that generate the rows; their versions count."""
    strip: bool = False
    """Whether a column map removes the white space around answers."""


def outcome(parse: Callable[..., T], *arguments: Any) -> T | Unused:
    """The result of `parse`, or why it has none. If the last argument is a broken row, that row."""
    if isinstance(arguments[-1], Unused):
        return arguments[-1]
    try:
        return parse(*arguments)
    except MalformedRowError as fault:
        return Unused(str(fault))
    except SkippedRowError as reason:
        return Unused(str(reason), bad=False)


def columns_of(columns: ColumnMap) -> tuple[str, ...]:
    """The columns of a column map, dotted if nested."""
    named = columns.model_dump(exclude_none=True).values()
    return tuple(one for each in named for one in ((each,) if isinstance(each, str) else each))


_KINDS = {str: "a string", int: "a whole number", list: "a list", dict: "an object"}


def field(row: Row, column: str, kind: type[T]) -> T:
    """The value of a column; raises MalformedRowError if it is missing or of another type."""
    if column not in row:
        raise MalformedRowError(f"column {column!r} is missing")
    value = row[column]
    if not isinstance(value, kind):
        raise MalformedRowError(f"column {column!r} is {type(value).__name__}, not {_KINDS[kind]}")
    return value


def text(row: Row, column: str) -> str:
    """The string in a column; raises like `field`."""
    return field(row, column, str)


def number(row: Row, column: str) -> float:
    """The finite number in a column, also as text, as in CSV; raises like `field`."""
    value: Any = field(row, column, object)
    with suppress(TypeError, ValueError, OverflowError):
        if math.isfinite(found := float(value)):
            return found
    raise MalformedRowError(f"column {column!r} is not a finite number")


def question(*parts: str) -> tuple[Message, ...]:
    """A prompt of one user turn: all parts that are not blank, separated by an empty line."""
    return (Message("user", "\n\n".join(part for part in parts if part.strip())),)


def preferred(
    prompt: tuple[Message, ...], answers: tuple[str, str], scores: tuple[float, float]
) -> Example:
    """Choose the answer with the higher score; raises SkippedRowError for equal scores."""
    if scores[0] == scores[1]:
        raise SkippedRowError("the two answers have the same score")
    chosen, rejected = answers if scores[0] > scores[1] else answers[::-1]
    return Example(prompt, chosen, rejected)


_ROLES: dict[str, Role] = {
    "system": "system",
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "bot": "assistant", "tool": "tool",
}  # fmt: skip
"""Names of roles in use by OpenAI, ShareGPT and OpenAssistant -> role."""


def messages(value: Any, column: str) -> tuple[Message, ...]:
    """Parse a list of {"role": ..., "content": ...} or ShareGPT's {"from": ..., "value": ...}.

    The content is a string, or OpenAI's list of parts, whose texts are joined.
    """
    if not isinstance(value, list) or not value:
        raise MalformedRowError(f"column {column!r} is not a list of messages")
    found = []
    for item in value:
        if not isinstance(item, dict):
            fault = "is not an object with role and content"
            raise MalformedRowError(f"a message in column {column!r} {fault}")
        role_key, content_key = ("from", "value") if "from" in item else ("role", "content")
        role = _ROLES.get(text(item, role_key))
        if role is None:
            raise MalformedRowError(f"a message's role is not one of {', '.join(_ROLES)}")
        calls = item.get("tool_calls")
        said = "" if calls and item.get(content_key) is None else _content(item, content_key)
        keys = {"tool_calls": _with_objects(calls)} if calls else {}
        if role == "tool":
            keys = {key: item[key] for key in ("name", "tool_call_id") if item.get(key) is not None}
        found.append(Message(role, said, _as_json(keys, "a description of tools is")))
    return tuple(found)


def _content(item: Row, column: str) -> str:
    """A content, or the texts of one in parts: {"type": "text", "text": ...} each."""
    if not isinstance(parts := item.get(column), list):
        return text(item, column)
    for part in parts:
        if not isinstance(part, dict) or part.get("type", "text") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise MalformedRowError(f"a content part of type {kind}, not text")
    return "".join(text(part, "text") for part in parts)


def _with_objects(calls: Any) -> list[Any]:
    """Calls whose arguments are objects, as chat templates expect; OpenAI has them as JSON."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise MalformedRowError("the tool_calls of a message are not a list of objects")
    found = []
    for call in calls:
        function = call.get("function", call)
        if isinstance(function, dict):
            function = function | {"arguments": _parsed_json(function.get("arguments"))}
        found.append(call | {"function": function} if "function" in call else function)
    return found


def _as_json(value: Any, what: str) -> str:
    """A value as JSON, or "" for an empty one; the fault of another kind of value names `what`."""
    try:
        return json.dumps(value) if value else ""
    except (TypeError, ValueError) as error:
        raise MalformedRowError(f"{what} not JSON: {error}") from None


def _parsed_json(value: Any) -> Any:
    with suppress(ValueError):
        return json.loads(value) if isinstance(value, str) else value
    return value


def parser(named: ColumnMap, *, strip: bool = False) -> Callable[[Row], Record]:
    """The parse function of a column map; it may remove the white space around answers."""

    def parse(row: Row) -> Record:
        values = {column: _value(row, column) for column in columns_of(named)}
        return _record(values, named, strip=strip)

    return parse


def _record(row: Row, named: ColumnMap, *, strip: bool) -> Record:
    if named.text is not None:
        return Text(text(row, named.text))
    given = (named.chosen, named.rejected, named.response, named.messages)
    columns = named.answers or [column for column in given if column is not None]
    answers = [_dialogue(row[column], column, "assistant") for column in columns]
    prompts = [dialogue[:-1] for dialogue in answers if len(dialogue) > 1]
    if isinstance(named.prompt, str):
        prompts.append(_dialogue(row[named.prompt], named.prompt, "user"))
    elif named.prompt is not None:
        parts = (column for column in named.prompt if row[column] is not None)
        prompts.append(question(*(text(row, column) for column in parts)))
    if not prompts:
        raise MalformedRowError("no mapped column contains the prompt: set columns.prompt")
    if any(prompt != prompts[0] for prompt in prompts):
        raise MalformedRowError("the columns contain different prompts")
    if any(dialogue[-1].further for dialogue in answers):
        raise SkippedRowError("the last answer calls a tool, which no stage learns")
    said = [dialogue[-1].content for dialogue in answers]
    said = list(map(str.strip, said)) if strip else said
    label = _label(row, named)
    example = Example(prompts[0], *said, label=label)
    if named.scores is not None and label is None:
        first, second = (number(row, score) for score in named.scores)
        example = preferred(prompts[0], (said[0], said[1]), (first, second))
    further = {column: row[column] for column in named.extra or ()}
    return replace(
        example,
        reference=_reference(row, named.reference) if named.reference else None,
        tools=_schemas(row, named.tools) if named.tools else None,
        extra=_as_json(further, f"the columns {', '.join(further)} are") or None,
    )


def _schemas(row: Row, column: str) -> str | None:
    schemas = _parsed_json(row[column])
    is_list = isinstance(schemas, list) and all(isinstance(one, dict) for one in schemas)
    if schemas is not None and not is_list:
        raise MalformedRowError(f"column {column!r} is not a list of objects, nor its JSON")
    return _as_json(schemas, "a description of tools is") or None


def _label(row: Row, named: ColumnMap) -> bool | None:
    """Whether the answers are good: true, false, 1 or 0, also as text, since CSV has only text.
    With scores, it may be missing."""
    value = None if named.label is None else row[named.label]
    if named.label is None or (named.scores is not None and value in (None, "")):
        return None
    known = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
    if (found := known.get(str(value).strip().lower())) is None:
        raise MalformedRowError(f"column {named.label!r} is neither true nor false, 1 nor 0")
    return found


def _reference(row: Row, column: str) -> str | None:
    """The true answer as text (numbers as Python prints them); None if the row has none."""
    value = row[column]
    if not isinstance(value, str | int | float | None):
        kind = type(value).__name__
        raise MalformedRowError(f"column {column!r} is {kind}, not a string or a number")
    return None if value is None else str(value).strip() or None  # CSV has no other way to omit it


def _dialogue(value: Any, column: str, role: Role) -> tuple[Message, ...]:
    if isinstance(value, str):
        return (Message(role, value),)
    if not isinstance(value, list):
        kind = type(value).__name__
        raise MalformedRowError(f"column {column!r} is {kind}, not a string or a list of messages")
    dialogue = messages(value, column)
    if dialogue[-1].role != role:
        raise MalformedRowError(f"the dialogue in column {column!r} does not end with the {role}")
    return dialogue


def _value(row: Row, column: str) -> Any:
    """The value of a column or dotted path, whose numbers are places in lists. A column with dots
    in its name takes precedence. A row whose list is shorter is skipped."""
    if column in row:
        return row[column]
    value: Any = row
    for name in column.split("."):
        if isinstance(value, list) and name.isdecimal():
            if int(name) >= len(value):
                raise SkippedRowError(f"the list of column {column!r} is shorter")
            value = value[int(name)]
        elif isinstance(value, dict) and name in value:
            value = value[name]
        else:
            listed = ", ".join(map(repr, row))
            raise MalformedRowError(f"column {column!r} is missing; the columns are {listed}")
    return value


SOURCES = (Source("files", "any", local_only=True),)
