"""Every program on a pretend accelerator, which refuses tensors that are in the wrong memory.

Two ranks of the lab run them.
"""

import math
from dataclasses import replace

import pytest
from strict_device import StrictDevice
from tiny_jobs import MAIN, STEPS, logged, tiny_job, trained

SHARDED = {"zero_stage": 3, "offload_parameters": True}
CASES = {  # the program, its changed parameters, and whether it also resumes
    "sft": ("sft", trained(3), True),
    "reward model": ("reward_model", trained(2) | {"start": "base"}, False),
    "dpo": ("dpo", trained(1), False),
    "kto, sharded": ("kto", trained(3), True),
    "ppo, sharded": (
        "ppo", {"actor": trained(3), "critic": trained(2), "ema": {"decay": 0.9}}, True
    ),
    "ppo, offloaded": (
        "ppo",
        {
            "actor": trained(3, offload_optimizer=True, offload_parameters=True),
            "critic": trained(2, offload_optimizer=True),
            "reference": {"deepspeed": SHARDED},
            "gather_for_generation": False,
        },
        False,
    ),
    "ppo with LoRA": (
        "ppo",
        {
            "actor": trained(2) | {"lora": {}, "gradient_checkpointing": True},
            "critic": None, "advantage": "grpo", "responses_per_prompt": 2,
        },
        False,
    ),
    "ppo by sequences, resampled": (
        "ppo",
        {
            "actor": trained(2), "critic": None, "advantage": "grpo", "responses_per_prompt": 2,
            "importance": "sequence", "denominator": "sequences", "clip_range": 3e-4,
            "equal_groups": "resample", "curriculum": {}, "rewards": [{"regex": "[a-m]"}],
        },
        True,
    ),
    "cispo": (
        "ppo",
        {
            "actor": trained(1), "critic": trained(1), "policy_loss": "cispo",
            "denominator": "constant", "value_lam": 1.0, "truncated": "mask",
            "sampling": {"max_response_tokens": 112},  # so that some answers end
        },
        True,
    ),
    "evaluate": ("evaluate", {"best_of_n": 2}, False),
}  # fmt: skip


def case(lab, program, changes, resumes):
    """The metrics of each step, and those of a run that repeats the second step from the first."""
    job = tiny_job(program, lab.inputs, lab.folder, changes)
    with StrictDevice():
        MAIN[program](job)
        lab.world.barrier()  # rank 0 writes the metrics
        whole = logged(job.directory)
        if resumes:
            MAIN[program](replace(job, resume_from=1))
            lab.world.barrier()
    return whole, logged(job.directory)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_no_tensor_is_in_the_wrong_memory_and_resumed_training_is_the_same(cells, name):
    """Otherwise the launch fails. The metrics show that the run has come to its end."""
    whole, found = cells[name]
    assert found == whole and len(found) == STEPS
    assert all(math.isfinite(value) for line in found for value in line.values())
