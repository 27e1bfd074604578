"""Nothing that somebody made is lost, wherever a process is killed and whenever the disk is full.

Each scenario runs in a child process that ends at a chosen fault point: a call that removes,
renames, truncates, makes or opens a file for writing, as Python's audit events report it; or the
disk is full at a write. Then it runs again without a fault, as the next command does, and its
results are checked.
"""

import os
import shutil
import subprocess
import sys
import traceback
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from conftest import Disk

from rlhf_pipeline.datasets.artifact import ArtifactDataset
from rlhf_pipeline.labelling.votes import Vote, add_vote, locked, remove_vote
from rlhf_pipeline.runtime.files import put_in_place, write_atomically
from rlhf_pipeline.runtime.job import checkpoint_path, newest_valid_step, seal
from rlhf_pipeline.runtime.manifest import Manifest, file_entries, verify
from rlhf_pipeline.stages import run as run_module
from rlhf_pipeline.stages.cache.fingerprint import identify
from rlhf_pipeline.stages.cache.workspace import remove, survey
from rlhf_pipeline.stages.job import StageRun
from rlhf_pipeline.stages.run import StageRunner
from rlhf_pipeline.stages.store import Store, StoredStages

FAULTS = {"os.remove", "os.rename", "os.rmdir", "os.truncate", "shutil.rmtree"}
FAULTS |= {"os.mkdir", "os.link", "os.symlink", "open"}
ENDED = 77
PAGE = 4096


@dataclass
class Kill:
    """Ends the process at a fault point, given by its number."""

    root: Path
    number: int

    def __call__(self, event, arguments):
        if event in FAULTS and self._is_here(event, arguments):
            self.number -= 1
            if self.number == 0:
                os._exit(ENDED)

    def _is_here(self, event, arguments):
        if event == "open":
            path, _, flags = arguments
            written = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
            return isinstance(path, str) and path.startswith(str(self.root)) and flags & written
        inside = event in ("os.remove", "os.rmdir") and arguments[1] != -1  # by shutil.rmtree
        return inside or str(arguments[0]).startswith(str(self.root))


def in_child(root, act, kill=None):
    """Run `act` in a child process; return whether a kill or a full disk ended it.

    What it raised is then in the file `message` beside the folder.
    """
    message, pid = root.with_name("message"), os.fork()
    if pid == 0:
        code = 0
        try:
            if kill is not None:
                sys.addaudithook(kill)
            act(root)
        except BaseException as error:
            text = "".join(traceback.format_exception(error))
            is_full = kill is None and ("No space left" in text or "MiB free" in text)
            code = ENDED if is_full else 1
            message.write_text(str(error) if is_full else text)
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, ENDED), message.read_text()
    return code == ENDED


def visit(tmp_path, prepare, act, check, *, explained=False):
    """End a scenario at each fault point, then let a disk be full at each of its writes: a file
    takes a page at least. `explained`: the message about a full disk has the place and the fix.
    """
    root = tmp_path / "root"  # one name, as some files contain it
    number, ended = 0, True
    while ended:
        number += 1
        root.mkdir()
        prepare(root)
        ended = in_child(root, act, Kill(root, number))
        check(root)
        shutil.rmtree(root)
    assert number > 1
    pages = passed = 0
    while passed < 3:
        disk = Disk(root, size=4 * 2**20)
        try:
            prepare(root)
            disk.leave(pages * PAGE)
            if in_child(root, act):
                passed = 0
                message = root.with_name("message").read_text()
                assert not explained or (str(root) in message and "fix  " in message)
            else:
                passed += 1
            disk.make_room()
            check(root)
        finally:
            subprocess.run(["umount", "--lazy", str(root)], check=True)
            root.rmdir()
        pages += 1


def vote(number):
    return Vote(
        pair=f"pair {number}", prompt=[], first="a", second="b", first_score=1, second_score=0,
        reason="", annotator="Ann", shown_as_a="first", time="2026-11-23T12:00:00+00:00",
    )  # fmt: skip


def acknowledge(root, what):
    """Record, outside of the fault points, that a caller was told of a success."""
    descriptor = os.open(root.with_name("acknowledged"), os.O_APPEND | os.O_WRONLY)
    os.write(descriptor, f"{what}\n".encode())
    os.close(descriptor)


def acknowledged(root):
    return root.with_name("acknowledged").read_text().split()


def test_votes_and_undo(tmp_path):
    def prepare(root):
        root.with_name("acknowledged").write_text("")
        for number in range(3):
            add_vote(root / "votes.jsonl", vote(number))

    def act(root):
        for number in (3, 4):
            add_vote(root / "votes.jsonl", vote(number))
            acknowledge(root, number)
        remove_vote(root / "votes.jsonl", "Ann", "pair 1")
        acknowledge(root, "undo")
        add_vote(root / "votes.jsonl", vote(5))
        acknowledge(root, 5)

    def check(root):
        told = acknowledged(root)
        with locked(root / "votes.jsonl") as found:
            pairs = [each.pair for each in found]
        assert {"pair 0", "pair 2"} <= set(pairs)
        assert {f"pair {each}" for each in told if each != "undo"} <= set(pairs)
        assert ("pair 1" in pairs) or pairs.count("pair 3") == 1  # its removal was asked for
        assert not ("undo" in told and "pair 1" in pairs)
        assert len(pairs) == len(set(pairs))

    visit(tmp_path, prepare, act, check)


