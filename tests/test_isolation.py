"""The tests stay on the CPU on a machine with GPUs, unless one asks for them."""

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
EIGHT_GPUS = """
import torch, rlhf_pipeline.models  # which asks a GPU for its properties
torch.cuda.is_available = lambda: True
torch.cuda.device_count = torch._C._cuda_getDeviceCount = lambda: 8
import conftest, rank_fixtures, rlhf_pipeline.distributed.world as world
print(world.on_gpu(), world.get_accelerator().device_name())
"""


def test_tests_compute_on_the_cpu_of_a_machine_with_gpus(monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.setenv("PYTHONPATH", f"{TESTS.parent / 'src'}:{TESTS}")
    command = [sys.executable, "-c", EIGHT_GPUS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split()[-2:] == ["False", "cpu"], done.stderr
