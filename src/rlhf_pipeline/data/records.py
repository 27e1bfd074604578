"""What a source yields: examples, texts, rows without a record, and how many there are."""

import hashlib
import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from rlhf_pipeline.errors import DataError

NOT_UTF8 = "not UTF-8"
"""The reason of rows in another encoding."""
_COUNTS = "counts.json"
_KEPT_BAD_ROWS, _SHOWN_BAD_ROWS = 5, 3
TO_UTF8 = "convert the file, for example: iconv -f latin1 -t utf-8 FILE > NEW_FILE"

Role = Literal["system", "user", "assistant", "tool"]
Conversation = list[dict[str, Any]]
"""Messages as chat templates expect them: {"role": ..., "content": ...} each, with `tool_calls` of
the assistant, and the schemas of tools as `tools` of the first message."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a dialogue."""

    role: Role
    content: str
    further: str = ""
    """`tool_calls` of the assistant, or `name` and `tool_call_id` of a tool: an object of JSON."""


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt with the source's answers, which decide the phases that can use the example."""

    prompt: tuple[Message, ...]
    """An optional system message, then user and assistant in alternation, with turns of tools after
    the assistant; the user or a tool is last."""
    chosen: str | None = None
    """The demonstration, or the preferred answer if there is a `rejected` one."""
    rejected: str | None = None
    reference: str | None = None
    """The true answer, for rewards and judges. No phase trains on it."""
    extra: str | None = None
    """Further columns for rewards and judges: an object of JSON."""
    tools: str | None = field(default=None, kw_only=True)
    """Schemas of the functions that the assistant may call: a list of JSON."""
    label: bool | None = field(default=None, kw_only=True)
    """Whether the answers are all good, or all bad, for KTO alone. None: they have no label."""

    def messages(self) -> Conversation:
        """The prompt as chat templates expect it, with the schemas of tools."""
        more = [json.loads(turn.further or "{}") for turn in self.prompt]
        more[0] |= {"tools": json.loads(self.tools)} if self.tools else {}
        turns = [{"role": turn.role, "content": turn.content} for turn in self.prompt]
        return [turn | further for turn, further in zip(turns, more, strict=True)]


@dataclass(frozen=True, slots=True)
class Text:
    """A document for the language-model loss of PPO."""

    text: str


@dataclass(frozen=True, slots=True)
class Unused:
    """A row without a record: bad or skipped."""

    reason: str
    """Equal for all rows with the same fault, since rows are counted by reason."""
    bad: bool = True
    """True: broken, which counts towards `max_bad_fraction`. False: skipped, such as a tie."""


Record = Example | Text


def dialogue(messages: Iterable[Mapping[str, str]]) -> str:
    """Messages as one text."""
    return "\n\n".join(f"{m['role'].title()}: {m['content']}" for m in messages)


def normalized_prompt(prompt: tuple[Message, ...]) -> str:
    """The identity of a prompt: a line for each turn, its role and its `normalized` content."""
    return "\n".join(f"{message.role}: {normalized(message.content)}" for message in prompt)


def conversation(identity: str) -> str:
    """The system message and first user turn of a normalized prompt, as all its continuations."""
    return "\n".join(identity.split("\n")[: 1 + identity.startswith("system: ")])


def key(*parts: str) -> bytes:
    """16 bytes that identify a sequence of texts: truncated SHA-256 of lengths and contents."""
    joined = b"".join(b"%d:%s" % (len(one), one) for one in map(str.encode, parts))
    return hashlib.sha256(joined).digest()[:16]


def normalized(text: str) -> str:
    """The text without regard to case, Unicode compatibility forms (NFKC) and white space."""
    # Case folding can produce text that is not NFKC, such as a folded ligature.
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(unicodedata.normalize("NFKC", folded).split())


def is_utf8(text: str) -> bool:
    """Whether a text has no half of a surrogate pair, which stands for a byte that is not UTF-8."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


@dataclass
class RowCounts:
    """Row counts of one source."""

    rows: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    """Sound rows without anything to learn from, by reason."""
    first_bad: list[tuple[str, str]] = field(default_factory=list)

    def add_unused(self, place: str, row: Unused) -> None:
        (self.bad if row.bad else self.skipped)[row.reason] += 1
        if row.bad and len(self.first_bad) < _KEPT_BAD_ROWS:
            self.first_bad.append((place, row.reason))

    def check_bad_fraction(self, max_bad_fraction: float, label: str) -> None:
        """Raise DataError if more rows are bad than allowed; the message lists the first ones."""
        bad = self.bad.total()
        # Divided, not multiplied: 0.57 * 100 is slightly less than 57.
        if bad and bad / self.rows > max_bad_fraction:
            shown = self.first_bad[:_SHOWN_BAD_ROWS]
            listed = "".join(f"\n  {place}: {reason}" for place, reason in shown)
            reason, _ = self.bad.most_common(1)[0]
            fix = "correct the source's `columns` or the file: most rows are bad."
            if reason == NOT_UTF8:
                fix = TO_UTF8
            elif 2 * bad <= self.rows:
                enough = f"{ceil(1_000 * bad / self.rows) / 1_000:g} to leave bad rows out."
                fix = f"correct these rows, or set split.max_bad_fraction to at least {enough}"
            raise DataError(
                f"source {label}: {bad} of {self.rows} rows are bad, more than "
                f"split.max_bad_fraction={max_bad_fraction} allows. The first bad rows:{listed}\n"
                f"Fix: {fix}"
            )

    def write(self, folder: Path) -> None:
        text = json.dumps(vars(self), indent=2, sort_keys=True)
        (folder / _COUNTS).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "RowCounts":
        return TypeAdapter(cls).validate_json((folder / _COUNTS).read_bytes())
