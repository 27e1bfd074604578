"""Held-out rows that two ranks cannot share evenly, at ZeRO-3: no rank may wait forever.

Every forward pass at ZeRO-3 needs all ranks. The ranks run this file as a program.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROWS = 5
"""3 and 2 rows, in micro batches of 2: two on the first rank, one on the second."""


def main(inputs: dict[str, str], folder: Path) -> None:
    """Evaluate SFT and PPO at stages 0 and 3. The responses of PPO differ in length, too."""
    import pyarrow as pa

    from rlhf_pipeline.data.token_contract import TokenContract
    from rlhf_pipeline.distributed.batches import Rows
    from rlhf_pipeline.distributed.world import join

    world = join(1, timeout_s=600)
    paths = {name: Path(path) for name, path in inputs.items()}
    contract = TokenContract.read(paths["sft_model"])
    table = Rows.of(
        pa.table(
            {
                "prompt_ids": [[5 + i] * (1 + i) for i in range(ROWS)],
                "response_ids": [[20 + i] * (ROWS - i) for i in range(ROWS)],
                "loss_mask": [[True] * (ROWS - i) for i in range(ROWS)],
                "source": ["files"] * ROWS,
                "messages": [[{"role": "user", "content": "?"}]] * ROWS,
            }
        )
    )
    found = {}
    for stage in (0, 3):
        model = {"optimizer": {"learning_rate": 1e-3}, "deepspeed": {"zero_stage": stage}}
        found[f"sft {stage}"] = evaluate_sft(model, paths, contract, table, world)
        found[f"ppo {stage}"] = evaluate_ppo(model, paths, contract, table, world, folder)
    if world.rank == 0:
        (folder / "found.json").write_text(json.dumps(found))


def evaluate_sft(model, paths, contract, table, world) -> dict[str, float]:
    from functools import partial

    from rlhf_pipeline.config.training import SFTConfig
    from rlhf_pipeline.distributed.engine import train_engine
    from rlhf_pipeline.models.loading import load_policy
    from rlhf_pipeline.training.sft import SFTTask
    from rlhf_pipeline.training.supervised import Setup, evaluate

    config = SFTConfig.model_validate(
        model | {"epochs": 1, "batch_size": 4, "micro_batch_tokens": 32}
    )
    engine = train_engine(partial(load_policy, paths["sft_model"]), config, 1)
    setup = Setup(
        engine=engine, task=SFTTask(contract), config=config, training=table, validation=table,
        world=world, seed=1, best=None, guard=None, checkpoints=None, done=0,
    )  # fmt: skip
    return evaluate(setup)


def evaluate_ppo(model, paths, contract, table, world, folder) -> dict[str, float]:
    from rlhf_pipeline.config.ppo import PPOConfig
    from rlhf_pipeline.runtime.job import LaunchedJob
    from rlhf_pipeline.training.ppo import held_out
    from rlhf_pipeline.training.ppo_setup import set_up

    config = PPOConfig.model_validate(
        {
            "steps": 1, "rollout_batch_size": 4, "minibatch_size": 4, "micro_batch_tokens": 32,
            "gather_for_generation": False, "actor": model, "critic": model,
            "sampling": {"max_response_tokens": 9, "batch_size_per_gpu": 2},
        }
    )  # fmt: skip
    block = {"ppo": config.model_dump(mode="json")}
    job = LaunchedJob("ppo", "f", 1, block, paths, {}, folder, 300.0)
    return held_out(replace(set_up(job, config, contract, world), validation=table))[0]


@pytest.mark.long
def test_held_out_rows_need_not_be_shared_evenly(on_ranks, ppo_inputs):
    found = json.loads((on_ranks(__file__, ppo_inputs) / "found.json").read_text())
    assert found["sft 0"]["tokens"] == 5 + 4 + 3 + 2 + 1  # each row once
    assert found["sft 3"] == pytest.approx(found["sft 0"], rel=1e-4)
    assert found["ppo 3"] == pytest.approx(found["ppo 0"], rel=1e-4)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
