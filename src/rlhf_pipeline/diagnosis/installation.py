import os
import platform
import shutil
import subprocess
import sysconfig
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from rlhf_pipeline.diagnosis.finding import Finding, Setup
from rlhf_pipeline.errors import pip_install
from rlhf_pipeline.stages.launch.resources import search_path

DISTRIBUTION = "rlhf-pipeline"
SOURCE = "#include <vector>\n#include <Python.h>\nint main() { return 0; }\n"


def python(_: Setup) -> Finding:
    """The interpreter is one that the tests run with."""
    tested = str(metadata.metadata(DISTRIBUTION)["Requires-Python"])
    found = platform.python_version()
    if SpecifierSet(tested).contains(found, prereleases=True):
        return Finding("python", "ok", found)
    fix = f"create the environment with a Python of {tested}"
    return Finding("python", "failure", f"{found}, expected {tested}", fix)


def libraries(_: Setup) -> Finding:
    """Every dependency is installed, in the range that the package declares."""
    required = [Requirement(line) for line in metadata.requires(DISTRIBUTION) or ()]
    needed = [each for each in required if each.marker is None or each.marker.evaluate()]
    faults = {each: fault for each in needed if (fault := _fault(each)) is not None}
    if not faults:
        return Finding("libraries", "ok", f"{len(needed)} in their tested ranges")
    names = " ".join(f"'{each.name}{each.specifier}'" for each in faults)
    fix = f"{pip_install()}{names}"
    return Finding("libraries", "failure", "; ".join(faults.values()), fix)


def _fault(requirement: Requirement) -> str | None:
    try:
        found = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return f"{requirement.name} is missing"
    if requirement.specifier.contains(found, prereleases=True):
        return None
    return f"{requirement.name} {found}, expected {requirement.specifier}"


def compiler(setup: Setup) -> Finding:
    """A C++ compiler, Python's headers and ninja, for DeepSpeed's CPU Adam and vLLM's kernels."""
    command = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    missing = [] if command else ["a C++ compiler"]
    if command:
        include = f"-I{sysconfig.get_path('include')}"
        compiling = [command, "-x", "c++", "-fsyntax-only", include, "-"]
        done = subprocess.run(compiling, input=SOURCE, capture_output=True, text=True, check=False)
        missing += [] if done.returncode == 0 else ["headers of Python or C++"]
    missing += [] if shutil.which("ninja", path=search_path()) else ["ninja"]
    if not missing:
        return Finding("compiler", "ok", f"{command}, ninja")
    found = f"missing: {', '.join(missing)}"
    if not (setup.compiles and setup.gpus > 0):
        only = "only offload_optimizer and generator vllm on a GPU need them"
        return Finding("compiler", "ok", f"{found}; {only}")
    change = f"change {', '.join(setup.compiles)}"
    fix = f"apt-get install g++ python3-dev, pip install ninja; or {change}"
    return Finding("compiler", "failure", found, fix)
