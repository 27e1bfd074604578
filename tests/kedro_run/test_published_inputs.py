"""The lineage of published artifacts is compared with the parameters; no node is executed."""

import json
import shutil
from pathlib import Path

import pytest

from rlhf_pipeline.config.training import SFTConfig
from rlhf_pipeline.data.sources.registry import source_origin
from rlhf_pipeline.kedro_run.checks import check
from rlhf_pipeline.kedro_run.published_inputs import changes_since
from rlhf_pipeline.pipelines.preparation import base_model_identity
from rlhf_pipeline.runtime.job import as_json
from rlhf_pipeline.runtime.manifest import Manifest, file_digest
from rlhf_pipeline.sizing.fit import changed

REWARDS = "def f(prompts, responses): ..."
ROW = {"prompt": "a", "chosen": "b", "rejected": "c"}

SEEDS = {"seed": 5, "policy_seed": 5}


@pytest.fixture
def blocks(parameters, tmp_path, monkeypatch):
    """The blocks of a run from files in the working folder, with changes by place."""
    monkeypatch.chdir(tmp_path)
    Path("rows").mkdir()
    Path("rows", "a.jsonl").write_text(json.dumps(ROW))
    Path("rewards.py").write_text(REWARDS)
    Path("model").mkdir()
    Path("model", "config.json").write_text("{}")
    Path("model", "tokenizer.json").write_text("{}")
    columns = {name: name for name in ROW}
    parameters["split"]["sources"] = [{"name": "files", "path": "rows/*.jsonl", "columns": columns}]
    parameters["base_model"] = {"path": "model"}
    parameters["rejection"] = {"sample": {"rewards": ["rewards.py:f"]}}

    return lambda **places: check(changed(parameters, places), gpus=0)


def write(folder, origin, ancestors):
    """Write the manifest of an artifact; return its folder."""
    folder.mkdir(exist_ok=True)
    rest = {"versions": {}, "metrics": {}, "files": {}}
    Manifest(**origin, fingerprint="", seed=5, **rest, ancestors=ancestors).write(folder)
    return folder


@pytest.fixture
def published(blocks, tmp_path):
    """A policy by rejection sampling with its lineage, and an SFT model alone."""
    made = blocks()
    (source,) = made["split"].readings()
    policy, recorded = made["rejection"], as_json(made)
    rows = {name: file_digest(path) for name, path in source_origin(source)[0].items()}
    part = policy.model_dump(mode="json", include={*SFTConfig.model_fields})
    records = {
        "source": (as_json({"source": source}), rows),
        "base_model": (
            {"base_model": recorded["base_model"]}, base_model_identity(made["base_model"])
        ),
        "split": ({"split": recorded["split"]}, {}),
        "sft": ({"sft": recorded["sft"]}, {}),
        "judge_model": ({"reward_model": {"epochs": 99}}, {}),
        "tasks": ({"evaluate": {"prompts": 99}}, {}),
        "sample": (as_json({policy.sampler: policy.sample}) | {"table": {}}, {}),
        "rejection": (
            {"rejection": part, "table": {}}, {"rewards.0": file_digest(Path("rewards.py"))}
        ),
    }  # fmt: skip
    ancestors = {
        stage: {"stage": stage, "config": config, "inputs": inputs}
        for stage, (config, inputs) in records.items()
    }
    policy = write(tmp_path / "policy", ancestors.pop("rejection"), ancestors)
    base = {name: ancestors[name] for name in ("source", "base_model", "split")}
    sft = write(tmp_path / "sft", ancestors["sft"], base)
    return {"sft_model": sft, "rejection_model": policy}


@pytest.mark.parametrize(
    ("places", "of_sft", "of_policy"),
    [
        ({}, None, None),
        ({"sft.epochs": 3.0}, ["sft.epochs 2.0 -> 3.0"], ["sft.epochs 2.0 -> 3.0"]),
        ({"rejection.epochs": 3.0}, None, ["rejection.epochs 1.0 -> 3.0"]),
        ({"rejection.sample.prompts": 77}, None, ["rejection.sample.prompts null -> 77"]),
        ({"sft": None}, ["split.weights.0 2.0 -> 0.0"], ["split.weights.0 2.0 -> 0.0"]),
        ({"reward_model.epochs": 3.0}, None, None),
    ],
)
def test_a_change_is_found_in_the_lineage_of_each_input(
    blocks, published, places, of_sft, of_policy
):
    expected = {"sft_model": of_sft, "rejection_model": of_policy}
    given = blocks(**places)
    assert changes_since(published, given, SEEDS) == {
        name: changes for name, changes in expected.items() if changes
    }


def test_another_start_of_the_reward_model_is_named_by_its_own_parameter(blocks, tmp_path):
    own = {"reward_model.start": "own", "reward_model.base_model": {"path": "model"}}
    made = blocks(**own)
    base = made["reward_model"].base_model
    config, inputs = as_json({"base_model": base}), base_model_identity(base)
    write(tmp_path, {"stage": "reward_base", "config": config, "inputs": inputs}, {})
    assert changes_since({"reward_model": tmp_path}, made, SEEDS) == {}
    shutil.copytree("model", "other")
    given = blocks(**own | {"reward_model.base_model": {"path": "other"}})
    assert changes_since({"reward_model": tmp_path}, given, SEEDS) == {
        "reward_model": ["reward_model.base_model.path model -> other"]
    }


def test_the_seed_and_the_bytes_of_files_count(blocks, published):
    other = dict.fromkeys(SEEDS, 6)
    assert changes_since(published, blocks(), other) == {
        "sft_model": ["seed 5 -> 6"],
        "rejection_model": ["policy_seed 5 -> 6"],
    }
    Path("model", "note").write_text("a")
    assert [*changes_since(published, blocks(), SEEDS).values()] == [["input bytes changed"]] * 2
    Path("model", "note").unlink()
    Path("rewards.py").write_text(REWARDS + " # changed")
    changed = {"rejection_model": ["input rewards.0 changed"]}
    assert changes_since(published, blocks(), SEEDS) == changed
    Path("rewards.py").write_text(REWARDS)
    Path("rows", "a.jsonl").rename("other.jsonl")
    (moved,) = blocks()["split"].sources
    sources = [moved.model_copy(update={"path": "other.jsonl"}).model_dump(mode="json")]
    found = changes_since(published, blocks(**{"split.sources": sources}), SEEDS)
    assert found.keys() == published.keys()
    assert found["sft_model"][-1] == "source files other.jsonl is new"


def test_files_of_a_source_that_came_or_went_count_and_each_is_read_once(
    blocks, published, monkeypatch
):
    """The source of the published split recorded all files that its glob found."""
    first, other = Path("rows", "a.jsonl"), Path("rows", "b.jsonl")
    other.write_text(json.dumps(ROW))
    assert [*changes_since(published, blocks(), SEEDS).values()] == [["input b.jsonl is new"]] * 2
    first.rename(other)
    renamed = ["input a.jsonl is gone", "input b.jsonl is new"]
    given, opened, read = blocks(), [], Path.open

    def counted(path, *args, **kwargs):
        opened.append(path.name)
        return read(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", counted)
    assert [*changes_since(published, given, SEEDS).values()] == [renamed] * 2
    assert opened.count("b.jsonl") == 1


def test_a_source_whose_files_are_all_gone_is_left_to_the_published_split(blocks, published):
    given = blocks()
    Path("rows", "a.jsonl").unlink()
    assert changes_since(published, given, SEEDS) == {}
