"""The wheel of `kedro package` runs without the repository, in an empty folder."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import yaml
from extending_page import DOORS, write_pairs, write_project
from processes import kedro
from readme import ROWS, table

PROJECT = Path(__file__).parents[1]
SECRET = "token: canary-of-a-user\n"
TINY = "--env=tiny"


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The folder with the wheel and the archive that `kedro package` makes of a copy."""
    copy = tmp_path_factory.mktemp("copy")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("conf", "src"):
        shutil.copytree(PROJECT / name, copy / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(PROJECT / name, copy)
    for name in ("local/parameters.yml", "local/credentials.yml"):
        (copy / "conf" / name).write_text(SECRET)
    done = kedro("package", folder=copy, PYTHONPATH=str(copy / "src"))
    output = done.stdout + done.stderr
    if re.search(r"No matching distribution found for setuptools|Failed to establish", output):
        pytest.skip("`kedro package` downloads setuptools, and no package registry is reachable")
    assert done.returncode == 0, output
    return copy / "dist"


@pytest.fixture(scope="module")
def installed(dist, tmp_path_factory):
    """Runs a program of an environment with the wheel, in a folder; returns the output."""
    venv = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    python = venv / "bin" / "python"
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    (wheel,) = dist.glob("*.whl")
    # Pip sees the editable package among the libraries and would install nothing.
    options = ["--quiet", "--no-deps", "--no-index", "--ignore-installed"]
    subprocess.run([str(python), "-m", "pip", "install", *options, str(wheel)], check=True)
    environment = os.environ | {"COLUMNS": "200"}
    for name in ("PYTHONPATH", "MLFLOW_TRACKING_URI"):
        environment.pop(name, None)

    def run(folder, program, *arguments):
        settings = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
        done = subprocess.run([str(venv / "bin" / program), *arguments], **settings)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def configure(folder, parameters):
    (folder / "conf" / "local").mkdir(parents=True)
    (folder / "conf" / "local" / "parameters.yml").write_text(yaml.safe_dump(parameters))


def test_the_wheel_has_all_files_of_the_package_and_the_configuration(dist):
    (wheel,) = dist.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    package = PROJECT / "src" / "rlhf_pipeline"
    files = [
        path.relative_to(package.parent)
        for folder in (package, package / "conf")  # a link, which rglob does not follow
        for path in folder.rglob("*")
        if path.is_file() and path.name[0] != "." and "__pycache__" not in path.parts
    ]
    assert {str(path) for path in files if "local" not in path.parts} <= names
    assert {"rlhf_pipeline/conf/base/catalog.yml", "rlhf_pipeline/conf/logging.yml"} <= names


def test_neither_the_wheel_nor_the_archive_has_what_is_personal(dist, tmp_path):
    for file in dist.iterdir():
        shutil.unpack_archive(file, tmp_path / file.stem, "zip" if file.suffix == ".whl" else None)
    unpacked = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(unpacked) > 200
    assert [path for path in unpacked if SECRET.encode() in path.read_bytes()] == []


@pytest.mark.slow
def test_the_configuration_of_the_package_counts_below_that_of_the_folder(installed, tmp_path):
    printed = installed(tmp_path, "rlhf-pipeline", "rlhf", "status", TINY)
    assert re.search(r"^ppo +run +[0-9a-f]{8} +downstream of split, sft", printed, re.M), printed
    assert "INFO" not in printed  # the logging of the package, not Kedro's
    assert not [*tmp_path.iterdir()]
    configure(tmp_path, {"ppo": {"steps": 2}})
    after = installed(tmp_path, "python", "-m", "rlhf_pipeline", "rlhf", "status", TINY)
    lines = zip(printed.splitlines(), after.splitlines(), strict=True)
    changed = {new.split()[0] for old, new in lines if old != new}
    assert changed == {"ppo"}  # what follows has no fingerprint before PPO has finished


@pytest.mark.slow
def test_the_first_row_of_the_readme_is_split_in_an_empty_folder(installed, make_model, tmp_path):
    """With the wheel, `kedro run` is `rlhf-pipeline run`; training is as in the repository."""
    first = table()[0]
    first.write(tmp_path, make_model("llama", max_position_embeddings=1024))
    printed = installed(
        tmp_path, "rlhf-pipeline", "run", f"--pipeline={first.pipeline}", "--to-nodes=split"
    )
    assert "No row can serve reward_model or ppo: weight 0" in printed
    (report,) = (tmp_path / "data" / "03_split" / "split").glob("2*/split/report.json")
    assert json.loads(report.read_text())["files"]["sft/train.arrow"]["rows"] == ROWS - 12


@pytest.mark.slow
def test_code_of_a_package_beside_the_wheel_reads_rows_and_trains(installed, tmp_path):
    """The package of docs/extending.md; tests/pipelines/test_extending.py has all of its code."""
    write_project(tmp_path / "my_rlhf")
    offline = ["--quiet", "--no-deps", "--no-index"]
    build = [sys.executable, "-m", "pip", "wheel", *offline, "--no-build-isolation", "./my_rlhf"]
    subprocess.run(build, cwd=tmp_path, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    installed(tmp_path, "python", "-m", "pip", "install", *offline, str(wheel))
    parameters = {
        "launch": {"processes": 1},
        "split": {"sources": DOORS["split.sources"]},
        "reward_model": {"loss": DOORS["reward_model.loss"]},
    }
    configure(tmp_path, parameters)
    write_pairs(tmp_path / "pairs.jsonl", 600)
    installed(tmp_path, "rlhf-pipeline", "run", TINY, "--to-nodes=reward_model")
    workspace = tmp_path / "data" / "tiny" / "07_workspace"
    for stage, module in {"source": "sources", "reward_model": "losses"}.items():
        (recipe,) = (workspace / stage).glob("*/recipe.json")
        assert f"my_rlhf.{module}" in json.loads(recipe.read_text())["code"]
    assert [*(workspace / "reward_model").glob("*/export/manifest.json")]
    printed = installed(tmp_path, "rlhf-pipeline", "rlhf", "status", TINY, "--pipeline=simpo")
    assert re.search(r"^simpo +run ", printed, re.M), printed  # by an entry point of the package


@pytest.mark.long
def test_the_whole_pipeline_runs_with_an_archive(dist, installed, tmp_path):
    """Another root in the archive shows that it counts, and not the package's configuration."""
    shutil.unpack_archive(dist / "conf-rlhf_pipeline.tar.gz", tmp_path / "own")
    (tmp_path / "own" / "conf" / "tiny" / "globals.yml").write_text("root: results\n")
    archive = shutil.make_archive(str(tmp_path / "conf-own"), "gztar", tmp_path / "own", "conf")
    shutil.rmtree(tmp_path / "own")
    options = [TINY, f"--conf-source={archive}"]
    printed = installed(tmp_path, "python", "-m", "rlhf_pipeline", *options)
    assert "registry  rlhf-policy-tiny: candidate" in printed
    assert (tmp_path / "results" / "08_reporting" / "evaluation" / "latest").exists()
    table = installed(tmp_path, "rlhf-pipeline", "rlhf", "status", *options)
    assert re.search(r"^evaluate +finished", table, re.M), table
    made = {"conf-own.tar.gz", "mlartifacts", "mlflow.db", "results"}
    assert {path.name for path in tmp_path.iterdir()} == made
