"""Corrupted artifacts, published or in the cache: each is reported before a launch."""

import itertools
import json
import logging
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from kedro.framework.session import KedroSession
from kedro.framework.startup import bootstrap_project

from rlhf_pipeline.errors import ArtifactError, ForeignFileError
from rlhf_pipeline.kedro_run.hooks import run_context
from rlhf_pipeline.pipeline_registry import register_pipelines
from rlhf_pipeline.pipelines.table import RUN
from rlhf_pipeline.stages import run
from rlhf_pipeline.stages.cache.planning import Planner
from rlhf_pipeline.stages.job import Stages
from rlhf_pipeline.stages.run import StageRunner

pytestmark = pytest.mark.slow
PROJECT = Path(__file__).parents[2]

READERS = {
    "base_model": ["split", "sft"],
    "split": ["sft", "reward_model", "ppo", "evaluate"],
    "sft_model": ["reward_model", "ppo", "evaluate", "register"],
    "reward_model": ["ppo", "evaluate"],
    "ppo_model": ["evaluate", "register"],
    "evaluation": ["register"],
}
"""Nodes that read a published artifact."""

STAGES = ("source", "base_model", "split", "sft", "reward_model", "ppo", "evaluate")
"""Each is reused by the node of its name, and the source by `split`."""


def flip(rng: random.Random, folder: Path) -> Path:
    """One bit of one file."""
    file = rng.choice([file for file in files_of(folder) if file.stat().st_size])
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)
    return file


def truncate(rng: random.Random, folder: Path) -> Path:
    file = rng.choice([file for file in files_of(folder) if file.stat().st_size])
    file.write_bytes(file.read_bytes()[: rng.randrange(file.stat().st_size)])
    return file


def delete(rng: random.Random, folder: Path) -> Path:
    file = rng.choice(files_of(folder))
    file.unlink()
    return file


def edit_the_manifest(rng: random.Random, folder: Path) -> Path:
    """The record of another recipe, or of better metrics; all files agree with it."""
    file = folder / "manifest.json"
    field = rng.choice([{"fingerprint": "0" * 64}, {"metrics": {"validation/accuracy": 1.0}}])
    file.write_text(json.dumps(json.loads(file.read_text()) | field, indent=2, sort_keys=True))
    return file


def add(rng: random.Random, folder: Path) -> Path:
    """A file that transformers would read, or any other file."""
    names = "adapter_config special_tokens_map sub/manifest model.safetensors.index".split()
    file = folder / f"{rng.choice(names)}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text("{}")
    return file


def files_of(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


CORRUPTIONS = [flip, truncate, delete, edit_the_manifest, add]
PLACES = [*((name, False) for name in READERS), *((stage, True) for stage in STAGES)]
CASES = list(itertools.product(CORRUPTIONS, PLACES))
"""Each kind of damage to each kind of artifact."""


class Launched(Exception):  # noqa: N818 - instead of a launch
    """A program would have been launched."""


@pytest.fixture(scope="module")
def stages(project, tmp_path_factory):
    """Runs a node in this process, on a copy of all artifacts of the project without hard links."""
    root = tmp_path_factory.mktemp("copied")
    shutil.copytree(
        project.root, root, ignore=shutil.ignore_patterns("mlflow.db*"), dirs_exist_ok=True
    )
    sources_only = tmp_path_factory.mktemp("workspace")
    shutil.copytree(project.root / "07_workspace" / "source", sources_only / "source")
    bootstrap_project(PROJECT)
    with KedroSession.create(PROJECT, env="tiny", runtime_params={"root": str(root)}) as session:
        catalog = session.load_context().catalog
        nodes = {node.name: node for node in register_pipelines()["full"].nodes}

        def call(name: str, *, cached: bool, stages: Stages | None = None) -> None:
            """Run a node with the copied cache, or with a cache of the sources only."""
            context = run_context(catalog)
            if not cached:
                context = replace(context, workspace=sources_only)
            RUN.update(stages=stages or StageRunner(context), project=PROJECT)
            nodes[name].func(*map(catalog.load, nodes[name].inputs))

        call.catalog, call.root = catalog, root
        yield call


@pytest.fixture
def damage(stages, project, monkeypatch):
    """Damages an artifact until the test ends; nothing is launched."""

    def refuse(*_: object) -> None:
        raise Launched

    monkeypatch.setattr(run, "launch", refuse)
    damaged = []

    def damage(corruption, seed: int, folder: Path) -> Path:
        damaged.append(folder.parent)
        return corruption(random.Random(seed), folder)

    yield damage
    for folder in damaged:
        shutil.rmtree(folder)
        shutil.copytree(project.root / folder.relative_to(stages.root), folder)


@pytest.mark.parametrize(
    ("seed", "corruption", "place", "cached"),
    [(seed, corruption, *place) for seed, (corruption, place) in enumerate(CASES)],
    ids=[
        f"{seed}-{how.__name__}-{'cached ' * cached}{place}"
        for seed, (how, (place, cached)) in enumerate(CASES)
    ],
)
def test_a_corrupted_artifact_is_reported_before_anything_is_launched(
    stages, damage, caplog, seed, corruption, place, cached
):
    if cached:
        reader = "split" if place == "source" else place
        planner = Planner(run_context(stages.catalog))
        stages(reader, cached=True, stages=planner)
        plans = planner.stages.values()
        (folder,) = [plan.run.export for plan in plans if plan.run.stage == place]
        expected = ForeignFileError if corruption is add else Launched  # the stage runs again
    else:
        folder, reader = stages.catalog.load(place), READERS[place][seed % len(READERS[place])]
        expected = ArtifactError
    file = damage(corruption, seed, folder)
    with caplog.at_level(logging.WARNING), pytest.raises(expected) as caught:
        stages(reader, cached=cached)
    messages = f"{caught.value}\n{caplog.text}"
    assert str(folder) in messages and file.relative_to(folder).as_posix() in messages, messages


def test_the_command_line_launches_nothing_from_a_corrupted_artifact(project, tmp_path):
    """The published tokenizer of the SFT model is edited; the cache is empty."""
    shutil.copytree(
        project.root, tmp_path / "data", ignore=shutil.ignore_patterns("07_workspace", "mlflow.db*")
    )
    tokenizer = sorted(
        (tmp_path / "data" / "06_models" / "sft_model").glob("*/sft_model/tokenizer.json")
    )[-1]
    tokenizer.write_text(tokenizer.read_text().replace('"<|end|>"', '"<|and|>"'))
    other = type(project)(tmp_path / "data")
    output = other.kedro("--from-nodes=ppo", check=False)
    assert f"{tokenizer} was changed after stage sft finished" in output
    assert "running as" not in output
    assert not (tmp_path / "data" / "07_workspace" / "ppo").exists()
