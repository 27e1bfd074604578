"""Win rates, means and text diversity against values computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rlhf_pipeline.verdict.statistics import (
    WinRate,
    calibration,
    cross_pairs,
    length_controlled,
    mean_with_interval,
    rank_correlation,
    rate_interval,
    share_with_interval,
    sign_test,
    smallest_visible_win_rate,
    standardized_gain,
    win_rate,
)


@pytest.mark.parametrize(
    ("candidate", "baseline", "expected"),
    [
        # A tie is half a win. z^2 = 3.8414588, centre 0.625 + 3.8414588 / 8 = 1.1051824, divisor
        # 1 + 3.8414588 / 4 = 1.9603647, variance 0.625 * 0.375 - 1 / 16 = 0.171875, half width
        # 1.9599640 sqrt(0.171875 / 4 + 3.8414588 / 64) = 1.9599640 * 0.3209230 = 0.6289974
        ([1.0, 2.0, 3.0, 0.0], [0.0, 2.0, 1.0, 1.0],
         WinRate(rate=0.625, lower=0.2429063, upper=0.8846210, wins=2, ties=1, losses=1, n=4)),
        # The textbook's interval of Wilson: 0.4902 to 0.9433.
        ([1.0] * 8 + [0.0] * 2, [0.5] * 10,
         WinRate(rate=0.8, lower=0.4901625, upper=0.9433178, wins=8, ties=0, losses=2, n=10)),
        # p = 1: lower = 1 / (1 + z^2 / n) = 1 / (1 + 3.8414588 / 5) = 0.5655175; p = 0 mirrors it.
        ([1.0] * 5, [0.0] * 5,
         WinRate(rate=1.0, lower=0.5655175, upper=1.0, wins=5, ties=0, losses=0, n=5)),
        ([0.0] * 5, [1.0] * 5,
         WinRate(rate=0.0, lower=0.0, upper=0.4344825, wins=0, ties=0, losses=5, n=5)),
    ],
)  # fmt: skip
def test_the_win_rate_by_hand(candidate, baseline, expected):
    result = win_rate(candidate, baseline)
    assert result.lower >= 0 and result.upper <= 1
    assert vars(result) == pytest.approx(vars(expected), rel=1e-5, abs=1e-12)


def test_a_smaller_error_makes_the_interval_wider():
    """Wilson's at z = 2.5758293, z^2 = 6.6348966: (0.8 + 0.3317448 -+ 0.4649871) / 1.6634897."""
    careful = win_rate([1.0] * 8 + [0.0] * 2, [0.5] * 10, alpha=0.01)
    assert (careful.lower, careful.upper) == pytest.approx((0.4008187, 0.9598688), rel=1e-5)


def test_several_answers_to_a_prompt_count_by_their_mean():
    """Outcomes 1, 3/4 (a win and a tie) and 0 on three prompts: rate 1.75 / 3.

    Variance of the prompts (1 + 0.5625) / 3 - 0.5833333^2 = 0.1805556, of the pairs
    (3 + 0.25) / 6 - 0.5833333^2 = 0.2013889: as good as 3 * 1.1153846 = 3.3461538 pairs. Centre
    0.5833333 + 3.8414588 / 6.6923077 = 1.1573444, divisor 2.1480222, half width
    1.9599640 sqrt(0.2013889 / 3.3461538 + 3.8414588 / (4 * 11.1967456)) = 0.7487910
    """
    result = win_rate([[1, 1], [1, 0], [0, 0]], [[0, 0], [0, 0], [1, 1]])
    assert (result.wins, result.ties, result.losses, result.n) == (2, 0, 1, 3)
    assert result.rate == pytest.approx(1.75 / 3)
    assert (result.lower, result.upper) == pytest.approx((0.1902006, 0.8873910), rel=1e-5)
    opposite = win_rate([[1, 0], [1, 1]], [[0, 1], [0, 0]])
    assert (opposite.wins, opposite.ties, opposite.losses) == (1, 1, 0)  # a win and a loss: a tie
    # Wins alone do not show whether the answers to a prompt are independent: five prompts, not ten.
    assert win_rate([[1, 1]] * 5, [[0, 0]] * 5).lower == pytest.approx(0.5655175, rel=1e-6)


