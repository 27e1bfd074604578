"""Forecasts of the time of a stage: short trainings whose long ones are known."""

import pytest

from rlhf_pipeline.sizing.forecast import (
    DRIFT,
    Timings,
    answering_range,
    lengths,
    line,
    peak_after,
    training_range,
)

START, STEP, EVALUATION, SAVING, EXPORT = 5.0, 0.5, 2.0, 0.25, 1.0


def training(steps, evaluated, saved_every, tokens=None, step_s=STEP):
    """The lines of metrics and the seconds of a training whose parts take the times above."""
    now, lines = START, []
    for step in range(1, steps + 1):
        took = step_s + EVALUATION * (step in evaluated)
        now += took
        metrics = {"time/step_s": took}
        metrics |= {} if tokens is None else {"rollout/response_tokens": tokens}
        lines.append({"step": step, "time": now, "metrics": metrics})
        now += SAVING * (step % saved_every == 0 or step in evaluated)
    return lines, now + EXPORT


def test_a_short_training_tells_how_long_a_long_one_takes():
    seen = Timings.of(*training(8, {8}, saved_every=4), saved_every=4)
    _, expected = training(200, {50, 100, 150, 200}, saved_every=10**6)
    least, found, most = training_range([seen], 200, 4, saved=4, lengths=(0, 0, 0), prompt=0)
    assert found == pytest.approx(expected)
    assert (least, most) == pytest.approx((found * (1 - DRIFT), found * (1 + DRIFT)))


def test_a_wider_range_comes_from_steps_that_differ():
    lines, seconds = training(8, {8}, saved_every=4)
    for number, line_ in enumerate(lines[1:-1]):
        line_["metrics"]["time/step_s"] += (-1) ** number * 0.2
    seen = Timings.of(lines, seconds, saved_every=4)
    steady = Timings.of(*training(8, {8}, saved_every=4), saved_every=4)
    ranges = [training_range([each], 200, 4, 4, (0, 0, 0), 0) for each in (seen, steady)]
    widths = [most - least for least, _, most in ranges]
    assert widths[0] > 1.5 * widths[1]


def test_a_step_that_samples_is_linear_in_the_length_of_the_answers():
    def step(tokens):
        return 0.2 + 0.05 * tokens

    seen = [
        Timings.of(*training(4, {4}, 2, tokens=each, step_s=step(each)), saved_every=2)
        for each in (24, 48)
    ]
    found = training_range(seen, 100, 5, saved=5, lengths=(10, 20, 30), prompt=7)
    for tokens, share, seconds in zip((10, 20, 30), (1 - DRIFT, 1, 1 + DRIFT), found, strict=True):
        evaluated = {20, 40, 60, 80, 100}
        _, expected = training(100, evaluated, 10**6, step_s=step(tokens))
        assert seconds == pytest.approx(share * expected)


def test_where_one_length_was_seen_steps_take_as_long_as_they_have_tokens():
    seen = Timings.of(*training(4, {4}, 2, tokens=20), saved_every=2)
    steps = [
        (each - seen.fixed) for each in training_range([seen, seen], 100, 5, 5, (10, 20, 40), 10)
    ]
    expected = seen.seconds(100, 5, 5) - seen.fixed
    assert steps[1] == pytest.approx(expected)
    least, most = (0.9 * (seen.fixed + share * expected) for share in (20 / 30, 50 / 30))
    assert steps[0] + seen.fixed == pytest.approx(least)
    assert steps[2] + seen.fixed == pytest.approx(most / 0.9 * 1.1)


def test_more_prompts_that_took_no_longer_may_take_as_long_as_they_are_many():
    found = answering_range([64, 256], [10.0, 10.0], 1024, (0.5, 1.0, 2.0))
    assert found == pytest.approx((9.0, 10.0, 44.0))


@pytest.mark.parametrize("steps", [1, 2, 3, 8])
def test_a_training_that_is_short_itself_is_forecast_as_it_was(steps):
    lines, seconds = training(steps, {steps}, saved_every=4)
    seen = Timings.of(lines, seconds, saved_every=4)
    assert seen.seconds(steps, 1, saved=1 + (steps > 4)) == pytest.approx(seconds)


def test_answers_to_more_prompts_take_longer_but_the_start_does_not():
    found = answering_range([64, 256], [10 + 6.4, 10 + 25.6], 1000, (0.5, 1.0, 2.0))
    expected = [10 + share * 100 for share in (0.5, 1.0, 2.0)]
    assert found == pytest.approx((0.9 * expected[0], expected[1], 1.1 * expected[2]))


def test_the_memory_of_rollouts_grows_and_then_stays():
    found = [peak_after(100.0, 4, steps) for steps in (2, 4, 8, 64, 640)]
    assert found == pytest.approx([100.0, 100.0, 103.3, 113.2, 113.2])


@pytest.mark.parametrize(
    ("xs", "ys", "why"),
    [((48, 47), (3.0, 5.0), "equal lengths"), ((24, 48), (5.0, 3.0), "it falls")],
)
def test_noise_is_no_line(xs, ys, why):
    assert line(xs, ys, 10.0) == 4.0, why


def test_answers_are_no_longer_than_their_limit():
    assert lengths(30.0, 40) == pytest.approx((20.0, 30.0, 40.0))
    assert lengths(30.0, 400) == pytest.approx((20.0, 30.0, 45.0))
