"""A forced stage runs again; until its new result stands the old one counts."""

import pytest

from rlhf_pipeline.errors import ConfigError, StageError
from rlhf_pipeline.stages.cache.forcing import forced_stages, forcing


@pytest.mark.parametrize(
    ("value", "stages"),
    [
        (None, []),
        (False, []),
        ("ppo", ["ppo"]),
        ("sft ppo", ["sft", "ppo"]),
        (["sft", "source"], ["sft", "source"]),
        (
            True,
            [
                "base_model",
                "source",
                "split",
                "sft",
                "reward_model",
                "ppo",
                "dpo",
                "evaluate",
                "evaluate_dpo",
            ],
        ),
    ],
)
def test_force_is_true_or_names(value, stages):
    assert forced_stages(value) == stages


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("pppo", r"force: no stage 'pppo' \(did you mean ppo\?\); known are base_model, source, "),
        (["register"], "force: no stage 'register'"),
        (3, "force: must be true, a stage, or a list of stages, is 3"),
    ],
)
def test_what_names_no_stage_is_refused(value, message):
    with pytest.raises(ConfigError, match=message):
        forced_stages(value)


def test_a_forced_stage_runs_again_once_in_a_run(drill):
    first = drill.run()
    with forcing(["drill"]):
        second = drill.run()
        assert drill.run() == second  # another node that needs it
    assert (first.parent.name + ".2", drill.launches) == (second.parent.name, 2)
    assert (first / "result").read_text() == "launch 1"
    assert (drill.run() / "result").read_text() == "launch 2"
    with forcing(["drill"]):
        assert drill.run().parent.name == first.parent.name + ".3"


def test_other_stages_are_not_forced(drill):
    drill.run()
    with forcing(["sft", "ppo"]):
        drill.run()
    assert drill.launches == 1


def test_a_forced_run_that_fails_leaves_the_finished_result_in_use(drill):
    first = drill.run()
    drill.order("fail")
    with forcing(["drill"]), pytest.raises(StageError, match="told to fail"):
        drill.run()
    assert drill.run() == first
    assert (drill.launches, (first / "result").read_text()) == (2, "launch 1")
    drill.order("fail", given=False)
    with forcing(["drill"]):  # takes up where the failed attempt was
        assert drill.run().parent.name == first.parent.name + ".2"


def test_a_stage_that_never_finished_is_not_helped_by_force(drill):
    drill.order("fail")
    with pytest.raises(StageError):
        drill.run()
    drill.order("fail", given=False)
    with forcing(["drill"]):
        assert "." not in drill.run().parent.name  # in its first directory
