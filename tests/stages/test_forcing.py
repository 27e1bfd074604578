"""A forced stage runs again; the earlier result is used until the new one is finished."""

import pytest

from rlhf_pipeline.errors import ConfigError, StageError
from rlhf_pipeline.pipelines.table import stage_specs
from rlhf_pipeline.stages.cache.planning import Planner
from rlhf_pipeline.stages.job import forced_stages
from rlhf_pipeline.stages.run import StageRunner

ALL = [
    *"source base_model split sft reward_base critic_base teacher".split(),
    *"reward_model sample judge_split judge_model".split(),
    *"ppo grpo distill dpo kto rejection iterative_dpo".split(),
    *"tasks evaluate evaluate_grpo evaluate_distill evaluate_dpo evaluate_kto".split(),
    *"evaluate_rejection evaluate_iterative_dpo evaluate_champion".split(),
]


@pytest.mark.parametrize(
    ("value", "stages"),
    [
        (None, []),
        (False, []),
        ("ppo", ["ppo"]),
        ("sft ppo", ["sft", "ppo"]),
        (["sft", "source"], ["sft", "source"]),
        (True, ALL),
    ],
)
def test_force_is_true_or_names(value, stages):
    assert forced_stages(value, stage_specs()) == frozenset(stages)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "pppo",
            r"force: no stage 'pppo' \(did you mean ppo\?\); the stages are " + ", ".join(ALL),
        ),
        (["register"], "force: no stage 'register'"),
        (3, "force: found 3, expected true, a stage, or a list of stages"),
    ],
)
def test_unknown_stages_are_refused(value, message):
    with pytest.raises(ConfigError, match=message):
        forced_stages(value, stage_specs())


def test_a_forced_stage_runs_once_per_run(drill):
    first = drill.run()
    context = drill.context(force=["drill"])
    runner = StageRunner(context)
    predicted = Planner(context).run(drill.job())
    second = runner.run(drill.job())
    assert runner.run(drill.job()) == second == predicted  # another node needs it, too
    assert (second.parent.name, drill.launches) == (first.parent.name + ".2", 2)
    assert (first / "result").read_text() == "launch 1"
    assert (drill.run() / "result").read_text() == "launch 2"
    assert drill.run(force=["drill"]).parent.name == first.parent.name + ".3"


def test_a_forced_run_that_fails_leaves_the_finished_result_in_use(drill):
    first = drill.run()
    drill.order("fail")
    with pytest.raises(StageError, match="ordered to fail"):
        drill.run(force=["drill"])
    assert drill.run() == first
    assert (drill.launches, (first / "result").read_text()) == (2, "launch 1")
    drill.order("fail", given=False)  # the next forced run continues the failed attempt
    assert drill.run(force=["drill"]).parent.name == first.parent.name + ".2"


def test_force_does_not_leave_the_directory_of_an_unfinished_stage(drill):
    drill.order("fail")
    with pytest.raises(StageError):
        drill.run()
    drill.order("fail", given=False)
    assert "." not in drill.run(force=["drill"]).parent.name
