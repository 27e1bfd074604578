"""Running stages: finished ones are reused, failures explain themselves, nothing is left behind."""

import json
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from rlhf_pipeline.config.block import Block
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.errors import (
    ArtifactError,
    ConfigError,
    ForeignFileError,
    Interrupted,
    StageError,
)
from rlhf_pipeline.runtime.manifest import Manifest, verify
from rlhf_pipeline.stages import events, job, run
from rlhf_pipeline.stages.cache import planning
from rlhf_pipeline.stages.job import Job, Program
from rlhf_pipeline.stages.launch import launcher
from rlhf_pipeline.stages.progress import ProgressDisplay


class ToyConfig(Block):
    """What the toy stage does."""

    action: str = "work"
    """work, fail, explain, vanish, sleep or fit."""

    micro_batch_size_per_gpu: int = 8
    """fit: runs out of memory above 2, after step 5."""


PROGRAM = """
import json, os, sys, time
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.runtime.checkpoint_files import seal
from rlhf_pipeline.stages.job import PROGRAMS, Program
from rlhf_pipeline.runtime.program import run_program

def main(job):
    action = job.config["toy"]["action"]
    with (job.directory / "launches").open("a") as file:
        file.write("once\\n")
    with job.metrics_file.open("a") as file:
        for step in (1, 2, 3):
            file.write(json.dumps({"step": step, "total_steps": 3, "time": 0.0, "metrics": {"loss": 1 / step}}) + "\\n")
    if action == "fail":
        raise RuntimeError("the cause")
    if action == "explain":
        raise DataError("rows.jsonl:3: no chosen answer")
    if action == "fit":
        size = job.config["toy"]["micro_batch_size_per_gpu"]
        with (job.directory / "attempts").open("a") as file:
            file.write(json.dumps([size, job.resume_from]) + "\\n")
        checkpoint = job.checkpoints / "step-00000005"
        if job.resume_from is None:
            checkpoint.mkdir(parents=True)
            seal(checkpoint)
        if size > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if action == "vanish":
        os._exit(0)
    if action == "sleep":
        import subprocess
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        time.sleep(60)
    job.export.mkdir()
    (job.export / "result").write_text("done")
    return {"loss": 0.25}

PROGRAMS["toy"] = Program("toy_program", distributed=False)
run_program(main)
"""


