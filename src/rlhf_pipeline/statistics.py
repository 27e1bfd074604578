"""Win rates, means and differences on the same prompts, with their uncertainty."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

ALPHA = 0.05
"""How often an interval may miss the true value: intervals are 95%."""


@dataclass(frozen=True)
class WinRate:
    """How often the candidate beats the baseline on the same prompts."""

    rate: float
    """(wins + ties / 2) / n."""
    lower: float
    """Lower end of the interval on `rate`."""
    upper: float
    """Upper end of the interval on `rate`."""
    wins: int
    ties: int
    losses: int
    n: int


def win_rate(
    candidate: Sequence[float], baseline: Sequence[float], alpha: float = ALPHA
) -> WinRate:
    """Share of prompts on which the candidate's score is higher; a tie counts half.

        p = (wins + ties / 2) / n

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
    lower, upper = rate_interval(rate, n, ties, alpha)
    return WinRate(rate, lower, upper, wins, ties, losses, n)


def rate_interval(rate: float, n: int, ties: int = 0, alpha: float = ALPHA) -> tuple[float, float]:
    """Interval of the rate p of successes among n, in which a tie is half a success.

        variance = p (1 - p) - ties / 4n,  z = 1.96 for alpha = 0.05
        interval = (p + z^2 / 2n  +-  z sqrt(variance / n + z^2 / 4n^2)) / (1 + z^2 / n)

    Without ties this is the interval of Wilson, "Probable Inference, the Law of Succession, and
    Statistical Inference", JASA 22, 1927. Ties lower the variance of an outcome; without that term
    95% intervals would cover the true rate in 99% of cases at ties of one half, see
    `benchmarks/coverage.py`.
    """
    z2 = _normal_quantile(alpha) ** 2
    variance = rate * (1 - rate) - ties / (4 * n)
    centre = rate + z2 / (2 * n)
    half_width = math.sqrt(z2 * (variance / n + z2 / (4 * n**2)))
    # Rounding can exceed [0, 1] by 1e-17.
    stretch = 1 + z2 / n
    return max(0.0, (centre - half_width) / stretch), min(1.0, (centre + half_width) / stretch)


