"""Every program on a pretend accelerator, which refuses tensors that are in the wrong memory.

Two ranks of the lab run them.
"""

import math
from collections import Counter
from dataclasses import replace

import pytest
from strict_device import MisplacedTensorError, StrictDevice
from tiny_jobs import MAIN, STEPS, logged, tiny_job, trained

from rlhf_pipeline.distributed import engine_state

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


# --- a mistake that only a GPU shows, planted -----------------------------------------------------


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


# --- how often the host waits for the device ------------------------------------------------------


def own_waits(strict, phase: str) -> dict[int | None, int]:
    """The waits of a phase by step."""
    return Counter(wait.step for wait in strict.waits if wait.own and wait.phase == phase)


@pytest.mark.parametrize("program", ["sft", "dpo", "kto"])
def test_a_step_of_supervised_training_waits_twice(strict, program_inputs, tmp_path, program):
    """For its metrics, and for whether a rank received SIGTERM; four micro batches add nothing."""
    MAIN[program](tiny_job(program, program_inputs, tmp_path, trained(2) | {"evaluations": 1}))
    # The last step waits for its metrics here, and for SIGTERM after it has saved its model.
    assert own_waits(strict, "update") == {1: 2, 2: 1}


@pytest.mark.parametrize(
    "changes, optimizer_steps",
    [
        ({}, 2),
        ({"critic_warmup_steps": 1}, 1),
        ({"minibatch_size": 4, "ppo_epochs": 2, "kl": {"stop_update": 9.0}}, 8),
    ],
    ids=["one minibatch", "critic alone", "four minibatches"],
)
def test_an_optimizer_step_of_ppo_waits_at_most_twice(
    strict, program_inputs, tmp_path, changes, optimizer_steps
):
    """A rollout waits for its metrics, for SIGTERM, and with `stop_update` after each epoch."""
    blocks = {"actor": trained(1), "critic": trained(1), "evaluations": 1}
    MAIN["ppo"](tiny_job("ppo", program_inputs, tmp_path, blocks | changes))
    waits = own_waits(strict, "update")[1]
    assert waits == 2 + (2 if "kl" in changes else 0)
    assert waits <= 2 * optimizer_steps


def test_a_rollout_waits_once_for_each_micro_batch_and_model(strict, program_inputs, tmp_path):
    """Neither a generated token nor a packed forward pass waits, in no library.

    After 16 tokens, generation looks at which rows have finished. Scoring waits for its metrics and
    its moments, too; in the first step also for the mean that the critic's values get.
    """
    blocks = {
        "actor": trained(1), "critic": trained(1), "evaluations": 1, "micro_batch_tokens": 16,
        "sampling": {"max_response_tokens": 20, "batch_size_per_gpu": 4},
    }  # fmt: skip
    MAIN["ppo"](tiny_job("ppo", program_inputs, tmp_path, blocks))
    waits = Counter((wait.phase, wait.step) for wait in strict.waits)
    assert [waits["rollout", step] for step in (1, 2)] == [4, 4]  # two micro batches
    assert [waits["scoring", step] for step in (1, 2)] == [4 + 2 + 1, 4 + 2]
