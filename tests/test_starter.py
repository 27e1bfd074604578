"""`kedro new --starter` from this repository makes a project that runs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
NAME, PACKAGE = "My Own Project", "my_own_project"


def kedro(folder, *arguments, **variables):
    """Run Kedro in a folder with this repository's package; return the output."""
    done = subprocess.run(
        [sys.executable, "-m", "kedro", *arguments],
        cwd=folder,
        env=os.environ
        | {"PYTHONPATH": str(PROJECT / "src"), "DO_NOT_TRACK": "true", "COLUMNS": "120"}
        | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A project made by the starter, as git hands it over."""
    place = tmp_path_factory.mktemp("new")
    repository = place / "repository"
    repository.mkdir()
    for name in ("starter", "conf"):
        shutil.copytree(PROJECT / name, repository / name, symlinks=True)
    subprocess.run(["git", "init", "--quiet"], cwd=repository, check=True)
    subprocess.run(["git", "add", "--all"], cwd=repository, check=True)
    author = ["-c", "user.name=a", "-c", "user.email=a@b.example"]
    subprocess.run(["git", *author, "commit", "--quiet", "-m", "x"], cwd=repository, check=True)
    starter = [f"--starter=git+file://{repository}", "--directory=starter"]
    kedro(place, "new", *starter, f"--name={NAME}", "--telemetry=no")
    return place / "my-own-project"


def example(project):
    """The YAML of the README."""
    return (project / "README.md").read_text().split("```yaml\n")[1].split("```")[0]


def test_the_project_has_the_whole_configuration_as_files(own):
    def tree(folder):
        return {
            path.relative_to(folder): path.read_text()
            for path in folder.rglob("*")
            if path.is_file()
        }

    assert tree(own / "conf") == tree(PROJECT / "conf")
    assert [path for path in own.rglob("*") if path.is_symlink()] == []
    assert [path for path in own.rglob("*") if "cookiecutter" in path.name] == []


def test_the_reward_of_the_readme_counts(own):
    before = kedro(own, "rlhf", "status", "--env=tiny")
    (own / "conf" / "local" / "parameters.yml").write_text(example(own))
    after = kedro(own, "rlhf", "status", "--env=tiny")
    (own / "conf" / "local" / "parameters.yml").unlink()
    changed = {
        old.split()[0]
        for old, new in zip(before.splitlines(), after.splitlines(), strict=True)
        if old != new
    }
    assert changed == {"ppo", "evaluate"}


@pytest.mark.long
def test_the_project_runs_with_its_own_reward(own, tmp_path):
    (own / "conf" / "local" / "parameters.yml").write_text(example(own))
    store = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
    printed = kedro(own, "run", "--env=tiny", f"--params=root={tmp_path}/data", **store)
    assert "registry  rlhf-policy-tiny: candidate" in printed
    (metrics,) = (tmp_path / "data" / "07_workspace" / "ppo").glob("*/metrics.jsonl")
    assert '"reward/brief"' in metrics.read_text()
