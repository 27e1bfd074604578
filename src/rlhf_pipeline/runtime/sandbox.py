"""Runs a Python program of a stranger, such as the answer of a model, and then tests of it.

    caller -> launcher: this file as a script -> init of the namespaces -> Python with the program

The program sees a read-only Python and an empty `/tmp` in memory, and no process, network or
environment of the caller: it has namespaces of its own, and ends with their init. A seccomp filter
denies it further processes, sockets, tracing and namespaces; rlimits bound memory, time and files.
Nothing needs root. It needs Linux 5.12, on x86_64 or aarch64.

A program passes if it returns a secret that is read after the tests; one that ends early, whatever
it prints, does not. One that looks for the open file of the secret can: no test in the process of
what it tests is safe from it.
"""

import ctypes
import errno
import json
import math
import os
import platform
import resource
import secrets
import signal
import struct
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NoReturn

Outcome = Literal["passed", "failed", "timed_out", "out_of_memory", "died"]

_SHOWN = "/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/urandom"
_OUT_OF_MEMORY = 77
_RUNNER = """if True:
    import json, os, sys, types
    def run(size, read=os.read, write=os.write, leave=os._exit, execute=exec, memory=MemoryError):
        text = b""
        while len(text) < size:
            text += read(0, size - len(text))
        secret, result, null = os.dup(0), os.dup(1), os.open("/dev/null", os.O_RDWR)
        for standard in range(3):
            os.dup2(null, standard)
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            for code in [compile(part, "<answer>", "exec") for part in json.loads(text)]:
                execute(code, main.__dict__)
        except BaseException as error:
            leave(77 if isinstance(error, memory) else 1)
        else:
            write(result, read(secret, 99))
            leave(0)
    run(int(sys.argv[1]))
"""
# System calls that are denied: number of the machine type, clone, and others: socket, fork, vfork,
# ptrace, keys, namespaces, memory of other processes. Without the first two, libraries use clone.
_ABSENT = 425, 435  # io_uring_setup, clone3
_CALLS = {
    "x86_64": (0xC000003E, 56, (41, 57, 58, 101, 248, 249, 250, 272, 308, 310, 311)),
    "aarch64": (0xC00000B7, 220, (97, 117, 198, 217, 218, 219, 268, 270, 271)),
}
_LIBC = ctypes.CDLL(None, use_errno=True)


class SandboxError(Exception):
    """The machine does not offer what the sandbox needs."""


def run(
    program: str, tests: str, *, timeout_s: float, memory_mib: int, isolated: bool = True
) -> Outcome:
    """Run the program and then the tests, in one module.

    Without `isolated` it has rlimits and seccomp alone, and the files of the user. Raises
    SandboxError if the machine does not offer the sandbox.
    """
    secret, text = secrets.token_bytes(32), json.dumps([program, tests]).encode()
    arguments = json.dumps([len(text), timeout_s, memory_mib, isolated])
    result, end = os.pipe()
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            process = subprocess.Popen(
                [sys.executable, "-I", __file__, arguments],
                stdin=subprocess.PIPE, stdout=end, stderr=subprocess.PIPE,
                cwd=folder, env={}, start_new_session=True,
            )  # fmt: skip
            with process:
                try:
                    fault = process.communicate(text + secret, timeout_s)[1]
                except subprocess.TimeoutExpired:
                    return "timed_out"
                finally:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
        if fault:
            raise SandboxError(fault.decode(errors="replace").strip())
        os.set_blocking(result, False)
        with suppress(BlockingIOError):
            if os.read(result, 99) == secret:
                return "passed"
    finally:
        os.close(result)
        os.close(end)
    code = process.returncode
    by_signal = -code if code < 0 else code - 128  # of the launcher, or of what it waited for
    if by_signal > 0:
        return "timed_out" if by_signal == signal.SIGXCPU else "died"
    return "out_of_memory" if code == _OUT_OF_MEMORY else "failed"


