"""Programs of a policy that hang, crash, lie or spread: the sandbox keeps them from files, network
and a reward that they have not earned.
"""

import os
import socket
import tempfile
from contextlib import suppress
from uuid import uuid4

import psutil
import pytest

from rlhf_pipeline.config.rewards import CodeReward
from rlhf_pipeline.runtime.heartbeat import LAUNCH
from rlhf_pipeline.scoring.answers import Answered
from rlhf_pipeline.scoring.sources import CodeSource

PROMPTS = [[{"role": "user", "content": f"Question {n}?"}] for n in range(3)]


def survivors(mark):
    """Processes of a launch that are still there after some seconds."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended
            if process.environ().get(LAUNCH) == mark:
                found.append(process)
    return psutil.wait_procs(found, timeout=5)[1]


# If the sandbox fails, none of these harms the machine: signal 0 is none, and a fork is small.
PASSES = "def f(): return 1\n"
PROGRAMS = {
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
    "reads_nowhere": ("import ctypes; ctypes.string_at(0)", "died"),
    "takes_all_memory": ("x = bytearray(1 << 33)", "out_of_memory"),
    "forks_many": (PASSES + "import os\nfor _ in range(8): os.fork()", "failed"),
    "starts_a_program": (PASSES + "import subprocess; subprocess.run(['true'])", "failed"),
    "mounts_over_python": (
        PASSES + "import ctypes; c = ctypes.CDLL(None)\n"
        "assert c.mount(b'x', b'/usr', b'tmpfs', 0, None) == 0", "failed",
    ),
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
    "writes_through_a_link": (
        PASSES + "import os; os.symlink('{home}', 'link'); open('link/x', 'w')", "failed",
    ),
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
    "guesses_the_secret": (
        "import os\nfor n in range(3, 9):\n"
        "    try: os.write(n, bytes(32))\n    except OSError: pass\nos._exit(0)",
        "failed",
    ),
    "replaces_exec": ("import builtins; builtins.exec = builtins.compile = print", "failed"),
    "replaces_errors": (
        "import builtins\nbuiltins.AssertionError = builtins.BaseException = int", "failed",
    ),
    "replaces_its_tests": (
        "import sys\nsys.modules['__main__'].__dict__.clear()\nsys.excepthook = print", "failed",
    ),
    "is_no_python": ("def f(: return 1", "failed"),
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
        values = {"home": home, "caller": os.getpid(), "port": server.getsockname()[1]}
        for field, value in values.items():
            program = program.replace(f"{{{field}}}", str(value))
        reward = CodeReward(code="python", timeout_s=4, memory_mib=128, processes=1)
        source = CodeSource(reward, "ppo.rewards.0")
        responses = [f"Here:\n```python\n{each}\n```" for each in (program, PASSES)]
        scores = source(None, Answered(PROMPTS[:2], ["assert f() == 1"] * 2, responses))
    assert scores == [0.0, 1.0]
    assert source.counts == {outcome: 1}
    assert survivors(mark) == []
    assert [*work.iterdir()] == [*temporary.iterdir()] == []
    assert [each.name for each in home.iterdir()] == ["secret"]
