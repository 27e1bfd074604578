"""The file of votes: one JSON object for each, which the source `files` reads as comparisons.

The end of a server loses no vote: each is forced to disk under a lock before the page hears of it.
"""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock
from pydantic import ValidationError

from rlhf_pipeline.errors import DataError
from rlhf_pipeline.labelling.pairs import Pair
from rlhf_pipeline.runtime.files import force_to_disk, put_in_place

logger = logging.getLogger(__name__)


class Vote(Pair):
    """What one person thinks about one pair, a line of the file."""

    first_score: int
    """1 if the first answer is better, or both are good; else 0. The source skips equal scores."""
    second_score: int
    reason: str
    annotator: str
    shown_as_a: str
    time: str


def read_votes(file: Path) -> list[Vote]:
    """All votes, oldest first; half a last line is none. Raises DataError for any other line."""
    content = file.read_bytes()
    return _votes(file, content[: content.rfind(b"\n") + 1])


def _votes(file: Path, content: bytes) -> list[Vote]:
    votes = []
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            votes.append(Vote.model_validate_json(line))
        except ValidationError as error:
            why = error.errors()[0]["msg"]
            fix = "correct or remove it, or choose another --output"
            raise DataError(f"{file}:{number}: found no vote ({why}). Fix: {fix}") from None
    return votes


def add_vote(file: Path, vote: Vote) -> None:
    """Write a vote. Only the first vote of a person on a pair counts."""
    with locked(file) as votes:
        if all((v.annotator, v.pair) != (vote.annotator, vote.pair) for v in votes):
            size = file.stat().st_size
            try:
                _write(file, "ab", _lines([vote]))
            except OSError:  # a full disk
                os.truncate(file, size)
                raise


def remove_vote(file: Path, annotator: str, pair: str) -> None:
    """Remove the vote of a person on a pair, if there is one, by replacing the file."""
    with locked(file) as votes:
        kept = [v for v in votes if (v.annotator, v.pair) != (annotator, pair)]
        partial = file.with_name(f"{file.name}.partial")
        partial.touch()
        shutil.copystat(file, partial)  # servers of other users may write the file, too
        with suppress(PermissionError):
            os.chown(partial, file.stat().st_uid, file.stat().st_gid)
        _write(partial, "wb", _lines(kept))
        put_in_place(partial, file)


@contextmanager
def locked(file: Path) -> Iterator[list[Vote]]:
    """Have the file, which is created, and its votes alone among all servers.

    Half a vote at its end is moved to `<file>.cut`. Raises DataError, before a byte changes, if
    the file contains something else.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{file}.lock"):
        file.touch()
        content = file.read_bytes()
        whole = content.rfind(b"\n") + 1
        votes, rest = _votes(file, content[:whole]), content[whole:]
        try:
            votes += _votes(file, rest)
            if rest:
                _write(file, "ab", b"\n")
        except DataError:
            if not votes:
                raise
            logger.warning("%s: moved half a vote to %s.cut; its pair comes again", file, file.name)
            _write(file.with_name(f"{file.name}.cut"), "ab", rest + b"\n")
            os.truncate(file, whole)
        yield votes


def _lines(votes: list[Vote]) -> bytes:
    return b"".join(f"{vote.model_dump_json()}\n".encode() for vote in votes)


def _write(file: Path, mode: str, content: bytes) -> None:
    with file.open(mode) as output:
        output.write(content)
    force_to_disk(file)
