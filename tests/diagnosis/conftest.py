"""A configuration and a machine to examine."""

import pytest

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.diagnosis.finding import Setup


@pytest.fixture
def setup(tmp_path, monkeypatch):
    """Makes a `Setup` of the embedded default; arguments replace its fields."""
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)

    def make(**fields):
        default = {
            "root": tmp_path / "data",
            "launch": LaunchConfig(),
            "compiles": (),
        }
        return Setup(**default | fields)

    return make
