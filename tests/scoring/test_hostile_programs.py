"""Functions and programs that hang, crash, lie or spread: each has a name, an end and no remains.

Functions are the user's own: their processes keep the rank alive. Programs are those of a policy:
the sandbox also keeps them from files, network and a reward that they have not earned.
"""

import os
import socket
import tempfile
import time
from uuid import uuid4

import psutil
import pytest

from rlhf_pipeline.config.rewards import CallableReward, CodeReward
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.runtime.heartbeat import LAUNCH
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.scoring.answers import Answered
from rlhf_pipeline.scoring.code_reward import CodeSource
from rlhf_pipeline.scoring.sources import FunctionSource

LONGEST_S = 20
"""Also on a machine that is busy; the limit of a case that hangs is 1 or 2 seconds."""
PROMPTS = [[{"role": "user", "content": f"Question {n}?"}] for n in range(3)]


def survivors(belongs):
    """Processes that are still there after some seconds."""
    deadline = time.monotonic() + 5
    while True:
        found = []
        for process in psutil.process_iter():
            try:
                if belongs(process):
                    found.append(process)
            except psutil.Error:  # it has ended
                continue
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


FUNCTIONS = {
    "sleeps": ("time.sleep(99)", "took longer than 1 s (timeout_s)"),
    "never_ends": ("while True: pass", "took longer than 1 s (timeout_s)"),
    "ignores_sigterm": (
        "[signal.signal(n, signal.SIG_IGN) for n in (signal.SIGTERM, signal.SIGINT)]\n"
        "    while True: time.sleep(1)",
        "took longer than 1 s (timeout_s)",
    ),
    "exits_well": ("os._exit(0)", "ended its process with code 0"),
    "exits": ("os._exit(3)", "ended its process with code 3"),
    "exits_in_a_thread": (
        "threading.Timer(0.2, os._exit, (5,)).start(); time.sleep(99)",
        "ended its process with code 5",
    ),
    "leaves": ("sys.exit(0)", "failed with SystemExit: 0 ("),
    "kills_itself": ("os.kill(os.getpid(), signal.SIGKILL)", "ended its process by SIGKILL"),
    "reads_nowhere": ("ctypes.string_at(0)", "ended its process by SIGSEGV"),
    "overflows_the_stack": ("faulthandler._stack_overflow()", "ended its process by SIGSEGV"),
    "becomes_another": ("os.execv('/bin/true', ['true'])", "ended its process with code 0"),
    "has_no_memory": ("bytearray(1 << 62)", "failed with MemoryError: "),
    "calls_itself": (
        "f = lambda: f()\n    f()",
        "failed with RecursionError: maximum recursion depth exceeded",
    ),
    "returns_none": ("return None", "failed: found None, expected a list of one number,"),
    "returns_text": ("return ['1.0']", "failed: found '1.0', expected a finite number,"),
    "returns_nan": ("return [math.nan]", "failed: found nan, expected a finite number,"),
    "returns_infinity": ("return [-math.inf]", "failed: found -inf, expected a finite number,"),
    "returns_too_many": ("return [1.0] * 9", "failed: found 9 results, expected one,"),
    "returns_a_table": (
        "return [[1.0, 2.0]]", "failed: found [1.0, 2.0], expected a finite number,",
    ),
    "returns_a_function": ("return [lambda: 1.0]", "failed: found <function"),
    "returns_a_liar": (
        "return [Liar()]", "failed: found an object of the type Liar, expected a finite number,",
    ),
    "raises_a_liar": ("raise Unpicklable(lambda: 0)", "failed with Unpicklable: <function"),
    "forks_many": (
        "[os.fork() or (time.sleep(60), os._exit(0)) for _ in range(30)]; time.sleep(60)",
        "took longer than 1 s (timeout_s)",
    ),
    "forks_children_that_fork": (
        "[(os.fork(), time.sleep(0.2)) for _ in range(6)]; time.sleep(60); os._exit(0)",
        "took longer than 1 s (timeout_s)",
    ),
    "leaves_a_daemon": ("daemon(); os._exit(4)", "ended its process with code 4"),
    "fails_beside_a_daemon": ("daemon(); raise ValueError('x')", "failed with ValueError: x ("),
    "leaves_a_program": (
        "subprocess.Popen(['sleep', '60'], start_new_session=True); os._exit(6)",
        "ended its process with code 6",
    ),
}  # fmt: skip
HEAD = """
import ctypes, faulthandler, math, os, signal, subprocess, sys, threading, time

class Liar:
    def __float__(self): raise ZeroDivisionError
    def __repr__(self): raise ZeroDivisionError

class Unpicklable(Exception): pass

def daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(60)
        os._exit(0)
    time.sleep(0.2)
"""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_hostile_function_ends_the_stage_with_its_name(name, tmp_path, monkeypatch):
    body, message = FUNCTIONS[name]
    file = tmp_path / "my.py"
    file.write_text(f"{HEAD}\ndef {name}(prompts, responses):\n    {body}\n")
    monkeypatch.setenv("HOSTILE_TEST", mark := uuid4().hex)
    place = f"{file}:{name}"
    limit = 1 if "longer" in message else 15
    reward = CallableReward(callable=place, processes=1, timeout_s=limit)
    job = LaunchedJob("ppo", "f", 1, {}, {"rewards.0": file}, {}, tmp_path, 60.0)
    began = time.monotonic()
    source = FunctionSource.load(reward, job, "rewards.0")
    with pytest.raises(StageError) as failure:
        source(None, Answered(PROMPTS, ["4", "5", "6"], ["four", "five", "six"]))
    assert time.monotonic() - began < LONGEST_S
    text = failure.value.message
    assert text.startswith(f"{place} {message}")
    assert text.endswith(f"at the response 'four' to the prompt {PROMPTS[0]}")
    assert survivors(lambda p: p.environ().get("HOSTILE_TEST") == mark) == []


