"""Two ranks under DeepSpeed's launcher, ended in every way there is: the cause is named, and nothing is left after 10 s.

The launches are real, the program is not: its ranks wait, die, hang or complain as they are told. All launches run first,
three at a time; the tests look at what came of them.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from rlhf_pipeline.stages import run

pytestmark = pytest.mark.long

PROGRAM = """
import os, signal, socket, subprocess, sys, time
from pathlib import Path
from rlhf_pipeline.config.block import Block
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.errors import PipelineError
from rlhf_pipeline.stages import events, run
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.stages.launch import launcher
from rlhf_pipeline.stages.cache import planning
from rlhf_pipeline.stages.job import Job, PROGRAMS, Program
from rlhf_pipeline.runtime.processes import process_identity
from rlhf_pipeline.runtime.program import run_program

PROGRAMS["toy"] = Program("toy_program", distributed=True, libraries=())

if "RANK" in os.environ and '"import"' in Path(sys.argv[1]).read_text():
    time.sleep(300)

class Toy(Block):
    ranks: tuple[str, str]

def main(job):
    rank = int(os.environ["RANK"])
    act = job.config["toy"]["ranks"][rank]
    if act == "listen":
        if rank == 0:
            socket.socket().bind(("", int(os.environ["MASTER_PORT"])))
        job.export.mkdir(exist_ok=True)
        return {}
    if act == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if act == "parent":
        for session in (False, True):
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=session)
    if act == "measure":
        job.metrics_file.write_text('{"step": 1, "total_steps": 2, "time": 1.0, "metrics": {}}\\n')
    heartbeat.at("update", 7)
    if act == "raise":
        raise ValueError("the cause")
    if act == "stop":
        time.sleep(2 * heartbeat.WRITE_EVERY_S)
        os.kill(os.getpid(), signal.SIGSTOP)
    heartbeat.at("update", 8)
    other = None
    while True:
        time.sleep(0.01)
        other = other or heartbeat.read_heartbeats(job.directory).get(1 - rank)
        if act == "complain" and other and process_identity(other.pid) is None:
            raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:1")

if __name__ == "__main__" and "RANK" in os.environ:
    run_program(main)
elif __name__ == "__main__":
    class Watcher:
        stage_started = stage_ended = lambda *arguments: None
        def stage_metrics(self, run, records):
            raise KeyError("in a hook of the driver")
    events._listeners.append(Watcher())
    workspace, ranks, options, ports = (__import__("json").loads(a) for a in sys.argv[1:])
    if ports:
        free = launcher.free_port
        launcher.free_port = lambda configured: ports.pop() if ports else free(configured)
    planning.fingerprint = lambda recipe: "toy".ljust(64, "0")
    try:
        run.run_stage(Job("toy", {"toy": Toy(ranks=ranks)}, {}, 1), LaunchConfig(processes=2, **options), Path(workspace))
    except PipelineError as error:
        sys.exit(f"{type(error).__name__}: {error}")
