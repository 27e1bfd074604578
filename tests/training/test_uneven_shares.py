"""Held-out rows that two ranks cannot share evenly: at ZeRO-3, where every forward pass takes all ranks, nobody waits for ever.

This file is also the program that the ranks run.
"""

import json
import sys
from pathlib import Path

import pytest

ROWS = 5
"""3 and 2 rows, in micro batches of 2: two of them on the first rank, one on the second."""


def main(inputs: dict[str, str], folder: Path) -> None:
    """Evaluate SFT and PPO at stages 0 and 3; the responses that PPO samples are of unequal lengths, too."""
    from functools import partial

    import pyarrow as pa

    from rlhf_pipeline.config.ppo import PPOConfig
    from rlhf_pipeline.config.training import SFTConfig
    from rlhf_pipeline.data.token_contract import TokenContract
    from rlhf_pipeline.distributed.engine import train_engine
    from rlhf_pipeline.distributed.world import join
    from rlhf_pipeline.models.loading import load_policy
    from rlhf_pipeline.runtime.job import LaunchedJob
    from rlhf_pipeline.training import ppo
    from rlhf_pipeline.training.ppo_models import load_ppo_models
    from rlhf_pipeline.training.sft import SFTTask
    from rlhf_pipeline.training.supervised import evaluate

    world = join(1, timeout_s=30)
    paths = {name: Path(path) for name, path in inputs.items()}
    contract = TokenContract.read(paths["sft_model"])
    table = pa.table(
        {
            "prompt_ids": [[5 + i] * (1 + i) for i in range(ROWS)],
            "response_ids": [[20 + i] * (ROWS - i) for i in range(ROWS)],
            "loss_mask": [[True] * (ROWS - i) for i in range(ROWS)],
            "source": ["files"] * ROWS,
            "messages": [[{"role": "user", "content": "?"}]] * ROWS,
        }
    )
    found = {}
    for stage in (0, 3):
        model = {"optimizer": {"learning_rate": 1e-3}, "deepspeed": {"zero_stage": stage}}
        sft = SFTConfig.model_validate(
            model | {"epochs": 1, "batch_size": 4, "micro_batch_size_per_gpu": 2}
        )
        engine = train_engine(partial(load_policy, paths["sft_model"]), sft, 1)
        found[f"sft {stage}"] = evaluate(engine, SFTTask(contract), table, world, 2)
        sizes = {"rollout_batch_size": 4, "minibatch_size": 4, "micro_batch_size_per_gpu": 2}
        config = PPOConfig.model_validate(
            sizes | {"steps": 1, "gather_for_generation": False, "actor": model, "critic": model}
            | {"sampling": {"max_response_tokens": 9, "batch_size_per_gpu": 2}}
        )  # fmt: skip
        job = LaunchedJob(
            "ppo", "f", 1, {"ppo": config.model_dump(mode="json")}, paths, {}, folder, 30.0
        )
        models = load_ppo_models(job, config, contract, world)
        found[f"ppo {stage}"] = ppo.evaluate(models, table, config, world, seed=1)
    if world.rank == 0:
        (folder / "found.json").write_text(json.dumps(found))


@pytest.mark.long
def test_held_out_rows_need_not_be_shared_evenly(on_ranks, ppo_inputs):
    found = json.loads((on_ranks(__file__, ppo_inputs) / "found.json").read_text())
    assert found["sft 0"]["tokens"] == 5 + 4 + 3 + 2 + 1  # each row once
    assert found["sft 3"] == pytest.approx(found["sft 0"], rel=1e-4)
    assert found["ppo 3"] == pytest.approx(found["ppo 0"], rel=1e-4)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
