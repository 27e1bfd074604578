"""`kedro new --starter` from this repository makes a project that runs."""

import shutil
import subprocess
from pathlib import Path

import processes

PROJECT = Path(__file__).parents[1]


def kedro(folder, *arguments):
    """Run Kedro in a folder with this repository's package; return the output."""
    own = {"PYTHONPATH": str(PROJECT / "src"), "DO_NOT_TRACK": "true", "COLUMNS": "120"}
    done = processes.kedro(*arguments, folder=folder, **own)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tree(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder): path.read_text() for path in files}


def test_a_new_project_has_the_whole_configuration_and_the_reward_of_its_readme_counts(tmp_path):
    """Git hands the starter over."""
    repository = tmp_path / "repository"
    repository.mkdir()
    for name in ("starter", "conf"):
        shutil.copytree(PROJECT / name, repository / name, symlinks=True)
    author = ["-c", "user.name=a", "-c", "user.email=a@b.example"]
    for command in (["init"], ["add", "--all"], [*author, "commit", "--quiet", "-m", "x"]):
        subprocess.run(["git", *command], cwd=repository, check=True, capture_output=True)
    starter = [f"--starter=git+file://{repository}", "--directory=starter"]
    kedro(tmp_path, "new", *starter, "--name=My Own Project", "--telemetry=no")
    own = tmp_path / "my-own-project"
    assert tree(own / "conf") == tree(PROJECT / "conf")
    assert [path for path in own.rglob("*") if path.is_symlink()] == []
    assert [path for path in own.rglob("*") if "cookiecutter" in path.name] == []

    before = kedro(own, "rlhf", "status", "--env=tiny").splitlines()
    printed = (own / "README.md").read_text().split("```yaml\n")[1].split("```")[0]
    (own / "conf" / "local" / "parameters.yml").write_text(printed)
    after = kedro(own, "rlhf", "status", "--env=tiny").splitlines()
    changed = {old.split()[0] for old, new in zip(before, after, strict=True) if old != new}
    assert changed == {"ppo", "evaluate"}
