"""Variants of the default recipe beside it, on several seeds: what does a change cost or bring?

    python benchmarks/variants.py reward_model          # reward models from a base of their own
    python benchmarks/variants.py ptx                   # coefficients of the loss on plain text
    python benchmarks/variants.py ptx --seeds 1 2 --variants default "ptx 27.8"

A seed decides data, model, split, training and decoding. Each seed runs with one process on its own
core. Variants of a seed share the stages that they have in common, and finished stages are reused,
so an interrupted benchmark resumes. Results: benchmarks/results/variants/.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path

import numpy as np
from baselines import ends, figures
from experiments import PROJECT, RESULTS, Tree, commit, parameters, side_by_side
from rich.console import Console
from rich.table import Table

from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.data.sources.synthetic import generate
from rlhf_pipeline.errors import StageError

FOLDER = RESULTS / "variants"


def own_reward_model(changes: Tree, critic: str) -> Tree:
    """A reward model from an untrained model of half the policy's width, and the critic's start."""
    base = parameters()["base_model"]
    smaller = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.125}
    own = base | {"architecture": base["architecture"] | smaller} | changes
    return {
        "reward_model.start": "own",
        "reward_model.base_model": own,
        "ppo.critic.start": critic,
    }


def ptx(coef: float) -> Tree:
    """PPO with the language-model loss on the texts of `write_texts`, and this coefficient."""
    source = {"name": "files", "path": str(FOLDER / "texts.jsonl")}
    return {
        "split.pretraining": {"sources": [source], "block_tokens": 64},
        "ppo.ptx": {"coef": coef, "batch_size": 64},
    }


def write_texts(file: Path) -> None:
    """Plain text for the loss: prompts and preferred answers of a seed that no run uses."""
    source = SplitConfig.model_validate(parameters()["split"]).sources[0]
    rows = (row for _, row in generate(source.model_copy(update={"samples": 5000}), seed=0))
    texts = (f"\n\nHuman: {row.prompt[-1].content}\n\nAssistant: {row.chosen}" for row in rows)
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


VARIANTS: dict[str, dict[str, Tree]] = {
    "reward_model": {
        "default": {},
        "own, tokens of the policy": own_reward_model({}, "reward_model"),
        "own, other tokens": own_reward_model({"vocab_size": 512}, "policy"),
        "from the base model": {"reward_model.start": "base"},
    },
    "ptx": {"default": {}} | {f"ptx {coef:g}": ptx(coef) for coef in (0.1, 1.0, 5.0, 27.8)},
}


def main() -> None:
    """Run the seeds, one on each core at a time; print a row for each seed and variant."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", choices=VARIANTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--variants", nargs="+", help="some of them [default: all]")
    given = parser.parse_args()
    names = given.variants or list(VARIANTS[given.family])
    FOLDER.mkdir(parents=True, exist_ok=True)
    if given.family == "ptx":
        write_texts(FOLDER / "texts.jsonl")
    for seed in side_by_side(measure, [(seed, given.family, names) for seed in given.seeds]):
        print(f"seed {seed}: done", flush=True)
    console = Console(width=150)
    console.print(f"at commit {commit()}")
    console.print(table(given.family, given.seeds, names))


def measure(seed: int, family: str, names: list[str]) -> int:
    """Run the variants on one seed, and write what each one found to a file of its own."""
    from rlhf_pipeline import run

    root = FOLDER / str(seed)
    root.mkdir(parents=True, exist_ok=True)
    log = os.open(root / "run.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{root}/mlflow.db"
    for name in names:
        common = {"seed": seed, "root": str(root), "launch.processes": 1, "evaluate.best_of_n": 0}
        try:
            result = run("full", params=common | VARIANTS[family][name], project=PROJECT)
        except StageError as error:  # such as a KL above its bound at each evaluation
            reason = error.message.splitlines()[1].partition(": ")[2]
            file_of(seed, name).write_text(json.dumps({"failed": reason}))
            continue
        evaluation, history = result.evaluation, result.metrics("ppo")
        scores = result.metrics("reward_model")
        norms = [one["metrics"]["optim/actor_grad_norm"] for one in history]
        found = {
            "sft": figures(evaluation["policies"]["sft"]),
            "ppo": figures(evaluation["policies"]["ppo"]) | ends(evaluation, "gold"),
            "perplexity": evaluation.get("perplexity", {}),
            "accuracy": scores[-1]["metrics"]["validation/accuracy"],
            "grad_norm": [float(np.median(norms)), max(norms)],
            "steps": len(history),
        }
        file_of(seed, name).write_text(json.dumps(found, indent=2))
    return seed


def file_of(seed: int, name: str) -> Path:
    """The file with what a variant found on a seed."""
    return FOLDER / f"{seed}-{re.sub('[^a-z0-9.]+', '-', name)}.json"


def table(family: str, seeds: list[int], names: list[str]) -> Table:
    """A row for each variant and seed."""
    made = Table(title=f"{family}: PPO against SFT on unseen requests")
    for column in (
        "variant",
        "seed",
        "accuracy of the reward model",
        "win rate by gold",
        "KL, nats",
        "steps",
        "right answers of SFT",
        "of PPO",
        "refusals of SFT",
        "of PPO",
        "perplexity of SFT",
        "of PPO",
        "gradient norm, median",
        "largest",
    ):
        made.add_column(column, justify="left" if column == "variant" else "right")
    for name in names:
        for seed in seeds:
            found = json.loads(file_of(seed, name).read_text())
            if "failed" in found:
                made.add_row(name, str(seed), "", f"failed: {found['failed']}")
                continue
            sft, ppo, perplexity = found["sft"], found["ppo"], found["perplexity"]
            shares = [
                f"{one[part]:.0%}"
                for part in ("gold_right_answers", "gold_right_refusals")
                for one in (sft, ppo)
            ]
            made.add_row(
                name,
                str(seed),
                f"{found['accuracy']:.1%}",
                f"{ppo['rate']:.3f} [{ppo['lower']:.3f}, {ppo['upper']:.3f}]",
                f"{ppo['kl']:.2f}",
                str(found["steps"]),
                *shares,
                *(f"{perplexity[policy]:.3f}" for policy in ("sft", "ppo")),
                *(f"{norm:.2f}" for norm in found["grad_norm"]),
            )
    return made


if __name__ == "__main__":
    main()
