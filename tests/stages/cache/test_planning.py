"""A plan predicts what each stage would do and why, and launches nothing."""

import json
import os

import pytest

from rlhf_pipeline.stages.cache.planning import Planner, recipe_changes
from rlhf_pipeline.stages.run import StageRunner

pytestmark = pytest.mark.usefixtures("in_this_process")
ONE, TWO = {"weight": 1.0}, {"weight": 2.0}
CONFIG = {"steps": 8, "kl": {"coef": 0.1}, "lora": None, "rewards": [ONE, TWO]}
RECORDED = {
    "form": 2,
    "stage": "ppo",
    "seed": 1,
    "config": {"ppo": CONFIG},
    "inputs": {"sft_model": "aa", "prompts": "bb"},
    "code": {"training/ppo.py": "c0", "training/ppo_update.py": "c1", "rl/kl.py": "c2"},
    "versions": {"torch": "2.13.0", "numpy": "2.4.0"},
    "processes": 2,
}


def new(**changes):
    return RECORDED | changes


def ppo(**changes):
    return new(config={"ppo": CONFIG | changes})


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        (new(), []),
        (ppo(kl={"coef": 0.2}), ["ppo.kl.coef 0.1 -> 0.2"]),
        (new(trust_remote_code=True), ["base_model.trust_remote_code false -> true"]),
        (ppo(lora={"rank": 8}), ['ppo.lora null -> {"rank": 8}']),
        (ppo(rewards=[ONE, {"weight": 3.0}]), ["ppo.rewards.1.weight 2.0 -> 3.0"]),
        (ppo(rewards=[ONE, TWO, {"name": None, "callable": "my.py:f"}]),
         ['ppo.rewards.2 null -> {"callable": "my.py:f"}']),
        (ppo(rewards=[ONE]), ['ppo.rewards.1 {"weight": 2.0} -> null']),
        (ppo(steps=list(range(30))), [f"ppo.steps 8 -> {str(list(range(30)))[:57]}..."]),
        (new(seed=7), ["seed 1 -> 7"]),
        (new(processes=4), ["processes 2 -> 4"]),
        (new(versions={"torch": "2.14", "numpy": "2.4.0"}), ["torch 2.13.0 -> 2.14"]),
        (new(inputs={"sft_model": "xx", "prompts": "bb"}), ["input sft_model changed"]),
        (new(inputs={"sft_model": "aa", "rewards.1": "cc"}),
         ["input prompts is gone", "input rewards.1 is new"]),
        (new(code={"training/ppo.py": "c0", "training/ppo_update.py": "xx", "rl/new.py": "c3"}),
         ["code changed: rl/kl.py, rl/new.py, training/ppo_update.py"]),
    ],
)  # fmt: skip
def test_each_change_is_reported_by_name(recipe, changes):
    assert recipe_changes(RECORDED, recipe, pending=()) == changes


def test_a_pending_input_is_not_a_change():
    recipe = new(inputs={"sft_model": "sft", "prompts": "xx"}, seed=2)
    found = recipe_changes(RECORDED, recipe, pending=["sft_model"])
    assert found == ["seed 1 -> 2", "input prompts changed"]


@pytest.fixture
def plan(drill):
    """Plans the stage with some parameters; returns its state and the reasons."""

    def plan(*, value=1, **context):
        stage = planned(drill, drill.job(value=value), **context)
        return stage.state, *stage.reasons

    return plan


def planned(drill, job, **context):
    planner = Planner(drill.context(**context))
    planner.run(job)
    (stage,) = planner.stages.values()
    return stage


def forget_users(drill):
    for file in (drill.root / "workspace" / ".locks").glob("*.json"):
        file.unlink()


def test_a_plan_creates_nothing_and_finds_a_finished_stage(drill, plan):
    assert plan() == ("run", "never run here")
    assert not (drill.root / "workspace").exists()
    export = drill.run()
    stage = planned(drill, drill.job())
    assert (stage.run.cached, stage.run.export) == (True, export)
    assert plan() == ("finished",)
    assert plan(value=2) == ("run", "drill.value 1 -> 2")
    assert drill.launches == 1


def test_recipes_are_compared_with_the_nearest_one_of_which_the_last_used_wins(drill, plan):
    drill.run(value=1)
    drill.run(value=2)
    assert plan(value=3) == ("run", "drill.value 2 -> 3")
    drill.run(value=1)  # reused, which also counts as use
    assert plan(value=3) == ("run", "drill.value 1 -> 3")
    StageRunner(drill.context()).run(drill.job(value=9, seed=7))
    assert plan(value=3) == ("run", "drill.value 1 -> 3")


@pytest.mark.parametrize("recipe", [{}, {"form": 1, "config": {"drill": {}}}])
def test_a_recipe_of_another_form_is_not_compared(drill, plan, recipe):
    directory = drill.root / "workspace" / "drill" / ("0" * 16)
    directory.mkdir(parents=True)
    (directory / "recipe.json").write_text(json.dumps(recipe))
    assert plan() == ("run", "never run here")


def test_a_failed_attempt_restarts_or_resumes(drill, plan):
    directory = drill.fail()
    state, reason = plan()
    assert state == "run"
    assert reason.startswith(f"in use by process {os.getpid()} since ")  # this process ran it
    forget_users(drill)
    assert plan() == ("run", "an earlier attempt did not finish")
    (directory / "checkpoints" / "step-00000024").mkdir(parents=True)
    stage = planned(drill, drill.job())
    assert (stage.state, stage.run.resume_from, stage.reasons) == ("resume", 24, ())


def test_damage_is_found_by_name_and_size(drill, plan):
    export = drill.run()
    forget_users(drill)
    (export / "result").write_text("launch 10")
    assert plan() == ("run", "its result is damaged: result has 9 bytes, expected 8")
    (export / "result").unlink()
    assert plan() == ("run", "its result is damaged: result is missing")


def test_a_forced_stage_is_planned_once(drill, plan):
    export = drill.run()
    forget_users(drill)
    assert plan(force=["drill"]) == ("run", "forced")
    planner = Planner(drill.context(force=["drill"]))
    assert planner.run(drill.job()) == planner.run(drill.job()) != export  # two nodes need it
    assert len(planner.stages) == 1


def test_a_stage_downstream_of_a_pending_one_may_run(drill):
    export = drill.run()
    drill.run(inputs={"model": export})
    (export / "result").unlink()
    planner = Planner(drill.context())
    planner.run(drill.job(inputs={"model": planner.run(drill.job())}))
    planner.run(drill.job(value=3, inputs={"model": export / "folder"}))
    pending, unchanged, changed = planner.stages.values()
    assert pending.state == "run"
    assert (unchanged.state, unchanged.reasons) == ("may run", ("downstream of drill",))
    assert changed.state == "run"
    assert changed.reasons == ("downstream of drill", "drill.value 1 -> 3")
