"""Runs untrusted Python, such as a model's answer, followed by its tests.

Bubblewrap (`bwrap`) shows the program a read-only Python and an empty `/tmp` in memory, and no
process, network or environment of the caller; all of it ends with the call, or with its caller.
Resource limits bound memory, time and files. A seccomp filter denies further processes, which
would each have the memory again and for which root has no limit, and what namespaces let through.

A program passes if it returns a secret that is read after the tests; one that ends early, whatever
it prints, does not. One that looks for the secret in its own process can: no test in the process of
what it tests is safe from it.
"""

import json
import math
import os
import platform
import secrets
import shutil
import signal
import struct
import subprocess
import sys
from contextlib import suppress
from errno import ENOSYS, EPERM
from pathlib import Path
from typing import Literal

from rlhf_pipeline.errors import StageError
from rlhf_pipeline.runtime.heartbeat import LAUNCH

Outcome = Literal["passed", "failed", "timed_out", "out_of_memory", "died"]

_SHOWN = "/usr", "/lib", "/lib64", "/etc/ld.so.cache"
_OPTIONS = (
    "--unshare-all --as-pid-1 --die-with-parent --cap-drop ALL --chdir /tmp "
    "--clearenv --setenv HOME /tmp --setenv LANG C.UTF-8 --setenv OPENBLAS_NUM_THREADS 1 "
    "--dev-bind /dev/null /dev/null --dev-bind /dev/urandom /dev/urandom"
).split()
_OUT_OF_MEMORY = 77
_RUNNER = """if True:
    import json, os, resource, select, sys, types
    def run(limits, leave=os._exit, execute=exec, memory=MemoryError):
        for name, limit in limits.items():
            resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
        (reader := select.poll()).register(1, 0)
        if reader.poll(0):  # the caller ended before bwrap had asked the kernel to end this too
            leave(1)
        receive = os.fdopen(os.dup(0), "rb").readline
        send = os.fdopen(os.dup(1), "wb", 0).write
        null = os.open("/dev/null", os.O_RDWR)
        for standard in range(3):
            os.dup2(null, standard)
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            for code in [compile(part, "<answer>", "exec") for part in json.loads(receive())]:
                execute(code, main.__dict__)
        except BaseException as error:
            leave(77 if isinstance(error, memory) else 1)
        else:
            send(receive())
            leave(0)
    run(json.loads(sys.argv[1]))
"""
# System calls that are denied: number of the machine type, clone, and others: socket, fork, vfork,
# ptrace, prctl (by which a program outlives its parent), keys, namespaces, memory of others.
# Without the first ones, libraries use others.
_ABSENT = 425, 435, 438  # io_uring_setup, clone3, pidfd_getfd
_CALLS = {
    "x86_64": (0xC000003E, 56, (41, 57, 58, 101, 157, 248, 249, 250, 272, 308, 310, 311)),
    "aarch64": (0xC00000B7, 220, (97, 117, 167, 198, 217, 218, 219, 268, 270, 271)),
}


def check(timeout_s: float, memory_mib: int) -> None:
    """Raises StageError if the machine does not offer the sandbox, or an empty program fails."""
    outcome = run("", "", timeout_s=timeout_s, memory_mib=memory_mib)
    if outcome != "passed":
        raise StageError(
            f"sandbox: found that an empty program {outcome.replace('_', ' ')}, expected that it "
            "passes. Fix: raise timeout_s or memory_mib"
        )


def run(program: str, tests: str, *, timeout_s: float, memory_mib: int) -> Outcome:
    """Run the program and then the tests, in one module.

    Raises StageError if the machine does not offer the sandbox.
    """
    secret, seconds, memory = secrets.token_hex().encode(), math.ceil(timeout_s), memory_mib << 20
    limits = {"AS": memory, "FSIZE": memory, "CPU": seconds, "NOFILE": 256, "CORE": 0}
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    with (
        os.fdopen(reader, "rb", 0) as result,
        os.fdopen(writer, "wb", 0) as output,
        os.fdopen(os.memfd_create("filter"), "w+b", 0) as rules,
    ):
        rules.write(_filter())
        rules.seek(0)
        command = [*_bubblewrap(memory), "--seccomp", str(rules.fileno())]
        command += [sys.executable, "-I", "-c", _RUNNER, json.dumps(limits)]
        text = json.dumps([program, tests]).encode() + b"\n" + secret
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.PIPE,
            env={LAUNCH: os.environ.get(LAUNCH, "")}, pass_fds=[rules.fileno()],
            start_new_session=True,
        ) as process:  # fmt: skip
            try:
                fault = process.communicate(text, timeout_s)[1]
            except subprocess.TimeoutExpired:
                return "timed_out"
            finally:  # bwrap may not yet have told its child to end with it
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        if fault:
            raise StageError(
                f"sandbox: found {fault.decode(errors='replace').strip()!r}, expected that bwrap "
                "runs Python. Fix: install bubblewrap 0.7 or newer, and allow namespaces "
                "(user.max_user_namespaces; on Ubuntu also kernel."
                "apparmor_restrict_unprivileged_userns=0; in Docker --security-opt seccomp="
                "unconfined --security-opt apparmor=unconfined)"
            )
        if result.read(99) == secret:
            return "passed"
    code = process.returncode
    if code < 0 or code > 128:  # bwrap, or the program, by a signal
        return "timed_out" if code == 128 + signal.SIGKILL else "died"  # by its time of CPU
    return "out_of_memory" if code == _OUT_OF_MEMORY else "failed"


def _bubblewrap(memory: int) -> list[str]:
    """The beginning of a command that sees only Python, and `/tmp` with that many bytes."""
    program = shutil.which("bwrap")
    if program is None:
        raise StageError(
            "sandbox: found no program bwrap, expected bubblewrap, in which programs of answers "
            "run. Fix: apt-get install bubblewrap"
        )
    command = [program, *_OPTIONS, "--size", str(memory), "--tmpfs", "/tmp"]  # noqa: S108
    python = [Path(each) for each in (sys.base_prefix, sys.prefix)]
    for path in sorted({*map(Path, _SHOWN), *python, *(each.resolve() for each in python)}):
        command += ["--ro-bind-try", str(path), str(path)]
    return [*command, "--remount-ro", "/"]


def _filter() -> bytes:
    """A seccomp filter that denies `_CALLS`. The program may start threads, but no processes."""
    if (machine := platform.machine()) not in _CALLS:
        raise StageError(
            f"sandbox: found a machine of the type {machine}, expected {' or '.join(_CALLS)}. Fix: "
            "score programs by a function of yours (callable)"
        )
    audit, clone, denied = _CALLS[machine]
    load, equal, at_least, has, end, kill, fault = 0x20, 0x15, 0x35, 0x45, 0x06, 1 << 31, 5 << 16
    steps = [(load, 0, 0, 4), (equal, 1, 0, audit), (end, 0, 0, kill)]
    steps += [(load, 0, 0, 0), (at_least, 0, 1, 1 << 30), (end, 0, 0, kill)]  # x32
    for number in (*_ABSENT, *denied):
        error = ENOSYS if number in _ABSENT else EPERM
        steps += [(equal, 0, 1, number), (end, 0, 0, fault | error)]
    steps += [(equal, 0, 3, clone), (load, 0, 0, 16), (has, 1, 0, 0x10000)]  # CLONE_THREAD
    steps += [(end, 0, 0, fault | EPERM), (end, 0, 0, 0x7FFF0000)]  # all else is allowed
    return b"".join(struct.pack("HBBI", *step) for step in steps)
