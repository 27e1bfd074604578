"""The file of votes: one JSON object for each, which the source `files` reads as comparisons.

Each change replaces the file under a lock, forced to disk before the page hears of it. So neither a
kill nor a full disk loses or cuts a vote.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock
from pydantic import ValidationError, computed_field

from rlhf_pipeline.errors import DataError
from rlhf_pipeline.labelling.pairs import Pair
from rlhf_pipeline.runtime.files import write_atomically


class Vote(Pair):
    """What one person thinks about one pair, a line of the file."""

    first_score: int
    """1 if the first answer is better, or both are good; else 0. The source skips equal
    scores, unless it reads `label`."""
    second_score: int
    reason: str
    annotator: str
    shown_as_a: str
    time: str

    @computed_field
    def label(self) -> bool | None:
        """Whether both answers are good, or both bad; None if one is better. For KTO."""
        return bool(self.first_score) if self.first_score == self.second_score else None


def read_votes(file: Path) -> list[Vote]:
    """All votes, oldest first. Raises DataError if a line is no vote."""
    votes = []
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
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
            _write(file, [*votes, vote])


def remove_vote(file: Path, annotator: str, pair: str) -> None:
    """Remove the vote of a person on a pair, if there is one."""
    with locked(file) as votes:
        _write(file, [v for v in votes if (v.annotator, v.pair) != (annotator, pair)])


@contextmanager
def locked(file: Path) -> Iterator[list[Vote]]:
    """Hold the lock of the file, which is created if it is missing, and yield its votes.

    Raises DataError if the file contains something else.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{file}.lock"):
        file.touch()
        yield read_votes(file)


def _write(file: Path, votes: list[Vote]) -> None:
    file = file.resolve()  # a link stays one
    partial = file.with_name(f"{file.name}.partial")  # the name that `write_atomically` uses
    partial.unlink(missing_ok=True)  # of a killed server of another user
    partial.touch()
    shutil.copystat(file, partial)  # servers of other users may write the file, too
    for owner, group in ((-1, file.stat().st_gid), (file.stat().st_uid, -1)):
        with suppress(PermissionError):  # only root gives a file to another user
            os.chown(partial, owner, group)
    write_atomically(file, "".join(f"{vote.model_dump_json()}\n" for vote in votes))
