"""The reports of finished stages in a real MLflow store."""

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf_pipeline.runtime.manifest import Manifest, content_digest, file_entries
from rlhf_pipeline.stages.job import StageRun
from rlhf_pipeline.tracking.mirror import MlflowTracker
from rlhf_pipeline.tracking.store import experiment_id


def finish(run, **files):
    """Write the export of a finished stage; `sft__train` is the file train in the folder sft."""
    for name, text in files.items():
        path = run.export / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    Manifest(
        run.stage,
        run.fingerprint,
        7,
        run.config,
        run.digests,
        {},
        {},
        file_entries(run.export),
    ).write(run.export)


def stage_run(workspace, stage, fingerprint, config=None, **paths):
    digests = {name: content_digest(path) for name, path in paths.items()}
    return StageRun(stage, fingerprint, 7, config or {}, paths, digests, workspace / stage, 60.0)


@pytest.fixture
def stages(tmp_path):
    """source, split and two phases, all finished; the phases read the published split."""
    source = stage_run(tmp_path, "source", "aa")
    finish(source, records="rows")
    model = stage_run(tmp_path, "base_model", "bb")
    finish(model, weights="weights")
    split = stage_run(tmp_path, "split", "cc", source_0=source.export, base_model=model.export)
    finish(
        split,
        sft__train="a",
        ppo__train="b",
        evaluation__test="c",
        **{"report.md": "# Data"},
    )
    published = tmp_path / "published" / "split"
    shutil.copytree(split.export, published)
    sft = stage_run(
        tmp_path, "sft", "dd", demonstrations=published / "sft", base_model=model.export
    )
    finish(sft, weights="more")
    evaluate = stage_run(
        tmp_path, "evaluate", "ee", prompts=published / "evaluation", sft_model=sft.export
    )
    finish(evaluate, **{"report.md": "# PPO against SFT"})
    return SimpleNamespace(
        source=source, split=split, sft=sft, evaluate=evaluate, published=published
    )


@pytest.fixture
def tracker(uri, tmp_path):
    tracker = MlflowTracker(uri, tmp_path)
    tracker.describe("full", {})
    return tracker


def track(tracker, *runs):
    for run in runs:
        tracker.stage_started(run)
        tracker.stage_ended(run, "FINISHED", {})


def child(client, stage):
    (found,) = client.search_runs([experiment_id(client)], f"tags.`rlhf.stage` = '{stage}'")
    return found


def test_a_failed_stage_has_no_results(tracker, stages, client):
    tracker.stage_started(stages.split)
    tracker.stage_ended(stages.split, "FAILED", {})
    split = child(client, "split")
    assert client.list_artifacts(split.info.run_id) == []


def test_reports_are_artifacts_of_their_run(tracker, stages, client):
    track(tracker, stages.split, stages.sft, stages.evaluate)
    artifacts = [
        [file.path for file in client.list_artifacts(child(client, stage).info.run_id)]
        for stage in ("split", "sft", "evaluate")
    ]
    assert artifacts == [["report.md"], [], ["report.md"]]


def test_a_reused_stage_adds_nothing_to_its_run(tracker, stages, client, monkeypatch):
    from mlflow import MlflowClient

    track(tracker, stages.split)
    uploads = []
    monkeypatch.setattr(
        MlflowClient, "log_artifact", lambda self, run_id, path: uploads.append(path)
    )
    track(tracker, replace(stages.split, cached=True))
    assert uploads == []


@pytest.mark.parametrize("by", ["this run", "the next run"])
def test_reports_that_an_outage_left_out_are_sent_to_the_run_that_was_closed(
    tracker, stages, client, monkeypatch, caplog, by
):
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    with monkeypatch.context() as outage, caplog.at_level(logging.WARNING):

        def refuse(*args, **kwargs):
            raise MlflowException("no space left")

        outage.setattr(MlflowClient, "log_artifact", refuse)
        track(tracker, stages.split)
    (warning,) = caplog.messages
    assert "does not record split (MlflowException: no space left)" in warning
    closed = child(client, "split")
    assert closed.info.status == "FINISHED"
    assert client.list_artifacts(closed.info.run_id) == []

    if by == "this run":
        tracker.catch_up()
    else:
        track(tracker, replace(stages.split, cached=True))
    found = child(client, "split")
    assert (found.info.run_id, found.info.status) == (closed.info.run_id, "FINISHED")
    assert found.info.end_time == closed.info.end_time
    reports = [file.path for file in client.list_artifacts(found.info.run_id)]
    assert reports == ["report.md"]


def test_a_reused_stage_sends_its_report_to_a_new_store(tracker, stages, client):
    track(tracker, replace(stages.split, cached=True))
    split = child(client, "split")
    assert [file.path for file in client.list_artifacts(split.info.run_id)] == [
        "report.md",
    ]


@pytest.mark.long
def test_through_a_server(served, stages, tmp_path):
    from mlflow.artifacts import download_artifacts

    tracker = MlflowTracker(served.tracking_uri, tmp_path)
    tracker.describe("full", {})
    track(tracker, stages.split)
    split = child(served, "split")
    uri = f"{split.info.artifact_uri}/report.md"
    report = download_artifacts(uri, tracking_uri=served.tracking_uri, dst_path=str(tmp_path))
    assert Path(report).read_text() == "# Data"
