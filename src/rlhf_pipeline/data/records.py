"""What a source yields: examples, texts, and rows without a record."""

import hashlib
import json
import unicodedata
from dataclasses import dataclass, field
from typing import Any, Literal

NOT_UTF8 = "not UTF-8"
"""The reason of rows in another encoding."""
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
