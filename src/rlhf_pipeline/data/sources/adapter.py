"""What a source is. An adapter declares one: its name, its columns, and how one of its rows becomes an example."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from rlhf_pipeline.config.split import ColumnMap, SourceConfig
from rlhf_pipeline.data.records import Example, Message, Record, Role, Unused

Row = dict[str, Any]
"""A row as its file or the hub gives it: column to value; nested columns are lists and dicts."""

Kind = Literal["comparisons", "demonstrations", "text", "any"]

CONVERTED = "refs/convert/parquet"
"""Branch of the hub with its own Parquet conversion of a repository, which needs no loading script."""

T = TypeVar("T")


class MalformedRowError(Exception):
    """Raised by an adapter for a row that it cannot map; the message becomes the bad row's reason."""


class PassedOverError(Exception):
    """Raised by an adapter for a sound row that holds nothing to learn from, such as a tie; not a fault of the data."""


@dataclass(frozen=True)
class Source:
    """One entry of the registry. Exactly one of `parse`, `parser`, `assemble` and `generate` is set."""

    name: str
    """The data set's name on the Hugging Face hub, or a name of ours."""

    kind: Kind
    """What it holds; demonstrations serve SFT only. "any": the source's configuration decides."""

    description: str
    """One line for people who choose a source."""

    columns: tuple[str, ...] = ()
    """The data set's real columns that the adapter reads; others are not even loaded where the format allows. Where there
    is a `parser`, those that it reads without a column map."""

    parse: Callable[[Row], Record] | None = None
    """One row is one record. Raises MalformedRowError or PassedOverError."""

    parser: Callable[[ColumnMap | None], Callable[[Row], Record]] | None = None
    """For data of your own: a configuration's column map in, `parse` out."""

    assemble: (
        Callable[[Iterable[tuple[str, Row]]], Iterator[tuple[str, Record | Unused]]] | None
    ) = None
    """For sources whose records span rows: places and rows in, places and records out."""

    generate: Callable[[SourceConfig, int], Iterator[tuple[str, Record]]] | None = None
    """For sources without files: a configuration and a seed in, places and records out."""

    hub: str | None = None
    """Repository on the hub where it differs from `name`."""

    revision: str | None = None
    """Revision on the hub that is read by default, such as "refs/convert/parquet" for a repository whose own files need
    a loading script. None: the main branch."""

    subset: str | None = None
    """Configuration on the hub that is read by default."""

    split: str = "train"
    """Split on the hub, or of a saved DatasetDict, that is read by default."""

    local_only: bool = False
    """True: the source has no hub repository; its `path` must be set."""

    def columns_read(self, columns: ColumnMap | None) -> tuple[str, ...]:
        """The columns that are looked at under a configuration's column map."""
        return self.columns if columns is None else columns_of(columns)


def outcome(parse: Callable[..., T], *arguments: Any) -> T | Unused:
    """What `parse` returns, or why it has nothing to return."""
    try:
        return parse(*arguments)
    except MalformedRowError as fault:
        return Unused(str(fault))
    except PassedOverError as reason:
        return Unused(str(reason), bad=False)


# --- columns --------------------------------------------------------------------------------------


def columns_of(columns: ColumnMap) -> tuple[str, ...]:
    """The columns that a map names, dotted where they are nested."""
    named = columns.model_dump(exclude_none=True).values()
    return tuple(
        column for value in named for column in ((value,) if isinstance(value, str) else value)
    )


_KINDS = {str: "a string", int: "a whole number", list: "a list", dict: "an object"}


def field(row: Row, column: str, kind: type[T]) -> T:
    """The value in a column; MalformedRowError when it is missing or of another type."""
    if column not in row:
        raise MalformedRowError(f"column {column!r} is missing")
    value = row[column]
    if not isinstance(value, kind):
        raise MalformedRowError(f"column {column!r} is {type(value).__name__}, not {_KINDS[kind]}")
    return value


def text(row: Row, column: str) -> str:
    """The string in a column; MalformedRowError when it is missing or no string."""
    return field(row, column, str)


