"""One process at a time runs a recipe; another one reports whom it waits for."""

import os
import re
import signal
import subprocess
import sys
from threading import Thread

import psutil
import pytest
from waiting import HANGS_S, once, wait_until

from rlhf_pipeline.errors import StageError
from rlhf_pipeline.stages.cache.workspace import attempts, await_programs, user


def first_attempt(drill):
    return next((drill.root / "workspace" / "drill").iterdir())


@pytest.fixture
def held(drill):
    """Another process that is running the stage."""
    drill.order("hold")
    process = drill.run_elsewhere()
    wait_until(lambda: drill.launches == 1)
    yield process
    process.kill()
    process.wait()


def reports(caplog, words):
    return any(words in message for message in caplog.messages)


def test_the_second_run_waits_and_reports_for_whom(drill, held, caplog):
    with once(
        lambda: reports(caplog, "waiting until it ends"), lambda: drill.order("hold", given=False)
    ):
        export = drill.run()
    assert held.communicate(timeout=HANGS_S)[0].strip() == str(export)
    assert (drill.launches, (export / "result").read_text()) == (1, "launch 1")
    pattern = (
        rf"stage drill: recipe {export.parent.name[:8]} is being run by process {held.pid} since "
        r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d; waiting until it ends"
    )
    assert [message for message in caplog.messages if re.fullmatch(pattern, message)] != []


def test_without_waiting_the_second_run_fails(drill, held):
    with pytest.raises(
        StageError,
        match=rf"is being run by process {held.pid} since .* Fix: set launch\.wait to true",
    ):
        drill.run(wait=False)
    assert drill.launches == 1


def test_another_recipe_does_not_wait(drill, held):
    with once(lambda: drill.launches == 2, lambda: drill.order("hold", given=False)):
        mine = drill.run(value=2, wait=False)
    theirs = held.communicate(timeout=HANGS_S)[0].strip()
    assert str(mine) != theirs


def test_the_lock_of_a_killed_process_is_free(drill, held, caplog):
    assert user(first_attempt(drill)).startswith(f"process {held.pid} since ")
    # The program outlives its driver; the next run waits for it, as both write into one directory.
    # While they are stopped, neither the program nor the driver's guard can end the program.
    orphans = psutil.Process(held.pid).children()
    with once(
        lambda: reports(caplog, "still works in"), lambda: [orphan.kill() for orphan in orphans]
    ):
        for orphan in orphans:
            orphan.suspend()
        wait_until(lambda: {orphan.status() for orphan in orphans} == {psutil.STATUS_STOPPED})
        os.kill(held.pid, signal.SIGKILL)
        held.wait()
        assert user(first_attempt(drill)) is None
        drill.order("hold", given=False)
        export = drill.run(wait=False)
    assert attempts(export.parent) == [export.parent]
    assert (drill.launches, (export / "result").read_text()) == (2, "launch 2")
    command = rf"\(python -m drill_program {re.escape(str(export.parent / 'job.json'))}\)"
    pattern = rf"process \d+ {command} still works in {re.escape(str(export.parent))}; waiting"
    assert [message for message in caplog.messages if re.match(pattern, message)] != []
    assert user(export.parent).startswith(f"process {os.getpid()} since ")


@pytest.fixture
def others(tmp_path):
    """Starts processes, and ends them."""
    started = []

    def start(*command, **options):
        started.append(subprocess.Popen(command, cwd="/", **options))
        wait_until(lambda: psutil.Process(started[-1].pid).cmdline()[1:] == [*command[1:]])

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_only_own_programs_are_waited_for(tmp_path, others):
    """Any other process may have the path of the job on its command line."""
    job = str(tmp_path / "job.json")
    others("tail", "-f", "/dev/null", job)
    others(sys.executable, "-c", "import time; time.sleep(60)", job)
    if os.getuid() == 0:  # a program of another user, which the shell imitates
        imitated = ("python", "-c", "read line; :", "-m", "program", job)
        others(*imitated, executable="/bin/sh", stdin=subprocess.PIPE, user=65534)
    waiting = Thread(target=await_programs, args=[tmp_path], daemon=True)
    waiting.start()
    waiting.join(10)
    assert not waiting.is_alive()
