"""A store, also on a real S3 server: whole or not at all, verified; another machine reuses and
resumes, and the store may fail."""

import json
import logging
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem
from ports import reserved_port
from s3_fixtures import serve_s3, store_at
from waiting import once, wait_until

from rlhf_pipeline.errors import ArtifactError, ConfigError, StageError
from rlhf_pipeline.runtime.job import checkpoint_path, list_checkpoints, seal
from rlhf_pipeline.runtime.manifest import FileEntry, Manifest, file_entries, verify
from rlhf_pipeline.stages import store as module
from rlhf_pipeline.stages.cache.planning import Planner
from rlhf_pipeline.stages.cache.workspace import work_directory
from rlhf_pipeline.stages.job import StageListener, StageRun, StageStore
from rlhf_pipeline.stages.run import StageRunner
from rlhf_pipeline.stages.store import Store, StoredStages, upload

pytestmark = pytest.mark.usefixtures("in_this_process")

# printf abc | sha256sum; printf d | sha256sum
ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
D = "18ac3e7343f016890c510e93f935261169d9e3f565436429830faf0934f4f8e4"


def sealed(folder):
    """Make a folder an artifact."""
    Manifest("sft", "f" * 64, 1, {}, {}, {}, {}, file_entries(folder)).write(folder)
    return folder


