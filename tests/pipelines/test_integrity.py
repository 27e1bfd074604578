"""A hundred corrupted artifacts, published or waiting in the cache: each is found, and named, before a program is launched."""

import itertools
import json
import logging
import random
import shutil
from pathlib import Path

import pytest
from kedro.framework.session import KedroSession
from kedro.framework.startup import bootstrap_project

from rlhf_pipeline.errors import ArtifactError, ForeignFileError
from rlhf_pipeline.pipeline_registry import register_pipelines
from rlhf_pipeline.stages import run
from rlhf_pipeline.stages.cache.planning import planning

pytestmark = pytest.mark.slow
PROJECT = Path(__file__).parents[2]

READERS = {
    "base_model": ["split", "sft"],
    "prepared_data": ["sft", "reward_model", "ppo", "evaluate"],
    "sft_model": ["reward_model", "ppo", "evaluate", "register"],
    "reward_model": ["ppo", "evaluate"],
    "ppo_model": ["evaluate", "register"],
    "evaluation": ["register"],
}
"""Nodes that read a published artifact."""

REUSERS = {
    "source": "split", "base_model": "base_model", "split": "split", "sft": "sft", "reward_model": "reward_model",
    "ppo": "ppo", "evaluate": "evaluate",
}  # fmt: skip
"""Nodes that reuse the result of a stage that they find finished."""


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


def edit(rng: random.Random, folder: Path) -> Path:
    """A key more in the tokenizer, or where there is none in another JSON file: valid, and not what was written."""
    tokenizer = folder / "tokenizer_config.json"
    file = (
        tokenizer
        if tokenizer.is_file()
        else rng.choice([f for f in files_of(folder) if f.suffix == ".json"])
    )
    file.write_text(json.dumps(json.loads(file.read_text()) | {"add_bos_token": True}))
    return file


def edit_the_manifest(rng: random.Random, folder: Path) -> Path:
    """The record of another recipe, or of better numbers; all files are what it says."""
    file = folder / "manifest.json"
    field = rng.choice([{"fingerprint": "0" * 64}, {"metrics": {"validation/accuracy": 1.0}}])
    file.write_text(json.dumps(json.loads(file.read_text()) | field, indent=2, sort_keys=True))
    return file


def add(rng: random.Random, folder: Path) -> Path:
    """A file that transformers would heed, or any."""
    names = [
        "adapter_config.json",
        "special_tokens_map.json",
        "sub/manifest.json",
        "model.safetensors.index.json",
    ]
    file = folder / rng.choice(names)
    file.parent.mkdir(exist_ok=True)
    file.write_text("{}")
    return file


def swap(rng: random.Random, folder: Path) -> Path:
    """Two files exchanged; the first by name is the one to be named."""
    one, other = sorted(
        rng.sample([file for file in files_of(folder) if file.name != "manifest.json"], 2)
    )
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    return one


def files_of(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


CORRUPTIONS = [flip, truncate, delete, edit, edit_the_manifest, add, swap]
PLACES = [*((name, False) for name in READERS), *((stage, True) for stage in REUSERS)]
CASES = list(itertools.islice(itertools.cycle(itertools.product(CORRUPTIONS, PLACES)), 100))
"""Every kind of damage to every kind of artifact, and some twice, with other random choices."""


class Launched(Exception):  # noqa: N818 - in the place of a program
    """A program would have been launched."""


@pytest.fixture(scope="module")
def stages(project, tmp_path_factory):
    """Runs a node in this process, on a copy of all that the project has made: no file is shared with it."""
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

        def call(name: str, *, cached: bool) -> None:
            inputs = {name: catalog.load(name) for name in nodes[name].inputs}
            if not cached and "workspace" in inputs:
                inputs["workspace"] = sources_only
            nodes[name].func(*inputs.values())

        call.catalog, call.root = catalog, root
        yield call


@pytest.fixture
def damage(stages, project, monkeypatch):
    """Damages an artifact until the test has ended; its programs are not launched."""

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
def test_a_corrupted_artifact_is_named_before_anything_is_launched(
    stages, damage, caplog, seed, corruption, place, cached
):
    if cached:
        with planning() as plan:
            stages(REUSERS[place], cached=True)
        (folder,) = [stage.run.export for stage in plan.stages.values() if stage.run.stage == place]
        reader, expected = (
            REUSERS[place],
            ForeignFileError if corruption is add else Launched,
        )  # it is made again
    else:
        folder, reader, expected = (
            stages.catalog.load(place),
            READERS[place][seed % len(READERS[place])],
            ArtifactError,
        )
    file = damage(corruption, seed, folder)
    with caplog.at_level(logging.WARNING), pytest.raises(expected) as caught:
        stages(reader, cached=cached)
    said = f"{caught.value}\n{caplog.text}"
    assert str(folder) in said and file.relative_to(folder).as_posix() in said, said


def test_the_command_line_launches_nothing_from_a_corrupted_artifact(project, tmp_path):
    """The published tokenizer of the SFT model is edited; nothing of PPO is in the cache."""
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
