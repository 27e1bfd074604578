"""The environment of a launch."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.stages.cache.fingerprint import recipe
from rlhf_pipeline.stages.cache.planning import recipe_changes
from rlhf_pipeline.stages.job import Job, RunContext, StageSpec
from rlhf_pipeline.stages.launch.node_program import ALLOCATOR, NodeProgram

REPEATABLE = {
    "RLHF_DETERMINISTIC": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "FLASH_ATTENTION_DETERMINISTIC": "1",
}


@pytest.fixture
def environment(nvidia_smi, monkeypatch, tmp_path):
    """The environment of two ranks on sixteen cores, with that many GPUs."""
    unset = ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR", "OMP_NUM_THREADS")
    for name in (*unset, *ALLOCATOR, *REPEATABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))

    def make(gpus, deterministic=False, **variables):
        nvidia_smi(gpus)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return NodeProgram("p", str(tmp_path), ranks=2, deterministic=deterministic).environment

    return make


def test_programs_of_this_python_are_found_without_an_activated_environment(environment, tmp_path):
    """DeepSpeed's CPU Adam is compiled by ninja, which pip puts beside the interpreter."""
    path = environment(0, PATH=str(tmp_path / "bin"))["PATH"]
    assert path == f"{Path(sys.executable).parent}:{tmp_path / 'bin'}"
    assert shutil.which("ninja", path=path) == str(Path(sys.executable).with_name("ninja"))


def test_only_a_single_process_tokenizes_on_all_cores(environment, tmp_path, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    assert environment(0)["TOKENIZERS_PARALLELISM"] == "false"
    plain = NodeProgram("program", str(tmp_path), distributed=False)
    assert "TOKENIZERS_PARALLELISM" not in plain.environment


def test_the_ranks_share_cores_and_memory_unless_the_user_says_otherwise(environment):
    """Memory of a GPU grows in segments."""
    assert ALLOCATOR[0] not in environment(0)
    assert environment(0)["OMP_NUM_THREADS"] == "8"
    assert environment(2)[ALLOCATOR[0]] == "expandable_segments:True"
    assert environment(2, OMP_NUM_THREADS="3")["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize("name", ALLOCATOR)
def test_the_allocator_has_the_options_of_the_user(environment, name):
    own = {name: "max_split_size_mb:512"}
    found = environment(2, **own)
    assert {key: found[key] for key in ALLOCATOR if key in found} == own


TREE = {"NCCL_ALGO": "Tree"}


@pytest.mark.parametrize(
    ("gpus", "deterministic", "given", "expected"),
    [
        (2, True, {}, REPEATABLE),
        (2, False, {}, {}),
        (0, True, {}, {}),
        # The user's algorithm counts where results need not repeat: the recipe says that they do,
        # not by which algorithm.
        (2, False, TREE, TREE),
        (2, True, TREE, REPEATABLE),
    ],
)
def test_ranks_on_gpus_repeat_their_results_if_they_are_told_to(
    environment, gpus, deterministic, given, expected
):
    found = environment(gpus, deterministic, **given)
    assert {name: found[name] for name in REPEATABLE if name in found} == expected


def test_it_is_part_of_the_recipe_of_ranks_if_it_is_true():
    def found(deterministic, *, distributed):
        job = Job(StageSpec("s", "rlhf_pipeline.errors", distributed, libraries=()), {}, {}, 1)
        launch = LaunchConfig(deterministic=deterministic)
        return recipe(job, {}, RunContext(Path(), launch), 1)

    plain, repeated = (found(each, distributed=True) for each in (False, True))
    assert "deterministic" not in plain and repeated["deterministic"] is True
    assert recipe_changes(plain, repeated, pending=()) == ["launch.deterministic false -> true"]
    assert found(False, distributed=False) == found(True, distributed=False)
