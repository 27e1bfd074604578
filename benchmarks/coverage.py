"""How often the 95% intervals of an evaluation contain the true value, by simulation.

    python benchmarks/coverage.py                  # 10,000 experiments for each value
    python benchmarks/coverage.py --experiments=200

Each experiment draws the outcomes of some prompts: wins, ties and losses of a known rate, or scores
of a known mean. The table shows the lowest and the highest coverage over several true values. The
next lines are how often the gate promotes a candidate that is as good as SFT. The second table is
that of a study: the rates of recipes over training seeds and prompts.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from statistics import NormalDist

import numpy as np
from rich.console import Console
from rich.table import Table

from rlhf_pipeline.config.evaluate import RegisterConfig
from rlhf_pipeline.verdict.answers import Answer
from rlhf_pipeline.verdict.comparison import Standing
from rlhf_pipeline.verdict.gate import Evidence, decide
from rlhf_pipeline.verdict.recipes import estimate, pairs_of
from rlhf_pipeline.verdict.statistics import (
    cross_pairs,
    length_controlled,
    mean_with_interval,
    rate_interval,
    standardized_gain,
    win_rate,
)

PROMPTS = (64, 160, 512)
TIES = (0.0, 0.2, 0.5)
RATES = (0.5, 0.6, 0.75, 0.9)
"""Share of wins among the prompts without a tie."""
SEEDS = (3, 5, 10)
RATIOS = (0.0, 1.0, 10.0)
"""Variance between seeds, in units of that of a mean over prompts which differ by 0.15."""
SPREADS = (0.05, 0.15, 0.25)
"""Standard deviations of the true rate between prompts."""
DRAWS = 4
"""Answers to each prompt in the lines with several draws."""
LIKE = (0.0, 0.5, 0.9)
"""Share of these answers that are like the prompt instead of independent."""
SCORES: dict[str, Callable[..., np.ndarray]] = {
    "normal scores": lambda rng, size: rng.normal(1.0, 2.0, size),
    "skewed scores": lambda rng, size: rng.exponential(1.0, size),
    "bounded scores": lambda rng, size: rng.beta(2.0, 2.0, size) * 2,
}
"""Draws with mean 1."""

Interval = tuple[float, float]


def main() -> None:
    """Simulate and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experiments", type=int, default=10_000)
    experiments = parser.parse_args().experiments
    table = Table(title=f"Coverage of 95% intervals, {experiments} experiments for each value")
    for column in ("interval", "prompts", "lowest", "highest"):
        table.add_column(column, justify="right")
    for n in PROMPTS:
        for number, (name, coverages) in enumerate(lines(n, experiments)):
            found = list(coverages(np.random.default_rng([1, n, number])))
            table.add_row(name, str(n), f"{min(found):.1%}", f"{max(found):.1%}")
    console = Console()
    console.print(table)
    for draws, tries in product((1, DRAWS), (1, 10)):
        families = max(1, experiments // (10 if tries == 1 else 50))
        share = promotions(np.random.default_rng([2, draws, tries]), draws, tries, families)
        console.print(
            f"{share:.1%} of {families} test sets promoted an equal policy; candidates: {tries}, "
            f"prompts: 200, answers to each: {draws}"
        )
    console.print(of_studies(max(100, experiments // 5)))


def of_studies(experiments: int) -> Table:
    """Coverage of the rate of a recipe, and how often one of two equal recipes is called better."""
    table = Table(title=f"Studies of {PROMPTS[0]} and {PROMPTS[-1]} prompts")
    for column in ("seeds", "variance between seeds", "lowest", "highest", "equal, called unequal"):
        table.add_column(column, justify="right")
    for seeds, ratio in product(SEEDS, RATIOS):
        found = [
            studies(np.random.default_rng([3, seeds, int(ratio), n, int(100 * spread)]),
                    (seeds, n), ratio, spread, experiments)
            for n, spread in product((PROMPTS[0], PROMPTS[-1]), SPREADS)
        ]  # fmt: skip
        covered, unequal = zip(*found, strict=True)
        ends = f"{min(covered):.1%}", f"{max(covered):.1%}"
        table.add_row(str(seeds), f"{ratio:g}", *ends, f"{max(unequal):.1%}")
    return table


def studies(
    rng: np.random.Generator, shape: tuple[int, int], ratio: float, spread: float, experiments: int
) -> tuple[float, float]:
    """The two shares of simulated studies whose recipes have the true rate 0.55."""
    rate, between = 0.55, 0.15 * math.sqrt(ratio / shape[1])
    covered = unequal = 0
    for _ in range(experiments):
        chance = rate + rng.uniform(-1, 1, (1, shape[1])) * spread * math.sqrt(3)
        one, other = (
            (rng.random(shape) < chance + rng.normal(0, between, (shape[0], 1))).astype(float)
            for _ in range(2)
        )
        found = estimate(one, same_prompts=True)
        covered += found.lower <= rate <= found.upper
        (pair,) = pairs_of({"one": one, "other": other}, same_prompts=True)
        unequal += pair.shown is not None
    return covered / experiments, unequal / experiments


def lines(
    n: int, experiments: int
) -> Iterator[tuple[str, Callable[[np.random.Generator], Iterable[float]]]]:
    """Each interval with n prompts, and the function that simulates its coverages."""
    for ties in TIES:
        yield (
            f"win rate, {ties:.0%} ties",
            lambda rng, ties=ties: (of_win_rate(rng, n, ties, rate, experiments) for rate in RATES),
        )
    for name, draw in SCORES.items():
        yield (
            f"mean, {name}",
            lambda rng, draw=draw: [
                coverage((mean_with_interval(draw(rng, n))[1:] for _ in range(experiments)), 1.0)
            ],
        )
    for ties in TIES:
        yield (
            f"length-controlled, {ties:.0%} ties",
            lambda rng, ties=ties: (
                of_length_controlled(rng, n, ties, rate, experiments) for rate in RATES
            ),
        )
    yield (
        "gain of normal scores",
        lambda rng: [coverage((gain(rng, n, 1, 0.0) for _ in range(experiments)), 0.5)],
    )
    more = f", {DRAWS} answers"
    yield (
        f"win rate{more}",
        lambda rng: (
            of_clustered_rate(rng, n, like, rate, experiments)
            for like, rate in product(LIKE, RATES)
        ),
    )
    yield (
        f"win rate of cross pairs{more}",
        lambda rng: (
            of_cross_pairs(rng, n, like, rate, experiments) for like, rate in product(LIKE, RATES)
        ),
    )
    yield (
        f"mean, normal scores{more}",
        lambda rng: (
            coverage((clustered_mean(rng, n, like) for _ in range(experiments)), 1.0)
            for like in LIKE
        ),
    )
    yield (
        f"gain of normal scores{more}",
        lambda rng: (
            coverage((gain(rng, n, DRAWS, like) for _ in range(experiments)), 0.5) for like in LIKE
        ),
    )
    yield (
        f"length-controlled{more}",
        lambda rng: (
            of_length_controlled(rng, n, 0.0, rate, experiments, DRAWS, like)
            for like, rate in product(LIKE, RATES)
        ),
    )


def alike(
    rng: np.random.Generator, shape: tuple[int, int], share: float, draw: Callable[..., np.ndarray]
) -> np.ndarray:
    """Draws (prompts, answers), of which a share repeats the draw of the prompt."""
    like = rng.random(shape) < share
    return np.where(like, draw(rng, (shape[0], 1)), draw(rng, shape))


def uniform(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    return rng.random(size)


def of_win_rate(
    rng: np.random.Generator, n: int, ties: float, rate: float, experiments: int
) -> float:
    """Coverage of the win rate's interval."""
    shares = [(1 - ties) * rate, ties, (1 - ties) * (1 - rate)]
    drawn = rng.multinomial(n, shares, size=experiments).tolist()
    intervals = (rate_interval((wins + tied / 2) / n, n, tied) for wins, tied, _ in drawn)
    return coverage(intervals, shares[0] + ties / 2)


def of_clustered_rate(
    rng: np.random.Generator, n: int, like: float, rate: float, experiments: int
) -> float:
    """Coverage of the win rate's interval where answers to one prompt resemble each other."""
    half = np.full((n, DRAWS), 0.5)

    def interval() -> Interval:
        wins = alike(rng, (n, DRAWS), like, uniform) < rate
        found = win_rate(wins, half)
        return found.lower, found.upper

    return coverage((interval() for _ in range(experiments)), rate)


def of_cross_pairs(
    rng: np.random.Generator, n: int, like: float, rate: float, experiments: int
) -> float:
    """Coverage of the win rate of independent draws, all pairs of unequal draws of a prompt."""
    shift = math.sqrt(8) * NormalDist().inv_cdf(rate)  # the difference has the variance 2 * 2^2

    def interval() -> Interval:
        ours, theirs = (alike(rng, (n, DRAWS), like, SCORES["normal scores"]) for _ in range(2))
        found = win_rate(*cross_pairs(ours + shift, theirs))
        return found.lower, found.upper

    return coverage((interval() for _ in range(experiments)), rate)


def clustered_mean(rng: np.random.Generator, n: int, like: float) -> Interval:
    return mean_with_interval(alike(rng, (n, DRAWS), like, SCORES["normal scores"]))[1:]


def of_length_controlled(
    rng: np.random.Generator,
    n: int,
    ties: float,
    rate: float,
    experiments: int,
    draws: int = 1,
    like: float = 0.0,
) -> float:
    """Coverage of the length-controlled rate, where a longer answer wins more often.

    Ties take the place of as many wins as losses, so the model of the rate stays true.
    """
    shape = n, draws

    def interval() -> Interval | None:
        extra = alike(rng, shape, like, lambda rng, size: rng.normal(10, 30, size))
        chance = 1 / (1 + np.exp(-np.log(rate / (1 - rate)) - np.tanh(extra / 30)))
        tie = ties * 2 * np.minimum(chance, 1 - chance)
        win = (chance - tie / 2) / (1 - tie)  # given that it is no tie
        outcome = np.where(rng.random(shape) < tie, 0.5, alike(rng, shape, like, uniform) < win)
        found = length_controlled(outcome, np.full(shape, 0.5), extra.round())
        return None if found is None else found[1:]

    return coverage((found for _ in range(experiments) if (found := interval())), rate)


def gain(rng: np.random.Generator, n: int, draws: int, like: float) -> Interval:
    """The interval of a gain of half the spread, between scores that differ by prompt."""
    difficulty = rng.normal(0, 0.6, (n, 1))
    baseline, candidate = (
        difficulty + alike(rng, (n, draws), like, lambda rng, size: rng.normal(0, 0.8, size))
        for _ in range(2)
    )
    return standardized_gain(candidate + 0.5, baseline)[1:]


def promotions(rng: np.random.Generator, draws: int, tries: int, families: int) -> float:
    """Share of test sets on which one of several candidates is promoted that equal SFT.

    The bound on the gain is 0, so that the win rate decides.
    """
    config, known = RegisterConfig(min_gain=0.0), Standing("independent")

    def policy(difficulty: np.ndarray) -> list[Answer]:
        shape = len(difficulty), draws
        scores = difficulty + alike(rng, shape, 0.5, lambda rng, size: rng.normal(0, 1, size))
        words = rng.integers(1000, size=(*shape, 12)).astype(str)
        return [
            Answer(row, "", " ".join(words[row, draw]), {"gold": scores[row, draw]}, 1.0, -20.0,
                   12, True, draw=draw)
            for row, draw in np.ndindex(shape)
        ]  # fmt: skip

    def promoted() -> bool:
        difficulty = rng.normal(0, 0.5, (200, 1))
        baseline = policy(difficulty)
        return any(
            not decide(
                Evidence(policy(difficulty), baseline, "gold", known, tries=k), config
            ).refusals
            for k in range(1, tries + 1)
        )

    return float(np.mean([promoted() for _ in range(families)]))


def coverage(intervals: Iterable[Interval], true: float) -> float:
    """Share of the intervals that contain the true value."""
    return float(np.mean([lower <= true <= upper for lower, upper in intervals]))


if __name__ == "__main__":
    main()
