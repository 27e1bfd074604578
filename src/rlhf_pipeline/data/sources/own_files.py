"""Rows whose records a map of their columns makes, such as your own files."""

import tomllib
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_pipeline.config.split import ColumnMap
from rlhf_pipeline.data.records import Example, Message, Record, Role, Text
from rlhf_pipeline.data.sources.adapter import (
    MalformedRowError,
    Row,
    SkippedRowError,
    Source,
    as_json,
    columns_of,
    messages,
    number,
    parsed_json,
    preferred,
    question,
    text,
)


class ColumnError(MalformedRowError):
    """The column map does not fit the file."""


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def known_columns(names: Collection[str]) -> ColumnMap:
    """The column map of a table in one of TRL's formats, by the names of its columns. Raises
    ColumnError with the line to add if the names fit none of the formats, or several."""
    if {*names} - {"tools"} == {"prompt"}:  # beside it, another column may be the answer
        return ColumnMap(prompt="prompt", tools="tools" if "tools" in names else None)
    if {*names} == {"text"}:
        raise ColumnError(
            "column 'text' is a document, not a prompt. Fix: list the source in "
            "split.pretraining.sources, with the line columns: {text: text}"
        )
    found = [form for form in _TABLE["formats"] if {*form.values()} <= {*names}]
    whole = [form for form in found if not any({*form} < {*other} for other in found)]
    # `label` marks bad answers, so a form without it would learn them.
    if len(whole) == 1 and ("label" in whole[0] or "label" not in names):
        tools = {"tools": "tools"} if "tools" in names else {}
        return ColumnMap.model_validate(whole[0] | tools)
    others = next(each["maps"] for each in _TABLE["examples"] if {*each["columns"]} <= {*names})
    lines = [f"columns: {form}".replace("'", "") for form in found or others]
    raise ColumnError(
        f"the columns do not say which of them to read; they are {', '.join(map(repr, names))}. "
        f"Fix: add to the source a line such as {' or '.join(lines)}"
    )


def parser(named: ColumnMap, *, strip: bool = False) -> Callable[[Row], Record]:
    """The parse function of a column map; it may remove the white space around answers."""

    def parse(row: Row) -> Record:
        try:
            values = {column: _value(row, column) for column in columns_of(named)}
            return _record(values, named, strip=strip)
        except ColumnError as error:
            listed = ", ".join(map(repr, row))
            raise MalformedRowError(f"{error}; the columns are {listed}") from None

    return parse


def _record(row: Row, named: ColumnMap, *, strip: bool) -> Record:
    if named.text is not None:
        return Text(text(row, named.text))
    given = (named.chosen, named.rejected, named.response, named.messages)
    columns = named.answers or [column for column in given if column is not None]
    answers = [_dialogue(row[column], column, "assistant") for column in columns]
    prompts = [dialogue[:-1] for dialogue in answers if dialogue[1:]]
    if isinstance(named.prompt, str):
        prompts.append(_dialogue(row[named.prompt], named.prompt, "user"))
    elif named.prompt is not None:
        parts = (column for column in named.prompt if row[column] is not None)
        prompts.append(question(*(text(row, column) for column in parts)))
    if not prompts:
        raise ColumnError("no mapped column contains the prompt: set columns.prompt")
    if any(prompt != prompts[0] for prompt in prompts):
        raise MalformedRowError("the columns contain different prompts")
    if any(dialogue[-1].further for dialogue in answers):
        raise SkippedRowError("the last answer calls a tool, which no stage learns")
    said = [dialogue[-1].content for dialogue in answers]
    said = [answer.strip() for answer in said] if strip else said
    label = None if named.label is None else _label(row, named.label, named.scores is not None)
    example = Example(prompts[0], *said, label=label)
    if named.scores is not None and label is None:
        first, second = (number(row, score) for score in named.scores)
        example = preferred(prompts[0], (said[0], said[1]), (first, second))
    reference = None if named.reference is None else _reference(row, named.reference)
    schemas = [] if named.tools is None else _schemas(row[named.tools], named.tools)
    tools = as_json(schemas, "a description of tools is") if schemas else None
    extra = None
    if named.extra:
        values = {column: row[column] for column in named.extra}
        extra = as_json(values, f"the columns {', '.join(values)} are")
    return replace(example, reference=reference, tools=tools, extra=extra)


def _schemas(value: Any, column: str) -> list[Any]:
    value = parsed_json(value)
    if value is None or (isinstance(value, list) and all(isinstance(one, dict) for one in value)):
        return value or []
    raise MalformedRowError(f"column {column!r} is not a list of objects, nor its JSON")


def _label(row: Row, column: str, may_be_null: bool) -> bool | None:
    """Whether the answers are good: true, false, 1 or 0, also as text, since CSV has only text."""
    value = row[column]
    if may_be_null and value in (None, ""):
        return None
    known = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
    if (found := known.get(str(value).strip().lower())) is None:
        raise MalformedRowError(f"column {column!r} is neither true nor false, 1 nor 0")
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
            raise ColumnError(f"column {column!r} is missing")
    return value


SOURCES = (Source("files", "any", local_only=True),)
