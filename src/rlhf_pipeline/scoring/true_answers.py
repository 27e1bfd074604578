"""Whether a response agrees with the true answer of its prompt, for rewards and judges.

    python -P -m rlhf_pipeline.scoring.true_answers   reads pairs as lines of JSON, writes 1 or 0

is the process in which math-verify compares. An answer such as $9^{9^{9^9}}$ would keep SymPy busy
for ever, in code that no handler of a signal interrupts. So each pair has an alarm by which the
system ends the process. The timeouts of math-verify, which replace the caller's handlers and need
its main thread, are off.
"""

import json
import logging
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal

from rlhf_pipeline.errors import StageError, install
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.verdict.answers import FINAL, final_answer

LIMIT_S, MEMORY = 10, 4 << 30
"""Longest time for one pair; bytes of the process's address space."""
_processes: list[subprocess.Popen[bytes]] = []

_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")
_WORD = re.compile(r"\s[A-Za-z]{2,}|[A-Za-z]{2,}\s")
_COMMAND = re.compile(r"\\[A-Za-z]+(?:\{[A-Za-z .]*\})?")
_TEX_THOUSANDS = re.compile(r"(?<=\d)(?:\\,|,\\!|\{,\})(?=\d{3})")


def _last_number(text: str) -> list[Decimal]:
    """The last number of a text if it has one, without separators: "1,234.50" is 1234.5."""
    return [Decimal(each.replace(",", "")) for each in _NUMBER.findall(text)[-1:]]


def _normal(text: str) -> str:
    """Text without differences in case and white space, and without a final full stop."""
    return " ".join(text.casefold().split()).removesuffix(".")


def _as_tex(text: str) -> str:
    """A text as math-verify reads it: a result without TeX's marks gets them, prose does not."""
    last = _TEX_THOUSANDS.sub("", text).rpartition("####")[2]
    if re.search(r"\$|\\[(\[]|\\boxed", last):
        return last
    result = FINAL.split(last)[-1].strip(" \t\n*_`.")
    return result if _WORD.search(_COMMAND.sub("", result)) else f"${result}$"


def _same_mathematics(true: str, given: str) -> bool:
    """Whether math-verify finds the true answer in another; without an end in time, it does not.

    Raises StageError if math-verify does not run.
    """
    heartbeat.report_progress()
    true, given = _as_tex(true), _as_tex(given)
    if not _processes or _processes[0].poll() is not None:
        pipe = subprocess.PIPE
        command = [sys.executable, "-P", "-m", __name__, str(LIMIT_S)]
        _processes[:] = [subprocess.Popen(command, stdin=pipe, stdout=pipe)]
    (process,) = _processes
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps([true, given]).encode() + b"\n")
    process.stdin.flush()
    verdict = process.stdout.read(1)
    if not verdict:
        if process.wait() > 0:
            raise StageError(f"math: math-verify failed, see the log. Fix: {install('math')}")
        logging.getLogger(__name__).warning(
            "math: status %d in the comparison with %r of %r; the answer counts as wrong",
            process.returncode, true, given[-200:],
        )  # fmt: skip
    return verdict == b"1"


AGREES: dict[str, Callable[[str, str], bool]] = {
    "exact": lambda true, given: _normal(true) == _normal(given),
    "final_answer": lambda true, given: _normal(final_answer(true)) == _normal(final_answer(given)),
    "contains": lambda true, given: _normal(true) in _normal(given),
    "last_number": lambda true, given: _last_number(true) == _last_number(given) != [],
    "math": _same_mathematics,
}
"""Whether an answer (second) agrees with the true one (first), by `ReferenceReward.reference`."""


def accuracy(true: str | None, given: str) -> tuple[float, float] | None:
    """Whether an answer is right, 1 or 0: (strict, lenient); None without a true answer.

    strict: its final answer is that of the true answer (`final_answer`). lenient: its last number
    is that of the true answer, if that one is a number, else it contains the true answer.
    """
    if true is None:
        return None
    right = final_answer(true)
    lenient = AGREES["last_number" if _NUMBER.fullmatch(right) else "contains"]
    return float(AGREES["final_answer"](true, given)), float(lenient(right, given))


def agreement(kind: str) -> Callable[..., list[float]]:
    """The reward function of a kind of agreement: 1 for a response that agrees, else 0."""
    agrees = AGREES[kind]

    def reward(
        prompts: Sequence[object], responses: Sequence[str], references: Sequence[str]
    ) -> list[float]:
        return [float(agrees(*pair)) for pair in zip(references, responses, strict=True)]

    return reward


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
