"""A stand-in for nvidia-smi, and what this machine offers."""

import os
import shlex
import shutil
import subprocess

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


@pytest.fixture(scope="session")
def bubblewrap():
    """Skips a test of the sandbox where there is no bubblewrap, or it gets no namespaces."""
    if (program := shutil.which("bwrap")) is None:
        pytest.skip("needs bubblewrap: apt-get install bubblewrap")
    command = [program, "--unshare-all", "--ro-bind", "/", "/", "true"]
    tried = subprocess.run(command, capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"bubblewrap does not work on this machine: {tried.stderr.strip()}")
