"""Pairs of answers that people compare: of an evaluation, or of a file."""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, PlainSerializer, ValidationError

from rlhf_pipeline.config.split import ColumnMap
from rlhf_pipeline.data.records import Example, Message, Unused, key, normalized_prompt
from rlhf_pipeline.data.source import record_fault
from rlhf_pipeline.data.sources.adapter import outcome
from rlhf_pipeline.data.sources.own_files import parser
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.evaluation.comparison import gain_by, read_answers


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


def evaluation_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """The first answers of the baseline and the candidate: one pair for each prompt.

    Intervals on what people prefer need independent pairs.
    """
    (baseline, firsts), (candidate, seconds), *_ = read_answers(folder).items()
    for first, second in zip(firsts, seconds, strict=True):
        if first.draw:
            continue
        yield {
            "prompt": first.messages,
            "first": first.response,
            "second": second.response,
            "policies": (baseline, candidate),
            "judges": {judge: gain_by((first, second), judge) for judge in first.scores},
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
        fix = "correct the rows; for an evaluation of an earlier version, repeat its `kedro run`"
        raise DataError(f"found no pair to compare, expected at least 1 ({reasons}). Fix: {fix}")
    return list(pairs.values()), left_out
