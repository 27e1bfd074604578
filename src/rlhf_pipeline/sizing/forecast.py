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

GROWTH, DOUBLINGS = 0.033, 4
"""The share by which memory grows each time that the rollouts of a training double, and how often:
batches of other lengths leave gaps. Measured for PPO on the default, 4 to 160 steps."""

Range = tuple[float, float, float]
"""The least, the expected and the largest value."""


@dataclass(frozen=True)
class Timings:
    """The seconds of a short training by what they are spent on."""

    fixed: float
    """Start, the first step, which warms up, and the last one with its evaluation, its checkpoint
    and the export."""
    within: int
    """Steps in `fixed`."""
    steps: tuple[float, ...]
    """Each of the other steps; of a training with two steps at most, the shorter one."""
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
        others = taken[1:-1]
        gaps = [
            after["time"] - before["time"] - after["metrics"]["time/step_s"]
            for before, after in pairwise(lines)
            if before["step"] % saved_every == 0
        ]
        sampled = [each["metrics"].get("rollout/response_tokens") for each in lines]
        found = [each for each in sampled if each is not None]
        return cls(
            fixed=seconds - sum(others) - sum(gaps),
            within=len(lines) - len(others),
            steps=tuple(others or [min(taken)]),
            evaluation=max(0.0, taken[-1] - mean(others or [min(taken)])),
            saving=max(0.0, mean(gaps or [0.0])),
            tokens=mean(found) if found else None,
        )

    def seconds(self, steps: int, evaluations: int, saved: int) -> float:
        """Seconds of a training with as many steps, evaluations and checkpoints."""
        more = (steps - self.within) * mean(self.steps)
        more += max(0, evaluations - 1) * self.evaluation
        return self.fixed + more + max(0, saved - 1) * self.saving

    def error(self, steps: int) -> float:
        """95% error of `seconds`, because few steps were seen."""
        spread = stdev(self.steps) if len(self.steps) > 1 else 0.0
        return 2 * steps * spread / math.sqrt(len(self.steps))


def training_range(
    seen: Sequence[Timings], steps: int, evaluations: int, saved: int, lengths: Range, prompt: float
) -> Range:
    """Seconds of a training.

    `seen` are short trainings; of one that samples answers, two with different limits of their
    lengths. Its times are linear in the mean length; `lengths` are those of the answers to come,
    and `prompt` is the mean length of a prompt, both in tokens.
    """
    times = [one.seconds(steps, evaluations, saved) for one in seen]
    tokens = [one.tokens or 0.0 for one in seen]
    if differ(tokens, times):
        expected = [line(tokens, times, length) for length in lengths]
    else:  # one length alone was seen: the steps take as long as they have tokens
        fixed, length = mean(one.fixed for one in seen), prompt + mean(tokens)
        shares = [(prompt + each) / length if length else 1.0 for each in lengths]
        expected = [fixed + (mean(times) - fixed) * share for share in shares]
    return with_drift(expected, max(one.error(steps) for one in seen))


def peak_after(peak: float, seen: int, steps: int) -> float:
    """Memory of a training that samples answers in `steps` steps, from that of `seen` steps."""
    doublings = math.log2(max(1.0, steps / seen))
    return peak * (1 + GROWTH * min(doublings, DOUBLINGS))


def answering_range(
    prompts: Sequence[int], seconds: Sequence[float], wanted: int, shares: Range
) -> Range:
    """Seconds of a stage that samples answers to `wanted` prompts.

    Two short runs took `seconds` for `prompts`. `shares` is how much longer than theirs prompts
    with answers will be. If the run with more prompts was not slower, they may take as long as
    their number says, at most.
    """
    if not differ(prompts, seconds):
        alone = mean(seconds)
        return with_drift((alone, alone, alone * max(1.0, wanted / prompts[-1])), 0.0)
    fixed = max(0.0, line(prompts, seconds, 0.0))
    more = line(prompts, seconds, float(wanted)) - fixed
    return with_drift(tuple(fixed + more * share for share in shares), 0.0)


def differ(xs: Sequence[float], ys: Sequence[float]) -> bool:
    """Whether points tell a slope: the first and the last differ by 10%, and the line rises."""
    apart = xs[-1] - xs[0]
    return abs(apart) > 0.1 * max(map(abs, xs)) and (ys[-1] - ys[0]) / apart > 0


def line(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """The value at `x` of the line through the first and the last point; the mean of points that
    tell no slope."""
    if not differ(xs, ys):
        return mean(ys)
    return ys[0] + (ys[-1] - ys[0]) / (xs[-1] - xs[0]) * (x - xs[0])


def with_drift(expected: Sequence[float], error: float) -> Range:
    """A range for a machine that may be faster or slower later, and a further error."""
    least, middle, most = (max(0.0, each) for each in expected)
    below, above = (math.hypot(DRIFT * each, error) for each in (least, most))
    return max(0.0, least - below), middle, most + above


def lengths(expected: float, limit: int) -> Range:
    """Mean lengths of answers in tokens that are expected to have `expected`, up to a limit."""
    return expected / LENGTH, expected, max(expected, min(limit, expected * LENGTH))
