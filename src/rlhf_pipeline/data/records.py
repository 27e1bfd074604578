"""What a source yields: examples, texts, and rows without a record."""

import hashlib
import unicodedata
from dataclasses import dataclass, field
from typing import Any, Literal

NOT_UTF8 = "not UTF-8"
"""The reason of rows in another encoding."""
TO_UTF8 = "convert the file, for example: iconv -f latin1 -t utf-8 FILE > NEW_FILE"

Role = Literal["system", "user", "assistant", "tool"]
Conversation = list[dict[str, Any]]
"""Messages as chat templates expect them: {"role": ..., "content": ...} each, and
`tool_calls` where the assistant calls functions, whose schemas are `tools` of the first message."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a dialogue."""

    role: Role
    content: str
    further: str = ""
    """Further keys as an object of JSON: `tool_calls` of the assistant; `name` and `tool_call_id`
    of a tool."""


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt with the source's answers. The answers decide which phases can use the example."""

    prompt: tuple[Message, ...]
    """An optional system message, then user and assistant in alternation, and turns of tools after
    the assistant; the user or a tool is last."""
    chosen: str | None = None
    """The demonstration, or the preferred answer if there is a `rejected` one."""
    rejected: str | None = None
    reference: str | None = None
    """The true answer, for rewards and judges that check responses. No phase trains on it."""
    extra: str | None = None
    """Further columns for rewards and judges: an object of JSON."""
    tools: str | None = field(default=None, kw_only=True)
    """Schemas of the functions that the assistant may call, as a list in JSON."""
    label: bool | None = field(default=None, kw_only=True)
    """Whether the answers are good, all of them, or bad: feedback for KTO alone. None: the answers
    are a demonstration or a comparison."""


@dataclass(frozen=True, slots=True)
class Text:
    """A document for the language-model loss of PPO."""

    text: str


@dataclass(frozen=True, slots=True)
class Unused:
    """A row without a record: bad or skipped."""

    reason: str
    """The same text for all rows with the same fault, since rows are counted by reason."""
    bad: bool = True
    """True: the row is broken, and counts towards `max_bad_fraction`. False: the row is skipped,
    such as a comparison that ends in a tie."""


Record = Example | Text


def normalized_prompt(prompt: tuple[Message, ...]) -> str:
    """The identity of a prompt: a line for each turn.

    Contents are equal regardless of case, Unicode compatibility forms (NFKC) and white space. Roles
    must be equal.
    """
    return "\n".join(f"{message.role}: {normalized(message.content)}" for message in prompt)


def conversation(identity: str) -> str:
    """The system message and first user turn of a normalized prompt.

    A prompt, its beginnings and its continuations belong to one conversation, and so to one part.
    """
    return "\n".join(identity.split("\n")[: 1 + identity.startswith("system: ")])


def key(*parts: str) -> bytes:
    """16 bytes that identify a sequence of texts: truncated SHA-256 of lengths and contents."""
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode()
        digest.update(b"%d:" % len(encoded))
        digest.update(encoded)
    return digest.digest()[:16]


def normalized(text: str) -> str:
    """The text without regard to case, Unicode compatibility forms (NFKC) and white space."""
    # Case folding can produce text that is not NFKC, such as a folded ligature.
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(unicodedata.normalize("NFKC", folded).split())


def is_utf8(text: str) -> bool:
    """Whether a text has no half of a surrogate pair, which stands for a byte that is not UTF-8."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
