"""Two ranks under DeepSpeed's launcher end in many ways: the cause is reported, no process is left.

The launches are real, the program is not: each of its ranks waits, dies, hangs or fails as its case
says. All launches run first, three at a time; the tests check the outcomes.
"""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from rlhf_pipeline.stages import run

pytestmark = pytest.mark.long

PROGRAM = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from rlhf_pipeline.config.block import Block
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.errors import PipelineError
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.heartbeat import process_identity
from rlhf_pipeline.runtime.program import run_program
from rlhf_pipeline.stages.job import Job, RunContext, StageSpec
from rlhf_pipeline.stages.run import StageRunner

if "RANK" in os.environ and '"import"' in Path(sys.argv[1]).read_text():
    time.sleep(300)

class Toy(Block):
    ranks: tuple[str, str]

def main(job):
    rank = int(os.environ["RANK"])
    act = job.config["toy"]["ranks"][rank]
    nothing = heartbeat.Heartbeat(-1, None)
    def known(rank):
        return heartbeat.read_heartbeats(job.directory).get(rank, nothing)
    if act == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if act == "parent":
        sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
        for session in (False, True):
            subprocess.Popen(sleep, start_new_session=session)
        subprocess.Popen([*sleep, os.environ["TOY_MARK"]], env={})  # as a sandbox does
    if act == "measure":
        job.metrics_file.write_text('{"step": 1, "total_steps": 2, "time": 1.0, "metrics": {}}\\n')
    heartbeat.begin_phase("update", 7)
    if act == "raise":
        raise ValueError("the cause")
    if act == "stop":
        while [known(each).step for each in (rank, 1 - rank)] != [7, 8]:  # both are written
            time.sleep(0.01)
            heartbeat.report_progress()
        os.kill(os.getpid(), signal.SIGSTOP)
    heartbeat.begin_phase("update", 8)
    other = None
    while True:
        time.sleep(0.01)
        if other is None:  # until then this rank waits for its start, and does not hang
            heartbeat.report_progress()
        other = other or heartbeat.read_heartbeats(job.directory).get(1 - rank)
        if act == "report" and other and process_identity(other.pid) is None:
            raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:1")

if __name__ == "__main__" and "RANK" in os.environ:
    run_program(main)
elif __name__ == "__main__":
    class FailingListener:
        stage_started = stage_phase = stage_ended = lambda *arguments: None
        def stage_metrics(self, run, records):
            raise KeyError("in a hook of the driver")
    workspace, ranks, options = (json.loads(argument) for argument in sys.argv[1:])
    spec = StageSpec("toy", "toy_program", libraries=())
    launch = LaunchConfig(**{"processes": 2, "grace_s": 6.5} | options)
    context = RunContext(Path(workspace), launch, listener=FailingListener())
    try:
        StageRunner(context).run(Job(spec, {"toy": Toy(ranks=ranks)}, {}, 1))
    except PipelineError as error:
        sys.exit(f"{type(error).__name__}: {error}")
"""

CASES = {
    "INT": (("parent", "ignore"), {}, "driver", signal.SIGINT),
    "TERM": (("wait", "parent"), {}, "driver", signal.SIGTERM),
    "HUP": (("wait", "wait"), {}, "driver", signal.SIGHUP),
    "driver": (("parent", "ignore"), {}, "driver", signal.SIGKILL),
    "launcher": (("wait", "parent"), {}, "rlhf_pipeline.distributed.node_launcher", signal.SIGKILL),
    "rank": (("report", "parent"), {}, "1", signal.SIGKILL),
    "raise": (("ignore", "raise"), {}, "report", None),
    "hang": (("wait", "stop"), {"hang_timeout_s": 30.0}, None, None),
    "twice": (("ignore", "ignore"), {"grace_s": 600.0}, "driver", (signal.SIGINT, signal.SIGINT)),
    "start": (("import", "import"), {}, "importing", signal.SIGKILL),
    "hook": (("measure", "parent"), {}, None, None),
}
"""Actions of the two ranks, options, and the process that gets a signal when both ranks run.

