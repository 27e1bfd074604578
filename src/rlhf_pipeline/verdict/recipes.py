"""Which recipe is better? Mean outcomes over training seeds and prompts, and their differences.

A recipe is a pipeline with its parameters. Its outcomes are a table with a row for each training
seed and a column for each prompt: how often the policy of that seed beats the baseline there.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import NormalDist

import numpy as np

from rlhf_pipeline.verdict.answers import Answer, scores_by
from rlhf_pipeline.verdict.statistics import ALPHA, cross_pairs, outcomes

Outcomes = Sequence[Sequence[float]]
"""Outcomes in [0, 1], (seeds, prompts). Where each seed has other prompts, rows may differ in
length."""
SHARED = 0.2
"""The constant in c of `estimate` for the rate of one recipe."""
MOST_SEEDS = 200
"""Where more seeds would be needed, other prompts are the better advice."""
POWER = 0.8
"""Probability with which the proposed number of seeds shows a difference."""


def against(
    ours: list[Answer], baseline: list[Answer], judge: str, *, one_each: bool = False
) -> list[float]:
    """How often answers beat those of the baseline that were drawn independently, by prompt;
    `one_each` as in `cross_pairs`."""
    scores = scores_by(ours, judge), scores_by(baseline, judge)
    found: list[float] = outcomes(*cross_pairs(*scores, one_each=one_each)).mean(1).tolist()
    return found


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and prompts, its interval, and the variances that it consists of.

    variance of the mean of S seeds = (between + rest) / S + prompts
    """

    mean: float
    lower: float
    upper: float
    between: float
    """Variance between the seeds' means over all prompts that could be asked."""
    rest: float
    """Variance of a seed's mean because its policy has luck with some prompts."""
    prompts: float
    """Variance of the mean because the prompts, which all seeds share, are a sample."""


def estimate(
    outcomes: Outcomes, *, same_prompts: bool, alpha: float = ALPHA, shared: float = SHARED
) -> Estimate:
    """The mean of a recipe over its seeds and prompts.

        y = m + a_seed + b_prompt + e       all seeds answer the same prompts
        SP half width^2 = t_S^2 max(0, M_a - c M_e) + t_P^2 max(c M_e, M_b - (1 - c) M_e)

    M: mean squares of seeds, prompts and the rest in the analysis of variance; t_S, t_P: quantiles
    of Student's t with S - 1 and P - 1 degrees of freedom. Half widths of independent sources add
    up like standard errors (Howe, JASA 69, 1974). With c = 0, three seeds cover the mean in more
    than 97% where prompts differ much; with c = 0.2 max(0, 1 - M_e / M_b) in 94 to 97%, see
    `benchmarks/coverage.py`. `shared` is the 0.2. With other prompts for each seed, the interval
    is Student's t of the seeds' means; with one seed, that of its prompts.

    Raises ValueError without a seed, or with fewer than two prompts.
    """
    if not len(outcomes) or min(map(len, outcomes)) < 2:
        raise ValueError("outcomes: expected at least one seed with two prompts")
    seeds, prompts = len(outcomes), len(outcomes[0])
    means = np.array([float(np.mean(row)) for row in outcomes])
    mean = float(means.mean())
    if not (same_prompts or seeds == 1):
        one = float(means.var(ddof=1))
        half_width = _t(seeds - 1, alpha) * math.sqrt(one / seeds)
        rest = float(np.mean([np.var(row, ddof=1) / len(row) for row in outcomes]))
        between = max(0.0, one - rest)
        return Estimate(mean, mean - half_width, mean + half_width, between, one - between, 0.0)
    table = np.asarray(outcomes, dtype=float)
    of_prompts = table.mean(0) - mean
    m_prompts = seeds * float((of_prompts**2).sum()) / (prompts - 1)
    m_seeds = m_rest = 0.0
    square = _t(prompts - 1, alpha) ** 2 * m_prompts
    if seeds > 1:
        m_seeds = prompts * float(means.var(ddof=1))
        m_rest = float(((table - means[:, None] - of_prompts) ** 2).sum())
        m_rest /= (seeds - 1) * (prompts - 1)
        moved = shared * max(0.0, 1 - m_rest / m_prompts) * m_rest if m_prompts else 0.0
        square = _t(seeds - 1, alpha) ** 2 * max(0.0, m_seeds - moved)
        square += _t(prompts - 1, alpha) ** 2 * max(moved, m_prompts - m_rest + moved)
    half_width = math.sqrt(square / (seeds * prompts))
    between = max(0.0, m_seeds - m_rest) / prompts
    own = max(0.0, m_prompts - m_rest) / (seeds * prompts)
    ends = mean - half_width, mean + half_width
    return Estimate(mean, *ends, between, m_rest / prompts, own)


