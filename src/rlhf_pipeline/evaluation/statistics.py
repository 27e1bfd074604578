"""Win rates, means and text diversity, with their uncertainty."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z_95 = 1.959963984540054
"""Quantile of the standard normal at 0.975: two-sided 95% intervals."""


@dataclass(frozen=True)
class WinRate:
    """How often the candidate beats the baseline on the same prompts."""

    rate: float
    """(wins + ties / 2) / n."""
    lower: float
    """Lower end of the 95% interval on `rate`."""
    upper: float
    """Upper end of the 95% interval on `rate`."""
    wins: int
    ties: int
    losses: int
    n: int


def win_rate(candidate: Sequence[float], baseline: Sequence[float]) -> WinRate:
    """Share of prompts on which the candidate's score is higher; a tie counts half.

        p = (wins + ties / 2) / n
        interval = (p + z^2 / 2n  +-  z * sqrt(p * (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)
        z = 1.96

    Source: Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", JASA 22,
    1927, for n coin flips. Half points vary less, so ties make the interval conservative.

    The scores belong to the responses of both models to the same prompts, in equal order. Raises
    ValueError if there are no scores, their numbers differ, or a score is not finite.
    """
    _check_scores("candidate", candidate)
    _check_scores("baseline", baseline)
    n = len(candidate)
    wins = sum(ours > theirs for ours, theirs in zip(candidate, baseline, strict=True))
    losses = sum(ours < theirs for ours, theirs in zip(candidate, baseline, strict=True))
    ties = n - wins - losses
    rate = (wins + ties / 2) / n
    centre = rate + Z_95**2 / (2 * n)
    half_width = Z_95 * math.sqrt(rate * (1 - rate) / n + Z_95**2 / (4 * n**2))
    lower, upper = ((centre + sign * half_width) / (1 + Z_95**2 / n) for sign in (-1, 1))
    # Rounding can exceed [0, 1] by 1e-17.
    return WinRate(rate, max(0.0, lower), min(1.0, upper), wins, ties, losses, n)


def mean_with_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and its 95% normal interval: (mean, lower, upper).

        mean +- z * s / sqrt(n)         s: sample standard deviation (divisor n - 1); z = 1.96

    Raises ValueError if there are fewer than two values, or a value is not finite.
    """
    _check_scores("values", values)
    n = len(values)
    if n < 2:
        raise ValueError("values has 1 entry; an interval needs at least 2")
    mean = math.fsum(values) / n
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    half_width = Z_95 * math.sqrt(variance / n)
    return mean, mean - half_width, mean + half_width


def distinct_n(texts: Sequence[str], n: int) -> float:
    """Distinct n-grams over all n-grams of all texts together, in [0, 1]; words end at white space.

    A low value shows that a policy repeats itself, within a response or between prompts. The value
    falls with the number and the length of the texts: compare models on equal prompts. 0 if no text
    has n words.

    Source: Li et al., https://arxiv.org/abs/1510.03055, who divide by the number of words instead.
    """
    ngrams = [
        tuple(words[i : i + n])
        for words in map(str.split, texts)
        for i in range(len(words) - n + 1)
    ]
    return len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def _check_scores(name: str, scores: Sequence[float]) -> None:
    if len(scores) == 0:
        raise ValueError(f"{name} is empty")
    for i, score in enumerate(scores):
        if not math.isfinite(score):
            raise ValueError(f"{name}[{i}] is {score}; every score must be finite")