def test_means_and_gains_of_several_answers():
    """Means 2, 2, 4: mean 8/3, s = 1.1547005; Student's t for 2 degrees of freedom is 4.3026527,
    half width 4.3026527 s / sqrt(3) = 2.8684351.

    Gains 1, 1, 3. Variances of all scores: 28/15 and 4/5, so the unit is s = sqrt(4/3) and
    d = 1.4433757. Squares 11/9, 2/9 and 17/9, less their mean 1/9, -8/9 and 7/9. Influences
    (g - 5/3) / s - d * 3/8 * these: -0.6374909, -0.0962250 and 0.7337160, half width 1.7156682.
    """
    ours, theirs = [[1, 3], [2, 2], [3, 5]], [[0, 2], [1, 1], [0, 2]]
    assert mean_with_interval(ours) == pytest.approx((2.6666667, -0.2017684, 5.5351018), rel=1e-6)
    assert standardized_gain(ours, theirs) == pytest.approx(
        (1.4433757, -0.2722925, 3.1590438), rel=1e-5
    )


def test_the_gain_is_in_units_of_the_spread():
    """Gains 1, 1, 4 and mean 2. Variances 1 and 7: unit 2, so the gain is 1.

    Squares 2.5, 0.5 and 5, mean 8/3. Influences (g - 2) / 2 - (square - 8/3) / 8: -0.4791667,
    -0.2291667 and 0.7083333, with s = 0.6260408: half width 2.4841377 * 0.6260408 = 1.5551716.

    A judge of pairs, 1, 0, 1 against three zeros: mean 2/3, variance 1/3, so 2/3 * sqrt(3) =
    1.1547005. Squares 1/9, 4/9, 1/9, mean 2/9. Influences (g - 2/3) sqrt(3) - 2/3 sqrt(27) / 2
    (square - 2/9): 0.7698004, -1.5396007, 0.7698004, with s = 1.3333333: half width
    2.4841377 * 1.3333333.
    """
    gain = standardized_gain([2.0, 3.0, 7.0], [1.0, 2.0, 3.0])
    assert gain == pytest.approx((1.0, -0.5551716, 2.5551716), rel=1e-6)
    gain = standardized_gain([1.0, 0.0, 1.0], [0.0, 0.0, 0.0])
    assert gain == pytest.approx((1.1547005, -2.1574831, 4.4668842), rel=1e-6)
    opposite = standardized_gain([0.0, 0.0, 0.0], [1.0, 0.0, 1.0])
    assert opposite == pytest.approx((-1.1547005, -4.4668842, 2.1574831), rel=1e-6)
    for candidate, expected in (([1.0, 1.0], 0.0), ([2.0, 2.0], math.inf)):  # no spread at all
        assert standardized_gain(candidate, [1.0, 1.0]) == (expected,) * 3


def test_cross_pairs_are_all_pairs_of_unequal_draws():
    ours, theirs = cross_pairs([[1, 2, 3]], [[10, 20, 30]])
    assert list(zip(ours[0], theirs[0], strict=True)) == [
        (1, 20), (1, 30), (2, 10), (2, 30), (3, 10), (3, 20),
    ]  # fmt: skip
    for one, other, pairs in (
        ([1], [10, 20], [(1, 20)]),  # one answer, and a second one of the baseline
        ([1], [10], [(1, 10)]),  # greedy answers
    ):
        ours, theirs = cross_pairs([one], [other])
        assert list(zip(ours[0], theirs[0], strict=True)) == pairs
    ours, theirs = cross_pairs([[1, 2, 3]], [[10, 20, 30]], one_each=True)
    assert list(zip(ours[0], theirs[0], strict=True)) == [(1, 20), (2, 30), (3, 10)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # Few are exact: P(X >= 2) is 0.025 at 0.003930757, P(X <= 2) at 0.1117191.
        ([1.0] * 2 + [0.0] * 60, (2 / 62, 0.003930757, 0.1117191)),
        ([0.0] * 30, (0.0, 0.0, 0.1157033)),  # 1 - 0.025^(1/30)
        ([1.0] * 30, (1.0, 0.8842967, 1.0)),
        # Many have the interval of Wilson, the textbook's. The same again is no further evidence.
        ([1.0] * 40 + [0.0] * 60, (0.4, 0.3094013, 0.4979974)),
        ([[1.0, 1.0]] * 40 + [[0.0, 0.0]] * 60, (0.4, 0.3094013, 0.4979974)),
    ],
)
def test_the_interval_of_a_share_stays_between_0_and_1(values, expected):
    assert share_with_interval(values) == pytest.approx(expected, rel=1e-6)