class Recorder:
    def __init__(self):
        self.heard = []

    def stage_started(self, run):
        self.run = run
        self.heard.append(("started", run.cached))

    def stage_metrics(self, run, records):
        self.heard += [("metrics", record["step"]) for record in records]

    def stage_ended(self, run, status, metrics):
        self.heard.append((status, metrics))


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A stage `toy` whose program runs as one plain process."""
    (tmp_path / "toy_program.py").write_text(textwrap.dedent(PROGRAM))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setitem(job.PROGRAMS, "toy", Program("toy_program", distributed=False))
    monkeypatch.setattr(
        planning, "fingerprint", lambda recipe: recipe["config"]["toy"]["action"].ljust(64, "0")
    )

    def run_toy(action="work", identities=None, halve=False, **inputs):
        toy_job = Job("toy", {"toy": ToyConfig(action=action)}, inputs, 1, identities or {})
        return run.run_stage(toy_job, LaunchConfig(halve_micro_batch_on_oom=halve), tmp_path / "ws")

    return run_toy


def test_a_stage_runs_once(toy):
    recorder = Recorder()
    with events.listening(recorder):
        first = toy()
        made = (first / "result").stat().st_mtime_ns
        assert toy() == first
    assert (first / "result").stat().st_mtime_ns == made
    assert recorder.heard == [
        ("started", False), ("metrics", 1), ("metrics", 2), ("metrics", 3), ("FINISHED", {"loss": 0.25}),
        ("started", True), ("FINISHED", {"loss": 0.25}),
    ]  # fmt: skip
    assert Manifest.read(first).metrics == {"loss": 0.25}


def test_a_failure_shows_the_program_s_own_reason(toy):
    recorder = Recorder()
    with events.listening(recorder), pytest.raises(StageError) as failure:
        toy("fail")
    message = str(failure.value)
    assert "stage toy failed after" in message
    assert "exit code 1" in message
    assert "RuntimeError: the cause" in message
    assert "toy_program" in message and "program.log" in message
    assert recorder.heard[-1] == ("FAILED", {})


def test_an_explained_failure_needs_no_traceback(toy):
    with pytest.raises(StageError) as failure:
        toy("explain")
    assert "rank0: rows.jsonl:3: no chosen answer" in str(failure.value)
    assert "Traceback" not in str(failure.value)


def test_exit_code_zero_without_a_manifest_is_a_failure(toy):
    with pytest.raises(StageError, match="exit code 0 but no manifest"):
        toy("vanish")


def test_a_failed_stage_starts_anew_and_counts_no_step_twice(toy, tmp_path):
    with pytest.raises(StageError):
        toy("fail")
    with pytest.raises(StageError):
        toy("fail")
    metrics = next((tmp_path / "ws" / "toy").glob("*/metrics.jsonl"))
    assert len(metrics.read_text().splitlines()) == 3


def test_a_stage_that_is_out_of_memory_says_what_helps(toy):
    with pytest.raises(StageError) as failure:
        toy("fit")
    assert failure.value.cause == "GPU memory"
    assert "lower toy.micro_batch_size_per_gpu (8)" in str(failure.value)
    assert "set to true launch.halve_micro_batch_on_oom (false)" in str(failure.value)
    assert "(this stage goes on after step 5)" in str(failure.value)


def test_a_stage_that_is_out_of_memory_goes_on_with_smaller_micro_batches_where_that_is_wanted(
    toy, capsys
):
    recorder = Recorder()
    with events.listening(recorder, ProgressDisplay()):
        export = toy("fit", halve=True)
    attempts = [json.loads(line) for line in (export.parent / "attempts").read_text().splitlines()]
    assert attempts == [[8, None], [4, 5], [2, 5]]
    manifest = Manifest.read(export)
    assert manifest.adjusted == {"toy.micro_batch_size_per_gpu": {"configured": 8, "used": 2}}
    assert manifest.config["toy"]["micro_batch_size_per_gpu"] == 2
    assert (
        recorder.run.config["toy"]["micro_batch_size_per_gpu"] == 2
    )  # what a message would advise to lower
    assert [what for what, _ in recorder.heard if what != "metrics"] == [
        "started", "FAILED", "started", "FAILED", "started", "FINISHED",
    ]  # fmt: skip
    assert "out of memory with toy.micro_batch_size_per_gpu 8: now 2" in capsys.readouterr().out
    assert toy("fit") == export and len((export.parent / "attempts").read_text().splitlines()) == 3


def test_another_failure_is_not_tried_again(toy, tmp_path):
    with pytest.raises(StageError):
        toy("fail", halve=True)
    assert len(next((tmp_path / "ws" / "toy").glob("*/launches")).read_text().splitlines()) == 1


def test_a_signal_ends_the_program_and_its_children(toy):
    before = {child.pid for child in psutil.Process().children(recursive=True)}

    def interrupt():
        while not {c.pid for c in psutil.Process().children(recursive=True)} - before:
            time.sleep(0.05)
        time.sleep(2.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt, daemon=True).start()
    recorder = Recorder()
    with events.listening(recorder), pytest.raises(Interrupted, match="SIGTERM"):
        toy("sleep")
    assert recorder.heard[-1] == ("KILLED", {})
    sleepers = [
        p
        for p in psutil.process_iter(["cmdline"])
        if "import time; time.sleep(60)" in (p.info["cmdline"] or [])
    ]
    assert sleepers == []


def flip_a_byte(export):
    (export / "result").write_text("dome")


def lose_a_file(export):
    (export / "result").unlink()


def lose_half_the_manifest(export):
    manifest = export / "manifest.json"
    manifest.write_text(manifest.read_text()[:100])


def lose_the_manifest(export):
    (export / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (flip_a_byte, "export/result was changed after stage toy finished"),
        (lose_a_file, "export/result is missing"),
        (lose_half_the_manifest, "export/manifest.json is damaged"),
        (lose_the_manifest, "export is not a finished artifact: it has no manifest.json"),
    ],
)
def test_a_damaged_result_is_made_again(toy, caplog, damage, named):
    export = toy()
    damage(export)
    recorder = Recorder()
    with events.listening(recorder), caplog.at_level(logging.WARNING):
        assert toy() == export
    assert (export / "result").read_text() == "done"
    assert launches(export) == 2
    assert recorder.heard[0] == ("started", False)
    (warning,) = caplog.messages
    assert warning.startswith("A result of stage toy is passed over: ")
    assert named in warning
    assert toy() == export
    assert launches(export) == 2


def test_a_file_that_was_added_to_a_result_stops_the_stage_and_costs_nothing(toy):
    export = toy()
    (export / "notes.txt").write_text("by hand")
    with pytest.raises(
        ForeignFileError,
        match=r"export/notes\.txt was added after stage toy finished; move it elsewhere",
    ):
        toy()
    (export / "notes.txt").rename(export / ".notes")
    assert toy() == export
    assert launches(export) == 1


def test_a_published_version_keeps_its_files_when_the_result_is_made_again(toy, tmp_path):
    export = toy()
    published = tmp_path / "published"
    shutil.copytree(export, published, copy_function=os.link)
    flip_a_byte(export)
    assert (published / "result").read_text() == "dome"  # one file by two names
    toy()
    assert (published / "result").read_text() == "dome"
    assert not (published / "result").samefile(export / "result")
    verify(export)


def test_two_processes_that_run_one_recipe_launch_it_once(toy, tmp_path):
    fork = multiprocessing.get_context("fork")  # the toy stage exists in this process alone
    at_once, answers = fork.Barrier(2), fork.Queue()

    def run_toy():
        recorder = Recorder()
        at_once.wait(timeout=60)
        with events.listening(recorder):
            answers.put((str(toy()), *recorder.heard[0]))

    processes = [fork.Process(target=run_toy) for _ in range(2)]
    for process in processes:
        process.start()
    found = sorted(answers.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(timeout=60)
    export = tmp_path / "ws" / "toy" / "work000000000000" / "export"
    assert found == [(str(export), "started", False), (str(export), "started", True)]
    assert launches(export) == 1
    assert verify(export).metrics == {"loss": 0.25}


def launches(export):
    return len((export.parent / "launches").read_text().splitlines())


def test_identities_of_inputs_that_are_no_files_stand_beside_the_digests_of_files(toy, tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")
    recorder = Recorder()
    with events.listening(recorder):
        export = toy(identities={"source_1": "commit 5d0e"}, source_0=tmp_path / "abc")
    both = {
        "source_0": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",  # printf abc | sha256sum
        "source_1": "commit 5d0e",
    }
    assert Manifest.read(export).inputs == recorder.run.inputs == both
    assert recorder.run.paths == {"source_0": tmp_path / "abc"}
    launched = json.loads((export.parent / "job.json").read_text())
    assert launched["digests"] == both
    assert list(launched["inputs"]) == ["source_0"]


def test_an_altered_input_stops_the_stage(toy, tmp_path):
    source = tmp_path / "input"
    source.mkdir()
    (source / "weights").write_text("abc")
    from rlhf_pipeline.runtime.manifest import file_entries

    Manifest("sft", "", 1, {}, {}, {}, {}, file_entries(source)).write(source)
    (source / "weights").write_text("abd")
    with pytest.raises(ArtifactError, match="weights was changed"):
        toy(sft_model=source)


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"launch\.master_port {port} is in use"):
            launcher.free_port(port)


def test_gpus_are_those_the_environment_shows(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    assert launcher.gpu_count() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert launcher.gpu_count() == 0
    assert launcher.process_count(LaunchConfig()) == 2
    assert launcher.process_count(LaunchConfig(processes=3)) == 3


def test_importing_the_driver_s_side_imports_no_torch():
    heavy = "('torch', 'mlflow', 'deepspeed', 'transformers')"
    code = f"import sys, rlhf_pipeline.stages.run, rlhf_pipeline.hooks; print([m for m in {heavy} if m in sys.modules])"
    source = Path(run.__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(source)},
    )
    assert result.stdout.strip() == "[]"
