"""Rates and differences over training seeds and prompts, and what they show."""

from statistics import mean

import numpy as np
import pytest

from rlhf_pipeline.verdict.answers import Answer
from rlhf_pipeline.verdict.recipes import (
    Estimate,
    Pair,
    against,
    conclusion,
    estimate,
    median_seed,
    pairs_of,
    seeds_to_show,
)
from rlhf_pipeline.verdict.statistics import mean_with_interval


def test_an_answer_meets_the_independent_draws_of_the_baseline_at_its_prompt():
    def answers(*scores):
        return [
            Answer(row, "", "", {"gold": score}, draw=draw)
            for row, own in enumerate(scores)
            for draw, score in enumerate(own)
        ]

    # Draw 0 meets draw 1 and draw 1 meets draw 0: a win and a tie, a loss and a win.
    assert against(answers([2, 1], [0, 9]), answers([1, 1], [5, 3]), "gold") == [0.75, 0.5]


def test_the_rate_of_several_seeds_by_hand():
    """Means of seeds 0.75 and 0.25, of prompts 0.5, 1, 0.5, 0.

    SS of seeds: 4 (0.25^2 + 0.25^2) = 0.5, one degree of freedom; of prompts 2 (0.5^2 + 0.5^2) = 1,
    three; all 8 deviations of 0.5 have 2, so the rest has 0.5, three. M: 0.5, 1/3, 1/6. c is 0.2 of
    (1 - 1/2) of the rest, 1/60. Quantiles of t: 12.7062047 and 3.1824463.
    """
    found = estimate([[1, 1, 1, 0], [0, 1, 0, 0]], same_prompts=True)
    square = 12.7062047**2 * (1 / 2 - 1 / 60) + 3.1824463**2 * (1 / 3 - 1 / 6 + 1 / 60)
    half_width = (square / 8) ** 0.5
    assert vars(found) == pytest.approx(
        {"mean": 0.5, "lower": 0.5 - half_width, "upper": 0.5 + half_width,
         "between": (1 / 2 - 1 / 6) / 4, "rest": 1 / 24, "prompts": 1 / 48}
    )  # fmt: skip


def test_one_seed_has_the_interval_of_its_prompts():
    row = [1.0, 0.5, 0.0, 1.0, 1.0]
    found = estimate([row], same_prompts=True)
    assert (found.mean, found.lower, found.upper) == pytest.approx(mean_with_interval(row))
    assert found.between == 0 == found.rest


def test_seeds_with_prompts_of_their_own_are_independent():
    rows = [[1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.5, 1.0]]
    found = estimate(rows, same_prompts=False)
    means = [mean(row) for row in rows]
    assert (found.mean, found.lower, found.upper) == pytest.approx(mean_with_interval(means))


@pytest.mark.parametrize("outcomes", [[], [[1.0]], [[1.0, 0.0], [1.0]]])
def test_too_few_outcomes_are_refused(outcomes):
    with pytest.raises(ValueError, match="at least one seed with two prompts"):
        estimate(outcomes, same_prompts=True)


PROMPTS = np.random.default_rng(3).uniform(-0.2, 0.2, (1, 100))
"""By how much the rate at a prompt differs from the mean."""
PROMPTS -= PROMPTS.mean()


def outcomes(rng, seeds, between, rate, prompts=PROMPTS):
    chance = rate + prompts + rng.normal(0, between, (seeds, 1))
    return (rng.random((seeds, prompts.shape[1])) < chance).astype(float)


@pytest.mark.parametrize("between", [0.0, 0.05])
def test_intervals_cover_the_rate_and_equal_recipes_are_rarely_called_different(between):
    """Of 500 studies with three seeds, 475 should; 99.9% of such counts are in these bounds."""
    rng, covered, different = np.random.default_rng(0), 0, 0
    for _ in range(500):
        prompts = rng.uniform(-0.2, 0.2, (1, 100))
        both = [outcomes(rng, 3, between, 0.5, prompts) for _ in range(2)]
        found = estimate(both[0], same_prompts=True)
        covered += found.lower <= 0.5 <= found.upper
        (pair,) = pairs_of({"a": both[0], "b": both[1]}, same_prompts=True)
        different += pair.shown is not None
    assert 458 <= covered <= 491 and different <= 42


