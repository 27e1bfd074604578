"""`kedro rlhf doctor`: its checks on machines that other programs pretend, and the command."""

import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from functools import partial
from pathlib import Path

import pytest
from processes import descendants

from rlhf_pipeline.commands import doctor as machine
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.sizing.fit import size_text
from rlhf_pipeline.sizing.hardware import GIB

Usage = namedtuple("Usage", "total used free")
TORCH = """
import sys, types
__version__, version = "2.13.0", types.SimpleNamespace(cuda={cuda!r})
class cuda:
    device_count = staticmethod(lambda: {count})
    is_available = staticmethod(lambda: {count} > 0)
    get_device_name = staticmethod(lambda index: "NVIDIA A100")
def ones(size, device):
    {compute}
    return types.SimpleNamespace(sum=lambda: types.SimpleNamespace(item=lambda: size))
"""


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Examines this machine by a check, or by a function."""
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)

    def check(name, launch=None):
        checks = {
            "gpu": partial(machine.gpu, launch or LaunchConfig()),
            "disk": partial(machine.disk, tmp_path / "data"),
            "nodes": partial(machine.nodes, launch, tmp_path / "data"),
        }
        return machine.examine(name if callable(name) else checks[name])

    return check


@pytest.fixture
def torch(tmp_path, monkeypatch):
    """Puts a module `torch` in front of the real one that sees so many GPUs."""

    def install(count, *, compute="pass", cuda="13.0"):
        folder = tmp_path / "pretended"
        folder.mkdir(exist_ok=True)
        text = TORCH.format(count=count, compute=compute, cuda=cuda)
        (folder / "torch.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(folder))

    return install


def test_a_broken_driver_is_a_failure_with_a_fix(check, nvidia_smi):
    nvidia_smi(None)
    found = check("gpu")
    assert found.state == "failure"
    assert "NVIDIA-SMI has failed" in found.found
    assert "repair the driver" in found.fix


def test_gpus_that_torch_can_use(check, nvidia_smi, torch):
    nvidia_smi(2)
    torch(2)
    assert check("gpu").found.startswith("2 x NVIDIA A100; torch 2.13.0, CUDA 13.0")


@pytest.mark.parametrize(
    ("arguments", "found", "fix"),
    [
        ({"count": 0}, "sees 0 of 2 GPUs with driver", "update the driver"),
        ({"count": 1}, "sees 1 of 2 GPUs with driver", "update the driver"),
        ({"count": 0, "cuda": None}, "for CUDA None sees 0", "install torch for the driver's CUDA"),
        (
            {"count": 2, "compute": "raise RuntimeError('no kernel image is available')"},
            "torch fails: RuntimeError: no kernel image is available",
            "install the torch that fits the driver and the GPU",
        ),
    ],
)
def test_gpus_that_torch_cannot_use(check, nvidia_smi, torch, arguments, found, fix):
    nvidia_smi(2)
    torch(**arguments)
    finding = check("gpu")
    assert finding.state == "failure"
    assert found in finding.found
    assert fix in finding.fix


@pytest.mark.parametrize(
    ("free", "state"), [(20 * GIB, "ok"), (5 * GIB, "warning"), (GIB // 2, "failure")]
)
def test_a_disk_that_is_almost_full(check, monkeypatch, free, state):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100 * GIB, 0, free))
    found = check("disk")
    assert found.state == state
    assert found.found.startswith(f"{size_text(free)} free for")


@pytest.fixture
def launch(monkeypatch):
    """Makes the block `launch` of two nodes; their ranks run on this machine."""
    source = str(Path(machine.__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]))

    def make(command):
        place = {"address": "127.0.0.1", "nodes": 2, "processes": 1}
        return LaunchConfig(mode="command", command=command, **place)

    return make


def test_ranks_start_on_each_node(check, launch):
    found = check("nodes", launch=launch("env NODE={node} {command}"))
    assert (found.state, found.found) == ("ok", "2 ranks start on 2 machines")


def test_a_node_that_cannot_be_started_is_a_failure_with_the_output(check, launch):
    failing = launch("sh -c 'echo cannot resolve worker-1; exit 3' {command}")
    found = check("nodes", launch=failing)
    assert found.state == "failure"
    assert "found exit code 3" in found.found and "cannot resolve worker-1" in found.found


def test_ranks_that_do_not_start_are_reported_in_time_and_ended(check, launch, monkeypatch):
    monkeypatch.setattr(machine, "START_S", 0.5)
    hanging = launch("sh -c 'exec sleep 600' {command}")
    found = check("nodes", launch=hanging)
    assert "found ranks that do not start within 0.5 s" in found.found
    commands = [program.info["cmdline"] for program in descendants(os.getpid())]
    assert ["sleep", "600"] not in commands


def explained():
    raise ConfigError("place: found 1, expected 2. Fix: set 2 at s3://me:secret@host/file")


def unexpected():
    raise ZeroDivisionError("first line\nsecond line")


def test_an_error_is_a_failure_with_its_fix(check):
    found = check(explained)
    assert (found.found, found.fix) == (
        "place: found 1, expected 2.",
        "set 2 at s3://...@host/file",
    )
    found = check(unexpected)
    assert (found.state, found.found) == ("failure", "ZeroDivisionError: first line")
    assert found.fix == "repair what the message names"


PROJECT = Path(__file__).parents[2]


def doctor(root, *options, python=(), **variables):
    """Run the command; return its exit code and its output."""
    done = subprocess.run(
        [
            *(sys.executable, *python, "-m", "kedro", "rlhf", "doctor", "--env=tiny"),
            f"--params=root={root}",
            *options,
        ],
        cwd=PROJECT,
        env=os.environ | {"PYTHONPATH": str(PROJECT / "src")} | variables,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_sound_machine_has_no_failure_and_torch_stays_out_of_the_driver(tmp_path):
    code, printed, log = doctor(tmp_path, python=("-X", "importtime"))
    assert code == 0, printed + log
    lines = printed.splitlines()
    assert lines[0].split() == ["check", "state", "found"]
    assert len([line for line in lines if " ok " in line or " warning " in line]) == 4
    imported = {line.rpartition("|")[2].strip() for line in log.splitlines()}
    assert "rlhf_pipeline.stages.launch.node_program" in imported
    assert imported & {"torch", "transformers", "deepspeed"} == set()


def test_what_a_run_would_refuse_is_a_failure_with_the_same_fix(tmp_path):
    """A model of 500 billion weights, whose training needs more memory than any machine of ours."""
    sizes = {"hidden_size": 20480, "intermediate_size": 81920, "num_hidden_layers": 100}
    params = ",".join(f"base_model.architecture.{name}={size}" for name, size in sizes.items())
    code, printed, log = doctor(tmp_path, "--json", f"--params=root={tmp_path},{params}")
    assert code == 1 and printed, log
    (found,) = [each for each in json.loads(printed) if each["check"] == "run"]
    assert found["state"] == "failure"
    assert found["found"].startswith("invalid parameters:")
    assert "use more or larger GPUs, or a smaller model" in found["fix"]
