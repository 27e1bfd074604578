"""GPUs, shared memory, disk and ports, on machines that other programs pretend."""

import shutil
from collections import namedtuple

import pytest

from rlhf_pipeline.diagnosis import machine
from rlhf_pipeline.diagnosis.finding import run_checks
from rlhf_pipeline.sizing.fit import size_text
from rlhf_pipeline.sizing.hardware import GIB

Usage = namedtuple("Usage", "total used free")
TORCH = """
import sys, types
__version__, version = "2.13.0", types.SimpleNamespace(cuda="13.0")
class cuda:
    device_count = staticmethod(lambda: {count})
    is_available = staticmethod(lambda: {count} > 0)
    get_device_name = staticmethod(lambda index: "NVIDIA A100")
    nccl = types.SimpleNamespace(version=lambda: (2, 28, 9))
class distributed:
    is_nccl_available = staticmethod(lambda: {has_nccl})
def ones(size, device):
    {compute}
    return types.SimpleNamespace(sum=lambda: types.SimpleNamespace(item=lambda: size))
"""


@pytest.fixture
def torch(tmp_path, monkeypatch):
    """Puts a module `torch` in front of the real one that sees so many GPUs."""

    def install(count, *, compute="pass", has_nccl=True):
        folder = tmp_path / "pretended"
        folder.mkdir(exist_ok=True)
        text = TORCH.format(count=count, compute=compute, has_nccl=has_nccl)
        (folder / "torch.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(folder))

    return install


def test_a_machine_without_a_gpu_trains_on_its_cores(setup, nvidia_smi):
    nvidia_smi(0)
    assert machine.gpu(setup()).found == "none; 2 ranks train on the CPU"


def test_a_broken_driver_is_a_failure_with_a_fix(setup, nvidia_smi):
    nvidia_smi(None)
    (found,) = run_checks([machine.gpu], setup())
    assert (found.check, found.state) == ("gpu", "failure")
    assert "NVIDIA-SMI has failed" in found.found
    assert "repair the driver" in found.fix


def test_gpus_that_torch_can_use(setup, nvidia_smi, torch):
    nvidia_smi(2)
    torch(2)
    assert machine.gpu(setup()).found.startswith("2 x NVIDIA A100; torch 2.13.0, CUDA 13.0")


@pytest.mark.parametrize(
    ("arguments", "found", "fix"),
    [
        ({"count": 0}, "sees 0 of 2 GPUs with driver", "update the driver"),
        ({"count": 1}, "sees 1 of 2 GPUs with driver", "update the driver"),
        (
            {"count": 2, "compute": "raise RuntimeError('no kernel image is available')"},
            "torch fails: RuntimeError: no kernel image is available",
            "install the torch that fits the driver and the GPU",
        ),
    ],
)
def test_gpus_that_torch_cannot_use(setup, nvidia_smi, torch, arguments, found, fix):
    nvidia_smi(2)
    torch(**arguments)
    finding = machine.gpu(setup())
    assert finding.state == "failure"
    assert found in finding.found
    assert fix in finding.fix


@pytest.mark.parametrize(
    "program, state, found, fix",
    [
        (
            "print(*['A100 in ' + each for each in sys.argv[1:]], sep=chr(10))",
            *("ok", "equal those of the CPU: A100 in bf16, A100 in fp32", ""),
        ),
        ("sys.exit('attention: found 2. Fix: set it')", "failure", "attention: found 2.", "set it"),
        ("pass", "failure", "torch sees no GPU", ""),
    ],
)
def test_kernels_are_compared_in_a_process_of_their_own(
    setup, nvidia_smi, monkeypatch, tmp_path, program, state, found, fix
):
    nvidia_smi(1)
    (tmp_path / "stand_in.py").write_text(f"import sys\n{program}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(machine, "SELF_CHECK", "stand_in")
    (row,) = run_checks([machine.kernels], setup(precisions=("bf16", "fp32")))
    assert (row.check, row.state, row.found, row.fix) == ("kernels", state, found, fix)


def test_without_a_gpu_no_kernel_is_compared(setup, nvidia_smi):
    nvidia_smi(0)
    (row,) = run_checks([machine.kernels], setup())
    assert (row.state, row.found) == ("ok", "none; a CPU runs the plain forms")


def test_two_gpus_need_nccl(setup, nvidia_smi, torch):
    nvidia_smi(2)
    torch(2, has_nccl=False)
    assert machine.gpu(setup()).found == "torch has no NCCL"
    assert machine.gpu(setup()).state == "failure"
    nvidia_smi(1)
    torch(1, has_nccl=False)
    assert machine.gpu(setup()).state == "ok"


@pytest.mark.parametrize(
    ("free", "gpus", "state"),
    [
        (2 * GIB, 2, "ok"),
        (GIB // 16, 0, "ok"),
        (GIB // 16, 2, "failure"),  # Docker's default
        (GIB // 32, 0, "failure"),
    ],
)
def test_shared_memory_must_have_room_for_ranks_on_gpus(
    setup, nvidia_smi, monkeypatch, free, gpus, state
):
    nvidia_smi(gpus)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(4 * GIB, 0, free))
    found = machine.shared_memory(setup())
    assert found.state == state
    assert ("--shm-size" in found.fix) == (state == "failure")


@pytest.mark.parametrize(
    ("free", "state"), [(20 * GIB, "ok"), (5 * GIB, "warning"), (GIB // 2, "failure")]
)
def test_a_disk_that_is_almost_full(setup, monkeypatch, free, state):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100 * GIB, 0, free))
    found = machine.disk(setup())
    assert found.state == state
    assert found.found.startswith(f"{size_text(free)} free for")
