"""PPO of this project, one iteration for each line; started by `ppo_iteration.py`.

The line `go` asks for an iteration, `profile` for one whose matrix products are recorded.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from matrix_products import peak, recorded

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.data.token_contract import common_contract
from rlhf_pipeline.distributed.world import join
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.training.ppo import train
from rlhf_pipeline.training.ppo_setup import Setup, set_up

STEPS = 1000


class Turn:
    """One iteration, from the line that asks for it to its report."""

    def __init__(self, setup: TakingTurns) -> None:
        """Wait until the first rank is asked."""
        world, self._stack = setup.world, ExitStack()
        asked = [sys.stdin.readline().strip() if world.rank == 0 else ""]
        torch.distributed.broadcast_object_list(asked)
        self._products = None
        if asked == ["profile"]:
            policy = setup.models.actor.module
            self._peak = peak(next(policy.parameters()).dtype)
            self._products = self._stack.enter_context(recorded(setup.profile))
        world.barrier()
        self._began = time.perf_counter()

    def report(self) -> dict[str, float]:
        """Seconds, and of matrix products their share of the time and of the peak."""
        seconds = time.perf_counter() - self._began
        self._stack.close()
        found = {"seconds": seconds}
        if self._products is not None:
            own = torch.tensor([self._products.seconds, self._products.operations, self._peak])
            torch.distributed.all_reduce(own)  # every rank takes as long as the slowest
            product_seconds, operations, peaks = own.tolist()
            ranks = torch.distributed.get_world_size()
            found["share_of_time"] = product_seconds / ranks / seconds
            found["share_of_peak"] = operations / seconds / peaks
        return found


@dataclass(frozen=True)
class TakingTurns(Setup):
    """Reports a step where PPO would save a checkpoint, and waits to be asked for the next one."""

    profile: Path
    """Receives the seconds of all operators."""

    def save(self, step: int, *, due: bool, kl_coef: float) -> None:
        """Report the newest turn; begin the next."""
        global turn
        found = turn.report()
        if self.world.rank == 0:
            print(json.dumps(found), flush=True)
        turn = Turn(self)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    # bf16 requires ZeRO: its optimizer keeps the float32 weights.
    engine = {"precision": given["precision"], "zero_stage": int(given["precision"] == "bf16")}
    model = {"optimizer": {"learning_rate": 3e-6}, "deepspeed": engine}
    config = PPOConfig.model_validate(
        {
            "steps": STEPS, "rollout_batch_size": given["batch"], "minibatch_size": given["batch"],
            "micro_batch_tokens": given.get("tokens", 100_000), "evaluations": 1, "log_every": 1,
            "sampling": {"max_response_tokens": given["response_tokens"]},
            "actor": model, "critic": model,
        }
    )  # fmt: skip
    inputs = {name: Path(path) for name, path in given["inputs"].items()}
    folder = Path(given["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    world = join(1, timeout_s=3600.0)
    job = LaunchedJob("ppo", "f", 1, {}, inputs, {}, folder, 3600.0)
    loaded = set_up(job, config, common_contract(inputs), world)
    setup = TakingTurns(**vars(loaded), profile=folder / f"profile-{world.rank}.txt")
    turn = Turn(setup)
    train(setup)
