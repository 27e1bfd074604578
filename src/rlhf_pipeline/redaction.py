"""Removal of secrets from messages, logs and files."""

import re

# A password may contain slashes, although it should not.
_CREDENTIALS = re.compile(r"(?<=://)(?:[^\s/]*|[^\s@]*:[^\s@]*)@")
# Only HTTP: elsewhere a question mark belongs to a glob.
_QUERY = re.compile(r"(https?://[^\s?]*\?)[^\s'\"]+")


def without_secrets(text: str) -> str:
    """The text without users, passwords and HTTP queries in URLs; signed URLs have a key there."""
    return _QUERY.sub(r"\1...", _CREDENTIALS.sub("...@", text))
