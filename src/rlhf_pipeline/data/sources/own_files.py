"""A file of your own: one object a line with `prompt`, `chosen` and `rejected`.

`prompt` is a string (one user turn) or a list of {"role": "system" | "user" | "assistant", "content": "..."}.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast, get_args

from rlhf_pipeline.config.data import SourceConfig
from rlhf_pipeline.data.records import BadRow, Comparison, Message, Role
from rlhf_pipeline.data.sources.source import Answers, MalformedRowError, Row, Source, reader, text
from rlhf_pipeline.errors import ConfigError

_NAME = "jsonl"
_ROLES = get_args(Role)


def parse(row: Row) -> Answers:
    """Prompt and answers exactly as written."""
    if isinstance(row.get("prompt"), list):
        prompt = tuple(_message(message) for message in row["prompt"])
    else:
        prompt = (Message("user", text(row, "prompt")),)
    return Answers(prompt, text(row, "chosen"), text(row, "rejected"))


def read(config: SourceConfig, seed: int) -> Iterator[Comparison | BadRow]:
    """The file's rows; ConfigError without a `path`."""
    if config.path is None:
        raise ConfigError(f"source {_NAME!r} reads a local file: set its `path` to a .jsonl or .jsonl.gz file.")
    return reader(_NAME, parse)(config, seed)


def _message(message: Any) -> Message:
    if not isinstance(message, dict):
        raise MalformedRowError("a message of the prompt is not an object with role and content")
    role = text(message, "role")
    if role not in _ROLES:
        raise MalformedRowError(f"a message's role is not one of {', '.join(_ROLES)}")
    return Message(cast(Role, role), text(message, "content"))


SOURCE = Source(_NAME, read, "a local file with the columns prompt, chosen and rejected")
