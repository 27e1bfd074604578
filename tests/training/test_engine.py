"""Joining the other ranks, and leaving them."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from rlhf_pipeline.config.training import TrainedModelConfig
from rlhf_pipeline.models.loading import load_policy
from rlhf_pipeline.training.engine import optimizer_step, step_metrics, train_engine

PROGRAM = """
import atexit, torch
from rlhf_pipeline.training.engine import join
atexit.register(lambda: print("connected at the end:", torch.distributed.is_initialized()))  # runs after what join registers
join(0, timeout_s=60)
print("connected:", torch.distributed.is_initialized())
"""


def test_a_program_needs_no_compiler_and_leaves_before_the_interpreter_ends(environment, tmp_path):
    """Threads of an open process group can abort a process after its work is done: exit code -6 instead of 0.

    DeepSpeed's shared-memory operation would be compiled, and leave 69 MB a rank in /dev/shm for good.
    """
    no_compiler = {"CXX": "/bin/false", "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    variables = os.environ | environment() | no_compiler
    ended = subprocess.run([sys.executable, "-c", PROGRAM], env=variables, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert not any(tmp_path.iterdir())
    assert not list(Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{variables['MASTER_PORT']}_*"))
    assert [line for line in ended.stdout.splitlines() if line.startswith("connected")] == [
        "connected: True",
        "connected at the end: False",
    ]


@pytest.mark.parametrize("deepspeed", [{}, {"zero_stage": 2, "precision": "bf16"}, {"zero_stage": 3}])
def test_a_step_left_out_without_a_word_shows_in_the_metrics(make_model, world, deepspeed):
    """DeepSpeed leaves out a step whose gradients are not finite: whatever comes after, the norm stays infinite."""
    config = TrainedModelConfig.model_validate({"optimizer": {"learning_rate": 1e-3}, "deepspeed": deepspeed})
    engine = train_engine(partial(load_policy, make_model()), config, 3)

    def loss(factor):
        return engine(input_ids=torch.tensor([[5, 6, 7]])).logits.float().square().mean() * factor

    norms = []
    for factor in (1.0, float("inf"), 1.0):
        optimizer_step(engine, world, [partial(loss, factor)])
        norms.append(step_metrics(engine)["grad_norm"])
    assert 0 < norms[0] < float("inf")
    assert norms[1:] == [float("inf")] * 2
    assert "loss_scale" not in step_metrics(engine)
