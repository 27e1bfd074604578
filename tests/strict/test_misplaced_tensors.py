"""Mistakes that only a GPU shows, planted: the pretend accelerator refuses each of them."""

from dataclasses import replace

import pytest
import torch
from strict_device import MisplacedTensorError
from tiny_jobs import MAIN, tiny_job, trained

from rlhf_pipeline.distributed import engine_state
from rlhf_pipeline.distributed.world import World


def test_a_sum_over_ranks_of_a_tensor_in_main_memory(strict, program_inputs, tmp_path, monkeypatch):
    """NCCL sums tensors of the device only; supervised training counts tokens in main memory."""

    def sum_in_place(world: World, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.detach().clone()
        torch.distributed.all_reduce(total)
        return total.to(world.device)

    monkeypatch.setattr(World, "sum", sum_in_place)
    with pytest.raises(MisplacedTensorError, match="allreduce_"):
        MAIN["sft"](tiny_job("sft", program_inputs, tmp_path, trained(0)))


def test_adam_s_step_in_main_memory(strict, program_inputs, tmp_path, monkeypatch):
    """Fused AdamW reads it on the device, at the first step after a checkpoint is loaded."""
    start = engine_state.start_optimizer

    def start_in_main_memory(engine, step):
        start(engine, step)
        for state in engine_state._adam(engine).state.values():
            state["step"] = state["step"].cpu()

    monkeypatch.setattr(engine_state, "start_optimizer", start_in_main_memory)
    job = tiny_job("sft", program_inputs, tmp_path, trained(2))
    MAIN["sft"](job)
    with pytest.raises(MisplacedTensorError, match="_fused_adamw_"):
        MAIN["sft"](replace(job, resume_from=1))


def test_a_batch_in_main_memory(strict, program_inputs, tmp_path, monkeypatch):
    from rlhf_pipeline.models.sequences import Sequences

    monkeypatch.setattr(Sequences, "to", lambda sequences, device: sequences)
    with pytest.raises(MisplacedTensorError, match="embedding"):
        MAIN["dpo"](tiny_job("dpo", program_inputs, tmp_path, trained(0)))
