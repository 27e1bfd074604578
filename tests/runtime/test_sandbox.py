"""The sandbox: what an honest program may do there, how programs end, and machines without one."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlhf_pipeline.runtime import sandbox

pytestmark = pytest.mark.usefixtures("namespaces")


def run(program, tests="", timeout_s=20, memory_mib=512, **options):
    return sandbox.run(program, tests, timeout_s=timeout_s, memory_mib=memory_mib, **options)


@pytest.mark.parametrize("isolated", [True, False])
@pytest.mark.parametrize(
    ("program", "tests", "outcome"),
    [
        ("def f(x): return x + 1", "assert f(1) == 2", "passed"),
        ("def f(x): return x", "assert f(1) == 2", "failed"),
        ("f = 1", "import no_such_module", "failed"),
        ("f = '\N{SNOWMAN}'", "assert len(f) == 1", "passed"),
        ("f = '\ud800'", "assert len(f) == 1", "failed"),
        ("if __name__ == '__main__': f = 1", "assert f == 1", "passed"),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int'\n",
         "import pickle; assert pickle.loads(pickle.dumps(A(1))) == A(1)", "passed"),
        ("import numpy", "assert numpy.ones(9).sum() == 9", "passed"),
        ("import threading", "t = threading.Thread(target=print); t.start(); t.join()", "passed"),
        ("import asyncio", "asyncio.run(asyncio.sleep(0))", "passed"),
        ("open('x', 'w').write('a')", "import os; assert os.path.expanduser('~') == os.getcwd(); "
         "assert open('x').read() == 'a'", "passed"),
        ("x = 1", "raise MemoryError", "out_of_memory"),
        ("while True: pass", "", "timed_out"),
    ],
)  # fmt: skip
def test_a_program_and_its_tests_run_in_one_module(program, tests, outcome, isolated):
    limit = 1 if outcome == "timed_out" else 20
    assert run(program, tests, isolated=isolated, timeout_s=limit) == outcome


def test_the_time_of_the_processor_is_limited_beside_the_clock(monkeypatch):
    """Two threads use two seconds in one."""
    monkeypatch.setattr(sandbox.subprocess.Popen, "communicate", lambda p, text, _: talk(p, text))

    def talk(process, text):
        process.stdin.write(text)
        process.stdin.close()
        return None, process.stderr.read()

    assert run("while True: pass", timeout_s=1) == "timed_out"


def test_programs_beside_each_other_do_not_mix():
    turns = threading.Barrier(8)

    def one(number):
        turns.wait()
        return run(f"open('x', 'w').write('{number}')", f"assert open('x').read() == '{number}'")

    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(one, range(8))] == ["passed"] * 8


def test_a_long_program_arrives():
    assert run("x = 1\n" * 200_000, "assert x == 1") == "passed"


REFUSED = """#!{python}
import os, sys
sys.path.insert(0, {folder!r})
import sandbox
sandbox._deny_calls()
os.execv({python!r}, [{python!r}, *sys.argv[1:]])
"""


def test_a_machine_that_denies_namespaces_is_refused(tmp_path, monkeypatch):
    """The kernel refuses `unshare` to the launcher, as in a container."""
    folder = str(tmp_path)
    (tmp_path / "sandbox.py").symlink_to(sandbox.__file__)
    starter = tmp_path / "python"
    starter.write_text(REFUSED.format(python=sys.executable, folder=folder))
    starter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(starter))
    with pytest.raises(sandbox.SandboxError, match=r"^PermissionError .*unshare: Operation not"):
        run("x = 1")


def test_another_type_of_machine_is_refused(monkeypatch, tmp_path):
    file = tmp_path / "sandbox.py"
    file.write_text(
        Path(sandbox.__file__).read_text().replace('"x86_64"', '"a"').replace("aarch64", "b")
    )
    monkeypatch.setattr(sandbox, "__file__", str(file))
    with pytest.raises(sandbox.SandboxError, match=r"^KeyError "):
        run("x = 1")
