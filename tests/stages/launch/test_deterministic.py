"""`launch.deterministic` reaches the ranks on GPUs, and is part of their recipe."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.stages.cache.fingerprint import recipe
from rlhf_pipeline.stages.cache.planning import recipe_changes
from rlhf_pipeline.stages.context import RunContext
from rlhf_pipeline.stages.job import Job, StageSpec
from rlhf_pipeline.stages.launch import launcher
from rlhf_pipeline.stages.launch.node_program import NodeProgram

VARIABLES = ("RLHF_DETERMINISTIC", "CUBLAS_WORKSPACE_CONFIG")


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in (*VARIABLES, "CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "gpus, deterministic, expected",
    [(2, True, ["1", ":4096:8"]), (2, False, [None, None]), (0, True, [None, None])],
)
def test_the_environment_of_ranks(nvidia_smi, tmp_path, gpus, deterministic, expected):
    nvidia_smi(gpus)
    program = NodeProgram("p", str(tmp_path), deterministic=deterministic)
    assert [program.environment.get(name) for name in VARIABLES] == expected


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_launch_passes_it_on(monkeypatch, tmp_path, deterministic):
    seen = []

    def supervise(attempt, program, listener):
        seen.append(program.deterministic)
        return replace(attempt, code=0)

    monkeypatch.setattr(launcher, "_supervise", supervise)
    run = SimpleNamespace(directory=tmp_path, export=tmp_path, stage="sft")
    (tmp_path / "manifest.json").touch()
    config = LaunchConfig(deterministic=deterministic)
    context = RunContext(tmp_path, config)
    launcher._launch_once(StageSpec("sft", "program"), run, context)
    assert seen == [deterministic]


def test_it_is_part_of_the_recipe_of_ranks_if_it_is_true():
    def found(deterministic, *, distributed):
        job = Job(StageSpec("s", "rlhf_pipeline.errors", distributed, libraries=()), {}, {}, 1)
        return recipe(job, digests={}, processes=1, deterministic=deterministic)

    plain, repeated = (found(each, distributed=True) for each in (False, True))
    assert "deterministic" not in plain and repeated["deterministic"] is True
    assert recipe_changes(plain, repeated, pending=()) == ["launch.deterministic false -> true"]
    assert found(False, distributed=False) == found(True, distributed=False)
