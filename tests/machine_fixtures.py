"""A stand-in for nvidia-smi, and what the kernel of this machine allows."""

import os
import shlex
import subprocess
import sys

import pytest


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Puts an nvidia-smi in front of PATH that lists that many GPUs; None: its driver is broken."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def install(gpus):
        listing = "".join(
            f"GPU {number}: NVIDIA A100-SXM4-40GB (UUID: GPU-8932f937-{number})\n"
            f"  MIG 3g.20gb Device 0: (UUID: MIG-{number}-0)\n"
            f"  MIG 3g.20gb Device 1: (UUID: MIG-{number}-1)\n"
            for number in range(gpus or 0)
        )
        text, code = {None: ("NVIDIA-SMI has failed", 9), 0: ("No devices were found", 6)}.get(
            gpus, (listing, 0)
        )
        program = folder / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho {shlex.quote(text)}\nexit {code}\n")
        program.chmod(0o755)

    return install


NAMESPACES = """
import ctypes, os
libc, uid = ctypes.CDLL(None, use_errno=True), os.geteuid()
def call(name, *arguments):
    if getattr(libc, name)(*arguments):
        raise SystemExit(f"{name}: {os.strerror(ctypes.get_errno())}")
call("unshare", 0x7E020000)
open("/proc/self/uid_map", "w").write(f"0 {uid} 1")
call("mount", b"none", b"/", None, 0x44000, None)
call("mount", b"tmpfs", b"/tmp", b"tmpfs", 0, None)
"""


@pytest.fixture(scope="session")
def namespaces():
    """Skips a test of the sandbox where the kernel gives a user no namespaces of their own."""
    tried = subprocess.run([sys.executable, "-c", NAMESPACES], capture_output=True, text=True)
    if tried.returncode:
        fault = tried.stderr.strip().splitlines()[-1]
        pytest.skip(f"this machine allows no namespaces to a user: {fault}")
