"""The flow, from left to right, and the catalog behind it."""

from pathlib import Path

import pytest
from kedro.framework.session import KedroSession
from kedro.framework.startup import bootstrap_project

from rlhf_pipeline.pipeline_registry import register_pipelines
from rlhf_pipeline.stages.job import PROGRAMS

PROJECT = Path(__file__).parents[2]
ORDER = ["base_model", "split", "sft", "reward_model", "ppo", "evaluate", "register"]
BY_DPO = {"base_model", "split", "sft", "reward_model", "dpo", "evaluate_dpo", "register_dpo"}


def test_the_nodes_run_from_left_to_right():
    assert [node.name for node in register_pipelines()["full"].nodes] == ORDER


def test_full_is_the_default():
    pipelines = register_pipelines()
    assert pipelines["__default__"].nodes == pipelines["full"].nodes


def test_what_follows_ppo_is_ppo_evaluate_and_register():
    assert [node.name for node in register_pipelines()["full"].from_nodes("ppo").nodes] == ORDER[4:]


def test_dpo_takes_ppo_s_place():
    dpo = register_pipelines()["dpo"]
    assert {node.name for node in dpo.nodes} == BY_DPO
    assert [node.name for node in dpo.from_nodes("dpo").nodes] == [
        "dpo",
        "evaluate_dpo",
        "register_dpo",
    ]
    assert dpo.all_outputs() == {
        "base_model", "prepared_data", "sft_model", "reward_model", "dpo_model", "dpo_evaluation", "dpo_registration",
    }  # fmt: skip


def test_each_launched_node_has_a_program_that_exists():
    assert [name for name in ORDER if name in PROGRAMS] == ORDER[:-1]
    assert BY_DPO - PROGRAMS.keys() == {"register_dpo"}
    for program in PROGRAMS.values():
        path = PROJECT / "src" / (program.module.replace(".", "/") + ".py")
        assert "run_program(main)" in path.read_text(), path


@pytest.mark.parametrize("env", ["local", "tiny", "hh-rlhf"])
def test_every_environment_s_catalog_and_parameters_serve_every_node(env, monkeypatch):
    from rlhf_pipeline.preflight import preflight

    monkeypatch.setenv("HH_RLHF_PATH", "comparisons.jsonl.gz")
    bootstrap_project(PROJECT)
    with KedroSession.create(PROJECT, env=env) as session:
        context = session.load_context()
        catalog = context.catalog
        pipelines = register_pipelines().values()
        free = {
            name for pipeline in pipelines for name in pipeline.inputs() | pipeline.all_outputs()
        }
        assert [name for name in sorted(free) if name not in catalog] == []
        preflight(catalog.load("parameters"), processes=2, gpus=0)


def test_an_environment_overrides_one_key_of_a_block_and_keeps_the_rest():
    bootstrap_project(PROJECT)
    with KedroSession.create(
        PROJECT, env="tiny", runtime_params={"ppo": {"kl": {"coef": 0.5}}}
    ) as session:
        ppo = session.load_context().params["ppo"]
    assert ppo.steps == 3  # tiny
    assert (ppo.kl.coef, ppo.kl.maximum) == (0.5, 3.0)  # command line over base
    assert ppo.actor.optimizer.learning_rate == 1.5e-4  # base
