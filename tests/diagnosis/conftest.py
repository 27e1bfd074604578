"""A configuration and a machine to examine."""

import pytest

from rlhf_pipeline.config.base_model import BaseModelConfig
from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.diagnosis.finding import Setup


@pytest.fixture
def setup(tmp_path, monkeypatch):
    """Makes a `Setup` of the embedded default; arguments replace its fields."""
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)

    def make(**fields):
        default = {
            "project": tmp_path,
            "root": tmp_path / "data",
            "launch": LaunchConfig(),
            "base_model": BaseModelConfig(architecture={"model_type": "llama"}, vocab_size=512),
            "split": SplitConfig(
                sources=[{"name": "synthetic", "samples": 600}],
                max_prompt_tokens=64,
                max_response_tokens=48,
            ),
            "evaluate": EvaluateConfig(),
            "compiles": (),
        }
        return Setup(**default | fields)

    return make
