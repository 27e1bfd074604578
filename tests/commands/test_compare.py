"""The comparison of policies that were made and evaluated by hand."""

import json
from dataclasses import replace

import numpy as np
import pytest
from random_answers import policy as random_policy

from rlhf_pipeline.commands.compare import (
    Policy,
    metric_table,
    parameter_table,
    recipe_table,
    verdicts,
)
from rlhf_pipeline.evaluation.comparison import summary, write_answers
from rlhf_pipeline.runtime.manifest import Manifest


def manifest(stage, config, fingerprint):
    return Manifest(stage, fingerprint, 1, {stage: config}, {}, {}, {}, {})


@pytest.fixture
def make(tmp_path):
    """Makes a policy by PPO of some quality."""

    def make(name, quality, answers=None, **config):
        folder = tmp_path / name
        own = manifest("ppo", {"steps": 3, "lam": 0.95} | config, f"{name}-{quality}")
        (folder / "evaluation").mkdir(parents=True)
        own.write(folder)
        answers = answers or random_policy(np.random.default_rng(len(name)), quality)
        write_answers({"ppo": answers}, folder / "evaluation")
        metrics = {"policies": {"ppo": summary(answers)}}
        (folder / "evaluation" / "evaluation.json").write_text(json.dumps(metrics))
        stages = {"ppo": own, "sft": manifest("sft", {"epochs": 1}, "the same")}
        return Policy(name, folder, stages, folder / "evaluation")

    return make


def rows(table):
    """The cells of a table, row by row."""
    return list(zip(*(column.cells for column in table.columns), strict=True))


def test_only_what_differs_is_shown(make):
    one, two = make("one", 0.0), make("two", 0.5, steps=4)
    assert rows(parameter_table([one, two])) == [("ppo.steps", "3", "4")]
    assert rows(recipe_table([one, two])) == [("ppo", "one-0.0", "two-0.5")]
    assert rows(parameter_table([one, one])) == []


def test_a_stage_that_only_one_policy_has_is_no_difference(make):
    two = make("two", 0.5, steps=4)
    sft = replace(two, stages={"sft": two.stages["sft"]})
    assert rows(parameter_table([sft, two])) == rows(recipe_table([sft, two])) == []


def test_the_metrics_have_their_intervals(make):
    one, two = make("one", 0.0), make("two", 0.9)
    cells = {row[0]: row[1:] for row in rows(metric_table([one, two]))}
    gold = (
        two.metrics["gold_score"],
        two.metrics["gold_score_lower"],
        two.metrics["gold_score_upper"],
    )
    mean, lower, upper = (f"{value:.2f}" for value in gold)
    assert cells["gold score"][1] == f"{mean} \\[{lower}, {upper}]"
    assert cells["KL from SFT (nats)"][0].startswith("2.00")
    assert rows(metric_table([replace(one, evaluation=None), two]))[0][1] == "-"


def test_every_judge_compares_the_answers_to_the_same_prompts(make):
    better, worse = make("better", 0.9), make("worse", 0.0)
    lines = verdicts(better, worse, 2)
    assert [line.partition(" prefers")[0] for line in lines] == [
        "better and worse: the reward model",
        "better and worse: the gold judge",
    ]
    assert "% (95%: " in lines[0] and " of 200 prompts; gain +0." in lines[0]
    assert "% (98.33%: " in verdicts(better, worse, 3)[0]  # three pairs


def test_answers_to_other_prompts_are_not_compared(make):
    one = make("one", 0.0)
    others = [replace(answer, prompt="another") for answer in one.answers]
    expected = ["two and one: no paired comparison, because they did not answer the same prompts"]
    assert verdicts(make("two", 0.9, others), one, 2) == expected
    assert verdicts(replace(make("two2", 0.9), name="two", evaluation=None), one, 2) == expected