def sign_test(wins: int, losses: int) -> float:
    """Two-sided p-value of the exact sign test: are wins and losses equally likely?

        p = P(|W - n/2| >= |wins - n/2|),  W ~ Binomial(n, 1/2),  n = wins + losses

    Ties say nothing and are left out. For two policies on the same prompts this is the exact test
    of McNemar. 1 if all prompts are ties.
    """
    from scipy.stats import binomtest  # here, because the driver imports this module

    return float(binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0


def length_controlled(
    candidate: Sequence[float],
    baseline: Sequence[float],
    extra_tokens: Sequence[int],
    alpha: float = ALPHA,
) -> tuple[float, float, float] | None:
    """The win rate that answers of equal length would have: (rate, lower, upper).

        P(win) = sigmoid(a + b tanh(d / s))     d: tokens by which the candidate's answer is longer;
                                                s: standard deviation of d; a tie is half a win
        rate = sigmoid(a)                       at d = 0
        interval = sigmoid(a +- z se(a))        se: delta method with the sandwich variance
                                                H^-1 (sum r^2 x x') H^-1 n / (n - 2), where
                                                r = outcome - P, x = (1, tanh(d / s)), H: Hessian

    Source: AlpacaEval 2 (Dubois et al. 2024, https://arxiv.org/abs/2404.04475), without its term
    for the difficulty of an instruction and without its regularization. None if the rate cannot be
    estimated: the lengths do not differ, or wins and losses are separable by them.
    """
    difference = np.asarray(extra_tokens, dtype=float)
    n = len(difference)
    if n < 3 or (spread := difference.std(ddof=1)) == 0:
        return None
    design = np.stack([np.ones(n), np.tanh(difference / spread)], axis=1)
    outcome = (np.sign(np.subtract(candidate, baseline)) + 1) / 2
    weights = np.zeros(2)
    for _ in range(25):  # Newton's method; where the classes are separable it never arrives
        expected = 1 / (1 + np.exp(-design @ weights))
        hessian = (design * (expected * (1 - expected))[:, None]).T @ design
        if np.linalg.cond(hessian) > 1e8:
            return None
        step = np.linalg.solve(hessian, design.T @ (outcome - expected))
        weights += step
        if abs(step).max() < 1e-9:
            break
    else:
        return None
    inverse = np.linalg.inv(hessian)
    residual = design * (outcome - expected)[:, None]
    error = math.sqrt((inverse @ residual.T @ residual @ inverse)[0, 0] * n / (n - 2))
    half_width = _normal_quantile(alpha) * error
    rate, lower, upper = 1 / (1 + np.exp(-weights[0] - half_width * np.array([0, -1, 1])))
    return float(rate), float(lower), float(upper)


def mean_with_interval(values: Sequence[float], alpha: float = ALPHA) -> tuple[float, float, float]:
    """Mean and its interval by Student's t distribution: (mean, lower, upper).

        mean +- t s / sqrt(n)       s: sample standard deviation (divisor n - 1); t: quantile at
                                    1 - alpha / 2 for n - 1 degrees of freedom

    Raises ValueError if there are fewer than two values, or a value is not finite.
    """
    from scipy.special import stdtrit  # here, because the driver imports this module

    _check_scores("values", values)
    n = len(values)
    if n < 2:
        raise ValueError("values has 1 entry; an interval needs at least 2")
    mean = math.fsum(values) / n
    half_width = float(stdtrit(n - 1, 1 - alpha / 2)) * _deviation(values) / math.sqrt(n)
    return mean, mean - half_width, mean + half_width


def standardized_gain(
    candidate: Sequence[float], baseline: Sequence[float], alpha: float = ALPHA
) -> tuple[float, float, float]:
    """Mean gain on the same prompts in units of the scores' spread: (gain, lower, upper).

        mean(candidate - baseline) / s          s^2: mean of the two sample variances

    with the interval of the mean gain (Cohen's d with pooled variance; its own error is left out).
    0 if all scores are equal, infinite if only the policies' scores differ.
    """
    gains = [ours - theirs for ours, theirs in zip(candidate, baseline, strict=True)]
    gain, lower, upper = mean_with_interval(gains, alpha)
    spread = math.sqrt((_deviation(candidate) ** 2 + _deviation(baseline) ** 2) / 2)
    unit = 1 / spread if spread else math.inf
    return gain and gain * unit, lower and lower * unit, upper and upper * unit


def smallest_visible_win_rate(n: int, power: float = 0.8, alpha: float = ALPHA) -> float:
    """The true win rate that n prompts show to be above one half with probability `power`.

        1/2 + (z + z_power) / (2 sqrt(n))       z = 1.96 for alpha = 0.05, z_power = 0.84 for 0.8

    without ties; at most 1. Ties make smaller differences visible.
    """
    return min(1.0, 0.5 + (_normal_quantile(alpha) + NormalDist().inv_cdf(power)) / (2 * n**0.5))


def agreement(units: Sequence[Sequence[Hashable]]) -> tuple[float | None, float | None]:
    """How far people agree who gave categories to units: (raw agreement, Krippendorff's alpha).

        raw   = 1 - sum_u d_u / sum_u m_u (m_u - 1),        d_u = m_u^2 - sum_c n_uc^2
        alpha = 1 - (n - 1) sum_u d_u / (m_u - 1) / (n^2 - sum_c n_c^2)

    n_uc of m_u people gave c to unit u; n_c and n are sums over the units with several people,
    without which raw is None. alpha is 0 at the agreement of chance, and None for one category.

    Source: Krippendorff, "Computing Krippendorff's Alpha-Reliability", 2011, nominal data.
    """
    counts = [Counter(unit) for unit in units if len(unit) > 1]
    if not counts:
        return None, None
    found = [(m := unit.total(), m**2 - sum(n**2 for n in unit.values())) for unit in counts]
    raw = 1 - sum(d for _, d in found) / sum(m * (m - 1) for m, _ in found)
    n = sum(m for m, _ in found)
    chance = n**2 - sum(count**2 for count in sum(counts, Counter[Hashable]()).values())
    return raw, 1 - (n - 1) * sum(d / (m - 1) for m, d in found) / chance if chance else None


def calibration(
    margins: Sequence[float], bins: int = 10
) -> tuple[float, list[dict[str, float | None]]]:
    """Expected calibration error of a reward model, and its bins as JSON types.

        confidence = sigmoid(|margin|) in [0.5, 1]      margin: chosen score minus rejected score
        error = sum over bins of n_bin / n |accuracy - confidence|

    in bins of equal width, with means. The model predicts that the answer with the higher score is
    the chosen one; a tie is half right. Source: Guo et al. 2017, https://arxiv.org/abs/1706.04599.
    """
    margin = np.asarray(margins, dtype=float)
    confidence, right = 1 / (1 + np.exp(-abs(margin))), (np.sign(margin) + 1) / 2
    place = np.minimum(((confidence - 0.5) * 2 * bins).astype(int), bins - 1)
    found, error = [], 0.0
    for number in range(bins):
        inside = place == number
        n, mean, share = int(inside.sum()), None, None
        if n:
            mean, share = float(confidence[inside].mean()), float(right[inside].mean())
            error += n / len(margin) * abs(share - mean)
        lower, upper = (0.5 + (number + end) / (2 * bins) for end in (0, 1))
        found.append(
            {"lower": lower, "upper": upper, "n": n, "confidence": mean, "accuracy": share}
        )
    return error, found


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's rank correlation in [-1, 1]; None if one of both does not vary."""
    from scipy.stats import spearmanr  # here, because the driver imports this module

    if len(set(first)) < 2 or len(set(second)) < 2:
        return None
    return float(spearmanr(first, second).statistic)


def _normal_quantile(alpha: float) -> float:
    return NormalDist().inv_cdf(1 - alpha / 2)


def _deviation(values: Sequence[float]) -> float:
    """The sample standard deviation."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _check_scores(name: str, scores: Sequence[float]) -> None:
    if len(scores) == 0:
        raise ValueError(f"{name} is empty")
    for i, score in enumerate(scores):
        if not math.isfinite(score):
            raise ValueError(f"{name}[{i}] is {score}; every score must be finite")
