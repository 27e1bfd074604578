"""The file of votes: one JSON object for each, which the source `files` reads as comparisons.

The end of a server loses no vote: each is forced to disk under a lock before the page hears of it.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock
from pydantic import ValidationError

from rlhf_pipeline.errors import DataError
from rlhf_pipeline.labelling.pairs import Pair

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
    votes = []
    for number, line in enumerate(file.read_bytes().splitlines(keepends=True), start=1):
        try:
            votes += [Vote.model_validate_json(line)] if line.endswith(b"\n") else []
        except ValidationError as error:
            why = error.errors()[0]["msg"]
            fix = "correct or remove it, or choose another --output"
            raise DataError(f"{file}:{number}: found no vote ({why}). Fix: {fix}") from None
    return votes


def add_vote(file: Path, vote: Vote) -> None:
    """Write a vote. Only the first vote of a person on a pair counts."""
    with locked(file):
        if all((v.annotator, v.pair) != (vote.annotator, vote.pair) for v in read_votes(file)):
            _write(file, "ab", [vote])


def remove_vote(file: Path, annotator: str, pair: str) -> None:
    """Remove the vote of a person on a pair, if there is one, by replacing the file."""
    with locked(file):
        kept = [v for v in read_votes(file) if (v.annotator, v.pair) != (annotator, pair)]
        partial = file.with_name(f"{file.name}.partial")
        _write(partial, "wb", kept)
        partial.replace(file)


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Have the file alone among all servers. Creates it, and removes half a last line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{file}.lock"):
        file.touch()
        content = file.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            logger.warning("%s: removed half a vote, left by a kill; its pair comes again", file)
            os.truncate(file, whole)
        yield


def _write(file: Path, mode: str, votes: list[Vote]) -> None:
    with file.open(mode) as output:
        output.writelines(f"{vote.model_dump_json()}\n".encode() for vote in votes)
        output.flush()
        os.fsync(output.fileno())