def test_pass_at_k_is_the_mean_over_all_groups_of_k_answers():
    """1 of 4: 3 of 6 pairs have it; 2 of 4: 5 of 6 pairs; none: no pair.

    p (1 - p) / var(y) = (20 / 81) / (19 / 162) = 2.1, so each prompt counts as its 4 // 2 groups.
    """
    values = [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0], [0.0] * 4]
    rate, lower, upper = share_with_interval(values, 2)
    assert rate == pytest.approx(4 / 9)
    assert (lower, upper) == pytest.approx(rate_interval(4 / 9, 6), rel=1e-9)
    assert share_with_interval(values, 4) == share_with_interval([1.0, 1.0, 0.0])


def test_the_smallest_visible_win_rate():
    # (1.9599640 + 0.8416212) / (2 sqrt(400)) = 0.0700396
    assert smallest_visible_win_rate(400) == pytest.approx(0.5700396, rel=1e-6)
    assert smallest_visible_win_rate(4) == 1.0


@pytest.mark.parametrize(
    ("wins", "losses", "expected"),
    [
        (3, 0, 0.25),  # 2 / 2^3
        (5, 1, 0.21875),  # 2 (1 + 6) / 2^6
        (1, 5, 0.21875),
        (4, 4, 1.0),
        (0, 0, 1.0),
    ],
)
def test_the_sign_test_by_hand(wins, losses, expected):
    assert sign_test(wins, losses) == pytest.approx(expected, rel=1e-12)


LONGER = [1.0] * 8 + [0.0] * 2
"""The outcomes of ten prompts with a longer answer."""


@pytest.mark.parametrize("draws", [1, 2])
def test_the_length_controlled_rate_by_hand(draws):
    """Two lengths of 10 prompts each: P(win) is 0.8 where longer, 0.4 where shorter.

    logit 0.8 = 1.3862944, logit 0.4 = -0.4054651, so a = 0.4904146 and the rate is 0.6202041.
    Each logit has the variance 1 / (10 p (1 - p)): 0.6250000 and 0.4166667, so that of a is
    (0.6250000 + 0.4166667) / 4 * 20 / 18 = 0.2893519, and z se = 1.0542929. The same answers again
    say nothing new.
    """
    scores = [[score] * draws for score in LONGER + [1.0] * 4 + [0.0] * 6]
    extra = [[3] * draws] * 10 + [[-3] * draws] * 10
    found = length_controlled(scores, [[0.5] * draws] * 20, extra)
    assert found == pytest.approx((0.6202041, 0.3626506, 0.8241480), rel=1e-6)


def test_a_tie_is_half_a_win_in_the_length_controlled_rate():
    """Every win of the shorter half becomes a tie: P(win) 0.8 and 0.2, so the rate is 1/2."""
    ties, wins = (
        length_controlled(LONGER + shorter, [0.5] * 20, [3] * 10 + [-3] * 10)
        for shorter in ([0.5] * 4 + [0.0] * 6, [1.0] * 2 + [0.0] * 8)
    )
    assert ties[0] == pytest.approx(0.5, abs=1e-9)
    assert ties[1] == pytest.approx(1 - ties[2])
    assert ties[2] - ties[1] < wins[2] - wins[1]  # ties say more