def seeds_to_show(difference: Estimate, alpha: float = ALPHA, present: int = 1) -> int | None:
    """The number of seeds, more than the `present` one, that would show a difference as large as
    the found one with probability `POWER`. None: more than `MOST_SEEDS`."""
    z, power = NormalDist().inv_cdf(1 - alpha / 2), NormalDist().inv_cdf(POWER)
    for seeds in range(present + 1, MOST_SEEDS + 1):
        between, other = difference.between / seeds, difference.rest / seeds + difference.prompts
        half_width = math.sqrt(_t(seeds - 1, alpha) ** 2 * between + z**2 * other)
        if abs(difference.mean) >= half_width + power * math.sqrt(between + other):
            return seeds
    return None


@dataclass(frozen=True)
class Pair:
    """Two recipes and the difference of their outcomes, the first minus the second."""

    first: str
    second: str
    difference: Estimate

    @property
    def shown(self) -> str | None:
        """The recipe that is shown to be better, if one is."""
        if self.difference.lower > 0:
            return self.first
        return self.second if self.difference.upper < 0 else None


def pairs_of(
    recipes: Mapping[str, Outcomes], *, same_prompts: bool, baselines: Collection[str] = ()
) -> list[Pair]:
    """All pairs of recipes, but for those of two baselines. Their intervals together miss in 5% of
    studies at most (Bonferroni).

    The recipes have equal seeds and, seed by seed, equal prompts. Prompts hardly matter to the
    difference of two recipes, so nothing is taken from the seeds' part: c is 0 in `estimate`.
    """
    chosen = [pair for pair in combinations(recipes, 2) if not {*pair} <= {*baselines}]

    def difference(first: str, second: str) -> Estimate:
        both = zip(recipes[first], recipes[second], strict=True)
        rows = [np.subtract(ours, theirs).tolist() for ours, theirs in both]
        alpha = ALPHA / len(chosen)
        return estimate(rows, same_prompts=same_prompts, alpha=alpha, shared=0.0)

    return [Pair(*names, difference(*names)) for names in chosen]


def conclusion(pairs: Sequence[Pair], means: Mapping[str, float], seeds: int) -> str:
    """Which recipe is shown to be the best; or that none is, and how many seeds would show it."""
    best = max(means, key=lambda name: means[name])
    if seeds == 1:
        return (
            f"No recipe is shown to be the best: {best} has the highest rate, but one seed says "
            "nothing about others. Three seeds are the least for a conclusion."
        )
    equals = {
        other: pair.difference
        for pair in pairs
        for name, other in ((pair.first, pair.second), (pair.second, pair.first))
        if name == best and pair.shown != best
    }
    if not equals:
        return f"{best} is shown to be better than every other recipe."
    text = (
        f"No recipe is shown to be the best: {best} has the highest rate, but is not shown to be "
        f"better than {', '.join(equals)}. "
    )
    needed = [seeds_to_show(each, ALPHA / len(pairs), seeds) for each in equals.values()]
    if None in needed:
        return text + "More seeds would hardly show it; more prompts may."
    most = max(each for each in needed if each is not None)
    return text + f"If the differences are as large as found, about {most} seeds would show it."


def median_seed(rates: Mapping[int, float]) -> int:
    """The seed with the median rate, so that nobody chooses the best one; of two, the lower one."""
    return sorted(rates, key=lambda seed: (rates[seed], seed))[(len(rates) - 1) // 2]


def _t(freedom: int, alpha: float) -> float:
    from scipy.special import stdtrit  # here, because the driver imports this module

    return float(stdtrit(freedom, 1 - alpha / 2))
