"""The pipeline with everything on a real S3 server: another machine reuses and resumes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import PROJECT, Project, end_group
from waiting import wait_until

from rlhf_pipeline.runtime.manifest import content_digest
from rlhf_pipeline.runtime.metrics_file import read_json_lines

STORE = "store=s3://bucket/project"


def finished_in(output: str) -> list[str]:
    """The stages that were launched."""
    return [line.partition(":")[0] for line in output.splitlines() if ": running as " in line]


@pytest.fixture
def machine(bucket, tmp_path, monkeypatch):
    """Makes machines with empty disks that share the store."""
    keys = {name: os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    monkeypatch.setattr("conftest.SECRETS", keys)

    def make(name):
        (tmp_path / name).mkdir()
        return Project(tmp_path / name)

    return make


@pytest.mark.long
def test_another_machine_reuses_every_stage_in_seconds(machine):
    one, two = machine("one"), machine("two")
    assert len(finished_in(one.kedro("--pipeline=full", params=STORE))) == 7
    status = two.kedro(params=STORE, command="rlhf status")
    assert status.count("reuse") == status.count("from the store") == 7
    start = time.monotonic()
    assert finished_in(two.kedro("--pipeline=full", params=STORE)) == []
    print(f"everything from the store in {time.monotonic() - start:.0f} s")
    for name in ("06_models/ppo_model", "08_reporting/evaluation"):
        assert content_digest(one.newest(name)) == content_digest(two.newest(name))


@pytest.mark.long
def test_training_that_lost_its_machine_resumes_on_another_bit_for_bit(machine, bucket, tmp_path):
    one, two, unbroken = machine("one"), machine("two"), machine("unbroken")
    # The last evaluation is late, so the best model of an early one has to move as well.
    training = "sft.epochs=8,sft.checkpoint_every=4,sft.evaluations=3"
    unbroken.kedro("--to-nodes=sft", params=training)
    command = [str(Path(sys.executable).with_name("kedro")), "run", "--env=tiny", "--to-nodes=sft"]
    command.append(f"--params=root={one.root},{STORE},{training}")
    environment = os.environ | {"MLFLOW_TRACKING_URI": one.uri}
    with (tmp_path / "log").open("w") as log:
        driver = subprocess.Popen(
            command, cwd=PROJECT, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        wait_until(lambda: steps(bucket) or driver.poll() is not None)
        assert driver.poll() is None, (tmp_path / "log").read_text()
        os.kill(driver.pid, signal.SIGKILL)
    finally:
        end_group(driver)
    wait_until(lambda: not working_in(one.root))
    assert not list(one.root.glob("07_workspace/sft/*/export/manifest.json"))
    shutil.rmtree(one.root)
    saved = steps(bucket)[-1]
    output = two.kedro("--to-nodes=sft", params=f"{STORE},{training}")
    assert finished_in(output) == ["sft"]
    assert "checkpoint downloaded from s3://bucket/project" in output
    (job,) = two.root.glob("07_workspace/sft/*/job.json")
    assert json.loads(job.read_text())["resume_from"] == saved > 0
    assert content_digest(two.newest("06_models/sft_model")) == content_digest(
        unbroken.newest("06_models/sft_model")
    )
    curves = [
        [(line["step"], line["metrics"]["sft/loss"]) for line in read_json_lines(file)
         if "sft/loss" in line["metrics"]]
        for root in (two.root, unbroken.root)
        for file in root.glob("07_workspace/sft/*/metrics.jsonl")
    ]  # fmt: skip
    assert curves[0] == curves[1] and len(curves[0]) == curves[0][-1][0]
    assert steps(bucket) == []  # of a finished stage


def steps(bucket: Path) -> list[int]:
    """The steps of the checkpoints in the store."""
    found = bucket.glob("project/checkpoints/sft/*/step-*.json")
    return sorted(int(path.stem.removeprefix("step-")) for path in found)


def working_in(root: Path) -> bool:
    """Whether a program still works in a folder."""
    import psutil

    return any(
        str(root) in " ".join(process.info["cmdline"] or [])
        for process in psutil.process_iter(["cmdline"])
    )
