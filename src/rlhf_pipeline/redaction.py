"""Keeping secrets out of what people and files are told."""

from __future__ import annotations

import re

_CREDENTIALS = re.compile(
    r"(?<=://)(?:[^\s/]*|[^\s@]*:[^\s@]*)@"
)  # a password may hold slashes, though it should not
_QUERY = re.compile(r"(https?://[^\s?]*\?)[^\s'\"]+")  # elsewhere a question mark is a glob's


def without_secrets(text: str) -> str:
    """A text whose URLs have no user, password and HTTP query, where signed URLs carry their key."""
    return _QUERY.sub(r"\1...", _CREDENTIALS.sub("...@", text))
