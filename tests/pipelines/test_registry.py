"""The registered pipelines and the catalog."""

from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from kedro.framework.session import KedroSession
from kedro.framework.startup import bootstrap_project

from rlhf_pipeline.kedro_run.checks import check
from rlhf_pipeline.pipeline_registry import register_pipelines
from rlhf_pipeline.pipelines.table import stage_specs

PROJECT = Path(__file__).parents[2]
ORDER = ["base_model", "split", "sft", "reward_model", "ppo", "evaluate", "register", "report"]
DPO_NODES = {*ORDER[:4], "dpo", "evaluate_dpo", "register_dpo", "report_dpo"}


def test_full_is_the_default_and_its_nodes_run_in_order():
    pipelines = register_pipelines()
    assert [node.name for node in pipelines["full"].nodes] == ORDER
    assert pipelines["__default__"].nodes == pipelines["full"].nodes
    assert [node.name for node in pipelines["full"].from_nodes("ppo").nodes] == ORDER[4:]


def test_the_pipeline_dpo_replaces_ppo_by_dpo():
    dpo = register_pipelines()["dpo"]
    assert {node.name for node in dpo.nodes} == DPO_NODES
    own = ["dpo", "evaluate_dpo", "register_dpo", "report_dpo"]
    assert [node.name for node in dpo.from_nodes("dpo").nodes] == own
    assert [node.name for node in dpo.from_nodes("register_dpo").nodes] == own[2:]
    shared = {"base_model", "split", "sft_model", "reward_model"}
    written = {"dpo_model", "dpo_evaluation", "dpo_registration", "dpo_evaluation_page"}
    assert dpo.all_outputs() == shared | written


def test_each_stage_has_a_program_that_exists():
    specs = stage_specs()
    assert [name for name in ORDER if name in specs] == ORDER[:-2]
    assert DPO_NODES - specs.keys() == {"register_dpo", "report_dpo"}
    for spec in specs.values():
        path = PROJECT / "src" / (spec.program.replace(".", "/") + ".py")
        assert "run_program(main)" in path.read_text(), path


@pytest.mark.parametrize("env", ["local", "tiny", "hh-rlhf", "smollm2"])
def test_each_environment_has_every_data_set_and_valid_parameters(env, monkeypatch):
    monkeypatch.setenv("HH_RLHF_PATH", "comparisons.jsonl.gz")
    bootstrap_project(PROJECT)
    with KedroSession.create(PROJECT, env=env) as session:
        context = session.load_context()
        catalog = context.catalog
        pipelines = register_pipelines().values()
        free = {
            name for pipeline in pipelines for name in pipeline.inputs() | pipeline.all_outputs()
        }
        assert not {name for name in free if name not in catalog}
        check(catalog.load("parameters"), gpus=0)


@pytest.mark.parametrize("name", ["full", "dpo", "grpo"])
def test_the_layers_of_the_drawing_follow_each_other(name):
    """kedro-viz shows no layers if a later one leads back to an earlier one."""
    bootstrap_project(PROJECT)
    with KedroSession.create(PROJECT) as session:
        catalog = session.load_context().catalog
        pipeline = register_pipelines()[name]
        layers = {
            data: catalog.get(data).metadata["kedro-viz"]["layer"]
            for data in pipeline.all_outputs()
        }
    earlier = {layer: set() for layer in layers.values()}
    for step in pipeline.nodes:
        inputs = {layers[data] for data in step.inputs if data in layers}
        for data in step.outputs:
            earlier[layers[data]] |= inputs - {layers[data]}
    order = list(TopologicalSorter(earlier).static_order())
    assert order == ["base model", "data", "models", "reporting"]
