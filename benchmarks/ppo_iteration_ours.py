"""PPO or GRPO of this project, one iteration for each line `go`; started by `ppo_iteration.py`."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rlhf_pipeline.config.policies import GRPOConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.data.token_contract import common_contract
from rlhf_pipeline.distributed.world import join
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.training.ppo import train
from rlhf_pipeline.training.ppo_setup import Setup, set_up

STEPS = 1000


@dataclass(frozen=True)
class TakingTurns(Setup):
    """Reports a step where PPO would save a checkpoint, and waits to be asked for the next one."""

    def save(self, step: int, *, due: bool, kl_coef: float) -> None:
        """Report the seconds since the newest turn began; begin the next."""
        global began
        if self.world.rank == 0:
            print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)
        began = next_turn(self)


def next_turn(setup: Setup) -> float:
    """Wait until the first rank is asked; return the time."""
    if setup.world.rank == 0:
        sys.stdin.readline()
    setup.world.barrier()
    return time.perf_counter()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    # bf16 requires ZeRO: its optimizer keeps the float32 weights.
    engine = {"precision": given["precision"], "zero_stage": int(given["precision"] == "bf16")}
    model = {"optimizer": {"learning_rate": 3e-6}, "deepspeed": engine}
    own = {"actor": model, "critic": model}
    if given["method"] == "grpo":
        own = {
            "actor": model,
            "responses_per_prompt": given["group"],
            "rewards": [{"regex": "[a-m]"}],
        }
    config = {"ppo": PPOConfig, "grpo": GRPOConfig}[given["method"]].model_validate(
        own
        | {
            "steps": STEPS, "rollout_batch_size": given["batch"], "minibatch_size": given["batch"],
            "micro_batch_tokens": given.get("tokens", 100_000), "evaluations": 1, "log_every": 1,
            "sampling": {"max_response_tokens": given["response_tokens"]},
        }
    )  # fmt: skip
    inputs = {name: Path(path) for name, path in given["inputs"].items()}
    folder = Path(given["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    world = join(1, timeout_s=3600.0)
    job = LaunchedJob(given["method"], "f", 1, {}, inputs, {}, folder, 3600.0)
    loaded = set_up(job, config, common_contract(inputs), world)
    setup = TakingTurns(**vars(loaded))
    began = next_turn(setup)
    train(setup)
