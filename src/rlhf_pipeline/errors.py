"""Errors shown to the user: what is wrong, the value found, and the fix, without a traceback.

Messages and logs contain no secrets.
"""

import difflib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import requires
from pathlib import Path
from typing import IO

import click

# At the start of what follows "://". A password may contain slashes, although it should not.
_CREDENTIALS = re.compile(r"\A(?:[^\s/]*|[^\s@:]*:[^\s@]*)@")
_HEADER = re.compile(
    r"(\bauthorization['\"]?\s*[:=]\s*['\"]?(?:\w+\s+)?|\bbearer\s+)[^\s'\",]+", re.IGNORECASE
)
_WORD = re.compile(r"[^\s'\"]+")
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]"
)


class PipelineError(click.ClickException):
    """Base of all errors that are explained to the user, without secrets.

    Kedro's command line prints the message of a `ClickException` without a traceback.
    """

    def __init__(self, message: str) -> None:
        super().__init__(as_typed(printable(without_secrets(message))))


class ConfigError(PipelineError):
    """An invalid parameter, or an invalid combination of parameters."""


class DataError(PipelineError):
    """A source, file or row that cannot be read as training data."""


class ArtifactError(PipelineError):
    """An artifact or model that is incomplete, was changed, or does not fit the others."""


class ForeignFileError(ArtifactError):
    """A file was added to an artifact; the files of the artifact are intact."""


class StageError(PipelineError):
    """A stage ended without a finished result."""


class Interrupted(PipelineError):  # noqa: N818 - not an error
    """The user or the scheduler ended the run by a signal."""

    exit_code = 130

    def show(self, file: IO[str] | None = None) -> None:
        """Print the message without the word "Error": the user wanted the end."""
        click.echo(self.format_message(), file=file, err=file is None)


@contextmanager
def about(place: str) -> Iterator[None]:
    """Begin the message of an error with the place that it is about."""
    try:
        yield
    except PipelineError as error:
        raise type(error)(f"{place}: {error.message}") from error


def as_typed(text: str) -> str:
    """The text with `rlhf-pipeline`, or `python -m rlhf_pipeline`, in place of `kedro` if the user
    started that program."""
    program = sys.argv[0].removesuffix("/__main__.py").rpartition("/")[2]
    known = {"rlhf-pipeline": "rlhf-pipeline", "rlhf_pipeline": "python -m rlhf_pipeline"}
    return re.sub(r"\bkedro (?=run|rlhf)", f"{known.get(program, 'kedro')} ", text)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean NAME?)" with the nearest known name; empty if none is near."""
    folded = {each.casefold(): each for each in known}
    close = difflib.get_close_matches(name.casefold(), folded, 1)
    return f" (did you mean {folded[close[0]]}?)" if close else ""


def install(extra: str) -> str:
    """The command that installs the packages of an extra, with the pins of a clone. This package
    is in no index, where another one may have its name."""
    pins = "--constraint constraints.txt " if Path("constraints.txt").is_file() else ""
    named = (each.partition(";") for each in requires("rlhf-pipeline") or [])
    packages = [f"'{name}'" for name, _, marker in named if f'"{extra}"' in marker]
    return f"{short_path(sys.prefix)}/bin/pip install {pins}{' '.join(packages)}"


def short_path(path: Path | str) -> str:
    """The path relative to the current folder if it is below it, else as it is."""
    here = Path(path).absolute().is_relative_to(Path.cwd())
    return os.path.relpath(path) if here else str(path)


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes; the context of an error counts unless `from None` hides it."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def printable(text: str) -> str:
    """The text of another with its control characters as escapes: a terminal would obey them."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def without_secrets(text: str, *secrets: str) -> str:
    """The text without some `secrets` of at least 8 characters, keys in headers, and users,
    passwords, queries and fields of fragments in URLs; signed URLs have a key there.

    The time is linear in the text, which a server may have sent.
    """
    for secret in secrets:
        text = text.replace(secret, "...") if len(secret) >= 8 else text
    text = _HEADER.sub(r"\1...", text)
    start, *rest = text.split("://")
    hidden = "://".join([start, *(_CREDENTIALS.sub("...@", each) for each in rest)])
    return _WORD.sub(_without_query, hidden)


def _without_query(word: re.Match[str]) -> str:
    """A word without the query of a URL, or the fields of its fragment. Without `name=`, a question
    mark belongs to a glob, except in HTTP."""
    mark = "?" if "?" in word[0] else "#"
    url, _, query = word[0].partition(mark)
    is_query = "=" in query or (mark == "?" and re.search("https?://", url, re.IGNORECASE))
    colon = ":" if query.endswith(":") else ""  # it ends the URL in a message
    return f"{url}{mark}...{colon}" if query and "://" in url and is_query else word[0]
