"""Stages and a store: another workspace reuses and resumes, the store may fail."""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from ports import reserved_port
from s3_fixtures import serve_s3, store_at
from waiting import wait_until

from rlhf_pipeline.errors import StageError
from rlhf_pipeline.runtime.digests import FileEntry
from rlhf_pipeline.runtime.job import checkpoint_path, list_checkpoints, seal
from rlhf_pipeline.runtime.manifest import Manifest, file_entries, verify
from rlhf_pipeline.stages import stored as module
from rlhf_pipeline.stages.cache.planning import Planner
from rlhf_pipeline.stages.cache.workspace import work_directory
from rlhf_pipeline.stages.job import StageListener, StageRun, StageStore
from rlhf_pipeline.stages.run import StageRunner
from rlhf_pipeline.stages.store import Store, StoredStages


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store in a local folder, which is asked often."""
    monkeypatch.setattr(module, "POLL_S", 0.02)
    monkeypatch.setattr(module, "RETRY_S", 0.02)
    return Store(str(tmp_path / "store"))


def machine(drill, store, name, listener=None, **context):
    """A run of the stage with a workspace of its own; returns the context."""
    workspace = drill.root / name
    stored = StoredStages(store, workspace)
    listeners = StageListener(stored, *([listener] if listener else []))
    return replace(drill.context(listener=listeners, **context), workspace=workspace, stored=stored)


def run(drill, store, name, **context):
    """Run the stage on a machine and wait for its uploads; return the export."""
    context = machine(drill, store, name, **context)
    export = StageRunner(context).run(drill.job())
    context.stored.close()
    return export


def warnings(caplog):
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def pointer(tmp_path):
    (found,) = (tmp_path / "store" / "stages" / "drill").iterdir()
    return found


def test_another_machine_reuses_a_finished_stage(drill, store, recorder, tmp_path):
    made = run(drill, store, "one")
    found = run(drill, store, "two", listener=recorder)
    assert drill.launches == 1
    assert found.is_relative_to(tmp_path / "two")
    assert verify(found) == verify(made)
    assert recorder.heard[0] == ("started", True)
    assert work_directory(found, tmp_path / "two") == found.parent  # with job.json
    assert (found.parent / "recipe.json").read_text() == (made.parent / "recipe.json").read_text()
    assert run(drill, store, "two") == found


def test_a_plan_knows_what_the_store_has(drill, store):
    run(drill, store, "one")
    planner = Planner(machine(drill, store, "two"))
    export = planner.run(drill.job())
    (planned,) = planner.stages.values()
    assert (planned.state, planned.reasons) == ("reuse", ())
    assert [path.name for path in export.iterdir()] == ["manifest.json"]
    assert planner.pending_stage(export) is None
    forced = Planner(machine(drill, store, "two", force=["drill"]))
    forced.run(drill.job())
    assert [stage.state for stage in forced.stages.values()] == ["run"]


def test_a_forced_stage_does_not_come_from_the_store_and_replaces_it(drill, store):
    run(drill, store, "one")
    forced = run(drill, store, "two", force=["drill"])
    assert (forced / "result").read_text() == "launch 2"
    assert forced.parent.suffix == ""  # nothing was downloaded first
    assert (run(drill, store, "three") / "result").read_text() == "launch 2"


def test_a_stage_that_was_finished_without_a_store_is_uploaded(drill, store, tmp_path):
    context = machine(drill, store, "one")
    StageRunner(replace(context, stored=StageStore(), listener=StageListener())).run(drill.job())
    assert not (tmp_path / "store").exists()
    run(drill, store, "one")
    shutil.rmtree(tmp_path / "one")
    run(drill, store, "one")
    assert drill.launches == 1


@pytest.mark.parametrize("damage", ["cut", "of another recipe"])
def test_a_damaged_pointer_is_mended_by_the_machine_that_has_the_artifact(
    drill, store, tmp_path, damage
):
    run(drill, store, "one")
    whole = pointer(tmp_path).read_text()
    if damage == "cut":
        pointer(tmp_path).write_text(whole[:100])
    else:
        folder = tmp_path / "other"
        folder.mkdir()
        Manifest("drill", "e" * 64, 1, {}, {}, {}, {}, {}).write(folder)
        pointer(tmp_path).write_text((folder / "manifest.json").read_text())
    planner = Planner(machine(drill, store, "two"))
    planner.run(drill.job())
    assert [stage.state for stage in planner.stages.values()] == ["run"]
    run(drill, store, "one")
    assert drill.launches == 1
    assert pointer(tmp_path).read_text() == whole


def test_a_damaged_artifact_in_the_store_is_made_again_and_mended(drill, store, caplog, tmp_path):
    run(drill, store, "one")
    for path in (tmp_path / "store" / "objects").iterdir():
        path.write_text(path.read_text().replace("launch 1", "lunch 10"))
    with caplog.at_level(logging.WARNING):
        made = run(drill, store, "two")
    (warning,) = warnings(caplog)
    assert warning.startswith("stage drill: a copy in the store is not used: ")
    assert "(result): found 8 bytes with the SHA-256 " in warning
    assert (made / "result").read_text() == "launch 2"
    assert (run(drill, store, "three") / "result").read_text() == "launch 2"


class Broken(Store):
    """A store that fails as long as it is broken."""

    broken = True

    def push(self, *arguments):
        if self.broken:
            raise StageError("s3://x: found OSError: gone. Fix: start it")
        return super().push(*arguments)


def test_a_store_that_fails_costs_no_result_and_the_run_says_so(drill, store, caplog, tmp_path):
    broken = Broken(store.url)
    context = machine(drill, broken, "one")
    with caplog.at_level(logging.WARNING):
        export = StageRunner(context).run(drill.job())
        wait_until(lambda: warnings(caplog))
        with pytest.raises(StageError) as error:
            context.stored.close()
    assert str(error.value) == (
        f"{tmp_path}/store does not have all that this machine has of drill: s3://x: found "
        "OSError: gone. Fix: start it. Then repeat the `kedro run`, which uploads the rest"
    )
    assert warnings(caplog) == [
        "training continues, the upload is tried again: s3://x: found OSError: gone. Fix: start it"
    ]
    context = machine(drill, broken, "one")
    assert StageRunner(context).run(drill.job()) == export  # reused, and uploaded again
    wait_until(lambda: len(warnings(caplog)) > 1)
    broken.broken = False
    wait_until(lambda: len(warnings(caplog)) > 2)
    assert warnings(caplog)[2] == f"{tmp_path}/store: uploads work again"
    context.stored.close()
    assert run(drill, store, "two") != export
    assert drill.launches == 1


def test_a_stage_runs_without_a_store_that_went_away(drill, store, caplog, tmp_path):
    (tmp_path / "s3" / "bucket").mkdir(parents=True)
    with reserved_port() as port:
        remote = store_at(port)
        server = serve_s3(tmp_path / "s3", port)
        run(drill, remote, "one")
        server.kill()
        server.communicate()
        context = machine(drill, remote, "two")
        made = StageRunner(context).run(drill.job())
        assert (made / "result").read_text() == "launch 2"
        assert context.stored.fetch_checkpoint(stage_run(tmp_path / "two"), 3) == 3
        with pytest.raises(StageError, match="s3://bucket/x does not have all that this machine"):
            context.stored.close()
        (warning,) = [text for text in warnings(caplog) if "training continues" not in text]
        assert warning.startswith("stage drill runs without the store: s3://bucket/x: cannot be ")
        server = serve_s3(tmp_path / "s3", port)
        try:
            run(drill, remote, "three")
        finally:
            server.kill()
            server.communicate()
    assert drill.launches == 2


def test_a_full_disk_is_no_failure_of_the_store(store, disk, tmp_path):
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "weights").write_bytes(bytes(2**24))
    files = file_entries(tmp_path / "big")
    Manifest("sft", "f" * 64, 1, {}, {}, {}, {}, files).write(tmp_path / "big")
    store.push(tmp_path / "big", f"stages/sft/{'f' * 64}.json")
    here = stage_run(disk.path / "two")
    with pytest.raises(StageError, match=r"store: the download needs 16 MiB, .* MiB free"):
        StoredStages(store, disk.path / "two").fetch(here)


@pytest.fixture
def training(tmp_path):
    """A running stage `sft` in the workspace `one`."""
    return stage_run(tmp_path / "one")


def stage_run(workspace):
    directory = workspace / "sft" / ("f" * 16)
    directory.mkdir(parents=True)
    return StageRun("sft", "f" * 64, 1, {}, {}, {}, directory, 60.0)


def save(run, step, best=None):
    """Write a checkpoint as training does, with the best model of a step."""
    if best is not None:
        (run.checkpoints / f"best-{best:08d}").mkdir(parents=True)
        (run.checkpoints / f"best-{best:08d}" / "weights").write_text(f"best {best}")
    partial = run.checkpoints / f"step-{step:08d}.partial"
    (partial / "policy").mkdir(parents=True)
    (partial / "policy" / "rank0").write_text(f"state {step}")
    seal(partial, {"policy/rank0": FileEntry.of(partial / "policy" / "rank0")})
    with run.metrics_file.open("a") as file:
        file.write(json.dumps({"step": step}) + "\n")
    partial.rename(checkpoint_path(run.checkpoints, step))
    for old in list_checkpoints(run.checkpoints)[:-1]:
        shutil.rmtree(old)


def newest(store, run):
    return StoredStages(store, run.directory).newest_step(run)


def upload(stored, run, *made):
    """Save checkpoints in a running stage, each after the last one was uploaded."""
    stored.stage_started(run)
    for step, best in made:
        save(run, step, best)
        wait_until(lambda: stored.newest_step(run) == step)  # noqa: B023 - used at once
    stored.stage_ended(run, "KILLED", {})
    stored.close()


def test_another_machine_resumes_from_the_newest_checkpoint(store, training, tmp_path):
    (training.checkpoints / "best-00000007").mkdir(parents=True)  # an evaluation writes it
    (training.checkpoints / "best-00000007" / "weights").write_text("half")
    (training.checkpoints / "best-00000008.partial").mkdir()
    upload(StoredStages(store, tmp_path / "one"), training, (2, 1), (4, None), (6, 5))
    assert newest(store, training) == 6
    objects = {path.read_text() for path in (tmp_path / "store").rglob("objects/*")}
    assert {"state 6", "best 1", "best 5"} < objects
    assert not objects & {"state 2", "state 4"}
    other = stage_run(tmp_path / "two")
    assert StoredStages(store, tmp_path / "two").fetch_checkpoint(other, None) == 6
    assert (checkpoint_path(other.checkpoints, 6) / "policy" / "rank0").read_text() == "state 6"
    found = {path.relative_to(other.directory).as_posix() for path in other.directory.glob("*/*")}
    assert found == {
        f"checkpoints/{n}" for n in ("best-00000001", "best-00000005", "step-00000006")
    }
    assert other.metrics_file.read_text() == '{"step": 2}\n{"step": 4}\n{"step": 6}\n'


def test_a_download_that_was_cut_off_between_its_two_moves_is_repeated(
    store, training, tmp_path, monkeypatch
):
    """The metrics are in place, and the checkpoint is not."""
    upload(StoredStages(store, tmp_path / "one"), training, (2, None))
    stored, other = StoredStages(store, tmp_path / "two"), stage_run(tmp_path / "two")

    def kill(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "put_in_place", kill)
        stored.fetch_checkpoint(other, None)
    assert other.metrics_file.is_file() and not other.checkpoints.exists()
    assert stored.fetch_checkpoint(other, None) == 2
    assert [path.name for path in other.checkpoints.iterdir()] == ["step-00000002"]


def test_training_may_remove_what_it_no_longer_needs_meanwhile(
    store, training, tmp_path, monkeypatch, caplog
):
    """A best model that a better one has replaced leaves after the newest checkpoint."""
    link, old = module.link_or_copy, training.checkpoints / "best-00000001"

    def removing(source, target):
        shutil.rmtree(old, ignore_errors=True)
        link(source, target)

    monkeypatch.setattr(module, "link_or_copy", removing)
    upload(StoredStages(store, tmp_path / "one"), training, (2, 1), (4, 3))
    other = stage_run(tmp_path / "two")
    assert StoredStages(store, tmp_path / "two").fetch_checkpoint(other, None) == 4
    assert {path.name for path in other.checkpoints.iterdir()} == {"step-00000004", "best-00000003"}
    assert not warnings(caplog)


def test_a_newer_checkpoint_of_this_machine_wins(store, training, tmp_path):
    stored = StoredStages(store, tmp_path / "one")
    upload(stored, training, (2, None))
    assert stored.fetch_checkpoint(training, 2) == 2
    save(training, 3)
    assert stored.fetch_checkpoint(training, 3) == 3
    assert [path.name for path in list_checkpoints(training.checkpoints)] == ["step-00000003"]


def test_two_machines_may_upload_checkpoints_of_one_recipe(store, training, tmp_path):
    """The other one has sent its objects, and its manifest follows."""
    theirs, place = stage_run(tmp_path / "two"), f"checkpoints/sft/{training.fingerprint}"
    upload(StoredStages(Store(str(tmp_path / "sent")), tmp_path / "two"), theirs, (8, None))
    sent, here = tmp_path / "sent" / place, tmp_path / "store" / place
    shutil.copytree(sent / "objects", here / "objects")
    upload(StoredStages(store, tmp_path / "one"), training, (2, 1), (4, None))
    shutil.copy(sent / "checkpoint.json", here)
    third = stage_run(tmp_path / "three")
    assert StoredStages(store, tmp_path / "three").fetch_checkpoint(third, None) == 8


@pytest.mark.parametrize("damaged", ["manifest", "object", "before its upload"])
def test_a_damaged_checkpoint_is_not_used_and_the_next_one_replaces_it(
    store, training, tmp_path, caplog, damaged
):
    save(training, 2)
    if damaged == "before its upload":
        (checkpoint_path(training.checkpoints, 2) / "policy" / "rank0").write_text("damage2")
    upload(StoredStages(store, tmp_path / "one"), training)
    if damaged == "manifest":
        store.write(f"checkpoints/sft/{training.fingerprint}/checkpoint.json", "{")
    if damaged == "object":
        for path in (tmp_path / "store").rglob("objects/*"):
            path.write_text(path.read_text().replace("state 2", "state 3"))
    other = stage_run(tmp_path / "two")
    assert StoredStages(store, tmp_path / "two").fetch_checkpoint(other, 1) == 1
    assert not other.checkpoints.exists()
    assert len(warnings(caplog)) == (damaged != "manifest")
    upload(StoredStages(store, tmp_path / "one"), training, (4, None))
    assert StoredStages(store, tmp_path / "two").fetch_checkpoint(other, None) == 4


def test_the_checkpoints_of_a_finished_stage_leave_the_store(drill, store, tmp_path, monkeypatch):
    context = machine(drill, store, "one")
    drill.order("fail")
    with pytest.raises(StageError, match="ordered to fail"):
        StageRunner(context).run(drill.job())
    (directory,) = (tmp_path / "one" / "drill").iterdir()
    failed = StageRun("drill", json_fingerprint(directory), 1, {}, {}, {}, directory, 60.0)
    save(failed, 2)
    context.stored.stage_started(failed)
    wait_until(lambda: context.stored.newest_step(failed) == 2)
    planner = Planner(context)
    planner.run(drill.job())
    assert [stage.state for stage in planner.stages.values()] == ["resume"]
    elsewhere = Planner(machine(drill, store, "two"))
    elsewhere.run(drill.job())
    assert [(stage.state, stage.reasons) for stage in elsewhere.stages.values()] == [
        ("resume", ("from the store",))
    ]
    drill.order("fail", given=False)
    StageRunner(context).run(drill.job())
    context.stored.close()
    assert not [path for path in (tmp_path / "store" / "checkpoints").rglob("*") if path.is_file()]


def json_fingerprint(directory: Path) -> str:
    """The whole fingerprint of a work directory."""
    return str(json.loads((directory / "job.json").read_text())["fingerprint"])
