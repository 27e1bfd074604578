"""Variants of the default recipe beside it, on several seeds: what does a change cost or bring?

    python benchmarks/variants.py reward_model          # reward models from a base of their own
    python benchmarks/variants.py ptx                   # coefficients of the loss on plain text
    python benchmarks/variants.py ptx --seeds 1 2 --variants default "ptx 27.8"
    python benchmarks/variants.py ptx_pretrained --seeds 1 2   # on SmolLM2 and WikiText-2

A seed decides data, model, split, training and decoding. Each seed runs with one process on its own
core. Variants of a seed share the stages that they have in common, and finished stages are reused,
so an interrupted benchmark resumes. Results: benchmarks/results/variants/.

`ptx_pretrained` needs SMOLLM2_PATH and HH_RLHF_PATH as docs/smollm2.md says, and WIKITEXT_PATH, a
text file. PPO starts from the instruct model and maximizes the reward of brevity.py.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path

import numpy as np
from baselines import ends
from experiments import PROJECT, RESULTS, Tree, commit, parameters, side_by_side
from rich.console import Console
from rich.table import Table

from rlhf_pipeline.api import RunResults
from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.data.sources.synthetic import generate
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.runtime.metrics_file import read_json_lines
from rlhf_pipeline.verdict.words import Evaluation

FOLDER = RESULTS / "variants"
CURVES = ("optim/actor_grad_norm", "objective/score", "objective/kl", "ptx/perplexity")
"""Metrics of training that the table shows."""


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


def ptx_pretrained(coef: float) -> Tree:
    """PPO from SmolLM2 on a reward by code. With a coefficient near 0, text is only measured."""
    text = {"name": "files", "path": os.environ.get("WIKITEXT_PATH", "")}
    model = {
        "deepspeed": {"precision": "bf16"},
        "lora": {"rank": 16, "alpha": 32},
        "optimizer.learning_rate": 5e-4,
    }
    return {
        "sft": None,
        "reward_model": None,
        "split.weights": [0, 0, 1],
        "split.max_prompt_tokens": 64,
        "split.pretraining": {"sources": [text], "block_tokens": 128},
        "evaluate.prompts": 100,
        "ppo.rewards": ["benchmarks/brevity.py:brevity"],
        "ppo.advantage": "rloo",  # a critic from nothing would learn first
        "ppo.critic": None,
        "ppo.responses_per_prompt": 4,
        "ppo.steps": 12,
        "ppo.ppo_epochs": 1,
        "ppo.evaluations": 1,
        "ppo.evaluation_prompts": 32,
        "ppo.sampling.max_response_tokens": 48,
        "ppo.ptx": {"coef": coef, "batch_size": 4},
        "ppo.actor": model,
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
    "ptx_pretrained": {f"ptx {coef:g}": ptx_pretrained(coef) for coef in (1e-9, 0.1, 1.0, 27.8)},
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
    console = Console(width=200)
    console.print(f"at commit {commit()}")
    console.print(table(given.family, given.seeds, names))


def measure(seed: int, family: str, names: list[str]) -> int:
    """Run the variants on one seed, and write what each one found to a file of its own."""
    from rlhf_pipeline import run

    root, env = FOLDER / str(seed), "smollm2" if family == "ptx_pretrained" else None
    root.mkdir(parents=True, exist_ok=True)
    log = os.open(root / "run.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{root}/mlflow.db"
    for name in names:
        common = {"seed": seed, "root": str(root), "launch.processes": 1, "evaluate.best_of_n": 0}
        try:
            result = run("full", params=common | VARIANTS[family][name], env=env, project=PROJECT)
        except StageError as error:  # such as a KL above its bound at each evaluation
            found = {"failed": error.message.splitlines()[1].partition(" Fix: ")[0]}
            newest = max((root / "07_workspace" / "ppo").iterdir(), key=os.path.getmtime)
            history = read_json_lines(newest / "metrics.jsonl")
        else:
            history = result.metrics("ppo")
            found = pretrained(result) if env else default_world(result)
        found |= training(history)
        file_of(seed, name).write_text(json.dumps(found, indent=2))
    return seed


def default_world(result: RunResults) -> dict[str, str]:
    """PPO on the default's world."""
    evaluation = result.evaluation
    sft, ppo = (evaluation["policies"][name] for name in ("sft", "ppo"))
    accuracy = result.metrics("reward_model")[-1]["metrics"]["validation/accuracy"]
    shares = {
        f"right {part} of {name}": f"{row[f'gold_right_{part}']:.0%}"
        for part in ("answers", "refusals")
        for name, row in (("SFT", sft), ("PPO", ppo))
    }
    perplexity = evaluation.get("perplexity", {})
    return (
        {"accuracy of the reward model": f"{accuracy:.1%}"}
        | won(evaluation, "gold")
        | shares
        | {f"perplexity of {name}": f"{perplexity[name]:.3f}" for name in ("sft", "ppo")}
    )


def pretrained(result: RunResults) -> dict[str, str]:
    """PPO from an instruct model."""
    return won(result.evaluation, "brevity")


def won(evaluation: Evaluation, judge: str) -> dict[str, str]:
    """How PPO's policy compares with its start."""
    found = ends(evaluation, judge)
    return {
        f"win rate by {judge}": f"{found['rate']:.3f} [{found['lower']:.3f}, {found['upper']:.3f}]",
        "KL, nats": f"{evaluation['policies']['ppo']['kl']:.2f}",
    }


def training(history: list[Tree]) -> dict[str, str]:
    """What PPO's training shows; text is measured before a step learns from it."""
    has = [name for name in CURVES if name in history[0]["metrics"]]
    curve = {name: [each["metrics"][name] for each in history] for name in has}
    norms = curve.pop("optim/actor_grad_norm")
    return {
        "steps": str(len(history)),
        "gradient norm, median": f"{np.median(norms):.2f}",
        "largest": f"{max(norms):.2f}",
        **{
            f"{name}, {part} 3 steps": f"{np.mean(values[steps]):.2f}"
            for name, values in curve.items()
            for part, steps in (("first", slice(3)), ("last", slice(-3, None)))
        },
    }


def file_of(seed: int, name: str) -> Path:
    """The file with what a variant found on a seed."""
    return FOLDER / f"{seed}-{re.sub('[^a-z0-9.]+', '-', name)}.json"


def table(family: str, seeds: list[int], names: list[str]) -> Table:
    """A row for each variant and seed."""
    rows = {(n, seed): json.loads(file_of(seed, n).read_text()) for n in names for seed in seeds}
    made = Table("variant", "seed", title=f"{family}: PPO against its start on unseen requests")
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    for column in columns:
        made.add_column(column, justify="right")
    for (name, seed), row in rows.items():
        made.add_row(name, str(seed), *(row.get(column, "") for column in columns))
    return made


if __name__ == "__main__":
    main()