# If the sandbox fails, none of these harms the machine: signal 0 is none, and a fork is small.
PASSES = "def f(): return 1\n"
PROGRAMS = {
    "sleeps": ("import time; time.sleep(99)", "timed_out"),
    "never_ends": ("while True: pass", "timed_out"),
    "ignores_signals": (
        "import signal, time\n"
        "for n in (signal.SIGTERM, signal.SIGXCPU, 14): signal.signal(n, signal.SIG_IGN)\n"
        "while True: pass",
        "timed_out",
    ),
    "sleeps_in_a_thread": (
        "import threading, time; threading.Thread(target=time.sleep, args=(99,)).start()",
        "failed",  # it is over with its main thread
    ),
    "leaves": ("import sys; sys.exit(0)", "failed"),
    "exits_well": ("import os; os._exit(0)", "failed"),
    "becomes_another": ("import os; os.execv('/usr/bin/true', ['true'])", "failed"),
    "kills_itself": ("import os; os.kill(os.getpid(), 9)", "failed"),  # no signal of its own
    "reads_nowhere": ("import ctypes; ctypes.string_at(0)", "died"),
    "overflows_the_stack": ("import faulthandler; faulthandler._stack_overflow()", "died"),
    "aborts": ("import os; os.abort()", "died"),
    "takes_all_memory": ("x = bytearray(1 << 33)", "out_of_memory"),
    "calls_itself": ("def g(): return g()\ng()", "failed"),
    "forks_many": (PASSES + "import os\nfor _ in range(8): os.fork()", "failed"),
    "leaves_a_daemon": (PASSES + "import os\nos.fork() or os.setsid() or os.fork()", "failed"),
    "starts_a_program": (PASSES + "import subprocess; subprocess.run(['true'])", "failed"),
    "starts_a_program_by_spawn": (
        PASSES + "import os; os.posix_spawn('/usr/bin/true', ['true'], {})", "failed",
    ),
    "mounts_over_python": (
        PASSES + "import ctypes; c = ctypes.CDLL(None)\n"
        "assert c.mount(b'x', b'/usr', b'tmpfs', 0, None) == 0", "failed",
    ),
    "writes_beside_its_folder": (PASSES + "open('/x', 'w')", "failed"),
    "writes_without_end": (
        PASSES + "import os\nfor n in 99 * [*range(3, 9)]:\n"
        "    try: os.write(n, bytes(1 << 16))\n    except OSError: pass", "failed",
    ),
    "signals_everyone": (PASSES + "import os; os.kill(-1, 0)", "failed"),
    "signals_the_caller": (PASSES + "import os; os.kill({caller}, 0)", "failed"),
    "makes_namespaces": (
        PASSES + "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0", "failed",
    ),
    "writes_at_home": (PASSES + "open('{home}/x', 'w')", "failed"),
    "writes_beside_the_caller": (PASSES + "open('{work}/x', 'w')", "failed"),
    "writes_into_python": (PASSES + "import json; open(json.__file__, 'a')", "failed"),
    "writes_through_a_link": (
        PASSES + "import os; os.symlink('{home}', 'link'); open('link/x', 'w')", "failed",
    ),
    "adds_to_python": (
        PASSES + "import os; os.mkdir(os.__file__.replace('os.py', 'hostile'))", "failed",
    ),
    "fills_the_disk": (PASSES + "open('big', 'wb').truncate(1 << 40)", "failed"),
    "fills_its_folder": (
        PASSES + "for n in range(9): open(str(n), 'wb').write(bytes(1 << 24))", "failed",
    ),
    "reads_a_secret_file": (PASSES + "open('{home}/secret').read()", "failed"),
    "reads_a_secret_variable": (
        PASSES + "import os; assert 'HOSTILE_SECRET' in os.environ", "failed",
    ),
    "reads_the_caller": (PASSES + "open('/proc/{caller}/environ').read()", "failed"),
    "connects": (
        PASSES + "import socket; socket.create_connection(('127.0.0.1', {port}))", "failed",
    ),
    "prints_ok": ("import os; print('ok', flush=True); os.write(1, bytes(32)); f = int", "failed"),
    "guesses_the_secret": (
        "import os\nfor n in range(3, 9):\n"
        "    try: os.write(n, bytes(32))\n    except OSError: pass\nos._exit(0)",
        "failed",
    ),
    "replaces_exec": ("import builtins; builtins.exec = builtins.compile = print", "failed"),
    "replaces_exit": ("import os, sys; os._exit = sys.exit = print; raise SystemExit", "failed"),
    "replaces_errors": (
        "import builtins\nbuiltins.AssertionError = builtins.BaseException = int", "failed",
    ),
    "replaces_its_tests": (
        "import sys\nsys.modules['__main__'].__dict__.clear()\nsys.excepthook = print", "failed",
    ),
    "is_no_python": ("def f(: return 1", "failed"),
    "contains_a_null": ("f = '\0'\0", "failed"),
}  # fmt: skip