def test_the_proposed_number_of_seeds_shows_the_difference_about_four_times_of_five():
    """Two recipes whose seeds vary by 0.05; an outcome has the variance 0.235 at a given prompt."""
    difference = Estimate(0.08, 0, 0, between=2 * 0.05**2, rest=2 * 0.235 / 100, prompts=0.0)
    seeds, rng, shown = seeds_to_show(difference), np.random.default_rng(1), 0
    for _ in range(400):
        both = {n: outcomes(rng, seeds, 0.05, rate) for n, rate in (("a", 0.58), ("b", 0.5))}
        (pair,) = pairs_of(both, same_prompts=True)
        shown += pair.shown == "a"
    assert 280 <= shown <= 350


def test_what_no_number_of_seeds_shows():
    assert seeds_to_show(Estimate(0.01, -1, 1, between=0.0, rest=0.0, prompts=0.01)) is None


def test_intervals_of_several_pairs_are_wider():
    rng = np.random.default_rng(6)
    given = {name: outcomes(rng, 3, 0.02, 0.5) for name in "abc"}
    (alone,) = pairs_of({name: given[name] for name in "ab"}, same_prompts=True)
    (only, _) = pairs_of(given, same_prompts=True, baselines="bc")
    assert (only.first, only.second) == ("a", "b")
    first, *others = pairs_of(given, same_prompts=True)
    assert [(p.first, p.second) for p in (first, *others)] == [("a", "b"), ("a", "c"), ("b", "c")]
    assert first.difference.mean == alone.difference.mean
    assert first.difference.upper > alone.difference.upper


def pair(first, second, mean, half_width, **variances):
    given = {"between": 0.001, "rest": 0.001, "prompts": 0.0} | variances
    return Pair(first, second, Estimate(mean, mean - half_width, mean + half_width, **given))


NOT = "No recipe is shown to be the best: ppo has the highest rate, but"


@pytest.mark.parametrize(
    ("to_dpo", "to_sft", "expected"),
    [
        (pair("ppo", "dpo", 0.2, 0.1), pair("SFT", "ppo", -0.3, 0.1),
         "ppo is shown to be better than every other recipe."),
        (pair("ppo", "dpo", 0.1, 0.2), pair("SFT", "ppo", -0.3, 0.1),
         f"{NOT} is not shown to be better than dpo. If the differences are as large as found, "
         "about 5 seeds would show it."),
        (pair("ppo", "dpo", 0.0, 0.2, prompts=0.1), pair("SFT", "ppo", 0.0, 0.1),
         f"{NOT} is not shown to be better than dpo, SFT. More seeds would hardly show it; more "
         "prompts may."),
    ],
)  # fmt: skip
def test_the_conclusion(to_dpo, to_sft, expected):
    pairs = [to_dpo, pair("dpo", "SFT", 0.2, 0.1), to_sft]
    assert conclusion(pairs, {"ppo": 0.7, "dpo": 0.6, "SFT": 0.5}, 3) == expected


def test_one_seed_concludes_nothing():
    found = conclusion([pair("ppo", "SFT", 0.3, 0.1)], {"ppo": 0.8, "SFT": 0.5}, 1)
    assert "ppo has the highest rate, but one seed says nothing about others" in found


def test_the_median_seed_is_the_lower_one_of_two():
    assert median_seed({1: 0.9, 2: 0.5, 3: 0.7}) == 3
    assert median_seed({1: 0.9, 2: 0.5, 3: 0.7, 4: 0.7}) == 3
    assert median_seed({4: 0.2}) == 4
