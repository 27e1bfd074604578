"""What a source yields: an example, a text, or a row that is neither."""

from __future__ import annotations

import hashlib
import unicodedata
from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "assistant"]
Conversation = list[dict[str, str]]
"""Messages in the form that chat templates take: {"role": ..., "content": ...} each."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a dialogue."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt with the answers that a source gives to it. Which answers it has decides which phases can use it."""

    prompt: tuple[Message, ...]
    """At most one system message, then user and assistant in turn; ends with a user's turn."""

    chosen: str | None = None
    """A demonstration; where there is a `rejected`, the answer that a person or a known rule prefers to it."""

    rejected: str | None = None

    reference: str | None = None
    """The true answer, for rewards that check responses against it; no phase trains on it."""


@dataclass(frozen=True, slots=True)
class Text:
    """A document to continue pre-training on."""

    text: str


@dataclass(frozen=True, slots=True)
class Unused:
    """A row that yields no record."""

    reason: str
    """In words that are the same for every row with the same fault, so that rows can be counted by it."""

    bad: bool = True
    """True: the row is broken, and counts towards `max_bad_fraction`. False: the source knows such rows and passes over
    them, for example a comparison that ends in a tie."""


Record = Example | Text


def normalized_prompt(prompt: tuple[Message, ...]) -> str:
    """A prompt's identity: two examples with the same one are about the same prompt and must not be split apart.

    Roles are kept; contents are compared without regard to case, Unicode compatibility forms (NFKC) and white space.
    """
    return "\n".join(f"{message.role}: {_normalized(message.content)}" for message in prompt)


def key(*parts: str) -> bytes:
    """16 bytes that identify a sequence of texts: SHA-256 of each part's length and content, cut short."""
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode()
        digest.update(b"%d:" % len(encoded))
        digest.update(encoded)
    return digest.digest()[:16]


def _normalized(text: str) -> str:
    # Case folding can leave a text that is not NFKC (a folded ligature, for one), hence the second pass.
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(unicodedata.normalize("NFKC", folded).split())