@pytest.fixture
def artifact(tmp_path):
    """Two names of one content, and another content in a subfolder."""
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "weights").write_text("abc")
    (folder / "copy").write_text("abc")
    (folder / "sub" / "more").write_text("d")
    return sealed(folder)


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store in a local folder, which is asked often."""
    monkeypatch.setattr(module, "POLL_S", 0.02)
    return Store(str(tmp_path / "store"))


@pytest.fixture
def pushed(store, artifact):
    """The same store, with that artifact."""
    store.push(artifact, "it.json")
    return store


@contextmanager
def server_at(folder, port):
    """A server of the folders of buckets."""
    server = serve_s3(folder, port)
    try:
        yield server
    finally:
        server.kill()
        server.communicate()


def uploads(folder):
    """When each object of a store was uploaded, by its digest."""
    return {path.name: path.stat().st_ctime_ns for path in (folder / "objects").iterdir()}


def test_each_content_is_stored_once_and_pulled_by_its_digest(bucket, artifact, tmp_path):
    store = Store("s3://bucket/once")
    store.push(artifact, "folders/it.json")
    uploaded = uploads(bucket / "once")
    objects = {path.name: path.read_text() for path in (bucket / "once" / "objects").iterdir()}
    assert objects == {ABC: "abc", D: "d"}
    pointer = bucket / "once" / "folders" / "it.json"
    assert pointer.read_bytes() == (artifact / "manifest.json").read_bytes()
    store.push(artifact, "folders/again.json")
    assert uploads(bucket / "once") == uploaded
    pointers = ["folders/again.json", "folders/it.json"]
    assert store.names() == [*pointers, f"objects/{D}", f"objects/{ABC}"]
    assert store.below("none").names() == []
    store.pull(store.manifest("folders/it.json"), tmp_path / "here")
    assert (tmp_path / "here" / "sub" / "more").read_text() == "d"
    assert verify(tmp_path / "here") == verify(artifact)
    assert store.manifest("folders/none.json") is None


@pytest.mark.parametrize(("content", "found"), [("abd", 3), ("e", 1), (None, 0)])
def test_a_damaged_or_lost_object_is_named_and_the_next_push_mends_it(
    pushed, artifact, tmp_path, content, found
):
    damaged = tmp_path / "store" / "objects" / ABC
    damaged.unlink() if content is None else damaged.write_text(content)
    with pytest.raises(ArtifactError) as error:
        pushed.pull(pushed.manifest("it.json"), tmp_path / "here")
    message = rf"{damaged} \(copy\): found {found} bytes .*, expected 3 bytes with "
    assert re.fullmatch(f"{message}.* Fix: restore it in the store", str(error.value))
    assert not (tmp_path / "here").exists()
    before = uploads(tmp_path / "store")
    Store(pushed.url).push(artifact, "it.json")
    assert uploads(tmp_path / "store")[D] == before[D]
    pushed.pull(pushed.manifest("it.json"), tmp_path / "here")
    assert verify(tmp_path / "here") == verify(artifact)


def test_a_damaged_pointer_is_named(pushed, tmp_path):
    pointer = tmp_path / "store" / "it.json"
    pointer.write_text(pointer.read_text().replace('"seed": 1', '"seed": 2'))
    with pytest.raises(ArtifactError, match=r"it\.json is damaged, or of another recipe\. Fix:"):
        pushed.manifest("it.json")
    pushed.remove(["gone", "it.json"])  # another machine has removed one of them
    assert pushed.manifest("it.json") is None


def test_a_pointer_is_replaced_whole_or_not_at_all(pushed, artifact, monkeypatch):
    """A kill or a full disk during the write leaves the earlier one."""

    def cut_off(self, text, **options):
        self.write_bytes(text.encode()[:100])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(StageError, match="No space left"):
        patch.setattr(Path, "write_text", cut_off)
        pushed.write("it.json", "x" * 1000)
    assert pushed.manifest("it.json") == verify(artifact)


def test_an_upload_that_a_killed_server_cut_off_sends_only_the_rest(tmp_path, monkeypatch):
    source, served = tmp_path / "source", tmp_path / "served"
    source.mkdir()
    for name, size in (("a", 1_000_000), ("b", 60_000_000), ("c", 1000)):
        (source / name).write_bytes(os.urandom(size))
    (served / "bucket").mkdir(parents=True)
    files = Manifest.read(sealed(source)).files
    first = served / "bucket" / "x" / "objects" / files["a"].sha256
    with reserved_port() as port:
        store = store_at(port)
        with (
            server_at(served, port) as server,
            once(first.exists, server.kill),
            pytest.raises(StageError, match="s3://bucket/x: "),
        ):
            store.push(source, "it.json")
        assert {path.name for path in first.parent.iterdir()} == {files["a"].sha256}
        with server_at(served, port):
            assert store.manifest("it.json") is None
            uploaded = first.stat().st_ctime_ns
            store.push(source, "it.json")
            assert first.stat().st_ctime_ns == uploaded
            store.pull(store.manifest("it.json"), tmp_path / "here")
    assert verify(tmp_path / "here") == verify(source)


def test_readers_of_one_artifact_do_not_disturb_each_other(pushed, artifact, tmp_path):
    manifest, here = pushed.manifest("it.json"), tmp_path / "cache" / "here"
    with ThreadPoolExecutor(8) as pool:
        for pulled in [pool.submit(pushed.pull, manifest, here) for _ in range(16)]:
            pulled.result()
    assert verify(here) == verify(artifact)


def test_a_download_that_was_cut_off_leaves_nothing_and_a_whole_one_is_not_repeated(
    pushed, artifact, tmp_path
):
    """What was cut off may be of another artifact, as of the checkpoint of an earlier step."""
    here, partial = tmp_path / "here", tmp_path / "here.partial"
    partial.mkdir()
    (partial / "first").write_text("1")
    pushed.pull(pushed.manifest("it.json"), here)
    assert verify(here) == verify(artifact)
    os.utime(here / "weights", (1000, 1000))
    pushed.pull(pushed.manifest("it.json"), here)
    assert (here / "weights").stat().st_mtime == 1000


def test_without_weights_a_copy_has_manifest_folders_and_json_files(store, artifact, tmp_path):
    (artifact / "report.json").write_text("{}")
    store.push(sealed(artifact), "it.json")
    store.pull(store.manifest("it.json"), tmp_path / "here", without_weights=True)
    found = {path.relative_to(tmp_path / "here").as_posix() for path in tmp_path.rglob("here/**/*")}
    assert found == {"manifest.json", "report.json", "sub"}


@pytest.mark.parametrize(
    ("name", "digest"), [("../outside", ABC), ("/tmp/outside", ABC), ("x", "../it.json")]
)
def test_a_name_outside_the_folder_is_refused(store, tmp_path, name, digest):
    files = {name: FileEntry(3, digest)}
    Manifest("sft", "f" * 64, 1, {}, {}, {}, {}, files).write(tmp_path)
    store.write("it.json", (tmp_path / "manifest.json").read_text())
    with pytest.raises(ArtifactError, match=r"store/it\.json is damaged"):
        store.pull(store.manifest("it.json"), tmp_path / "here")


def test_a_store_that_cannot_be_used_is_explained_before_anything_is_uploaded(bucket, s3_server):
    Store("s3://bucket/fine").check()
    assert not [path for path in bucket.rglob("fine/**/*") if path.is_file()]
    with pytest.raises(StageError) as missing:
        Store("s3://nowhere/x").check()
    assert str(missing.value).startswith("s3://nowhere/x: not found (NoSuchBucket: ")
    with pytest.raises(StageError, match=r"s3://bucket/x: access denied \(.*signature") as it:
        Store("s3://bucket/x", key="access", secret="canary-secret").check()
    assert "canary" not in str(it.value)
    with pytest.raises(StageError, match=r"\(ValueError: .*nothing\)\. Fix: check the path"):
        Store("nothing://x").check()


def test_a_secret_in_the_url_of_a_store_is_refused():
    with pytest.raises(ConfigError) as error:
        Store("s3://me:canary@bucket/x").check()
    assert str(error.value) == (
        "s3://...@bucket/x: found a user, a password or a query, expected none. Fix: set them as "
        "`credentials` of the catalog entry, or in the environment"
    )


class Forgetful(LocalFileSystem):
    """A store that damages every file."""

    def put_file(self, local, remote, **options):
        Path(remote).write_text("2!")


def test_bytes_that_arrive_damaged_do_not_stay(tmp_path):
    (tmp_path / "weights").write_text("abc")
    with pytest.raises(StageError, match=r"x: found SHA-256 .* expected ba7816bf8f01"):
        upload(Forgetful(), tmp_path / "weights", str(tmp_path / "x"), ABC)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("root", ["{}/a::b [c]*", "file://{}/two"])
def test_a_local_folder_is_a_store_and_its_path_is_taken_literally(artifact, tmp_path, root):
    store = Store(root.format(tmp_path))
    store.check()
    store.push(artifact, "a/it.json")
    assert store.names()[0] == "a/it.json"
    store.pull(store.manifest("a/it.json"), tmp_path / "here")
    assert verify(tmp_path / "here") == verify(artifact)


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


def planned(drill, store, name, **context):
    """The plan of the stage on a machine."""
    planner = Planner(machine(drill, store, name, **context))
    planner.run(drill.job())
    (stage,) = planner.stages.values()
    return stage


def warnings(caplog):
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


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
    (stage,) = planner.stages.values()
    assert (stage.state, stage.reasons) == ("reuse", ())
    assert [path.name for path in export.iterdir()] == ["manifest.json"]
    assert planner.pending_stage(export) is None
    assert planned(drill, store, "two", force=["drill"]).state == "run"


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
    (pointer,) = (tmp_path / "store" / "stages" / "drill").iterdir()
    whole = pointer.read_text()
    if damage == "cut":
        pointer.write_text(whole[:100])
    else:
        Manifest("drill", "e" * 64, 1, {}, {}, {}, {}, {}).write(tmp_path)
        pointer.write_text((tmp_path / "manifest.json").read_text())
    assert planned(drill, store, "two").state == "run"
    run(drill, store, "one")
    assert drill.launches == 1
    assert pointer.read_text() == whole


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
    broken.broken = False
    assert run(drill, broken, "one") == export  # reused, and uploaded
    assert run(drill, store, "two") != export
    assert drill.launches == 1


def test_a_stage_runs_without_a_store_that_went_away(drill, store, caplog, tmp_path):
    (tmp_path / "s3" / "bucket").mkdir(parents=True)
    with reserved_port() as port:
        remote = store_at(port)
        with server_at(tmp_path / "s3", port):
            run(drill, remote, "one")
        context = machine(drill, remote, "two")
        made = StageRunner(context).run(drill.job())
        assert (made / "result").read_text() == "launch 2"
        assert context.stored.fetch_checkpoint(stage_run(tmp_path / "two"), 3) == 3
        with pytest.raises(StageError, match="s3://bucket/x does not have all that this machine"):
            context.stored.close()
        warned = "stage drill: a copy in the store is not used: s3://bucket/x: cannot be "
        assert [text.startswith(warned) for text in warnings(caplog)].count(True) == 1
        with server_at(tmp_path / "s3", port):
            run(drill, remote, "three")
    assert drill.launches == 2


def test_a_full_disk_is_no_failure_of_the_store(store, disk, tmp_path):
    big = tmp_path / "big"
    big.mkdir()
    (big / "weights").write_bytes(bytes(2**24))
    store.push(sealed(big), f"stages/sft/{'f' * 64}.json")
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


def stored_of(store, run):
    """What the machine of a running stage has in the store."""
    return StoredStages(store, run.directory.parents[1])


def fetch(store, run, local=None):
    return stored_of(store, run).fetch_checkpoint(run, local)


def upload_all(stored, run, *made):
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
    upload_all(stored_of(store, training), training, (2, 1), (4, None), (6, 5))
    assert stored_of(store, training).newest_step(training) == 6
    objects = {path.read_text() for path in (tmp_path / "store").rglob("objects/*")}
    assert {"state 6", "best 1", "best 5"} < objects
    assert not objects & {"state 2", "state 4"}
    other = stage_run(tmp_path / "two")
    assert fetch(store, other) == 6
    assert (checkpoint_path(other.checkpoints, 6) / "policy" / "rank0").read_text() == "state 6"
    found = {path.relative_to(other.directory).as_posix() for path in other.directory.glob("*/*")}
    assert found == {
        f"checkpoints/{n}" for n in ("best-00000001", "best-00000005", "step-00000006")
    }
    assert other.metrics_file.read_text() == '{"step": 2}\n{"step": 4}\n{"step": 6}\n'


def test_training_may_remove_what_it_no_longer_needs_meanwhile(
    store, training, tmp_path, monkeypatch, caplog
):
    """A best model that a better one has replaced leaves after the newest checkpoint."""
    link, old = module.link_or_copy, training.checkpoints / "best-00000001"

    def removing(source, target):
        shutil.rmtree(old, ignore_errors=True)
        link(source, target)

    monkeypatch.setattr(module, "link_or_copy", removing)
    upload_all(stored_of(store, training), training, (2, 1), (4, 3))
    other = stage_run(tmp_path / "two")
    assert fetch(store, other) == 4
    assert {path.name for path in other.checkpoints.iterdir()} == {"step-00000004", "best-00000003"}
    assert not warnings(caplog)


def test_a_newer_checkpoint_of_this_machine_wins(store, training, tmp_path):
    stored = stored_of(store, training)
    upload_all(stored, training, (2, None))
    assert stored.fetch_checkpoint(training, 2) == 2
    save(training, 3)
    assert stored.fetch_checkpoint(training, 3) == 3
    assert [path.name for path in list_checkpoints(training.checkpoints)] == ["step-00000003"]


def test_two_machines_may_upload_checkpoints_of_one_recipe(store, training, tmp_path):
    """The other one has sent its objects, and its manifest follows."""
    theirs, place = stage_run(tmp_path / "two"), f"checkpoints/sft/{training.fingerprint}"
    upload_all(stored_of(Store(str(tmp_path / "sent")), theirs), theirs, (8, None))
    sent, here = tmp_path / "sent" / place, tmp_path / "store" / place
    shutil.copytree(sent / "objects", here / "objects")
    upload_all(stored_of(store, training), training, (2, 1), (4, None))
    shutil.copy(sent / "checkpoint.json", here)
    third = stage_run(tmp_path / "three")
    assert fetch(store, third) == 8


@pytest.mark.parametrize("damaged", ["manifest", "object", "before its upload"])
def test_a_damaged_checkpoint_is_not_used_and_the_next_one_replaces_it(
    store, training, tmp_path, caplog, damaged
):
    save(training, 2)
    if damaged == "before its upload":
        (checkpoint_path(training.checkpoints, 2) / "policy" / "rank0").write_text("damage2")
    upload_all(stored_of(store, training), training)
    if damaged == "manifest":
        store.write(f"checkpoints/sft/{training.fingerprint}/checkpoint.json", "{")
    if damaged == "object":
        for path in (tmp_path / "store").rglob("objects/*"):
            path.write_text(path.read_text().replace("state 2", "state 3"))
    other = stage_run(tmp_path / "two")
    assert fetch(store, other, 1) == 1
    assert not other.checkpoints.exists()
    assert len(warnings(caplog)) == 1
    upload_all(stored_of(store, training), training, (4, None))
    assert fetch(store, other) == 4


def test_a_machine_that_is_behind_replaces_no_checkpoint_that_can_be_used(
    store, training, tmp_path
):
    upload_all(stored_of(store, training), training, (4, None))
    behind = stage_run(tmp_path / "two")
    save(behind, 2)
    upload_all(stored_of(store, behind), behind)
    assert stored_of(store, training).newest_step(training) == 4
    for path in (tmp_path / "store").rglob("objects/*"):
        path.write_text(path.read_text().replace("state 4", "state 5"))
    again = stored_of(store, behind)
    assert again.fetch_checkpoint(behind, 2) == 2
    upload_all(again, behind)
    assert stored_of(store, training).newest_step(training) == 2


def test_a_checkpoint_that_is_replaced_during_its_download_is_fetched_again(
    store, training, tmp_path, monkeypatch
):
    upload_all(stored_of(store, training), training, (2, None))
    pull, other = Store.pull, stage_run(tmp_path / "two")

    def replaced_first(self, manifest, folder, **options):
        if manifest.metrics["step"] == 2:
            upload_all(stored_of(store, training), training, (4, None))
        return pull(self, manifest, folder, **options)

    monkeypatch.setattr(Store, "pull", replaced_first)
    assert fetch(store, other) == 4


def test_the_checkpoints_of_a_finished_stage_leave_the_store(drill, store, tmp_path, monkeypatch):
    context = machine(drill, store, "one")
    drill.order("fail")
    with pytest.raises(StageError, match="ordered to fail"):
        StageRunner(context).run(drill.job())
    (directory,) = (tmp_path / "one" / "drill").iterdir()
    fingerprint = json.loads((directory / "job.json").read_text())["fingerprint"]
    failed = StageRun("drill", fingerprint, 1, {}, {}, {}, directory, 60.0)
    save(failed, 2)
    context.stored.stage_started(failed)
    wait_until(lambda: context.stored.newest_step(failed) == 2)
    assert planned(drill, store, "one").state == "resume"
    elsewhere = planned(drill, store, "two")
    assert (elsewhere.state, elsewhere.reasons) == ("resume", ("from the store",))
    drill.order("fail", given=False)
    StageRunner(context).run(drill.job())
    context.stored.close()
    assert not [path for path in (tmp_path / "store" / "checkpoints").rglob("*") if path.is_file()]
