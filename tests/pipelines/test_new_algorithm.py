"""The algorithm of docs/extending.md, added to a copy of the project as the page shows it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from documented_code import documented_changes

from rlhf_pipeline.runtime.manifest import verify

pytestmark = pytest.mark.slow

PROJECT = Path(__file__).parents[2]
COPIED = ("src", "conf", "pyproject.toml")
PACKAGE = "src/rlhf_pipeline/algorithms/"
REGISTRY = "src/rlhf_pipeline/pipelines/table.py"


def files(root: Path) -> dict[str, bytes]:
    """Content by path of every file of the project in a folder."""
    found = [path for name in COPIED for path in (root / name, *(root / name).rglob("*"))]
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in found
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def tree(project, tmp_path_factory):
    """A copy of the project, and the content of its files before the algorithm was added."""
    tree = tmp_path_factory.mktemp("tree")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in COPIED[:2]:
        shutil.copytree(PROJECT / name, tree / name, ignore=ignore)
    shutil.copy2(PROJECT / COPIED[2], tree)
    before = files(tree)
    for change in documented_changes(PROJECT / "docs" / "extending.md", "An algorithm"):
        change.apply(tree)
    return tree, before


@pytest.fixture(scope="module")
def trained(tree, project, tmp_path_factory):
    """A run of the new pipeline on the finished stages of the full run."""
    own = type(project)(tmp_path_factory.mktemp("new_algorithm"))
    shutil.copytree(project.root / "07_workspace", own.root / "07_workspace")
    kedro = str(Path(sys.executable).with_name("kedro"))
    result = subprocess.run(
        [kedro, "run", "--env=tiny", "--pipeline=simpo", f"--params=root={own.root}"],
        cwd=tree[0], env=os.environ | {"MLFLOW_TRACKING_URI": own.uri, "COLUMNS": "100"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    own.output = result.stdout + result.stderr
    assert result.returncode == 0, own.output
    return own


def test_an_algorithm_is_one_package_and_one_line(tree):
    root, before = tree
    after = files(root)
    added = after.keys() - before.keys()
    assert added and all(path.startswith(PACKAGE) for path in added)
    assert {path for path in before if after.get(path) != before[path]} == {REGISTRY}
    lines, old_lines = after[REGISTRY].splitlines(), before[REGISTRY].splitlines()
    new = [line for line in lines if line not in old_lines]
    assert new == [b'    ("rlhf_pipeline.algorithms.simpo.node", "split sft_model"),']
    lines.remove(new[0])
    assert lines == old_lines


def test_the_import_contracts_hold(tree):
    root, _ = tree
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    environment = os.environ | {"PYTHONPATH": str(root / "src")}
    result = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.long
def test_finished_stages_are_reused(trained):
    for stage in ("source synthetic", "base_model", "split", "sft", "reward_model"):
        assert f"{stage}: reused" in trained.output
        assert f"{stage}: running" not in trained.output
    assert "simpo: running" in trained.output


@pytest.mark.long
def test_the_stage_trained_from_its_defaults(trained):
    (work,) = trained.recipes("simpo")
    job = json.loads((work / "job.json").read_text())
    assert (job["config"]["simpo"]["beta"], job["config"]["simpo"]["batch_size"]) == (2.0, 32)
    lines = [json.loads(line) for line in (work / "metrics.jsonl").read_text().splitlines()]
    assert all({"simpo/loss", "simpo/accuracy"} <= line["metrics"].keys() for line in lines)
    published = trained.newest("06_models/simpo_model")
    verify(published)
    manifest = json.loads((published / "manifest.json").read_text())
    assert manifest["stage"] == "simpo"
    assert manifest["metrics"]["validation/loss"] > 0


@pytest.mark.long
def test_the_policy_was_evaluated_against_sft(trained):
    folder = trained.newest("08_reporting/simpo_evaluation")
    evaluation = json.loads((folder / "evaluation.json").read_text())
    assert evaluation["candidate"] == "simpo"
    assert sorted(evaluation["policies"]) == ["sft", "simpo"]
    assert evaluation["policies"]["simpo"]["kl"] != 0.0
    page = trained.newest("08_reporting/simpo_evaluation.html").read_text()
    assert evaluation["judge"] == "gold" and evaluation["independent"]
    assert "SIMPO was not trained on this judge." in page
    assert "SIMPO was trained to maximize" not in page  # no reward model took part
    assert "SIMPO's answer" in trained.output


@pytest.mark.long
def test_the_policy_was_registered(trained):
    candidate = trained.client().get_model_version_by_alias("rlhf-policy-tiny", "candidate")
    assert Path(candidate.source) == trained.newest("06_models/simpo_model")
    assert candidate.tags["rlhf.stage"] == "simpo"
    registration = json.loads(trained.newest("08_reporting/simpo_registration.json").read_text())
    assert registration["versions"] == {"sft": "1", "simpo": "2"}