@pytest.mark.usefixtures("bubblewrap")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_hostile_program_earns_nothing(name, tmp_path, monkeypatch):
    program, outcome = PROGRAMS[name]
    home, work, temporary = (tmp_path / each for each in ("home", "work", "temporary"))
    for folder in (home, work, temporary):
        folder.mkdir()
    (home / "secret").write_text("x")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HOSTILE_SECRET", "x")
    monkeypatch.setenv(LAUNCH, mark := f"1@2 {uuid4().hex}")  # what bubblewrap runs belongs to it
    monkeypatch.chdir(work)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with socket.create_server(("127.0.0.1", 0)) as server:
        values = {"home": home, "work": work, "caller": os.getpid()}
        for field, value in (values | {"port": server.getsockname()[1]}).items():
            program = program.replace(f"{{{field}}}", str(value))
        reward = CodeReward(code="python", timeout_s=4, memory_mib=128, processes=1)
        source = CodeSource(reward, "ppo.rewards.0")
        responses = [f"Here:\n```python\n{each}\n```" for each in (program, PASSES)]
        began = time.monotonic()
        scores = source(None, Answered(PROMPTS[:2], ["assert f() == 1"] * 2, responses))
    assert time.monotonic() - began < LONGEST_S
    assert scores.tolist() == [0.0, 1.0]
    assert source.counts == {outcome: 1}
    assert survivors(lambda p: p.environ().get(LAUNCH) == mark) == []
    assert [*work.iterdir()] == [*temporary.iterdir()] == []
    assert [each.name for each in home.iterdir()] == ["secret"]
