"""Versions and the compiler."""

import platform
from importlib import metadata

import pytest

from rlhf_pipeline.diagnosis import installation
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


def test_a_machine_without_a_compiler_needs_one_only_to_offload_on_a_gpu(
    setup, monkeypatch, nvidia_smi, tmp_path
):
    for name in ("CXX", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    nvidia_smi(1)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    found = installation.compiler(setup())
    assert (found.state, found.fix) == ("ok", "")
    assert found.found.startswith("missing: a C++ compiler, ninja;")
    found = installation.compiler(setup(offloads=True))
    assert found.state == "failure"
    assert found.found == "missing: a C++ compiler, ninja, nvcc or CUDA_HOME"
    assert "set offload_optimizer to false" in found.fix


def test_a_compiler_that_cannot_compile_is_found(setup, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    assert "headers of Python or C++" in installation.compiler(setup()).found
