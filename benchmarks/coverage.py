"""How often the 95% intervals of an evaluation contain the true value, by simulation.

    python benchmarks/coverage.py                  # 20,000 experiments for each line
    python benchmarks/coverage.py --experiments=2000

Each experiment draws the outcomes of some prompts: wins, ties and losses of a known rate, or scores
of a known mean. The table shows the lowest and the highest coverage over several true values.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from rich.console import Console
from rich.table import Table

from rlhf_pipeline.statistics import (
    length_controlled,
    mean_with_interval,
    rate_interval,
    standardized_gain,
)

PROMPTS = (64, 160, 512)
TIES = (0.0, 0.2, 0.5)
RATES = (0.5, 0.6, 0.75, 0.9)
"""Share of wins among the prompts without a tie."""
SCORES: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "normal scores": lambda rng, n: rng.normal(1.0, 2.0, n),
    "skewed scores": lambda rng, n: rng.exponential(1.0, n),
    "bounded scores": lambda rng, n: rng.beta(2.0, 2.0, n) * 2,
}
"""Draws with mean 1."""

Interval = tuple[float, float]


def main() -> None:
    """Simulate and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experiments", type=int, default=20_000)
    experiments = parser.parse_args().experiments
    table = Table(title=f"Coverage of 95% intervals, {experiments} experiments each")
    for column in ("interval", "prompts", "lowest", "highest"):
        table.add_column(column, justify="right")
    rng = np.random.default_rng(1)
    for n in PROMPTS:
        for name, coverages in lines(rng, n, experiments):
            found = list(coverages)
            table.add_row(name, str(n), f"{min(found):.1%}", f"{max(found):.1%}")
    Console().print(table)


def lines(
    rng: np.random.Generator, n: int, experiments: int
) -> Iterator[tuple[str, Iterable[float]]]:
    """The coverages of each interval with n prompts."""
    for ties in TIES:
        name = f"win rate, {ties:.0%} ties"
        yield name, (of_win_rate(rng, n, ties, rate, experiments) for rate in RATES)
    few = max(1, experiments // 10)  # scores are slower than counts
    for name, draw in SCORES.items():
        means = (mean_with_interval(draw(rng, n).tolist())[1:] for _ in range(few))
        yield f"mean, {name}", [coverage(means, 1.0)]
    for ties in TIES:
        found = (of_length_controlled(rng, n, ties, rate, few) for rate in RATES)
        yield f"length-controlled, {ties:.0%} ties", found
    yield "gain of normal scores", [coverage((gain(rng, n) for _ in range(few)), 0.5)]


def of_win_rate(
    rng: np.random.Generator, n: int, ties: float, rate: float, experiments: int
) -> float:
    """Coverage of the win rate's interval."""
    shares = [(1 - ties) * rate, ties, (1 - ties) * (1 - rate)]
    drawn = rng.multinomial(n, shares, size=experiments).tolist()
    intervals = (rate_interval((wins + tied / 2) / n, n, tied) for wins, tied, _ in drawn)
    return coverage(intervals, shares[0] + ties / 2)


def of_length_controlled(
    rng: np.random.Generator, n: int, ties: float, rate: float, experiments: int
) -> float:
    """Coverage of the length-controlled rate, where a longer answer wins more often.

    Ties take the place of as many wins as losses, so the model of the rate stays true.
    """

    def interval() -> Interval | None:
        extra = rng.normal(10, 30, n)
        chance = 1 / (1 + np.exp(-np.log(rate / (1 - rate)) - np.tanh(extra / 30)))
        tie = ties * 2 * np.minimum(chance, 1 - chance)
        win = (chance - tie / 2) / (1 - tie)  # given that it is no tie
        outcome = np.where(rng.random(n) < tie, 0.5, rng.random(n) < win)
        found = length_controlled(outcome.tolist(), [0.5] * n, extra.round().astype(int).tolist())
        return None if found is None else found[1:]

    return coverage((found for _ in range(experiments) if (found := interval())), rate)


def gain(rng: np.random.Generator, n: int) -> Interval:
    """The interval of a gain of half the spread, between scores that differ by prompt."""
    difficulty = rng.normal(0, 0.6, n)
    baseline, candidate = (difficulty + rng.normal(0, 0.8, n) for _ in range(2))
    return standardized_gain((candidate + 0.5).tolist(), baseline.tolist())[1:]


def coverage(intervals: Iterable[Interval], true: float) -> float:
    """Share of the intervals that contain the true value."""
    return float(np.mean([lower <= true <= upper for lower, upper in intervals]))


if __name__ == "__main__":
    main()