def number(row: Row, column: str) -> float:
    """The number in a column, also as text, since CSV knows nothing else.

    Raises:
        MalformedRowError: the column is missing or holds no finite number.
    """
    value = field(row, column, object)
    try:
        found = float(value) if isinstance(value, int | float | str) else math.nan
    except (ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise MalformedRowError(f"column {column!r} is not a finite number")
    return found


def items(row: Row, column: str, kind: type[T]) -> list[T]:
    """The list in a column; MalformedRowError when it is missing, or it or an item of it is of another type."""
    values = field(row, column, list)
    if not all(isinstance(value, kind) for value in values):
        raise MalformedRowError(f"an item of column {column!r} is not {_KINDS[kind]}")
    return values


# --- prompts and answers --------------------------------------------------------------------------


def question(*parts: str) -> tuple[Message, ...]:
    """A prompt of one user turn: the parts that are not blank, with an empty line between them."""
    return (Message("user", "\n\n".join(part for part in parts if part.strip())),)


def preferred(
    prompt: tuple[Message, ...], answers: tuple[str, str], scores: tuple[float, float]
) -> Example:
    """The answer with the higher score as the chosen one; PassedOverError where both have the same score."""
    if scores[0] == scores[1]:
        raise PassedOverError("the two answers have the same score")
    chosen, rejected = answers if scores[0] > scores[1] else answers[::-1]
    return Example(prompt, chosen, rejected)


_ROLES: dict[str, Role] = {
    "system": "system",
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "bot": "assistant",
}  # fmt: skip
"""Roles by the names in use: OpenAI's, ShareGPT's, OpenAssistant's."""


def messages(value: Any, column: str) -> tuple[Message, ...]:
    """A column's list of {"role": ..., "content": ...} (or ShareGPT's {"from": ..., "value": ...}) as messages.

    Raises:
        MalformedRowError: it is no such list, or a role is unknown.
    """
    if not isinstance(value, list) or not value:
        raise MalformedRowError(f"column {column!r} is not a list of messages")
    return tuple(_message(item, column) for item in value)


def _message(item: Any, column: str) -> Message:
    if not isinstance(item, dict):
        raise MalformedRowError(
            f"a message in column {column!r} is not an object with role and content"
        )
    role_key, content_key = ("from", "value") if "from" in item else ("role", "content")
    role = _ROLES.get(text(item, role_key))
    if role is None:
        raise MalformedRowError(f"a message's role is not one of {', '.join(_ROLES)}")
    return Message(role, text(item, content_key))


def compared(chosen: tuple[Message, ...], rejected: tuple[Message, ...]) -> Example:
    """Two dialogues that differ in the last answer as one comparison; MalformedRowError where they are not that."""
    if chosen[-1].role != "assistant" or rejected[-1].role != "assistant":
        raise MalformedRowError("the dialogue does not end with the assistant")
    if chosen[:-1] != rejected[:-1]:
        raise MalformedRowError("the dialogues differ before the last answer")
    return Example(chosen[:-1], chosen[-1].content, rejected[-1].content)


def rated(row: Row, chosen_rating: str, rejected_rating: str) -> Example:
    """The dialogues in the columns `chosen` and `rejected`, lists of messages, with the columns of their ratings.

    Raises:
        MalformedRowError: they are no two dialogues that differ in the last answer.
        PassedOverError: both have the same rating.
    """
    if number(row, chosen_rating) == number(row, rejected_rating):
        raise PassedOverError("the two answers have the same score")
    return compared(
        *(messages(field(row, column, list), column) for column in ("chosen", "rejected"))
    )


def turns(dialogue: str, marker: re.Pattern[str]) -> tuple[str, tuple[Message, ...]]:
    """What stands before the first turn of a dialogue in one string, and its turns, all without white space around them.

    The only group of `marker` is the name of who speaks in the turn that follows, in letters of any case.
    """
    before, *parts = marker.split(dialogue)
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return before.strip(), tuple(
        Message(_ROLES[name.lower()], content.strip()) for name, content in pairs
    )
