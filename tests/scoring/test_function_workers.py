"""Functions in processes of their own, and functions that are async, hang, crash or spread."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from uuid import uuid4

import psutil
import pytest

from rlhf_pipeline.errors import StageError
from rlhf_pipeline.scoring.answers import Answered

FILE = """
import asyncio, ctypes, math, os, signal, sys, threading, time
from dataclasses import dataclass
from pathlib import Path

@dataclass
class Score:
    value: float

    def __float__(self):
        return self.value

class Unpicklable(Exception): pass

def reads(prompts, responses, references, level=0):
    assert len(prompts) == len(responses) == len(references) == len(level) == 1
    return [Score(len(prompts[0][0]["content"]) + float(references[0]) + level[0])]

def together(prompts, responses):
    own = Path(__file__).with_name(f"ran-{responses[0]}")
    own.touch()
    while len([*own.parent.glob("ran-*")]) < 3:
        time.sleep(0.01)
    return [os.getpid()]

def modules(prompts, responses):
    return [len({"torch", "deepspeed", "transformers", "pytest"} & {*sys.modules})]

async def later(prompts, responses):
    return await asyncio.gather(*(one(each) for each in responses))

async def one(response):
    await asyncio.sleep(0.01)
    return len(response)

async def never(prompts, responses):
    await asyncio.sleep(99)

def hangs(prompts, responses):
    Path(__file__).with_name("pid").write_text(f"{os.getpid()}\\n")
    time.sleep(99)

def given(prompts, responses):
    BODY
"""


@pytest.fixture
def make(load_one, tmp_path):
    """Loads a function of the file above; its processes end with the test."""
    file = tmp_path / "my.py"
    made = []

    def function(name, processes=2, body="pass", **fields):
        file.write_text(FILE.replace("BODY", body))
        block = {"callable": f"{file}:{name}", "processes": processes} | fields
        made.append(load_one(block, files={"rewards.0": file}))
        return made[-1]

    yield function
    for source in made:
        if source.workers is not None:
            source.workers.stop()


def test_a_process_gets_one_row_with_its_columns(make, scored, answered):
    given = replace(answered, columns={"level": [100, 200, 300]})
    assert make("reads")(scored, given) == [115.0, 216.0, 317.0]


def test_the_processes_work_at_the_same_time_and_stay(make, scored, answered):
    source = make("together", processes=3, timeout_s=60)
    first = source(scored, answered)
    assert len({*first}) == 3
    for process in first:  # a scheduler's, which the rank obeys at the end of its step
        os.kill(int(process), signal.SIGTERM)
    assert {*source(scored, answered)} <= {*first}


@pytest.mark.parametrize("processes", [0, 2])
def test_an_async_function_is_awaited(make, processes, scored, answered):
    assert make("later", processes)(scored, answered) == [1.0, 4.0, 1.0]


def test_an_async_function_has_the_same_limit(make, scored, answered):
    with pytest.raises(StageError, match=r"my\.py:never took longer than 0\.5 s \(timeout_s\) at"):
        make("never", timeout_s=0.5)(scored, answered)


MANY = Answered([[]] * 5, [None] * 5, ["a"] * 5)


def test_the_limit_is_that_of_one_response(make, scored):
    """Five calls of 0.3 s take longer than the limit of one."""
    slow = make("given", processes=1, body="time.sleep(0.3); return [1.0]", timeout_s=1)
    assert slow(scored, MANY) == [1.0] * 5


def test_a_fork_that_returns_from_the_function_gives_no_further_result(make, scored):
    forks = make("given", processes=1, body="return [0.0 if os.fork() else 1.0]")
    assert forks(scored, MANY) == [0.0] * 5


HOSTILE = {
    "never_ends": ("while True: pass", " took longer than 1 s (timeout_s) at"),
    "ignores_sigterm": (
        "[signal.signal(n, signal.SIG_IGN) for n in (signal.SIGTERM, signal.SIGINT)]\n"
        "    while True: time.sleep(1)",
        " took longer than 1 s (timeout_s) at",
    ),
    "exits_in_a_thread": (
        "threading.Timer(0.2, os._exit, (5,)).start(); time.sleep(99)",
        " ended its process with code 5 at",
    ),
    "leaves": ("sys.exit(0)", " failed at"),
    "reads_nowhere": ("ctypes.string_at(0)", " ended its process by SIGSEGV at"),
    "calls_itself": ("f = lambda: f()\n    f()", " failed at"),
    "returns_none": ("return None", ": found None, expected a list of one number, for"),
    "returns_a_function": ("return [lambda: 1.0]", ": found <function"),
    "raises_what_cannot_be_sent": ("raise Unpicklable(lambda: 0)", " failed at"),
    "raises_what_cannot_be_printed": (
        "class Silent(Exception):\n        def __str__(self): raise ZeroDivisionError\n"
        "    raise Silent", " failed at",
    ),
    "returns_what_cannot_be_printed": (
        "class Silent:\n        def __repr__(self): raise ZeroDivisionError\n"
        "    return [Silent()]", ": found an object of the type Silent",
    ),
    "is_cancelled": ("import asyncio; raise asyncio.CancelledError", " failed at"),
    "fails_within_a_lazy_result": ("return (len(None) for _ in responses)", " failed at"),
    "returns_a_number_that_is_too_large": ("return [10**400]", ": found 1000"),
    "forks_children_that_fork": (
        "[(os.fork(), time.sleep(0.2)) for _ in range(6)]; time.sleep(60); os._exit(0)",
        " took longer than 1 s (timeout_s) at",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_function_ends_the_stage_with_its_response_and_leaves_no_process(
    make, name, scored, answered, monkeypatch
):
    body, message = HOSTILE[name]
    monkeypatch.setenv("HOSTILE_TEST", mark := uuid4().hex)
    limit = 1 if "longer" in message else 15
    source = make("given", processes=1, body=body, timeout_s=limit)
    with pytest.raises(StageError) as failure:
        source(scored, answered)
    assert failure.value.message.startswith(f"{source.place}{message}")
    assert f"the response '4' to the prompt {answered.prompts[0]}" in failure.value.message
    remains = [each for each in psutil.process_iter() if _has(each, mark)]
    _, alive = psutil.wait_procs(remains, timeout=5)
    assert alive == []


def _has(process, mark):
    try:
        return process.environ().get("HOSTILE_TEST") == mark and process.pid != os.getpid()
    except psutil.Error:  # it has ended, or belongs to another user
        return False


PROGRAM = """
import sys
from rlhf_pipeline.scoring.function_workers import Call, Workers
workers = Workers("my.py", sys.argv[1], sys.argv[2], 2, None)
print(workers([Call([[]], ["a"], {})]))
"""


@pytest.fixture
def command(make, tmp_path):
    """The command of a program that calls a function of the file in two processes.

    It has no guard `if __name__ == "__main__"`.
    """
    make("later", 0)  # writes the file
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    return lambda name: [sys.executable, program, tmp_path / "my.py", name]


def test_the_processes_end_with_the_program_and_import_no_library_of_the_rank(command):
    ended = subprocess.run(command("modules"), capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "[0.0]\n"), ended.stderr


def test_a_call_that_hangs_ends_with_a_rank_that_is_killed(command, tmp_path):
    rank = subprocess.Popen(command("hangs"))
    written = tmp_path / "pid"
    while not (written.is_file() and written.read_text().endswith("\n")):
        assert rank.poll() is None
        time.sleep(0.05)
    worker = psutil.Process(int(written.read_text()))
    rank.kill()
    rank.wait()
    gone, _ = psutil.wait_procs([worker], timeout=10)
    assert gone == [worker]