"""

CASES = {
    "INT": (("parent", "ignore"), {}, "driver", signal.SIGINT),
    "TERM": (("wait", "parent"), {}, "driver", signal.SIGTERM),
    "HUP": (("wait", "wait"), {}, "driver", signal.SIGHUP),
    "driver": (("parent", "ignore"), {}, "driver", signal.SIGKILL),
    "runner": (("wait", "ignore"), {}, "deepspeed", signal.SIGKILL),
    "launcher": (("wait", "parent"), {}, "deepspeed.launcher.launch", signal.SIGKILL),
    "rank": (("complain", "parent"), {}, "1", signal.SIGKILL),
    "raise": (("ignore", "raise"), {}, "report", None),
    "hang": (("wait", "stop"), {"hang_timeout_s": 4.0}, None, None),
    "twice": (("ignore", "ignore"), {}, "driver", (signal.SIGINT, signal.SIGINT)),
    "start": (("import", "import"), {}, "importing", signal.SIGKILL),
    "hook": (("measure", "parent"), {}, None, None),
    "port": (("listen", "listen"), {}, None, None),
}
"""What each rank does, options, and who gets which signal once both ranks are there; or what is waited for instead."""


class Ended:
    """One launch after its end."""

    def __init__(self, folder: Path, ranks, options, whom, number, ports):
        self.mark = uuid.uuid4().hex
        environment = os.environ | {
            "TOY_MARK": self.mark,
            "PYTHONPATH": f"{folder}:{Path(run.__file__).parents[2]}",
        }
        self.directory = folder / "toy" / "toy".ljust(16, "0")
        arguments = [json.dumps(argument) for argument in (str(folder), ranks, options, ports)]
        command = [sys.executable, str(folder / "toy_program.py"), *arguments]
        (folder / "toy_program.py").write_text(textwrap.dedent(PROGRAM))
        with (folder / "output").open("w") as output:
            driver = subprocess.Popen(
                command, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        if whom == "importing":
            self.wait_for(
                lambda: sum("RANK" in self.environment(process) for process in self.left()) == 2
            )
            driver.send_signal(number)
        elif whom == "report":
            self.wait_for(lambda: any(self.directory.glob("errors/*.txt")))
        elif whom is not None:
            self.wait_for(lambda: len(self.at_work()) == 2)
            family = psutil.Process(driver.pid).children(recursive=True)
            named = [
                p
                for p in family
                if whom
                in (self.environment(p).get("RANK"), Path(p.cmdline()[1]).name, *p.cmdline())
            ]
            for each in number if isinstance(number, tuple) else (number,):
                os.kill(driver.pid if whom == "driver" else named[0].pid, each)
                time.sleep(1)
        else:
            self.wait_for(lambda: driver.poll() is not None)
        ended = time.monotonic()
        while time.monotonic() < ended + 20 and (driver.poll() is None or self.left()):
            time.sleep(0.1)
        self.seconds = time.monotonic() - ended
        self.remained = [process.cmdline() for process in self.left()]
        for process in self.left():
            process.kill()
        self.code, self.output = driver.wait(), (folder / "output").read_text()
        self.log = (self.directory / "program.log").read_text()

    def at_work(self):
        return [
            p
            for p in self.directory.glob("heartbeats/rank*.json")
            if json.loads(p.read_text())["step"] == 8
        ]

    def left(self):
        return [
            p for p in psutil.process_iter() if self.environment(p).get("TOY_MARK") == self.mark
        ]

    @staticmethod
    def environment(process):
        try:
            return process.environ()
        except psutil.Error:
            return {}

    @staticmethod
    def wait_for(condition, seconds=240):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Every case's launch, by name."""
    with socket.socket() as taken, ThreadPoolExecutor(3) as pool:
        taken.bind(("", 0))
        taken.listen()
        futures = {
            name: pool.submit(
                Ended,
                tmp_path_factory.mktemp(name),
                *case,
                [taken.getsockname()[1]] if name == "port" else [],
            )
            for name, case in CASES.items()
        }
        return {name: future.result() for name, future in futures.items()}


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_left_ten_seconds_later(ended, name):
    assert ended[name].remained == []
    assert ended[name].seconds < 10, ended[name].output


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP", "twice"])
def test_a_signal_to_the_driver_is_an_interruption(ended, name):
    assert f"Interrupted: ended by SIG{name.replace('twice', 'INT')}" in ended[name].output


def test_an_error_in_the_driver_is_its_own(ended):
    assert "KeyError: 'in a hook of the driver'" in ended["hook"].output


def test_a_killed_rank_is_the_cause_and_its_peers_complaint_is_not(ended):
    output = ended["rank"].output
    assert "rank 1 was ended by SIGKILL in update of step 8 since " in output
    assert "  cause    " in output  # which one depends on what else this machine is short of
    assert "pair.cc" in ended["rank"].log
    assert "pair.cc" not in output


def test_a_killed_launcher_is_no_killed_rank(ended):
    for name in ("runner", "launcher"):
        assert "the launcher was ended while its ranks were at work" in ended[name].output


def test_a_rank_that_raises_is_the_cause(ended):
    output = ended["raise"].output
    assert re.search(r"StageError: stage toy failed after \d+ s \(.*\)\nrank1: Traceback", output)
    assert "ValueError: the cause" in output


def test_a_hang_names_the_rank_that_is_behind(ended):
    output = ended["hang"].output
    assert (
        "no rank has made progress for 4 s: rank 1 is behind, in update of step 7 since " in output
    )
    assert re.search(r"  rank 0: update of step 8 since [\d:]+$", output, re.MULTILINE)
    assert re.search(
        r"  rank 1: update of step 7 since [\d:]+, its process is stopped$", output, re.MULTILINE
    )
    assert "raise launch.hang_timeout_s (4.0)" in output
    assert 'toy_program.py", line' in ended["hang"].log  # the stack of the rank that waits


def test_a_port_that_was_taken_meanwhile_is_tried_again(ended):
    assert ended["port"].code == 0, ended["port"].output
    assert "it is launched again on another" in ended["port"].output
