"""Waiting for an observed fact: a test that waits for a time depends on the machine's speed."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

HANGS_S = 600
"""Seconds after which a test takes a program for hung, however slow the machine is."""


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds. The deadline is only for a program that hangs."""
    deadline = time.monotonic() + HANGS_S
    while not condition():
        assert time.monotonic() < deadline, f"not fulfilled within {HANGS_S} s"
        time.sleep(0.05)


@contextmanager
def once(condition: Callable[[], object], action: Callable[[], object]) -> Iterator[None]:
    """Perform an action in another thread as soon as a condition holds.

    The action is performed at the latest when the block ends or hangs, so that nothing waits for
    it forever. The test must assert what shows that the condition held.
    """
    ended = threading.Event()

    def perform() -> None:
        with suppress(AssertionError):
            wait_until(lambda: ended.is_set() or condition())
        action()

    thread = threading.Thread(target=perform)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
