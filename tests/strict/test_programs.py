"""Every program on a pretend accelerator, which refuses tensors that are in the wrong memory.

Two real ranks run this file as a program under DeepSpeed's launcher, all runs in one launch.
"""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from strict_device import StrictDevice
from tiny_jobs import MAIN, STEPS, logged, tiny_job, trained

SHARDED = {"zero_stage": 3, "offload_parameters": True}
RUNS = {
    **{f"sft at ZeRO-{stage}": ("sft", trained(stage)) for stage in (0, 1, 2, 3)},
    "reward model": ("reward_model", trained(2)),
    "dpo": ("dpo", trained(1)),
    "dpo, sharded": ("dpo", trained(3)),
    "ppo": ("ppo", {"actor": trained(0), "critic": trained(1), "ema": {"decay": 0.9}}),
    "ppo, sharded": ("ppo", {"actor": trained(3), "critic": trained(2), "ema": {"decay": 0.9}}),
    "ppo in fp16": ("ppo", {"actor": trained(2, "fp16"), "critic": trained(3, "fp16")}),
    "ppo, offloaded": (
        "ppo",
        {
            "actor": trained(3, offload_optimizer=True, offload_parameters=True),
            "critic": trained(2, offload_optimizer=True),
            "reference": {"deepspeed": SHARDED},
            "gather_for_generation": False,
        },
    ),
    "ppo with LoRA": (
        "ppo",
        {
            "actor": trained(2) | {"lora": {}, "gradient_checkpointing": True},
            "critic": None, "advantage": "grpo", "responses_per_prompt": 2,
        },
    ),
    "evaluate": ("evaluate", {"best_of_n": 2}),
}  # fmt: skip
RESUMED = [*(name for name in RUNS if name.startswith("sft")), "ppo, sharded"]


def main(inputs: dict[str, Path], folder: Path) -> None:
    """Run everything; repeat the second step of some runs from the checkpoint of the first one."""
    whole = {}
    with StrictDevice():
        for name, (program, changes) in RUNS.items():
            job = tiny_job(program, inputs, folder / name, changes)
            MAIN[program](job)
            torch.distributed.barrier()  # rank 0 writes the metrics
            whole[name] = logged(job.directory)
            if name in RESUMED:
                MAIN[program](replace(job, resume_from=1))
    (folder / "whole.json").write_text(json.dumps(whole))


@pytest.fixture(scope="module")
def results(on_ranks, inputs):
    return on_ranks(__file__, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_no_tensor_is_in_the_wrong_memory(results, name):
    """Otherwise the launch fails. The metrics show that the run has come to its end."""
    found = logged(results / name)
    assert len(found) == STEPS
    assert all(math.isfinite(value) for line in found for value in line.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_resumed_training_equals_uninterrupted_training(results, name):
    assert logged(results / name) == json.loads((results / "whole.json").read_text())[name]


if __name__ == "__main__":
    main({name: Path(path) for name, path in json.loads(sys.argv[1]).items()}, Path(sys.argv[2]))
