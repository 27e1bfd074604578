"""Data sets of runs in a real MLflow store: digests connect training, split and source."""

import json
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

SOURCE = {
    "name": "files",
    "path": "/somewhere/rows.jsonl",
    "columns": {"chosen": "good", "rejected": "bad"},
}
METRICS = {
    "source": {"source/rows": 12.0, "source/bad": 2.0},
    "split": {
        "data/rows": 10.0,
        "data/sft_train_rows": 3.0,
        "data/sft_validation_rows": 1.0,
        "data/ppo_train_rows": 4.0,
    },
}


def finish(run, **files):
    """Write the export of a finished stage; `sft__train` is the file train in the folder sft."""
    for name, text in files.items():
        path = run.export / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    metrics = METRICS.get(run.stage, {})
    Manifest(
        run.stage,
        run.fingerprint,
        7,
        run.config,
        run.digests,
        {},
        metrics,
        file_entries(run.export),
    ).write(run.export)


def stage_run(workspace, stage, fingerprint, config=None, **paths):
    digests = {name: content_digest(path) for name, path in paths.items()}
    return StageRun(stage, fingerprint, 7, config or {}, paths, digests, workspace / stage, 60.0)


@pytest.fixture
def stages(tmp_path):
    """source, split and two phases, all finished; the phases read the published split."""
    source = stage_run(tmp_path, "source", "aa", {"source": SOURCE})
    finish(source, records="rows")
    model = stage_run(tmp_path, "base_model", "bb")
    finish(model, weights="weights")
    split = stage_run(tmp_path, "split", "cc", source_0=source.export, base_model=model.export)
    finish(
        split,
        sft__train="a",
        ppo__train="b",
        evaluation__test="c",
        **{"report.json": "{}"},
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
    finish(evaluate, **{"comparison.json": "{}"})
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


def data_sets(run):
    """Name to (context, digest)."""
    found = {}
    for used in run.inputs.dataset_inputs:
        (tag,) = used.tags
        assert tag.key == "mlflow.data.context"
        found[used.dataset.name] = (tag.value, used.dataset.digest)
    assert len(found) == len(run.inputs.dataset_inputs)
    return found


def test_a_digest_leads_from_training_to_the_split_and_to_the_source(tracker, stages, client):
    track(tracker, stages.source, stages.split, stages.sft, stages.evaluate)
    source, split, sft, evaluate = (
        data_sets(child(client, stage)) for stage in ("source", "split", "sft", "evaluate")
    )
    digests = {name: digest for name, (_, digest) in split.items()}
    assert {name: context for name, (context, _) in split.items()} == {
        "files (rows.jsonl)": "source",
        "split": "prepared",
        "split/evaluation": "prepared",
        "split/ppo": "prepared",
        "split/sft": "prepared",
    }
    assert source == {"files (rows.jsonl)": ("source", digests["files (rows.jsonl)"])}
    assert sft == {"split/sft": ("training", digests["split/sft"])}
    assert evaluate == {"split/evaluation": ("evaluation", digests["split/evaluation"])}
    # printf '{"sft/train": "%s"}' "$(printf a | sha256sum | cut -d' ' -f1)" | sha256sum | cut -c-36
    assert digests["split/sft"] == "8dc903c7abc32cf3765caef9659fc9b32700"
    assert len(set(digests.values())) == 5


def test_a_data_set_has_its_location_and_its_size(tracker, stages, client):
    track(tracker, stages.source, stages.split)
    found = {
        used.dataset.name: used.dataset for used in child(client, "split").inputs.dataset_inputs
    }
    assert {data.source_type for data in found.values()} == {"local"}
    assert json.loads(found["split/sft"].source) == {
        "uri": str(stages.split.export / "sft"),
        "stage": "split",
        "fingerprint": "cc",
    }
    assert json.loads(found["split/sft"].profile) == {"train_rows": 3, "validation_rows": 1}
    assert json.loads(found["split"].profile)["rows"] == 10
    assert json.loads(found["files (rows.jsonl)"].profile) == {"rows": 12, "bad": 2}


def test_a_running_stage_shows_its_data(tracker, stages, client):
    tracker.stage_started(stages.sft)
    assert list(data_sets(child(client, "sft"))) == ["split/sft"]


def test_a_failed_stage_has_no_results(tracker, stages, client):
    tracker.stage_started(stages.split)
    tracker.stage_ended(stages.split, "FAILED", {})
    split = child(client, "split")
    assert list(data_sets(split)) == ["files (rows.jsonl)"]
    assert client.list_artifacts(split.info.run_id) == []


def test_a_report_is_an_artifact_of_its_run(tracker, stages, client):
    track(tracker, stages.split, stages.sft, stages.evaluate)
    artifacts = [
        [file.path for file in client.list_artifacts(child(client, stage).info.run_id)]
        for stage in ("split", "sft", "evaluate")
    ]
    assert artifacts == [["report.json"], [], []]


def test_a_reused_stage_adds_nothing_to_its_run(tracker, stages, client, monkeypatch):
    from mlflow import MlflowClient

    track(tracker, stages.split)
    before = child(client, "split")
    uploads = []
    monkeypatch.setattr(
        MlflowClient, "log_artifact", lambda self, run_id, path: uploads.append(path)
    )
    track(tracker, replace(stages.split, cached=True))
    after = child(client, "split")
    assert uploads == []
    assert data_sets(after) == data_sets(before)


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
    assert reports == ["report.json"]


def test_a_reused_stage_sends_its_data_and_report_to_a_new_store(tracker, stages, client):
    track(tracker, replace(stages.split, cached=True))
    split = child(client, "split")
    assert len(data_sets(split)) == 5
    assert [file.path for file in client.list_artifacts(split.info.run_id)] == ["report.json"]


@pytest.mark.long
def test_through_a_server(served, stages, tmp_path):
    from mlflow.artifacts import download_artifacts

    tracker = MlflowTracker(served.tracking_uri, tmp_path)
    tracker.describe("full", {})
    track(tracker, stages.split, stages.sft)
    split, sft = (child(served, stage) for stage in ("split", "sft"))
    assert data_sets(sft) == {"split/sft": ("training", data_sets(split)["split/sft"][1])}
    uri = f"{split.info.artifact_uri}/report.json"
    report = download_artifacts(uri, tracking_uri=served.tracking_uri, dst_path=str(tmp_path))
    assert Path(report).read_text() == "{}"
