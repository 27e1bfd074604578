"""The declaration of a source: its name, its columns, and how its rows become records."""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from rlhf_pipeline.config.split import ColumnMap, SourceConfig
from rlhf_pipeline.data.records import Example, Message, Record, Role, Unused

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
        calls, content = item.get("tool_calls"), item.get(content_key)
        if calls and content is None:
            item = item | {content_key: ""}
        said = _joined(content) if isinstance(content, list) else text(item, content_key)
        keys = {"tool_calls": _with_objects(calls)} if calls else {}
        if role == "tool":
            keys = {key: item[key] for key in ("name", "tool_call_id") if item.get(key) is not None}
        found.append(
            Message(role, said, as_json(keys, "a description of tools is") if keys else "")
        )
    return tuple(found)


def as_json(value: Any, what: str) -> str:
    """A value as JSON; raises MalformedRowError, of `what`, if JSON does not know it."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise MalformedRowError(f"{what} not JSON: {error}") from None


def parsed_json(value: Any) -> Any:
    """What a string of JSON says, or any other value itself."""
    with suppress(ValueError):
        return json.loads(value) if isinstance(value, str) else value
    return value


def _with_objects(calls: Any) -> Any:
    """Calls whose arguments are objects, as chat templates expect; OpenAI has them as JSON."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise MalformedRowError("the tool_calls of a message are not a list of objects")
    found = []
    for call in calls:
        function = call.get("function", call)
        if isinstance(function, dict):
            function = function | {"arguments": parsed_json(function.get("arguments"))}
        found.append(call | {"function": function} if "function" in call else function)
    return found


def _joined(parts: list[Any]) -> str:
    """The texts of a content in parts: {"type": "text", "text": ...} each."""
    for part in parts:
        if not isinstance(part, dict) or part.get("type", "text") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise MalformedRowError(f"a content part of type {kind}, not text")
    return "".join(text(part, "text") for part in parts)


def compared(chosen: tuple[Message, ...], rejected: tuple[Message, ...]) -> Example:
    """One comparison from two dialogues that differ in the last answer; else they are malformed."""
    if chosen[-1].role != "assistant" or rejected[-1].role != "assistant":
        raise MalformedRowError("the dialogue does not end with the assistant")
    if chosen[:-1] != rejected[:-1]:
        raise MalformedRowError("the dialogues differ before the last answer")
    return Example(chosen[:-1], chosen[-1].content, rejected[-1].content)


def turns(dialogue: str, marker: re.Pattern[str]) -> tuple[str, tuple[Message, ...]]:
    """Split a dialogue in one string into the text before the first turn, and the turns.

    Texts are stripped. The only group of `marker` is the speaker of the next turn, in any case.
    """
    before, *parts = marker.split(dialogue)
    pairs = zip(parts[::2], parts[1::2], strict=True)
    found = [Message(_ROLES[name.lower()], content.strip()) for name, content in pairs]
    return before.strip(), tuple(found)
