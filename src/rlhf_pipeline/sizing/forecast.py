"""Forecasts of the time of a stage, from short runs of it on the same machine."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, stdev
from typing import Any, Self

DRIFT = 0.1
"""How much faster or slower the machine may be later, as a share of the time."""
LENGTH = 1.5
"""Factor by which answers may become shorter or longer than expected."""

Range = tuple[float, float, float]
"""The least, the expected and the largest value."""


@dataclass(frozen=True)
class Timings:
    """The seconds of a short training by what they are spent on."""

    fixed: float
    """Start, first step, one evaluation, one checkpoint and export."""
    steps: tuple[float, ...]
    """Each step without evaluation, but for the first one, which warms up."""
    evaluation: float
    saving: float
    """A checkpoint for resuming."""
    tokens: float | None
    """Mean length of the sampled answers; None if the stage samples none."""

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]], seconds: float, saved_every: int) -> Self:
        """From the lines of `metrics.jsonl`, one for each step, of which only the last evaluated.

        Checkpoints were saved after every `saved_every` steps.
        """
        lines = [each for each in records if each["step"] > 0]
        taken = [each["metrics"]["time/step_s"] for each in lines]
        steps = tuple(taken[1:-1] or taken)
        gaps = [
            after["time"] - before["time"] - after["metrics"]["time/step_s"]
            for before, after in pairwise(lines)
            if before["step"] % saved_every == 0
        ]
        sampled = [each["metrics"].get("rollout/response_tokens") for each in lines]
        found = [each for each in sampled if each is not None]
        return cls(
            fixed=seconds - sum(steps) - sum(gaps),
            steps=steps,
            evaluation=max(0.0, taken[-1] - mean(steps)),
            saving=max(0.0, mean(gaps or [0.0])),
            tokens=mean(found) if found else None,
        )

    def seconds(self, steps: int, evaluations: int, saved: int) -> float:
        """Seconds of a training with as many steps, evaluations and checkpoints."""
        more = max(0, steps - 2) * mean(self.steps)
        more += max(0, evaluations - 1) * self.evaluation
        return self.fixed + more + max(0, saved - 1) * self.saving

    def error(self, steps: int) -> float:
        """95% error of `seconds`, because few steps were seen."""
        spread = stdev(self.steps) if len(self.steps) > 1 else 0.0
        return 2 * steps * spread / math.sqrt(len(self.steps))


def training_range(
    seen: Sequence[Timings], steps: int, evaluations: int, saved: int, lengths: Range
) -> Range:
    """Seconds of a training.

    `seen` are short trainings; of one that samples answers, two with different limits of their
    lengths, whose times are linear in the mean length. `lengths` are those of the answers to come.
    """
    times = [one.seconds(steps, evaluations, saved) for one in seen]
    tokens = [one.tokens or 0.0 for one in seen]
    error = max(one.error(steps) for one in seen)
    expected = tuple(line(tokens, times, length) for length in lengths)
    return with_drift(expected, error)


def answering_range(
    prompts: Sequence[int], seconds: Sequence[float], wanted: int, shares: Range
) -> Range:
    """Seconds of a stage that samples answers to `wanted` prompts.

    Two short runs took `seconds` for `prompts`. `shares` is how much longer than theirs prompts
    with answers will be.
    """
    fixed = max(0.0, line(prompts, seconds, 0.0))
    more = line(prompts, seconds, float(wanted)) - fixed
    return with_drift(tuple(fixed + more * share for share in shares), 0.0)


def line(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """The value at `x` of the line through the first and the last point, or the mean without one.

    A line needs points whose `xs` differ by 10%. A falling one is noise, so it gives the mean, too.
    """
    (x0, *_, x1), (y0, *_, y1) = [*xs, xs[-1]], [*ys, ys[-1]]
    if abs(x1 - x0) <= 0.1 * max(abs(x0), abs(x1)) or (y1 - y0) / (x1 - x0) < 0:
        return mean(ys)
    return y0 + (y1 - y0) / (x1 - x0) * (x - x0)


def with_drift(expected: Sequence[float], error: float) -> Range:
    """A range for a machine that may be faster or slower later, and a further error."""
    least, middle, most = (max(0.0, each) for each in expected)
    below, above = (math.hypot(DRIFT * each, error) for each in (least, most))
    return max(0.0, least - below), middle, most + above


def lengths(expected: float, limit: int | None) -> Range:
    """Mean lengths of answers in tokens that are expected to have `expected`, up to a limit."""
    most = expected * LENGTH if limit is None else min(float(limit), expected * LENGTH)
    return expected / LENGTH, expected, max(most, expected)
