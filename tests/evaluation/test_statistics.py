"""Win rates, means and text diversity against values computed by hand."""

from __future__ import annotations

import pytest

from rlhf_pipeline.evaluation.statistics import WinRate, distinct_n, mean_with_interval, win_rate


def test_win_rate_counts_a_tie_as_half():
    result = win_rate(candidate=[1.0, 2.0, 3.0, 0.0], baseline=[0.0, 2.0, 1.0, 1.0])
    assert (result.wins, result.ties, result.losses, result.n) == (2, 1, 1, 4)
    assert result.rate == 0.625
    # z^2 = 3.8414588
    # centre 0.625 + 3.8414588 / 8 = 1.1051824, divisor 1 + 3.8414588 / 4 = 1.9603647
    # half width 1.9599640 * sqrt(0.234375 / 4 + 3.8414588 / 64) = 1.9599640 * 0.3444075 = 0.6750263
    assert result.lower == pytest.approx(0.2194266, rel=1e-5)
    assert result.upper == pytest.approx(0.9081008, rel=1e-5)


def test_wilson_interval_of_8_in_10():
    # The textbook case: 0.4902 to 0.9433.
    result = win_rate([1.0] * 8 + [0.0] * 2, [0.5] * 10)
    assert (result.lower, result.upper) == pytest.approx((0.4901625, 0.9433178), rel=1e-5)


@pytest.mark.parametrize(
    ("candidate", "baseline", "expected"),
    [
        # p = 1: lower = 1 / (1 + z^2 / n) = 1 / (1 + 3.8414588 / 5) = 0.5655175; p = 0 mirrors it.
        (1.0, 0.0, WinRate(rate=1.0, lower=0.5655175, upper=1.0, wins=5, ties=0, losses=0, n=5)),
        (0.0, 1.0, WinRate(rate=0.0, lower=0.0, upper=0.4344825, wins=0, ties=0, losses=5, n=5)),
    ],
)
def test_the_interval_stays_within_0_and_1(candidate: float, baseline: float, expected: WinRate):
    result = win_rate([candidate] * 5, [baseline] * 5)
    assert result.lower >= 0 and result.upper <= 1
    assert vars(result) == pytest.approx(vars(expected), rel=1e-5, abs=1e-12)


def test_a_model_ties_with_itself():
    result = win_rate([1.0, 2.0], [1.0, 2.0])
    assert (result.rate, result.ties) == (0.5, 2)


def test_win_rate_refuses_unpaired_scores():
    with pytest.raises(ValueError, match="shorter"):
        win_rate([1.0, 2.0], [1.0])


def test_win_rate_refuses_no_scores():
    with pytest.raises(ValueError, match="candidate is empty"):
        win_rate([], [])


def test_win_rate_refuses_a_score_that_would_count_as_a_tie():
    with pytest.raises(ValueError, match=r"baseline\[1\] is nan; every score must be finite"):
        win_rate([1.0, 2.0], [1.0, float("nan")])


def test_mean_with_interval():
    # Mean 2, s = 1: 1.9599640 / sqrt(3) = 1.1315857.
    assert mean_with_interval([1.0, 2.0, 3.0]) == pytest.approx(
        (2.0, 0.8684143, 3.1315857), rel=1e-6
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "values is empty"),
        ([1.0], "an interval needs at least 2"),
        ([1.0, float("inf")], r"values\[1\] is inf"),
    ],
)
def test_mean_with_interval_refuses_values_without_an_interval(values: list[float], message: str):
    with pytest.raises(ValueError, match=message):
        mean_with_interval(values)


@pytest.mark.parametrize(
    ("texts", "n", "expected"),
    [
        (["a b a b"], 1, 0.5),  # a, b of a, b, a, b
        (["a b a b"], 2, 2 / 3),  # ab, ba of ab, ba, ab
        (["a b", "a c"], 1, 0.75),  # repeated from one text to the next
        (["a b", "b c"], 2, 1.0),  # no bigram across texts: ab, bc
        (["a  b\n", ""], 2, 1.0),  # white space is not a word
        (["a", "b"], 2, 0.0),  # no bigrams
    ],
)
def test_distinct_n(texts: list[str], n: int, expected: float):
    assert distinct_n(texts, n) == pytest.approx(expected, rel=1e-12)
