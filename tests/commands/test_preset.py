"""`kedro rlhf preset`: writes an environment, or shows the table."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from kedro.framework.startup import bootstrap_project

from rlhf_pipeline.cli import cli


@pytest.fixture
def preset():
    metadata = bootstrap_project(Path(__file__).parents[2])

    def run(*arguments):
        return CliRunner().invoke(cli, ["rlhf", "preset", *map(str, arguments)], obj=metadata)

    return run


def contents(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_an_environment_is_written_once(preset, tmp_path):
    folder = tmp_path / "mine"
    done = preset("opt-1.3b", "--gpus", "1x24", "--output", folder)
    assert done.exit_code == 0, done.output
    assert f"{folder} is written. Next: kedro rlhf plan --env=mine --gpus=1x24" in done.output
    written = contents(folder)
    assert written["globals.yml"] == "root: data/mine\n"
    assert "kedro run --env=mine" in written["parameters.yml"]

    (folder / "parameters.yml").write_text("mine")
    again = preset("opt-1.3b", "--gpus", "1x24", "--output", folder)
    assert again.exit_code == 1
    assert f"{folder}: found globals.yml, expected a new folder. Fix: " in again.output
    assert contents(folder)["parameters.yml"] == "mine"

    assert preset("opt-1.3b", "--gpus=1x24", "--output", folder, "--overwrite").exit_code == 0
    assert contents(folder) == written


def test_the_next_commands_name_the_pipeline(preset, tmp_path):
    folder = tmp_path / "mine"
    done = preset("qwen2.5-0.5b", "--gpus=1x24", "--pipeline=grpo", "--output", folder)
    assert "Next: kedro rlhf plan --env=mine --gpus=1x24 --pipeline=grpo\n" in done.output
    written = contents(folder)["parameters.yml"]
    assert "plan --env=mine --gpus=1x24 --check --pipeline=grpo\n" in written
    assert "kedro run --env=mine --pipeline=grpo\n" in written


def test_the_table(preset):
    lines = preset("opt-6.7b", "--list").output.splitlines()
    assert lines[0].split()[:6] == ["model", "1x16", "1x24", "1x40", "1x80", "1x141"]
    assert lines[1].split()[:6] == ["opt-6.7b", "-", "Q", "LQ", "LQ", "FLQ"]
    assert lines[2].strip() == "F: all weights, L: LoRA, Q: QLoRA"
    assert "use MODEL and --gpus, or --list" in preset("opt-1.3b").output