@pytest.mark.parametrize(
    ("scores", "extra"),
    [
        ([1.0] * 5 + [0.0] * 5, [2] * 5 + [-2] * 5),  # the longer answer always wins
        ([1.0] * 10, [2] * 5 + [-2] * 5),  # no loss
        ([1.0, 0.0] * 5, [4] * 10),  # equal differences
    ],
)
def test_no_length_controlled_rate_where_it_cannot_be_estimated(scores, extra):
    assert length_controlled(scores, [0.5] * 10, extra) is None


def test_calibration_by_hand():
    """Margins log 3 and -log 3: confidence 0.75, one right; log 19: 0.95, right; 0: 0.5, a tie.

    Bins of width 0.05: 0.75 is in the sixth, with accuracy 0.5; 0.95 is in the tenth, with 1.0.
    The error is (2 * 0.25 + 0.05 + 0) / 4 = 0.1375.
    """
    third, last = math.log(3) + 1e-9, math.log(19) + 1e-9
    error, bins = calibration([third, -third, last, 0.0])
    assert error == pytest.approx(0.1375, rel=1e-6)
    assert [found["n"] for found in bins] == [1, 0, 0, 0, 0, 2, 0, 0, 0, 1]
    assert bins[5] == pytest.approx(
        {"lower": 0.75, "upper": 0.8, "n": 2, "confidence": 0.75, "accuracy": 0.5}
    )
    assert bins[0]["accuracy"] == 0.5 and bins[9]["accuracy"] == 1.0
    assert bins[1] == pytest.approx(
        {"lower": 0.55, "upper": 0.6, "n": 0, "confidence": None, "accuracy": None}
    )
    assert calibration([1000.0])[1][9]["n"] == 1  # a confidence of 1 is in the last bin


def test_the_rank_correlation():
    assert rank_correlation([1.0, 5.0, 100.0], [2, 3, 4]) == pytest.approx(1.0)
    # Ranks 1 2 3 4 and 2 1 4 3: 1 - 6 (1 + 1 + 1 + 1) / (4 * 15) = 0.6
    assert rank_correlation([1, 2, 3, 4], [20, 10, 40, 30]) == pytest.approx(0.6)
    assert rank_correlation([1.0, 2.0], [3, 3]) is None


@pytest.mark.parametrize(
    ("measure", "values", "message"),
    [
        (win_rate, ([1.0, 2.0], [1.0]), "expected equal shapes"),
        (standardized_gain, ([[1.0, 2.0], [3.0, 4.0]], [1.0, 2.0]), "expected equal shapes"),
        (win_rate, ([], []), "candidate is empty"),
        (win_rate, ([1.0, 2.0], [1.0, math.nan]), r"baseline\[1\] is nan; every score must be"),
        (mean_with_interval, ([],), "values is empty"),
        (mean_with_interval, ([1.0],), "an interval needs at least 2"),
        (mean_with_interval, ([1.0, math.inf],), r"values\[1\] is inf"),
    ],
)
def test_values_that_cannot_be_compared_are_refused(measure, values, message):
    with pytest.raises(ValueError, match=message):
        measure(*values)


def test_intervals_cover_where_the_answers_to_a_prompt_resemble_each_other():
    """Nine of ten answers are like the prompt. Counted as independent pairs, they cover 70%."""
    rng, covered = np.random.default_rng(1), {"by prompt": 0, "by pair": 0}
    for _ in range(1000):
        easy, other = rng.random((100, 1)) < 0.6, rng.random((100, 4)) < 0.6
        wins = np.where(rng.random((100, 4)) < 0.9, easy, other).astype(float)
        for unit, won in (("by prompt", wins), ("by pair", wins.reshape(-1, 1))):
            rate = win_rate(won.tolist(), np.full_like(won, 0.5).tolist())
            covered[unit] += rate.lower <= 0.6 <= rate.upper
    assert 935 <= covered["by prompt"] <= 965
    assert covered["by pair"] < 750
