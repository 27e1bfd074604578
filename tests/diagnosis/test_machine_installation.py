"""Versions and the compiler."""

import os
import platform
import shutil
import sys
from importlib import metadata

import pytest

from rlhf_pipeline.diagnosis import machine as installation
from rlhf_pipeline.errors import pip_install

DECLARED = ["click>=8.1", "numpy>=2", 'gguf>=999; extra == "gguf"']


@pytest.fixture
def declared(monkeypatch):
    """Sets the requirements that the package declares; versions stay those of the environment."""

    def declare(*requirements, python=">=3.11,<3.14"):
        monkeypatch.setattr(metadata, "requires", lambda name: [*requirements])
        monkeypatch.setattr(metadata, "metadata", lambda name: {"Requires-Python": python})

    return declare


def test_libraries_in_their_ranges(setup, declared):
    declared(*DECLARED)  # gguf belongs to an extra
    assert installation.libraries(setup()).found == "2 in their tested ranges"


def test_libraries_that_are_missing_or_of_another_version_are_named(setup, declared):
    declared(*DECLARED, "pytest>=900", "no-such-library<2")
    found = installation.libraries(setup())
    assert found.state == "failure"
    installed = metadata.version("pytest")
    assert found.found == f"pytest {installed}, expected >=900; no-such-library is missing"
    assert found.fix == f"{pip_install()}'pytest>=900' 'no-such-library<2'"


def test_python_is_compared_with_the_declared_range(setup, declared):
    declared(python=">=3.11,<3.14")
    assert installation.python(setup()).state == "ok"
    declared(python=">=3.99")
    found = installation.python(setup())
    assert (found.state, found.found) == (
        "failure",
        f"{platform.python_version()}, expected >=3.99",
    )


def test_the_package_itself_declares_versions(setup):
    """The real metadata is readable."""
    assert installation.python(setup()).state == "ok"
    assert installation.libraries(setup()).state == "ok"


@pytest.fixture
def nothing_installed(monkeypatch, nvidia_smi, tmp_path):
    """A machine with a GPU, and no program but nvidia-smi."""
    for name in ("CXX", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    nvidia_smi(1)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    return tmp_path / "bin"


@pytest.mark.parametrize("parameter", ["sft.deepspeed.offload_optimizer (true)", "ppo.generator"])
def test_a_machine_without_a_compiler_needs_one_for_what_a_gpu_compiles(
    setup, nothing_installed, parameter
):
    found = installation.compiler(setup())
    assert (found.state, found.fix) == ("ok", "")
    assert found.found.startswith("missing: a C++ compiler, ninja;")
    found = installation.compiler(setup(compiles=(parameter,)))
    assert (found.state, found.found) == ("failure", "missing: a C++ compiler, ninja")
    assert found.fix.endswith(f"; or change {parameter}")


def test_neither_cudas_compiler_nor_an_activated_environment_is_needed(
    setup, nothing_installed, monkeypatch
):
    """ninja lies beside the interpreter; the ranks find it there."""
    (nothing_installed / "ninja").touch(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("CXX", shutil.which("g++", path=os.defpath))
    assert installation.compiler(setup(compiles=("ppo.generator (vllm)",))).state == "ok"


def test_a_compiler_that_cannot_compile_is_found(setup, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    assert "headers of Python or C++" in installation.compiler(setup()).found
