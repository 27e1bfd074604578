"""The sandbox: what an honest program may do there, how programs end, and machines without one."""

import os
import platform
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import psutil
import pytest
from processes import descendants
from waiting import wait_until

from rlhf_pipeline.errors import StageError
from rlhf_pipeline.runtime import sandbox
from rlhf_pipeline.runtime.heartbeat import LAUNCH
from rlhf_pipeline.stages.processes import kill_launch

pytestmark = pytest.mark.usefixtures("bubblewrap")
TWO_THREADS = "from threading import Timer; Timer(99, print).start(); Timer(99, print).run()"


def run(program, tests="", timeout_s=20, memory_mib=512):
    return sandbox.run(program, tests, timeout_s=timeout_s, memory_mib=memory_mib)


@pytest.mark.parametrize(
    ("program", "tests", "outcome"),
    [
        ("def f(x): return x + 1", "assert f(1) == 2", "passed"),
        ("def f(x): return x", "assert f(1) == 2", "failed"),
        ("f = '\N{SNOWMAN}'", "assert len(f) == 1", "passed"),
        ("f = '\ud800'", "assert len(f) == 1", "failed"),
        ("if __name__ == '__main__': f = 1", "assert f == 1", "passed"),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int'\n",
         "import pickle; assert pickle.loads(pickle.dumps(A(1))) == A(1)", "passed"),
        ("x = 1\n" * 200_000, "assert x == 1", "passed"),
        ("import numpy", "assert numpy.ones(9).sum() == 9", "passed"),
        ("import asyncio", "asyncio.run(asyncio.sleep(0))", "passed"),
        ("open('x', 'w').write('a')", "import os; assert os.path.expanduser('~') == os.getcwd(); "
         "assert open('x').read() == 'a'", "passed"),
        ("x = 1", "raise MemoryError", "out_of_memory"),
        ("while True: pass", "", "timed_out"),
    ],
)  # fmt: skip
def test_a_program_and_its_tests_run_in_one_module(program, tests, outcome):
    assert run(program, tests, timeout_s=1 if outcome == "timed_out" else 20) == outcome


def test_the_time_of_the_processor_is_limited_beside_the_clock(monkeypatch):
    """A clock that never rings leaves the limit of the processor."""
    patient = subprocess.Popen.communicate
    monkeypatch.setattr(subprocess.Popen, "communicate", lambda p, text, _: patient(p, text))
    assert run("while True: pass", timeout_s=1) == "timed_out"


def test_programs_beside_each_other_do_not_mix():
    turns = threading.Barrier(8)

    def one(number):
        turns.wait()
        return run(f"open('x', 'w').write('{number}')", f"assert open('x').read() == '{number}'")

    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(one, range(8))] == ["passed"] * 8


def test_a_program_cannot_undo_its_sandbox():
    """The last call would let it outlive its caller."""
    for call in (
        "CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, None)", "CDLL(None).sethostname(b'x', 1)",
        "CDLL(None).chroot(b'/usr')", "CDLL(None).prctl(1, 0)",
    ):  # fmt: skip
        assert run(f"from ctypes import CDLL; assert {call} == 0") == "failed"


@pytest.fixture
def launch(monkeypatch):
    """The launch of this process, whose variable a program of this test would have."""
    monkeypatch.setenv(LAUNCH, launch := f"1@2 {uuid4().hex}")
    return launch


def of_launch(launch):
    found = psutil.process_iter(["environ"])
    return [each for each in found if (each.info["environ"] or {}).get(LAUNCH) == launch]


def test_a_program_belongs_to_the_launch_but_does_not_know_it(launch):
    seen = "import os; assert {*os.environ} == {'HOME', 'LANG', 'OPENBLAS_NUM_THREADS', 'PWD'}"
    assert run(seen) == "passed"
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(run, "import time; time.sleep(99)", timeout_s=99)
        wait_until(lambda: of_launch(launch))
        kill_launch(launch)
        assert future.result(20) == "died"


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Puts a shell script in front of bubblewrap, which is `bwrap` in it."""

    def install(text):
        program, real = tmp_path / "bwrap", shutil.which("bwrap")
        program.write_text(f"#!/bin/sh\n{text.replace('bwrap', real)}")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return install


def test_a_process_that_bubblewrap_does_not_end_ends_with_the_call(launch, stand_in):
    """Bubblewrap asks the kernel to end its child with it only after the child has started."""
    stand_in('sleep 99 & exec bwrap "$@"')
    assert run("while True: pass", timeout_s=1) == "timed_out"
    assert psutil.wait_procs(of_launch(launch), timeout=5)[1] == []


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_program_ends_with_its_caller(is_slow, stand_in):
    """A killed rank leaves no program, even if bubblewrap starts only after its end."""
    if is_slow:
        stand_in('while kill -0 $PPID; do sleep 0.1; done 2> /dev/null; exec bwrap "$@"')
    calls = f"sandbox.run({TWO_THREADS!r}, '', timeout_s=99, memory_mib=128)"
    command = [sys.executable, "-c", f"from rlhf_pipeline.runtime import sandbox; {calls}"]

    def runs(each):
        return each.info["cmdline"][:1] == ["/bin/sh"] or each.num_threads() == 2

    with subprocess.Popen(command) as caller:
        wait_until(lambda: any(map(runs, descendants(caller.pid))))
        found = descendants(caller.pid)
        caller.kill()
    assert psutil.wait_procs(found, timeout=20)[1] == []


def test_a_machine_that_denies_namespaces_is_refused(stand_in):
    """The kernel refuses them to bubblewrap, which runs in a sandbox without further ones."""
    stand_in('exec bwrap --unshare-user --disable-userns --dev-bind / / bwrap "$@"')
    message = r"^sandbox: found 'bwrap: .*, expected .* allow namespaces"
    with pytest.raises(StageError, match=message):
        run("x = 1")


def test_another_type_of_machine_is_refused(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(StageError, match=r"type riscv64, expected x86_64 or aarch64\. Fix: "):
        run("x = 1")
