"""One process at a time runs a recipe; another one reports whom it waits for."""

import os
import re
import signal
from contextlib import suppress

import psutil
import pytest
from waiting import HANGS_S, once, wait_until

from rlhf_pipeline.errors import StageError
from rlhf_pipeline.runtime.heartbeat import process_identity
from rlhf_pipeline.stages.cache.workspace import attempts, user


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


def test_the_lock_of_a_killed_process_is_free_and_its_program_is_ended(drill, held):
    """The program may outlive its driver; two of them would write into one directory.

    While the driver's guard is stopped, it cannot end the program.
    """
    assert user(first_attempt(drill)).startswith(f"process {held.pid} since ")
    orphans = psutil.Process(held.pid).children()
    for orphan in orphans:
        orphan.suspend()
    wait_until(lambda: {orphan.status() for orphan in orphans} == {psutil.STATUS_STOPPED})
    os.kill(held.pid, signal.SIGKILL)
    held.wait()
    assert user(first_attempt(drill)) is None
    (program,) = [each for each in orphans if "drill_program" in each.cmdline()]
    drill.order("hold", given=False)
    export = drill.run(wait=False)
    assert process_identity(program.pid) is None
    for guard in orphans:
        with suppress(psutil.NoSuchProcess):
            guard.resume()
    assert attempts(export.parent) == [export.parent]
    assert (drill.launches, (export / "result").read_text()) == (2, "launch 2")
    assert user(export.parent).startswith(f"process {os.getpid()} since ")


def test_a_damaged_record_of_an_owner_is_none(drill):
    first = drill.run().parent
    (owner,) = (drill.root / "workspace" / ".locks").glob("*.json")
    for record in ("", "{}", "[]", '{"driver": "x 1@2"}', '{"driver": 1, "since": 0}'):
        owner.write_text(record)
        assert user(first) is None
