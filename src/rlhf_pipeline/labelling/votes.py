"""Pairs of answers that people compare, and the file of their votes.

The file has one JSON object for each vote, which the source `files` reads as comparisons. Each
change replaces it under a lock, forced to disk before the page hears of it. So neither a kill nor a
full disk loses or cuts a vote.
"""

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

from filelock import FileLock
from pydantic import BaseModel, Field, PlainSerializer, ValidationError, computed_field

from rlhf_pipeline.config.split import ColumnMap
from rlhf_pipeline.data.records import Example, Message, Unused, key, normalized_prompt
from rlhf_pipeline.data.sources.adapter import outcome, parser
from rlhf_pipeline.data.sources.registry import record_fault
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.runtime.files import write_atomically
from rlhf_pipeline.verdict.answers import read_answers


def as_read(prompt: tuple[Message, ...]) -> list[dict[str, str]]:
    """The messages as a person reads them, without calls of tools."""
    return [{"role": turn.role, "content": turn.content} for turn in prompt]


class Pair(BaseModel):
    """Two answers to one prompt."""

    pair: str
    """Equal for equal prompts with equal answers."""
    prompt: Annotated[tuple[Message, ...], PlainSerializer(as_read)]
    first: str
    second: str
    policies: tuple[str, str] = ("first", "second")
    """Who gave the answers; the second one is the candidate."""
    judges: dict[str, float] = Field(default={}, exclude=True)
    """How much higher each judge scores the second answer; 0 also if it has no score."""


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


def evaluation_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """The first answers of both policies to each prompt, as intervals need independent pairs."""
    (baseline, firsts), (candidate, seconds), *_ = read_answers(folder).items()
    for first, second in zip(firsts, seconds, strict=True):
        if first.draw == 0:
            scores = {judge: score or 0.0 for judge, score in second.scores.items()}
            yield {
                "prompt": first.messages,
                "first": first.response,
                "second": second.response,
                "policies": (baseline, candidate),
                "judges": {j: scores[j] - (score or 0.0) for j, score in first.scores.items()},
            }


def distinct_pairs(rows: Iterable[Any]) -> tuple[list[Pair], Counter[str]]:
    """The distinct pairs that `split` can use, and the numbers of rows left out by reason.

    Rows have the columns prompt, first and second, each as the source `files` accepts it, and may
    have policies and judges. Raises DataError if there is no pair.
    """
    # Nobody has chosen yet; these names select the checks that `split` makes of comparisons.
    parse = parser(ColumnMap(prompt="prompt", chosen="first", rejected="second"))
    pairs: dict[str, Pair] = {}
    left_out: Counter[str] = Counter()
    for row in rows:
        found: Any = row if isinstance(row, Unused) else outcome(parse, row)
        found = record_fault(found) or found
        if isinstance(found, Example):
            answers = {"first": str(found.chosen), "second": str(found.rejected)}
            name = key(normalized_prompt(found.prompt), *answers.values()).hex()
            try:
                pair = Pair(**row | answers | {"pair": name, "prompt": found.prompt})
                if pairs.setdefault(name, pair) is pair:
                    continue
                found = Unused("it repeats an earlier pair")
            except ValidationError as error:
                found = Unused(f"column {error.errors()[0]['loc'][0]!r} is not what a pair has")
        left_out[found.reason.replace("chosen", "first").replace("rejected", "second")] += 1
    if not pairs:
        reasons = "; ".join(f"{count}, {reason}" for reason, count in left_out.items())
        raise DataError(
            f"found no pair to compare, expected at least 1 ({reasons}). Fix: correct the rows"
        )
    return list(pairs.values()), left_out


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
    partial = file.with_name(f".{file.name}.partial")  # the name that `write_atomically` uses
    partial.unlink(missing_ok=True)  # of a killed server of another user
    partial.touch()
    shutil.copystat(file, partial)  # servers of other users may write the file, too
    for owner, group in ((-1, file.stat().st_gid), (file.stat().st_uid, -1)):
        with suppress(PermissionError):  # only root gives a file to another user
            os.chown(partial, owner, group)
    write_atomically(file, "".join(f"{vote.model_dump_json()}\n" for vote in votes))
