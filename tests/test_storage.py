"""The pipeline with everything on a real S3 server: another machine reuses and resumes."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from conftest import KEDRO, PROJECT, end_group
from waiting import wait_until

from rlhf_pipeline.runtime.manifest import content_digest
from rlhf_pipeline.runtime.metrics_file import read_json_lines

STORE = "store=s3://bucket/project"


def finished_in(output: str) -> list[str]:
    """The stages that were launched."""
    return [line.partition(":")[0] for line in output.splitlines() if ": running as " in line]


@pytest.fixture
def machine(bucket, new_project, tmp_path):
    """Makes machines with empty disks that share the store."""
    keys = {name: os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}

    def make(name):
        made = new_project(tmp_path / name)
        made.secrets = keys
        return made

    return make


@pytest.fixture
def conf(tmp_path, s3_server):
    """A configuration whose store has Kedro's credentials."""
    local = shutil.copytree(PROJECT / "conf", tmp_path / "conf") / "local"
    kind = "rlhf_pipeline.datasets.artifact.StoreDataset"
    store = {"type": kind, "url": "s3://bucket/project", "credentials": "s3"}
    keys = {"key": "access", "secret": "secret", "client_kwargs": {"endpoint_url": s3_server[0]}}
    (local / "catalog.yml").write_text(json.dumps({"store": store}))
    (local / "credentials.yml").write_text(json.dumps({"s3": keys}))
    return f"--conf-source={tmp_path / 'conf'}"


@pytest.mark.long
def test_another_machine_publishes_all_stages_and_launches_none(machine, conf, bucket, monkeypatch):
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    assert len(finished_in(machine("one").kedro("--pipeline=full", conf))) == 7
    two = machine("two")
    status = two.kedro(conf, command="rlhf status")
    assert status.count("reuse") == status.count("from the store") == 7
    assert finished_in(two.kedro("--pipeline=full", conf)) == []
    assert two.kedro(conf, command="rlhf runs").count("gold") == 1


@pytest.mark.slow
def test_a_missing_bucket_or_a_wrong_key_ends_the_run_before_it_trains(machine):
    one = machine("one")
    output = one.kedro(params="store=s3://nowhere/x", check=False)
    assert "Error: s3://nowhere/x: not found (NoSuchBucket: " in output
    one.secrets = {"AWS_ACCESS_KEY_ID": "access", "AWS_SECRET_ACCESS_KEY": "canary-wrong"}
    output = one.kedro(params=STORE, check=False)
    assert "Error: s3://bucket/project: access denied (" in output
    assert "canary" not in output
    assert not (one.root / "07_workspace").exists()


@pytest.mark.long
def test_training_that_lost_its_machine_resumes_on_another_bit_for_bit(machine, bucket, tmp_path):
    one, two, unbroken = machine("one"), machine("two"), machine("unbroken")
    # The last evaluation is late, so the best model of an early one has to move as well.
    training = "sft.epochs=8,sft.checkpoint_every=4,sft.evaluations=3"
    unbroken.kedro("--to-nodes=sft", params=training)
    command = [KEDRO, "run", "--env=tiny", "--to-nodes=sft"]
    command.append(f"--params=root={one.root},{STORE},{training}")
    settings = {"cwd": PROJECT, "env": os.environ | {"MLFLOW_TRACKING_URI": one.uri}}
    with (tmp_path / "log").open("w") as log:
        output = {"stdout": log, "stderr": log}
        driver = subprocess.Popen(command, start_new_session=True, **settings, **output)
    try:
        wait_until(lambda: checkpoints(bucket) or driver.poll() is not None)
        assert driver.poll() is None, (tmp_path / "log").read_text()
        os.kill(driver.pid, signal.SIGKILL)
    finally:
        end_group(driver)
    wait_until(lambda: not any(str(one.root) in line for line in command_lines()))
    assert not list(one.root.glob("07_workspace/sft/*/export/manifest.json"))
    shutil.rmtree(one.root)
    (checkpoint,) = checkpoints(bucket)
    saved = json.loads(checkpoint.read_text())["metrics"]["step"]
    output = two.kedro("--to-nodes=sft", params=f"{STORE},{training}")
    assert finished_in(output) == ["sft"]
    assert "checkpoint downloaded from s3://bucket/project" in output
    (job,) = two.root.glob("07_workspace/sft/*/job.json")
    assert json.loads(job.read_text())["resume_from"] == saved > 0
    digests = [content_digest(each.newest("06_models/sft_model")) for each in (two, unbroken)]
    assert digests[0] == digests[1]
    curves = []
    for trained in (two, unbroken):
        (file,) = trained.root.glob("07_workspace/sft/*/metrics.jsonl")
        lines = [line for line in read_json_lines(file) if "sft/loss" in line["metrics"]]
        curves.append([(line["step"], line["metrics"]["sft/loss"]) for line in lines])
    assert curves[0] == curves[1] and len(curves[0]) == curves[0][-1][0]
    assert checkpoints(bucket) == []  # of a finished stage


def checkpoints(bucket: Path) -> list[Path]:
    """The manifests of checkpoints in the store."""
    return [*bucket.glob("project/checkpoints/sft/*/checkpoint.json")]


def command_lines() -> list[str]:
    """Those of all processes."""
    return [" ".join(each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"])]
