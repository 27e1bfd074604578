"""Training that was ended and is started again: real launches on two ranks, real signals, the smallest environment."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlhf_pipeline.runtime.checkpoint_files import (
    checkpoint_path,
    list_checkpoints,
    newest_valid_step,
    seal,
)
from rlhf_pipeline.runtime.manifest import Manifest, content_digest
from rlhf_pipeline.runtime.metrics_file import truncate_after

DRIVER = """
import json, sys
from pathlib import Path
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.training import SFTConfig
from rlhf_pipeline.stages.job import Job
from rlhf_pipeline.stages.run import run_stage

done = json.loads(Path(sys.argv[1]).read_text())
stage = done["stage"]
block = {"sft": SFTConfig, "ppo": PPOConfig}[stage].model_validate(done["config"][stage] | {"checkpoint_every": 1})
inputs = {name: Path(path) for name, path in done["inputs"].items()}
run_stage(Job(stage, {stage: block}, inputs, done["seed"]), LaunchConfig(**json.loads(sys.argv[3])), Path(sys.argv[2]))
"""


def start(recipe: Path, workspace: Path, **launch: int) -> subprocess.Popen:
    """The stage of a recipe that was finished elsewhere, in a workspace of its own."""
    command = [
        sys.executable,
        "-c",
        DRIVER,
        str(recipe / "job.json"),
        str(workspace),
        json.dumps(launch),
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(pattern: str, workspace: Path, driver: subprocess.Popen) -> None:
    deadline = time.monotonic() + 300
    while not any(workspace.glob(pattern)):
        assert driver.poll() is None, driver.stdout.read()
        assert time.monotonic() < deadline, f"no {pattern} in {workspace}"
        time.sleep(0.01)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def lines(directory: Path) -> list:
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [
        (r["step"], {n: v for n, v in r["metrics"].items() if not n.startswith("time/")})
        for r in records
    ]


def kill_group(driver, group):
    os.killpg(group, signal.SIGKILL)


def kill_driver(driver, group):
    driver.kill()


def terminate_driver(driver, group):
    driver.terminate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "end", "after"),
    [
        ("ppo", kill_driver, "step-00000001"),
        pytest.param("sft", kill_group, "step-00000003", marks=pytest.mark.long),
        pytest.param("sft", terminate_driver, "step-00000002", marks=pytest.mark.long),
    ],
)
def test_it_ends_as_if_nothing_had_happened(project, tmp_path, stage, end, after):
    (recipe,) = project.recipes(stage)[:1]
    driver = start(recipe, tmp_path)
    wait_for(f"{stage}/*/heartbeats/rank1.json", tmp_path, driver)
    family = psutil.Process(driver.pid).children(
        recursive=True
    )  # now: no time is left for it between two steps
    group = next(os.getpgid(child.pid) for child in family if "RANK" in child.environ())
    wait_for(f"{stage}/*/checkpoints/{after}", tmp_path, driver)
    end(driver, group)
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
    assert driver.wait(30) != 0
    (directory,) = (tmp_path / stage).iterdir()
    assert directory.name == recipe.name  # how often it saves is no part of the recipe
    assert not (directory / "export" / "manifest.json").exists()

    again = start(recipe, tmp_path)
    assert again.wait(300) == 0, again.stdout.read()
    resumed = json.loads((directory / "job.json").read_text())["resume_from"]
    assert resumed >= int(after[-8:])
    assert content_digest(directory / "export") == content_digest(recipe / "export")
    assert lines(directory) == lines(recipe)
    assert names(directory / "checkpoints") == names(recipe / "checkpoints")


@pytest.mark.long
def test_another_number_of_ranks_goes_on(project, tmp_path):
    """Two ranks are interrupted and one goes on, on the same rows: the same losses to rounding, which Adam makes larger."""
    (recipe,) = project.recipes("sft")[:1]
    driver = start(recipe, tmp_path)
    wait_for("sft/*/checkpoints/step-00000002", tmp_path, driver)
    driver.terminate()
    assert driver.wait(30) != 0
    again = start(recipe, tmp_path, processes=1, continue_from=2)
    assert again.wait(300) == 0, again.stdout.read()
    (directory,) = (tmp_path / "sft").iterdir()
    assert json.loads((directory / "job.json").read_text())["resume_from"] >= 2
    assert (
        Manifest.read(directory / "export").ranks == 1
        and Manifest.read(recipe / "export").ranks == 2
    )
    assert [step for step, _ in lines(directory)] == [step for step, _ in lines(recipe)]
    for (_, found), (_, expected) in zip(lines(directory), lines(recipe), strict=True):
        assert found["sft/loss"] == pytest.approx(expected["sft/loss"], rel=1e-4)


def written(directory: Path, step: int) -> Path:
    checkpoint = checkpoint_path(directory, step)
    (checkpoint / "actor").mkdir(parents=True)
    (checkpoint / "actor" / "rank0.safetensors").write_bytes(bytes(100))
    (checkpoint / "loop.json").write_text("{}")
    seal(checkpoint)
    return checkpoint


def flip(checkpoint):
    file = checkpoint / "actor" / "rank0.safetensors"
    file.write_bytes(bytes(50) + b"\x01" + bytes(49))


def cut(checkpoint):
    (checkpoint / "actor" / "rank0.safetensors").write_bytes(bytes(99))


def lose(checkpoint):
    (checkpoint / "loop.json").unlink()


def unseal(checkpoint):
    (checkpoint / "seal.json").unlink()


def garble(checkpoint):
    (checkpoint / "seal.json").write_text("[1, 2")


@pytest.mark.parametrize("damage", [flip, cut, lose, unseal, garble])
def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path, caplog, damage):
    written(tmp_path, 2)
    newest = written(tmp_path, 10)
    assert newest_valid_step(tmp_path) == 10
    damage(newest)
    assert newest_valid_step(tmp_path) == 2
    assert str(newest) in caplog.text and "passed over" in caplog.text


def test_half_a_checkpoint_is_none(tmp_path):
    written(tmp_path, 4).rename(tmp_path / "step-00000004.partial")
    assert newest_valid_step(tmp_path) is None and list_checkpoints(tmp_path) == []


def test_lines_after_the_step_are_dropped_and_so_is_half_a_line(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3)) + '{"step": 2')
    truncate_after(file, 2)
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_two_checkpoints_are_kept_and_a_full_disk_is_said_before_anything_is_written(
    world, tmp_path, monkeypatch
):
    import shutil
    from types import SimpleNamespace

    from rlhf_pipeline.errors import StageError
    from rlhf_pipeline.training.resume import Checkpoints

    checkpoints = Checkpoints(tmp_path, world, {}, keep=2)
    for step in (1, 2, 3):
        checkpoints.step_ended(step, due=True, loop={"kl_coef": 0.5})
    checkpoints.step_ended(4, due=False, loop={})
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000002", "step-00000003"]
    assert checkpoints.restore(3) == {"kl_coef": 0.5} and checkpoints.restore(None) == {}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=-1))
    with pytest.raises(
        StageError, match=r"the checkpoint of step 5 takes 0 MiB, and .* has .* left; make room"
    ):
        checkpoints.save(5, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_a_signal_is_obeyed_after_the_step_with_a_checkpoint(world, tmp_path):
    from rlhf_pipeline.errors import Interrupted
    from rlhf_pipeline.training.resume import Checkpoints

    before = signal.getsignal(signal.SIGTERM)
    try:
        checkpoints = Checkpoints(tmp_path, world, {}, keep=2)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted, match="after step 7; run the same command again"):
            checkpoints.step_ended(7, due=False, loop={})
    finally:
        signal.signal(signal.SIGTERM, before)
    assert newest_valid_step(tmp_path) == 7
