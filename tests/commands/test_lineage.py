"""The walk from a policy to the bytes of its data, on artifacts made by hand."""

import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.tree import Tree

from rlhf_pipeline.commands.lineage import Walk
from rlhf_pipeline.runtime.manifest import (
    Manifest,
    content_digest,
    file_digest,
    file_entries,
    folder_digest,
)


def artifact(workspace, stage, inputs):
    """A finished stage: its export, and the job that names the places of its inputs."""
    fingerprint = stage.ljust(16, "0")
    folder = workspace / stage / fingerprint / "export"
    (folder / "sub").mkdir(parents=True)
    (folder / "model").write_text(stage)
    (folder / "sub" / "rows").write_text(f"rows of {stage}")
    digests = {
        name: value if isinstance(value, str)
        else file_digest(value) if value.is_file() else content_digest(value)
        for name, value in inputs.items()
    }  # fmt: skip
    places = {name: str(value) for name, value in inputs.items() if isinstance(value, Path)}
    (folder.parent / "job.json").write_text(json.dumps({"inputs": places}))
    files = file_entries(folder)
    Manifest(stage, fingerprint, 0, {}, digests, {}, {}, files).write(folder)
    return folder


@pytest.fixture
def data(tmp_path):
    (tmp_path / "rows.csv").write_text("prompt,answer")
    return tmp_path / "rows.csv"


@pytest.fixture
def policy(tmp_path, data):
    """source -> split -> sft -> policy, which also reads the split."""
    workspace = tmp_path / "workspace"
    source = artifact(workspace, "source", {"file": data, "hub": "commit abc"})
    split = artifact(workspace, "split", {"source_0": source})
    sft = artifact(workspace, "sft", {"demonstrations": split / "sub"})
    return artifact(workspace, "policy", {"sft_model": sft, "prompts": split / "sub"})


def walked(policy):
    """The walk, and the tree that it printed."""
    workspace = policy.parents[2]
    found = [path.parent for path in workspace.glob("*/*/export/manifest.json")]
    places = {content_digest(path): path for folder in found for path in (folder, folder / "sub")}
    ledger = SimpleNamespace(by_digest=places, workspace=workspace)
    walk, tree = Walk(ledger), Tree("champion")
    walk.visit(tree, "policy", policy)
    console = Console(file=io.StringIO(), width=200)
    console.print(tree)
    return walk, console.file.getvalue()


def test_every_input_down_to_the_data_is_visited_once(policy):
    walk, printed = walked(policy)
    assert walk.faults == []
    lines = [line.strip("│├└─ ") for line in printed.splitlines() if "/" not in line]
    assert lines == [
        "champion",
        "policy: policy policy00, 2 files, 20 bytes",
        "prompts: split split000, 2 files, 18 bytes",
        "source_0: source source00, 2 files, 20 bytes",
        "file: 1 files, 13 bytes, not made by this project",
        "hub: commit abc",
        "sft_model: sft sft00000, 2 files, 14 bytes",
        "demonstrations: split split000, see above",
    ]
    assert "rows.csv" in printed
    assert (walk.files, walk.size) == (9, 20 + 18 + 20 + 13 + 14)


def test_a_changed_byte_of_an_artifact_or_of_the_data_is_named(policy, data, tmp_path):
    (file,) = (tmp_path / "workspace").glob("split/*/export/sub/rows")
    before = file.read_text()
    file.write_text(before.replace("s", "z", 1))
    (fault,) = walked(policy)[0].faults
    assert str(file) in fault
    file.write_text(before)
    data.write_text("prompt,answers")
    (fault,) = walked(policy)[0].faults
    assert fault.startswith(f"{data}: found ") and "expected content" in fault
    data.unlink()
    (fault,) = walked(policy)[0].faults
    assert fault.startswith(f"{data}: found nothing, expected content")


def test_an_input_that_is_not_on_this_machine_is_a_fault(policy, tmp_path):
    shutil.rmtree(tmp_path / "workspace" / "sft")
    (fault,) = walked(policy)[0].faults
    assert "sft0000000000000/export: found nothing, expected content " in fault
    (policy.parent / "job.json").unlink()  # nor where it was
    (fault,) = walked(policy)[0].faults
    assert fault.startswith("sft_model: found nothing, expected content ")


def test_a_folder_outside_the_workspace_is_read(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "weights").write_text("weights")
    folder = artifact(tmp_path / "workspace", "ppo", {"rewards.0": folder_digest(other)})
    (folder.parent / "job.json").write_text(json.dumps({"inputs": {"rewards.0": str(other)}}))
    assert walked(folder)[0].faults == []
    (other / "weights").write_text("changed")
    assert len(walked(folder)[0].faults) == 1
