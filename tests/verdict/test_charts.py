"""The data of charts, worked by hand."""

import json
import math

import pytest

from rlhf_pipeline.verdict.charts import Chart, frontier, histogram, line, training_charts


def records(**metrics):
    """Records of consecutive steps; None leaves a metric out."""
    names = {name.replace("__", "/"): values for name, values in metrics.items()}
    length = len(next(iter(names.values())))
    return [
        {"step": step + 1, "metrics": {name: values[step] for name, values in names.items()
                                       if values[step] is not None}}
        for step in range(length)
    ]  # fmt: skip


def test_a_line_has_the_steps_that_have_the_metric():
    found = line("held-out", records(validation__loss=[None, 3.0, None, math.inf, 1.5]),
                 "validation/loss")  # fmt: skip
    assert found == {"name": "held-out", "x": [2, 5], "y": [3.0, 1.5], "dots": True}


def test_a_long_training_has_points_of_several_steps():
    """1,000 steps give 334 points of 3 steps; the last one has a single step."""
    found = line("training", records(sft__loss=[float(step) for step in range(1000)]), "sft/loss")
    assert len(found["x"]) == 334
    assert (found["x"][:2], found["y"][:2]) == ([3, 6], [1.0, 4.0])
    assert (found["x"][-1], found["y"][-1]) == (1000, 999.0)
    assert found["dots"] is False


def test_a_stage_has_the_charts_of_its_metrics():
    given = records(dpo__loss=[0.7, 0.6], validation__loss=[None, 0.65], dpo__margin=[0.1, 0.2])
    loss, margin = training_charts("dpo", given, {"step": 2, "validation/loss": 0.65}, "Score")
    assert (loss.title, loss.value, loss.mark) == ("Loss", "0.650", 2)
    assert [series["name"] for series in loss.series] == ["training", "held-out"]
    assert (margin.title, margin.value) == ("Margin of the chosen response", "")
    given = records(objective__score=[1.0], reward__trained=[0.5], reward__length=[0.25])
    score, length, trained = training_charts("grpo", given, {}, "Score of two")
    titles = [chart.title for chart in (score, length, trained)]  # each reward has its own curve
    assert titles == ["Score of two", "Reward: length", "Reward: the reward model"]
    assert length.series[0]["y"] == [0.25]


EVALUATION = {
    "candidate": "ppo",
    "rewards": ["trained"],
    "policies": {
        "sft": {"kl": 0.0, "score": 0.1},
        "ppo": {"kl": 2.25, "score": 0.9},
        "ppo_ema": {"kl": 9.0, "score": 9.0},
    },
    "best_of_n": [{"n": 2, "kl": 0.25, "score": 0.5}],
}


def test_scores_stand_against_the_root_of_the_kl():
    training = records(validation__kl=[4.0, None, -0.01], validation__score=[1.0, None, 2.0])
    (chart,) = frontier(training, "Score of the reward model", EVALUATION)
    assert chart.x == "√KL from SFT, KL in nats"
    path, tested, best = chart.series
    assert (path["x"], path["y"], path["texts"]) == ([2.0, 0.0], [1.0, 2.0], ["step 1", "step 3"])
    assert (tested["x"], tested["y"]) == ([0.0, 1.5], [0.1, 0.9])
    assert tested["texts"] == ["SFT", "PPO"]
    assert (best["x"], best["y"], best["texts"]) == ([0.5], [0.5], ["best of 2"])
    without_kl = EVALUATION | {"policies": {"sft": {}, "ppo": {}}, "best_of_n": []}
    assert [*frontier(records(validation__score=[1.0]), "Score", without_kl)] == []


def test_policies_share_the_bars_of_a_histogram():
    chart = histogram("Scores", "", "score", {"PPO": [0.0, 24.0, 24.0], "SFT": [0.0, 0.5, 12.0]})
    ppo, sft = chart.series
    assert ppo["x"] == sft["x"] == [float(edge) for edge in range(25)]
    assert (ppo["y"][0], ppo["y"][23], sum(ppo["y"])) == (1, 2, 3)
    assert (sft["y"][0], sft["y"][12], sum(sft["y"])) == (2, 1, 3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_no_chart_has_a_number_that_json_lacks(value):
    given = records(ppo__x=[1.0], validation__kl=[1.0], validation__score=[value])
    charts = [*training_charts("ppo", given, {}, ""), *frontier(given, "", EVALUATION)]
    assert all(isinstance(chart, Chart) for chart in charts)
    json.dumps([chart.series for chart in charts], allow_nan=False)