def _launch(size: int, timeout_s: float, memory_mib: int, isolated: bool) -> NoReturn:
    """Become the program, whose text has `size` bytes in the standard input."""
    seconds, memory = math.ceil(timeout_s), memory_mib << 20
    signal.alarm(seconds + 2)  # if the caller is no more
    if isolated:
        _enter_namespaces(memory_mib)
    limits = {"AS": memory, "FSIZE": memory, "CPU": seconds, "NOFILE": 256, "CORE": 0}
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value + (name == "CPU")))
    _deny_calls()
    environment = {"HOME": str(Path.cwd()), "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-I", "-c", _RUNNER, str(size)]
    os.execve(command[0], command, environment)  # noqa: S606


def _call(name: str, *arguments: Any) -> None:
    given = [ctypes.c_ulong(each) if isinstance(each, int) else each for each in arguments]
    if getattr(_LIBC, name)(*given) < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _enter_namespaces(memory_mib: int) -> None:
    """Continue in a child with namespaces and a root of its own; this process waits for it."""
    root, own, uid, gid = Path.cwd(), Path("/proc/self"), os.geteuid(), os.getegid()
    _call("unshare", 0x7E020000)  # NEWUSER, NEWNS, NEWPID, NEWNET, NEWIPC, NEWUTS, NEWCGROUP
    for name, text in ("setgroups", "deny"), ("uid_map", f"9 {uid} 1"), ("gid_map", f"9 {gid} 1"):
        (own / name).write_text(text)
    _call("mount", b"none", b"/", None, 0x44000, None)  # REC | PRIVATE
    for folder, size in (root, 1), (root / "tmp", memory_mib):
        folder.mkdir(exist_ok=True)
        _call("mount", b"tmpfs", bytes(folder), b"tmpfs", 6, b"size=%dm,mode=755" % size)
    python = [Path(each) for each in (sys.base_prefix, sys.prefix)]
    shown = {*map(Path, _SHOWN), *python, *(each.resolve() for each in python)}
    for path in sorted(each for each in shown if each.exists() and not shown & {*each.parents}):
        target = root / path.relative_to("/")
        (target if path.is_dir() else target.parent).mkdir(parents=True, exist_ok=True)
        target.touch()
        _call("mount", bytes(path), bytes(target), None, 0x5000, None)  # BIND | REC
    for path, flags, *change in (root, 0x8000, 1, 0), (root / "tmp", 0, 0, 1):
        # mount_setattr: all becomes read-only (RECURSIVE; RDONLY), but /tmp does not
        _call("syscall", 442, -100, bytes(path), flags, struct.pack("4Q", *change, 0, 0), 32)
    os.chdir(root)
    _call("pivot_root", b".", b".")
    _call("umount2", b".", 2)  # DETACH the earlier root, which lies on top
    os.chdir("/tmp")  # noqa: S108 - that of the sandbox
    for _ in range(2):  # the init, and the program: an init would be spared most signals
        if child := os.fork():
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            os._exit(code if code >= 0 else 128 - code)
        _call("prctl", 1, signal.SIGKILL, 0, 0, 0)  # PDEATHSIG: it ends with its parent


def _deny_calls() -> None:
    """Deny `_CALLS` by seccomp. The program may start threads, but no processes."""
    audit, clone, denied = _CALLS[platform.machine()]
    load, equal, at_least, has, end, kill, fault = 0x20, 0x15, 0x35, 0x45, 0x06, 1 << 31, 5 << 16
    steps = [(load, 0, 0, 4), (equal, 1, 0, audit), (end, 0, 0, kill)]
    steps += [(load, 0, 0, 0), (at_least, 0, 1, 1 << 30), (end, 0, 0, kill)]  # x32
    for number in (*_ABSENT, *denied):
        error = errno.ENOSYS if number in _ABSENT else errno.EPERM
        steps += [(equal, 0, 1, number), (end, 0, 0, fault | error)]
    refusal = (end, 0, 0, fault | errno.EPERM)
    steps += [(equal, 0, 3, clone), (load, 0, 0, 16), (has, 1, 0, 0x10000), refusal]  # THREAD
    steps += [(end, 0, 0, 0x7FFF0000)]  # all else is allowed
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    _call("prctl", 38, 1, 0, 0, 0)  # NO_NEW_PRIVS
    _call("prctl", 22, 2, struct.pack("HP", len(steps), ctypes.addressof(code)), 0, 0)  # SECCOMP


if __name__ == "__main__":
    try:
        _launch(*json.loads(sys.argv[1]))
    except Exception as error:
        sys.exit(f"{type(error).__name__} {error}")
