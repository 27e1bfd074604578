"""A plan tells what stages would do, and does nothing."""

import os

import pytest

from rlhf_pipeline.errors import StageError
from rlhf_pipeline.stages.cache.forcing import forcing
from rlhf_pipeline.stages.cache.lock import recipe_lock
from rlhf_pipeline.stages.cache.planning import planning


@pytest.fixture
def plan(drill):
    """Plans the stage with some parameters; returns what it would do, and why."""

    def plan(**parameters):
        with planning() as planned:
            drill.run(**parameters)
        (stage,) = planned.stages.values()
        return stage.state, *stage.reasons

    return plan


def forget_users(drill):
    for file in (drill.root / "workspace" / ".locks").glob("*.json"):
        file.unlink()


def test_a_plan_makes_nothing(drill, plan):
    assert plan() == ("run", "never run here")
    assert not (drill.root / "workspace").exists()


def test_what_is_finished_is_found_and_what_changed_is_named(drill, plan):
    export = drill.run()
    with planning() as planned:
        assert drill.run() == export
    assert [stage.run.cached for stage in planned.stages.values()] == [True]
    assert plan() == ("finished",)
    assert plan(value=2) == ("run", "drill.value 1 -> 2")
    assert drill.launches == 1


def test_the_recipe_to_compare_with_is_the_one_used_last(drill, plan):
    drill.run(value=1)
    drill.run(value=2)
    assert plan(value=3) == ("run", "drill.value 2 -> 3")
    drill.run(value=1)  # found finished, and used all the same
    assert plan(value=3) == ("run", "drill.value 1 -> 3")


def test_an_attempt_that_failed_starts_again_or_goes_on(drill, plan):
    drill.order("fail")
    with pytest.raises(StageError):
        drill.run()
    assert plan() == ("run", plan()[1])
    assert plan()[1].startswith(
        f"in use by process {os.getpid()} since "
    )  # this very process took it last
    forget_users(drill)
    assert plan() == ("run", "an earlier attempt did not finish")
    (directory,) = (drill.root / "workspace" / "drill").iterdir()
    (directory / "checkpoints" / "step-00000024").mkdir(parents=True)
    with planning() as planned:
        drill.run()
    (stage,) = planned.stages.values()
    assert (stage.state, stage.run.resumed_from, stage.reasons) == ("resume", 24, ())


def test_damage_is_seen_by_name_and_size(drill, plan):
    export = drill.run()
    forget_users(drill)
    (export / "result").write_text("launch 10")
    assert plan() == ("run", "its result is damaged: result has 9 bytes instead of 8")
    (export / "result").unlink()
    assert plan() == ("run", "its result is damaged: result is missing")


def test_what_is_forced_runs_once_though_finished(drill, plan):
    export = drill.run()
    forget_users(drill)
    with forcing(["drill"]):
        assert plan() == ("run", "forced")
    with forcing(["drill"]), planning() as planned:
        assert drill.run() == drill.run() != export  # two nodes need it: one row, one place
    assert len(planned.stages) == 1


def test_what_follows_an_unmade_stage_may_run(drill):
    export = drill.run()
    follower = {"model": export}
    drill.run(inputs=follower)
    (export / "result").unlink()
    with planning() as planned:
        drill.run(inputs={"model": drill.run()})
        drill.run(value=3, inputs={"model": export / "folder"})
    unmade, unchanged, changed = planned.stages.values()
    assert (unmade.state, unchanged.state, unchanged.reasons) == (
        "run",
        "may run",
        ("downstream of drill",),
    )
    assert (changed.state, changed.reasons) == (
        "run",
        ("downstream of drill", "drill.value 1 -> 3"),
    )


def test_another_process_s_work_is_told(drill, plan):
    drill.order("fail")
    with pytest.raises(StageError):
        drill.run()
    (directory,) = (drill.root / "workspace" / "drill").iterdir()
    with recipe_lock(directory):
        assert plan()[1].startswith("in use by process ")
