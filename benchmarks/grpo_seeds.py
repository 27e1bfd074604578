"""Does GRPO learn a reward of 0 or 1? Train the default SFT model on several seeds.

    python benchmarks/grpo_seeds.py                 # seeds 1 to 3
    python benchmarks/grpo_seeds.py --seeds 4 5     # other seeds

The reward is 1 if the gold score of an answer is at least 2.5, else 0. Each of 60 steps answers 16
prompts 8 times, with `kl.coef` 0.05; the other parameters are the default's. A seed decides the
order of the prompts and the answers; data, split and SFT model are those of seed 1234. The policy
of the last step answers every test prompt once. Results: benchmarks/results/grpo_seeds/.
The exit code is 0 if the mean reward there is at least 0.94 on every seed.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path

from rlhf_pipeline.data.records import Conversation
from rlhf_pipeline.data.sources.synthetic import gold_score

SUCCESS, TARGET = 2.5, 0.94
CHANGES = {
    "advantage": "grpo", "critic": None, "steps": 60, "rollout_batch_size": 128,
    "responses_per_prompt": 8, "kl": {"coef": 0.05, "maximum": None}, "evaluations": 1,
    "rewards": [f"{__file__}:success"],
}  # fmt: skip


def success(prompts: list[Conversation], responses: list[str]) -> list[float]:
    """The reward function."""
    gold = [gold_score("synthetic", *pair) for pair in zip(prompts, responses, strict=True)]
    return [float(score is not None and score >= SUCCESS) for score in gold]


def main() -> int:
    """Train and measure one seed after the other; print and keep a row for each."""
    from experiments import RESULTS, commit, prepare_policy

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    given, root = parser.parse_args(), RESULTS / "grpo_seeds"
    split, policy = prepare_policy(1234, root / "workspace")
    rows = []
    for seed in given.seeds:
        rows.append({"commit": commit()} | train_and_measure(seed, split, policy, root))
        (root / f"{seed}.json").write_text(json.dumps(rows[-1]))
        print(json.dumps(rows[-1]), flush=True)
    return 0 if all(row["success"] >= TARGET for row in rows) else 1


def train_and_measure(seed: int, split: Path, policy: Path, root: Path) -> dict[str, float]:
    """Train in this process; return the means of the last policy over the test prompts."""
    from experiments import ppo_config

    from rlhf_pipeline.data.token_contract import TokenContract
    from rlhf_pipeline.distributed.batches import load_rows
    from rlhf_pipeline.distributed.world import join
    from rlhf_pipeline.runtime.job import LaunchedJob
    from rlhf_pipeline.stages.launch.resources import free_port
    from rlhf_pipeline.training import ppo
    from rlhf_pipeline.training.ppo_setup import set_up

    os.environ |= {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port(None)),
    }  # fmt: skip
    folder = root / f"seed-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    inputs = {"prompts": split / "ppo", "sft_model": policy, "rewards.0": Path(__file__)}
    # Neither the score nor a critic reads the reward model, but PPO compares its tokenizer.
    inputs["reward_model"] = policy
    job = LaunchedJob("ppo", "", seed, {}, inputs, {}, folder, 600.0)
    world = join(seed, timeout_s=600.0)
    setup = set_up(job, ppo_config(CHANGES), TokenContract.read(policy), world)
    ppo.train(setup)
    test = load_rows(split / "evaluation" / "test.arrow", world)
    everything = setup.config.model_copy(update={"evaluation_prompts": test.num_rows})
    found = ppo.held_out_metrics(replace(setup, validation=test, config=everything))
    return {
        "seed": seed,
        "prompts": test.num_rows,
        "success": found["objective/score"],
        "gold": found["objective/gold_score"],
        "kl": found["objective/kl"],
    }


if __name__ == "__main__":
    raise SystemExit(main())
