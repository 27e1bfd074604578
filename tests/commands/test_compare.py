"""The comparison of policies that were made and evaluated by hand."""

import json
from dataclasses import replace

import numpy as np
import pytest
from random_answers import policy as random_policy

from rlhf_pipeline.commands.report import difference_table, metric_table, recipes, verdicts
from rlhf_pipeline.kedro_run.artifacts import Policy
from rlhf_pipeline.runtime.manifest import Manifest, file_entries
from rlhf_pipeline.verdict.answers import write_answers
from rlhf_pipeline.verdict.comparison import summary


def manifest(stage, config, fingerprint):
    return Manifest(stage, fingerprint, 1, {stage: config}, {}, {}, {}, {})


@pytest.fixture
def make(tmp_path):
    """Makes a policy by PPO of some quality; further arguments are parameters."""

    def make(name, quality, answers=None, reward_model="r", temperature=1.0, **config):
        folder = tmp_path / name / "evaluation"
        folder.mkdir(parents=True)
        own = manifest("ppo", {"steps": 3, "lam": 0.95} | config, f"{name}-{quality}")
        answers = answers or random_policy(np.random.default_rng(len(name)), quality)
        write_answers({"ppo": answers}, folder)
        metrics = {"policies": {"ppo": summary(answers)}}
        (folder / "evaluation.json").write_text(json.dumps(metrics))
        inputs = {"prompts": "p", "reward_model": reward_model, "ppo_model": name}
        blocks = {"evaluate": {"sampling": {"temperature": temperature}}}
        files = file_entries(folder)
        Manifest("evaluate", name, 1, blocks, inputs, {}, {}, files).write(folder)
        made_from = {"ppo": own, "sft": manifest("sft", {"epochs": 1}, "the same")}
        return Policy(name, "ppo", made_from, ((folder, "ppo"),))

    return make


def rows(table):
    """The cells of a table, row by row."""
    return list(zip(*(column.cells for column in table.columns), strict=True))


def test_only_what_differs_is_shown(make):
    one, two = make("one", 0.0), make("two", 0.5, steps=4)
    sft = replace(two, made_from={"sft": two.made_from["sft"]})  # only one has the stage ppo
    for policies, parameters, stages in (
        ([one, two], [("ppo.steps", "3", "4")], [("ppo", "one-0.0", "two-0.5")]),
        ([one, one], [], []),
        ([sft, two], [], []),
    ):
        assert rows(difference_table("values", policies, Policy.parameters)) == parameters
        assert rows(difference_table("values", policies, recipes)) == stages


def test_the_metrics_have_their_intervals(make):
    one, two = make("one", 0.0), make("two", 0.9)
    cells = {row[0]: row[1:] for row in rows(metric_table([one, two]))}
    ends = (two.metrics[f"gold_score{end}"] for end in ("", "_lower", "_upper"))
    assert cells["gold score"][1] == "{:.2f} [{:.2f}, {:.2f}]".format(*ends)
    assert cells["KL from SFT (nats)"][0].startswith("2.00")
    assert rows(metric_table([replace(one, evaluations=()), two]))[0][1] == "-"


def test_every_judge_compares_the_answers_to_the_same_prompts(make):
    better, worse = make("better", 0.9), make("worse", 0.0)
    lines = verdicts(better, worse, 1)
    assert [line.partition(" prefers")[0] for line in lines] == [
        "better and worse: the reward model",
        "better and worse: the gold judge",
    ]
    # Two judges, a win rate and a gain: 5% / 4, and a third of that for three pairs.
    assert "% (98.75% for each of 4 intervals, 95% for all: " in lines[0]
    assert " of 200 prompts, with equal draws; gain +0." in lines[0]
    assert "% (99.58% for each of 12 intervals, 95% for all: " in verdicts(better, worse, 3)[0]


def test_several_answers_to_a_prompt_are_compared_draw_by_draw(make):
    one = random_policy(np.random.default_rng(1), 0.0)
    draws = [replace(a, draw=draw) for a in one for draw in range(2)]
    better = [replace(a, scores=dict.fromkeys(a.scores, 1e3 * (a.draw - 0.5))) for a in draws]
    lines = verdicts(make("better", 0, answers=better), make("one", 0, answers=draws), 1)
    assert all("better on 50.0% (98.75% for each of 4 intervals" in line for line in lines)
    assert " 2 answers of each policy, with equal draws; gain " in lines[0]


@pytest.mark.parametrize("changes", [{"reward_model": "another"}, {"temperature": 0.5}])
def test_answers_under_other_conditions_are_not_compared(make, changes):
    expected = ["two and one: no comparison, because no evaluation had the same prompts and judges"]
    assert verdicts(make("two", 0.9, **changes), make("one", 0.0), 1) == expected


def test_an_evaluation_of_both_is_found_behind_newer_ones(make):
    one, two = make("one", 0.0), make("two", 0.9)
    later = make("later", 0.9, temperature=0.5)
    two = replace(two, evaluations=later.evaluations + two.evaluations)
    assert "prefers two on" in verdicts(two, one, 1)[0]