def make_checkpoint(directory, step):
    partial = directory / f"step-{step:08d}.partial"
    (partial / "actor").mkdir(parents=True)
    (partial / "actor" / "rank0").write_text(f"state {step}")
    seal(partial, file_entries(partial))
    put_in_place(partial, checkpoint_path(directory, step))
    (directory / "best-00000001").mkdir(exist_ok=True)
    (directory / "best-00000001" / "weights").write_text("best 1")


class OneRank:
    """The communication of a single rank; a child process cannot use that of its parent."""

    rank, size = 0, 1

    def barrier(self):
        pass

    def gather(self, value):
        return [value]


@pytest.mark.parametrize("keep", [1, 2])
def test_checkpoints(tmp_path, keep):
    from rlhf_pipeline.training.checkpoints import Checkpoints

    def prepare(root):
        root.with_name("acknowledged").write_text("2\n")
        make_checkpoint(root / "checkpoints", 2)
        make_checkpoint(root / "checkpoints", 9)  # damaged: training resumed from step 2
        (checkpoint_path(root / "checkpoints", 9) / "actor" / "rank0").write_text("damage9")

    def act(root):
        checkpoints = Checkpoints(root / "checkpoints", OneRank(), {}, keep=keep)
        for step in (3, 9):
            checkpoints.save(step, {"step": step})
            acknowledge(root, step)

    def check(root):
        assert newest_valid_step(root / "checkpoints") >= int(acknowledged(root)[-1])
        assert (root / "checkpoints" / "best-00000001" / "weights").read_text() == "best 1"

    visit(tmp_path, prepare, act, check)


