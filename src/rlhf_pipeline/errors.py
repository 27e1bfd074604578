"""Errors shown to the user: what is wrong, the value found, and the fix, without a traceback.

Messages and logs contain no secrets.
"""

import difflib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import click

# A password may contain slashes, although it should not.
_CREDENTIALS = re.compile(r"(?<=://)(?:[^\s/]*|[^\s@]*:[^\s@]*)@")
# Only HTTP: elsewhere a question mark belongs to a glob.
_QUERY = re.compile(r"(https?://[^\s?]*\?)[^\s'\"]+")


class PipelineError(click.ClickException):
    """Base of all errors that are explained to the user.

    Kedro's command line prints the message of a `ClickException` without a traceback.
    """


class ConfigError(PipelineError):
    """An invalid parameter, or an invalid combination of parameters."""


class DataError(PipelineError):
    """A source, file or row that cannot be read as training data."""


class ArtifactError(PipelineError):
    """An artifact or model that is incomplete, was changed, or does not fit the others."""


class ForeignFileError(ArtifactError):
    """A file was added to an artifact; the files of the artifact are intact."""


class StageError(PipelineError):
    """A stage ended without a finished result.

    `cause` is the name of a known failure, see `rlhf_pipeline.stages.launch.hints`; None: unknown.
    """

    def __init__(self, message: str, cause: str | None = None) -> None:
        super().__init__(message)
        self.cause = cause


class Interrupted(PipelineError):  # noqa: N818 - not an error
    """The user or the scheduler ended the run by a signal."""

    exit_code = 130

    def show(self, file: IO[str] | None = None) -> None:
        """Print the message without the word "Error": the user wanted the end."""
        click.echo(self.format_message(), file=file, err=file is None)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean NAME?)" with the nearest known name; empty if none is near."""
    folded = {each.casefold(): each for each in known}
    close = difflib.get_close_matches(name.casefold(), folded, 1)
    return f" (did you mean {folded[close[0]]}?)" if close else ""


def install(extra: str) -> str:
    """The command that installs an extra of this package into the present environment."""
    pins = "--constraint constraints.txt " if Path("constraints.txt").is_file() else ""
    return f"{short_path(sys.prefix)}/bin/pip install {pins}'rlhf-pipeline[{extra}]'"


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


def without_secrets(text: str) -> str:
    """The text without users, passwords and HTTP queries in URLs; signed URLs have a key there."""
    return _QUERY.sub(r"\1...", _CREDENTIALS.sub("...@", text))
