"""Whether an answer is the true answer as mathematics, by math-verify in a process of its own.

    python -P -m rlhf_pipeline.rollout.mathematics   reads pairs as lines of JSON, writes 1 or 0

An answer such as $9^{9^{9^9}}$ would keep SymPy busy for ever, in code that no handler of a signal
interrupts. So each pair has an alarm by which the system ends the process. The timeouts of
math-verify, which replace the caller's handlers and need its main thread, are off.
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

LIMIT_S, MEMORY = 10, 4 << 30
"""Longest time for one pair; bytes of the process's address space."""
_processes: list[subprocess.Popen[bytes]] = []
_turn = Lock()


def same_mathematics(true: str, given: str) -> bool:
    """Whether math-verify finds the true answer in another; without an end in time, it does not.

    Raises StageError if math-verify does not run.
    """
    heartbeat.tick()
    with _turn:
        if not _processes or _processes[0].poll() is not None:
            pipe = subprocess.PIPE
            command = [sys.executable, "-P", "-m", __name__, str(LIMIT_S)]
            _processes[:] = [subprocess.Popen(command, stdin=pipe, stdout=pipe)]
        (process,) = _processes
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps([true, given]).encode() + b"\n")
        process.stdin.flush()
        found = process.stdout.read(1)
        if not found:
            if process.wait() > 0:
                raise StageError(f"math: math-verify failed, see the log. Fix: {install('math')}")
            why = f"status {process.returncode} in the comparison with {true!r} of {given[-200:]!r}"
            logging.getLogger(__name__).warning("math: %s; the answer counts as wrong", why)
        return found == b"1"


def _serve() -> None:
    from math_verify import parse, verify

    logging.disable()  # it warns that its timeouts are off
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for each in (signal.SIGINT, signal.SIGTERM):  # it ends with its input, which the rank closes
        signal.signal(each, signal.SIG_IGN)
    for line in sys.stdin.buffer:
        signal.alarm(int(sys.argv[1]))
        true, given = (parse(text, parsing_timeout=None) for text in json.loads(line))
        is_same = bool(true) and verify(true, given, timeout_seconds=None)
        signal.alarm(0)
        print(int(is_same), end="", flush=True)


if __name__ == "__main__":
    _serve()