def texts(root):
    """The contents of all files."""
    return {path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("damage", ["nothing", "export", "checkpoints"])
def test_the_end_of_a_stage(tmp_path, drill, monkeypatch, damage):
    def launch(spec, run, context):
        """What the program does."""
        assert run.resume_from == (None if damage == "checkpoints" else 4)
        run.export.mkdir()
        (run.export / "weights").write_text("trained")
        entries = file_entries(run.export)
        Manifest("drill", run.fingerprint, 1, {}, {}, {}, {}, entries).write(run.export)

    monkeypatch.setattr(run_module, "launch", launch)
    named = replace(drill.context(), workspace=tmp_path / "root" / "workspace")
    directory = identify(drill.job(), {}, named).directory

    def prepare(root):
        for step in (2, 4):
            make_checkpoint(directory / "checkpoints", step)
        (directory / "metrics.jsonl").write_text('{"step": 4}\n')
        if damage == "export":
            (directory / "export").mkdir()
            (directory / "export" / "weights").write_text("weight0")
            entries = file_entries(directory / "export")
            manifest = Manifest("drill", directory.name, 1, {}, {}, {}, {}, entries)
            manifest.write(directory / "export")
            (directory / "export" / "weights").write_text("weightX")
        if damage == "checkpoints":
            for step in (2, 4):
                file = checkpoint_path(directory / "checkpoints", step) / "actor" / "rank0"
                file.write_text(f"stat3 {step}")

    def act(root):
        StageRunner(named).run(drill.job())

    def check(root):
        if not (directory / "export" / "manifest.json").is_file() and damage == "nothing":
            assert newest_valid_step(directory / "checkpoints") == 4
        export = StageRunner(named).run(drill.job())
        verify(export)
        assert (export / "weights").read_text() == "trained"
        kept = texts(root)
        assert b'{"step": 4}\n' in kept
        if damage == "nothing":  # the export is a copy of the best model
            assert b"best 1" not in kept
        if damage == "export":
            assert b"weightX" in kept
        if damage == "checkpoints":
            assert {b"stat3 2", b"stat3 4", b"best 1"} <= kept

    visit(tmp_path, prepare, act, check, explained=True)


def make_export(folder, content):
    (folder / "sub").mkdir(parents=True)
    (folder / "weights").write_text(content)
    (folder / "sub" / "config").write_text("{}")
    Manifest("sft", "f" * 64, 1, {}, {}, {}, {}, file_entries(folder)).write(folder)


def test_a_publication(tmp_path):
    from kedro.io import Version

    def dataset(root, version):
        file = str(root / "models" / "sft_model")
        return ArtifactDataset(filepath=file, version=Version(None, f"2026-01-0{version}T00"))

    export = tmp_path / "export"  # links to it need no space, copies to another disk do

    def prepare(root):
        shutil.rmtree(export, ignore_errors=True)
        make_export(export, "one")
        dataset(root, 1).save(export)

    def act(root):
        dataset(root, 2).save(export)

    def check(root):
        verify(export)
        versions = dataset(root, 3).versions()
        assert len(versions) in (1, 2)
        for version in versions:
            verify(version)
        dataset(root, 3).save(export)
        verify(dataset(root, 4).load())
        for leftover in dataset(root, 3).abandoned():
            shutil.rmtree(leftover)
        assert not list(root.rglob("*.partial"))

    visit(tmp_path, prepare, act, check, explained=True)


def test_cleaning(tmp_path):
    def work(root, key, content, checkpoint=None):
        directory = root / "workspace" / "sft" / key.ljust(16, "0")
        make_export(directory / "export", content)
        (directory / "job.json").write_text('{"digests": {}}')
        manifest = Manifest.read(directory / "export")
        replace(manifest, fingerprint=key.ljust(64, "0")).write(directory / "export")
        return directory

    def prepare(root):
        kept = work(root, "a", "published")
        shutil.copytree(kept / "export", root / "models" / "v1" / "sft", copy_function=os.link)
        work(root, "b", "not published")
        (kept / "export.damaged-2026").mkdir()
        (kept / "export.damaged-2026" / "weights").write_text("damaged")
        (root / "models" / "v2" / "sft.1.partial").mkdir(parents=True)
        resumable = root / "workspace" / "sft" / "c".ljust(16, "0")
        make_checkpoint(resumable / "checkpoints", 4)

    def act(root):
        unwanted = {
            root / "models" / "v2" / "sft.1.partial": "left",
            root / "workspace" / "sft" / "a".ljust(16, "0") / "export.damaged-2026": "damaged",
        }
        unwanted = {path: why for path, why in unwanted.items() if path.exists()}
        published = [root / "models" / "v1" / "sft"]
        workspace = root / "workspace"
        found, _ = survey(workspace, ["sft"], published, unwanted, unfinished=False)
        for leftover in found:
            assert remove(leftover, workspace) is None

    def check(root):
        act(root)
        verify(root / "models" / "v1" / "sft")
        names = {path.name[0] for path in (root / "workspace" / "sft").iterdir()}
        assert names == {"a", "c"}
        verify(root / "workspace" / "sft" / "a".ljust(16, "0") / "export")
        assert newest_valid_step(next(root.glob("workspace/sft/c*/checkpoints"))) == 4
        assert b"damaged" not in texts(root)

    visit(tmp_path, prepare, act, check)


def test_downloads_from_a_store(tmp_path):
    def stage(root):
        directory = root / "workspace" / "sft" / ("f" * 16)
        return StageRun("sft", "f" * 64, 1, {}, {}, {}, directory, 60.0)

    elsewhere = tmp_path / "elsewhere"
    make_checkpoint(elsewhere / "checkpoints", 6)
    (elsewhere / "metrics.jsonl").write_text('{"step": 6}\n')
    files = file_entries(elsewhere)
    Manifest("sft", "f" * 64, 1, {}, {}, {}, {"step": 6.0}, files).write(elsewhere)
    store = Store(str(tmp_path / "store"))
    store.below(f"checkpoints/sft/{'f' * 64}").push(elsewhere, "checkpoint.json")

    def prepare(root):
        make_checkpoint(stage(root).checkpoints, 2)
        stage(root).metrics_file.write_text('{"step": 2}\n')

    def act(root):
        assert StoredStages(store, root / "workspace").fetch_checkpoint(stage(root), 2) == 6

    def check(root):
        local = newest_valid_step(stage(root).checkpoints)
        stored = StoredStages(store, root / "workspace")
        assert stored.fetch_checkpoint(stage(root), local) == 6
        assert newest_valid_step(stage(root).checkpoints) == 6
        assert {b"best 1", b'{"step": 6}\n'} <= texts(stage(root).directory)

    visit(tmp_path, prepare, act, check)


def test_a_folder_and_a_file_that_are_replaced(tmp_path):
    def prepare(root):
        (root / "last").mkdir()
        (root / "last" / "weights").write_text("old")
        (root / "job.json").write_text("old")

    def act(root):
        (root / "last.partial").mkdir(exist_ok=True)
        (root / "last.partial" / "weights").write_text("new")
        put_in_place(root / "last.partial", root / "last")
        write_atomically(root / "job.json", "new")

    def check(root):
        assert (root / "last" / "weights").read_text() in ("old", "new")
        assert (root / "job.json").read_text() in ("old", "new")

    visit(tmp_path, prepare, act, check)


def test_two_writers_at_once_of_which_one_is_killed(tmp_path):
    """The other one neither waits nor loses a vote."""
    for number in range(1, 60, 3):
        root = tmp_path / f"root{number}"
        root.mkdir()
        (tmp_path / "acknowledged").write_text("")

        def write(root, first):
            for each in range(first, first + 8, 2):
                add_vote(root / "votes.jsonl", vote(each))
                acknowledge(root, each)

        other = os.fork()
        if other == 0:
            write(root, 1)
            os._exit(0)
        in_child(root, lambda root: write(root, 0), Kill(root, number))
        assert os.waitpid(other, 0)[1] == 0
        with locked(root / "votes.jsonl") as found:
            pairs = {each.pair for each in found}
        assert {f"pair {each}" for each in acknowledged(root)} <= pairs
        assert {"pair 1", "pair 3", "pair 5", "pair 7"} <= pairs
