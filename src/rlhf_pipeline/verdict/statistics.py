"""Win rates, means and differences on the same prompts, with their uncertainty.

Several answers to one prompt resemble each other, so intervals treat the prompt as the unit: they
are about the mean over its answers (cluster-robust; Miller 2024, https://arxiv.org/abs/2411.00640).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, stdev

import numpy as np

ALPHA = 0.05  # how often an interval may miss the true value: intervals are 95%

Values = Sequence[float] | Sequence[Sequence[float]]
"""One value for each prompt, or the equally many values of its answers."""


@dataclass(frozen=True)
class WinRate:
    """How often the candidate beats the baseline on the same prompts."""

    rate: float  # mean outcome of a pair of answers: a win is 1, a tie 1/2, a loss 0
    lower: float  # lower end of the interval on `rate`
    upper: float  # upper end of the interval on `rate`
    wins: int  # prompts whose mean outcome is above 1/2
    ties: int
    losses: int
    n: int  # prompts


def win_rate(candidate: Values, baseline: Values, alpha: float = ALPHA) -> WinRate:
    """Share of pairs of answers in which the candidate's score is higher; a tie counts half.

        p = mean of y,  y: mean outcome of the k pairs of a prompt
        interval = that of m independent pairs (`rate_interval`), m = n min(var(x) / var(y), k)

    x is the outcome of a pair. With k = 1, m = n; where the pairs of each prompt agree as well; at
    most n k. Source of the effective sample size: Korn, Graubard, "Confidence Intervals for
    Proportions with Small Expected Number of Positive Counts", Survey Methodology 24, 1998.

    The scores belong to the responses of both models to the same prompts, in equal order. Raises
    ValueError if there are no scores, their numbers differ, or a score is not finite.
    """
    x = outcomes(candidate, baseline)
    y, (n, k) = x.mean(1), x.shape
    rate, tied = float(y.sum() / n), float((4 * x * (1 - x)).sum())
    of_pairs = rate * (1 - rate) - tied / (4 * n * k)
    of_prompts = rate * (1 - rate) - float((y * (1 - y)).sum()) / n
    # Without any spread, nothing is known about the agreement within a prompt.
    size = n * min(of_pairs / of_prompts, k) if of_prompts > 0 else n
    lower, upper = rate_interval(rate, size, tied * size / (n * k), alpha)
    wins, losses = int((y > 0.5).sum()), int((y < 0.5).sum())
    return WinRate(rate, lower, upper, wins, n - wins - losses, losses, n)


def difference(candidate: Values, baseline: Values) -> tuple[float, float, float]:
    """Difference of two shares on the same prompts, in [-1, 1]: (difference, lower, upper).

    It is 2 p - 1, where p is the win rate of values 0 and 1, and no others, with its interval. So
    the interval has a width even if no prompt differs. Raises ValueError like `win_rate`.
    """
    rate = win_rate(candidate, baseline)
    return 2 * rate.rate - 1, 2 * rate.lower - 1, 2 * rate.upper - 1


def cross_pairs(
    candidate: Values, baseline: Values, *, one_each: bool = False
) -> tuple[Values, Values]:
    """Both values of each pair of independently drawn answers to a prompt: two (prompts, pairs).

    Draw i of both policies has equal randomness, so draw i meets all draws but i; with `one_each`
    the next one alone. If there is no other draw, because answers are greedy, draw 0 meets draw 0.
    """
    ours, theirs = _table("candidate", candidate), _table("baseline", baseline)
    own, other = np.indices((ours.shape[1], theirs.shape[1])).reshape(2, -1)
    apart = (other - own) % theirs.shape[1] == 1 if one_each else own != other
    kept = apart if apart.any() else own == other
    return ours[:, own[kept]].tolist(), theirs[:, other[kept]].tolist()


def rate_interval(
    rate: float, n: float, ties: float = 0, alpha: float = ALPHA
) -> tuple[float, float]:
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
    from scipy.special import bdtr  # here, because the driver imports this module

    return min(1.0, 2 * float(bdtr(min(wins, losses), wins + losses, 0.5)))


def length_controlled(
    candidate: Values, baseline: Values, extra_tokens: Values, alpha: float = ALPHA
) -> tuple[float, float, float] | None:
    """The win rate that answers of equal length would have: (rate, lower, upper).

        P(win) = sigmoid(a + b tanh(d / s))     d: tokens by which the candidate's answer is longer;
                                                s: standard deviation of d; a tie is half a win
        rate = sigmoid(a)                       at d = 0
        interval = sigmoid(a +- z se(a))        se: delta method with the sandwich variance
                                                H^-1 (sum u u') H^-1 n / (n - 2), where u: sum of
                                                (outcome - P) x over the pairs of a prompt,
                                                x = (1, tanh(d / s)), H: Hessian

    Source: AlpacaEval 2 (Dubois et al. 2024, https://arxiv.org/abs/2404.04475), without its term
    for the difficulty of an instruction and without its regularization. None if the rate cannot be
    estimated: the lengths do not differ, or wins and losses are separable by them.
    """
    n, difference = len(extra_tokens), np.ravel(extra_tokens).astype(float)
    if n < 3 or (spread := difference.std(ddof=1)) == 0:
        return None
    design = np.stack([np.ones(len(difference)), np.tanh(difference / spread)], axis=1)
    outcome = outcomes(candidate, baseline).ravel()
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
    residual = (design * (outcome - expected)[:, None]).reshape(n, -1, 2).sum(1)
    error = math.sqrt((inverse @ residual.T @ residual @ inverse)[0, 0] * n / (n - 2))
    half_width = _normal_quantile(alpha) * error
    rate, lower, upper = 1 / (1 + np.exp(-weights[0] - half_width * np.array([0, -1, 1])))
    return float(rate), float(lower), float(upper)


def share_with_interval(values: Values, k: int = 1) -> tuple[float, float, float]:
    """Share of ones among values 0 and 1, and its interval within [0, 1]: (share, lower, upper).

    With k > 1 it is pass@k, the probability that one of k answers to a prompt is a one:

        p = mean of y,  y = 1 - C(d - c, k) / C(d, k)       c: ones among the d values of a prompt
        interval = that of m independent outcomes (`rate_interval`), m = n min(p (1 - p) / var(y),
                   d / k rounded down), as in `win_rate`

    without bias. With one group of k for each prompt and fewer than 10 ones or zeros, the interval
    is the exact one of Clopper and Pearson, Biometrika 26, 1934. Source of pass@k: Chen et al.
    2021, https://arxiv.org/abs/2107.03374. `k` is at most d.
    """
    x = _table("values", values)
    n, d = x.shape
    y = [1 - math.comb(d - int(c), k) / math.comb(d, k) for c in x.sum(1)]
    rate, ones = float(np.mean(y)), round(sum(y))
    if k == d and min(ones, n - ones) < 10:
        from scipy.stats import binomtest  # here, because it takes half a second

        return rate, *binomtest(ones, n).proportion_ci(1 - ALPHA)
    spread = float(np.var(y))
    size = n * min(rate * (1 - rate) / spread, d // k) if spread > 0 else n
    return rate, *rate_interval(rate, size)


def mean_with_interval(values: Values, alpha: float = ALPHA) -> tuple[float, float, float]:
    """Mean and its interval by Student's t distribution: (mean, lower, upper).

        mean +- t s / sqrt(n)       s: sample standard deviation (divisor n - 1) of the means of the
                                    n prompts; t: quantile at 1 - alpha / 2 for n - 1 degrees of
                                    freedom

    Raises ValueError if there are fewer than two prompts, or a value is not finite.
    """
    from scipy.special import stdtrit  # here, because the driver imports this module

    means = _table("values", values).mean(1).tolist()
    n = len(means)
    if n < 2:
        raise ValueError("values has 1 entry; an interval needs at least 2")
    mean = math.fsum(means) / n
    half_width = float(stdtrit(n - 1, 1 - alpha / 2)) * stdev(means) / math.sqrt(n)
    return mean, mean - half_width, mean + half_width


def standardized_gain(
    candidate: Values, baseline: Values, alpha: float = ALPHA
) -> tuple[float, float, float]:
    """Mean gain on the same prompts in units of the scores' spread: (gain, lower, upper).

        d = mean(candidate - baseline) / s      s^2: mean of the two sample variances of all scores
        d +- t sd(e) / sqrt(n)                  e = g / s - d q / 2 s^2, for each prompt; g: mean
                                                gain, q: mean of the two squared deviations

    (Cohen's d with pooled variance). If all scores of one policy are equal, s^2 is the variance of
    the other one's: a pairwise judge gives each answer of the baseline 0. e is the influence of a
    prompt on d, so the interval knows the error of s as well: Jaeckel, "The Infinitesimal
    Jackknife", 1972. The interval is Student's t. 0 if all scores are equal, infinite if only the
    policies' scores differ.
    """
    ours, theirs = _tables(candidate, baseline)
    gains = (ours - theirs).mean(1)
    gain = mean_with_interval(gains.tolist(), alpha)[0]
    varied = [scores for scores in (ours, theirs) if np.ptp(scores) > 0]
    if not varied:
        return (gain and math.copysign(math.inf, gain),) * 3
    variances = [stdev(scores.ravel().tolist()) ** 2 for scores in varied]
    unit = math.sqrt(len(varied) / sum(variances))
    squares = np.mean([((scores - scores.mean()) ** 2).mean(1) for scores in varied], axis=0)
    influence = (gains - gain) * unit - gain * unit**3 * (squares - squares.mean()) / 2
    _, lower, upper = mean_with_interval((gain * unit + influence).tolist(), alpha)
    return gain * unit, lower, upper


def smallest_visible_win_rate(n: int) -> float:
    """The true win rate that n prompts show to be above one half with probability 0.8.

        1/2 + (z + z_power) / (2 sqrt(n))       z = 1.96 for alpha = 0.05, z_power = 0.84 for 0.8

    without ties; at most 1. Ties, and several answers to each prompt, make smaller differences
    visible; but even endless answers leave the differences between prompts.
    """
    return min(1.0, 0.5 + (_normal_quantile(ALPHA) + NormalDist().inv_cdf(0.8)) / (2 * n**0.5))


def calibration(margins: Sequence[float]) -> tuple[float, list[dict[str, float | None]]]:
    """Expected calibration error of a reward model, and its bins as JSON types.

        confidence = sigmoid(|margin|) in [0.5, 1]      margin: chosen score minus rejected score
        error = sum over bins of n_bin / n |accuracy - confidence|

    in 10 bins of equal width, with means. The model predicts that the answer with the higher score
    is the chosen one; a tie is half right. Source: Guo et al. 2017, https://arxiv.org/abs/1706.04599.
    """
    bins, margin = 10, np.asarray(margins, dtype=float)
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
    """Spearman's rank correlation in [-1, 1]; None if one of the two does not vary."""
    from scipy.stats import spearmanr  # here, because the driver imports this module

    if len(set(first)) < 2 or len(set(second)) < 2:
        return None
    return float(spearmanr(first, second).statistic)


def _normal_quantile(alpha: float) -> float:
    return NormalDist().inv_cdf(1 - alpha / 2)


def _table(name: str, values: Values) -> np.ndarray:
    """The values as (prompts, answers to each)."""
    if len(values) == 0:
        raise ValueError(f"{name} is empty")
    table = np.asarray(values, dtype=float).reshape(len(values), -1)
    for i, score in enumerate(table.ravel().tolist()):
        if not math.isfinite(score):
            raise ValueError(f"{name}[{i}] is {score}; every score must be finite")
    return table


def _tables(candidate: Values, baseline: Values) -> tuple[np.ndarray, np.ndarray]:
    ours, theirs = _table("candidate", candidate), _table("baseline", baseline)
    if ours.shape != theirs.shape:
        raise ValueError(f"found scores {ours.shape} and {theirs.shape}, expected equal shapes")
    return ours, theirs


def outcomes(candidate: Values, baseline: Values) -> np.ndarray:
    """1 for a win of the candidate, 1/2 for a tie, 0 for a loss: (prompts, answers to each)."""
    return (np.sign(np.subtract(*_tables(candidate, baseline))) + 1) / 2