The receiver may also be an event to wait for."""


class Ended:
    """One launch after its end."""

    def __init__(self, folder: Path, ranks, options, receiver, number):
        self.mark = uuid.uuid4().hex
        path = f"{folder}:{Path(run.__file__).parents[2]}"
        environment = os.environ | {"TOY_MARK": self.mark, "PYTHONPATH": path}
        self.folder = folder
        arguments = [json.dumps(argument) for argument in (str(folder), ranks, options)]
        command = [sys.executable, str(folder / "toy_program.py"), *arguments]
        (folder / "toy_program.py").write_text(textwrap.dedent(PROGRAM))
        with (folder / "output").open("w") as output:
            driver = subprocess.Popen(
                command, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        if receiver == "importing":
            wait_until(lambda: sum("RANK" in self.environment(p) for p in self.left()) == 2)
            driver.send_signal(number)
        elif receiver == "report":
            wait_until(lambda: any(self.directory.glob("errors/*.txt")))
        elif receiver is not None:
            wait_until(lambda: len(self.running()) == 2)
            pid = driver.pid if receiver == "driver" else self.named(receiver, driver.pid)
            for each in number if isinstance(number, tuple) else (number,):
                os.kill(pid, each)
                time.sleep(1)
        else:
            wait_until(lambda: driver.poll() is not None)
        ended = time.monotonic()
        while time.monotonic() < ended + 60 and (driver.poll() is None or self.left()):
            time.sleep(0.1)
        self.seconds = time.monotonic() - ended
        self.remained = [process.cmdline() for process in self.left()]
        for process in self.left():
            process.kill()
        self.code, self.output = driver.wait(), (folder / "output").read_text()
        self.log = (self.directory / "program.log").read_text()

    @property
    def directory(self):
        """The work directory of the stage; before it exists, a folder without anything."""
        return next(self.folder.glob("toy/*"), self.folder)

    def running(self):
        files = self.directory.glob("heartbeats/rank*.json")
        return [file for file in files if json.loads(file.read_text())["step"] == 8]

    def named(self, receiver, driver):
        """The process of a rank's number, or of a module."""
        family = psutil.Process(driver).children(recursive=True)
        words = {p.pid: (self.environment(p).get("RANK"), *p.cmdline()) for p in family}
        return next(pid for pid, found in words.items() if receiver in found)

    def left(self):
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if self.environment(process).get("TOY_MARK") == self.mark
            or self.mark in (process.info["cmdline"] or [])
        ]

    @staticmethod
    def environment(process):
        try:
            return process.environ()
        except psutil.Error:
            return {}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The ended launch of every case, by name."""
    with ThreadPoolExecutor(3) as pool:
        futures = {
            name: pool.submit(Ended, tmp_path_factory.mktemp(name), *case)
            for name, case in CASES.items()
        }
        return {name: future.result() for name, future in futures.items()}


@pytest.mark.parametrize("name", CASES)
def test_no_process_is_left_after_ten_seconds(ended, name):
    """The grace of the interrupted ranks is most of the seconds."""
    assert ended[name].remained == []
    assert ended[name].seconds < 10, ended[name].output


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("INT", "Interrupted: ended by SIGINT"),
        ("TERM", "Interrupted: ended by SIGTERM"),
        ("HUP", "Interrupted: ended by SIGHUP"),
        ("twice", "Interrupted: ended by SIGINT"),
        ("hook", "KeyError: 'in a hook of the driver'"),  # raised unchanged
        ("launcher", "the launcher was ended while its ranks were running"),  # not a rank
    ],
)
def test_what_ended_the_launch_is_reported(ended, name, words):
    assert words in ended[name].output


def test_a_killed_rank_is_the_cause_not_the_report_of_its_peer(ended):
    output = ended["rank"].output
    assert "rank 1 was ended by SIGKILL in update of step 8 since " in output
    assert "  cause    " in output  # which one depends on the machine
    assert "pair.cc" in ended["rank"].log
    assert "pair.cc" not in output


def test_a_rank_that_raises_is_the_cause(ended):
    output = ended["raise"].output
    assert re.search(r"StageError: stage toy failed after \d+ s \(.*\)\nrank1: Traceback", output)
    assert "ValueError: the cause" in output


def test_a_hang_is_reported_with_the_rank_that_is_behind(ended):
    output = ended["hang"].output
    for line in (
        "no rank has made progress for 30 s: rank 1 is behind, in update of step 7 since ",
        r"  rank 0: update of step 8 since [\d:]+$",
        r"  rank 1: update of step 7 since [\d:]+, its process is stopped$",
    ):
        assert re.search(line, output, re.MULTILINE), line
    assert "Raise launch.hang_timeout_s (30.0)." in output
    assert 'toy_program.py", line' in ended["hang"].log  # the stack of the rank that waits
