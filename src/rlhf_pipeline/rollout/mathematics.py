"""Whether an answer is the true answer as mathematics, by math-verify in a process of its own.

    python -P -m rlhf_pipeline.rollout.mathematics   reads pairs as lines of JSON, writes 1 or 0

An answer such as 9^(9^(9^9)) would keep SymPy busy for ever, in code that answers no signal handler
and in the memory of the rank. So each pair has an alarm, by which the system ends the process, and
the process has a limit of memory. The timeouts of math-verify, which take the handler of the
caller's process and work in its main thread alone, are off.
"""

import json
import logging
import resource
import signal
import subprocess
import sys
from threading import Lock

from rlhf_pipeline.errors import StageError, install
from rlhf_pipeline.runtime import heartbeat

logger = logging.getLogger(__name__)

LIMIT_S = 10
"""Longest time for one pair."""
MEMORY = 4 << 30
"""Bytes of the address space of the process."""
_READY = b"."

_running: list[subprocess.Popen[bytes]] = []
_turn = Lock()


def same_mathematics(true: str, given: str) -> bool:
    """Whether math-verify finds the true answer in another; without an end in time it does not.

    Raises StageError if the process cannot start.
    """
    heartbeat.tick()
    with _turn:
        process = _running[0] if _running else _start()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps([true, given]).encode() + b"\n")
        process.stdin.flush()
        found = process.stdout.read(1)
        if not found:
            _running.remove(process)
            logger.warning(
                "math: comparing %r with the true answer %r came to no end (status %d): it counts "
                "as wrong", given[-200:], true, process.wait(),
            )  # fmt: skip
        return found == b"1"


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", __name__]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    if process.stdout.read(1) != _READY:
        raise StageError(
            f"math: math-verify did not start (status {process.wait()}); its reason is in the log. "
            f"Fix: {install('math')}"
        )
    _running.append(process)
    return process


def _serve() -> None:
    for each in (signal.SIGINT, signal.SIGTERM):  # it ends with the input, which the rank closes
        signal.signal(each, signal.SIG_IGN)
    from math_verify import parse, verify

    logging.disable()  # it warns that its timeouts are off
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    sys.stdout.buffer.write(_READY)
    sys.stdout.flush()
    for line in sys.stdin.buffer:
        signal.alarm(LIMIT_S)
        true, given = (parse(text, parsing_timeout=None) for text in json.loads(line))
        is_same = bool(true) and verify(true, given, timeout_seconds=None)
        signal.alarm(0)
        sys.stdout.buffer.write(b"1" if is_same else b"0")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
