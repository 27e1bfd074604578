"""Does a gain over an instruct model survive a judge that the training has not seen?

    python benchmarks/human_preferences.py MODEL HH_FILE            # seeds 1 to 3
    python benchmarks/human_preferences.py MODEL HH_FILE --seeds 1  # one seed

One half of the comparisons of HH-RLHF trains a reward model, DPO, and PPO with that reward model.
The other half trains the judge. All dialogues with the same first turn are in the same half. Every
policy starts from the untouched instruct model, which is the baseline, and trains adapters in bf16.
A seed decides the order of the rows and all answers. Each run has one core; finished stages are
reused. Results: benchmarks/results/human_preferences/.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
from pathlib import Path

from experiments import LAUNCH, RESULTS, Tree, commit, side_by_side
from rich.console import Console
from rich.table import Table

from rlhf_pipeline.config.base_model import BaseModelConfig
from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.preferences import DPOConfig
from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.config.training import RewardModelConfig
from rlhf_pipeline.pipelines.evaluate import evaluate_models
from rlhf_pipeline.pipelines.ppo import ppo
from rlhf_pipeline.pipelines.preparation import base_model, split
from rlhf_pipeline.pipelines.supervised import dpo, reward_model
from rlhf_pipeline.stages.job import RunContext
from rlhf_pipeline.stages.run import StageRunner
from rlhf_pipeline.verdict.comparison import read_evaluation

UNTOUCHED, JUDGE, PROXY = "untouched", "judge", "proxy"
TOKENS = 64
SPLIT = {
    "max_prompt_tokens": 256,
    "max_response_tokens": 96,
    "over_long_prompts": "drop",
    "over_long_responses": "drop",
    "max_bad_fraction": 0.01,  # some dialogues of the file are malformed
}
HALVES: dict[str, Tree] = {
    JUDGE: {"weights": [0, 1, 0], "validation_fraction": 0.15, "test_fraction": 0.0},
    PROXY: {"weights": [0, 6, 3], "validation_fraction": 0.1, "test_fraction": 0.2},
}
"""How the half of each reward model is split."""
MODEL: Tree = {
    "deepspeed": {"zero_stage": 1, "precision": "bf16"},
    "optimizer": {"learning_rate": 2e-4, "weight_decay": 0.0},
    "lora": {"rank": 16, "alpha": 32},
}
SUPERVISED = MODEL | {"batch_size": 16, "micro_batch_tokens": 2400, "evaluations": 2}
REWARD_MODEL = RewardModelConfig.model_validate(SUPERVISED | {"epochs": 2})
# At 1e-4, neither DPO in 23 updates nor PPO in 40 left the instruct model: margin 0.0, KL 0.3.
POLICY_OPTIMIZER = {"optimizer": {"learning_rate": 5e-4, "weight_decay": 0.0}}
DPO_CONFIG = DPOConfig.model_validate(SUPERVISED | POLICY_OPTIMIZER | {"epochs": 3})
PPO_CONFIG = PPOConfig.model_validate(
    {
        "steps": 24,
        "rollout_batch_size": 32,
        "minibatch_size": 16,
        "ppo_epochs": 1,
        "micro_batch_tokens": 2400,
        "evaluations": 2,
        "evaluation_prompts": 32,
        "sampling": {"max_response_tokens": TOKENS},
        "kl": {"coef": 0.05, "maximum": 10.0},
        "actor": MODEL | POLICY_OPTIMIZER,
        "critic": MODEL,
    }
)


def main() -> None:
    """Train the judge and the policies, compare them, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder or id of the instruct model")
    parser.add_argument("comparisons", type=Path, help="file of HH-RLHF, .jsonl or .jsonl.gz")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    given, root = parser.parse_args(), RESULTS / "human_preferences"
    write_halves(given.comparisons, root)
    for name in (JUDGE, PROXY):
        prepare(name, given.model, root)
    found: dict[str, Tree] = {}
    for name, row in side_by_side(part, [(n, given.model, root) for n in (JUDGE, *given.seeds)]):
        found[str(name)] = row
        result = {"commit": commit(), "parts": found}
        (root / "human_preferences.json").write_text(json.dumps(result, indent=1))
        show(result)


def write_halves(comparisons: Path, root: Path) -> None:
    """Two files: each first turn of a human, by its hash, is in one of them."""
    if all((root / f"{name}.jsonl").exists() for name in HALVES):
        return
    root.mkdir(parents=True, exist_ok=True)
    opened = gzip.open if comparisons.suffix == ".gz" else open
    halves: dict[str, list[str]] = {name: [] for name in HALVES}
    with opened(comparisons, "rt", encoding="utf-8") as lines:
        for line in lines:
            first = json.loads(line)["chosen"].split("\n\nAssistant:")[0].strip()
            odd = hashlib.sha256(first.encode()).digest()[0] % 2
            halves[(JUDGE, PROXY)[odd]].append(line)
    for name, rows in halves.items():
        (root / f"{name}.jsonl").write_text("".join(rows))


def prepare(half: str, model: str, root: Path) -> tuple[Path, Path, SplitConfig, StageRunner]:
    """The untouched model as a checkpoint, the split of one half, and its parameters."""
    stages = StageRunner(RunContext(root / half, LAUNCH))
    source = {"name": "Anthropic/hh-rlhf", "path": str(root / f"{half}.jsonl")}
    config = SplitConfig.model_validate(SPLIT | HALVES[half] | {"sources": [source]})
    base = base_model(BaseModelConfig(path=model), config, 1, stages)
    return base, split(base, config, None, 1, stages), config, stages


def reward(half: str, seed: int, model: str, root: Path) -> Path:
    """The reward model of one half."""
    base, rows, data, stages = prepare(half, model, root)
    return reward_model(base, rows, base, data, REWARD_MODEL, seed, stages)


def policy(method: str, seed: int, model: str, root: Path) -> Path:
    """A policy that is trained on the half of the proxy."""
    base, rows, _, stages = prepare(PROXY, model, root)
    if method == "dpo":
        return dpo(rows, base, DPO_CONFIG, seed, stages)
    scores = reward(PROXY, seed, model, root)
    return ppo(rows, base, scores, REWARD_MODEL, PPO_CONFIG, seed, stages)


def part(name: str | int, model: str, root: Path) -> tuple[str | int, Tree]:
    """Train the judge; or of a seed the proxy and the policies, which both reward models judge."""
    if name == JUDGE:
        return name, {"accuracy": accuracy(reward(JUDGE, 1, model, root))}
    seed = int(name)
    base, rows, _, stages = prepare(PROXY, model, root)
    proxy = reward(PROXY, seed, model, root)
    policies = {method: policy(method, seed, model, root) for method in ("dpo", "ppo")}
    judges = {JUDGE: reward(JUDGE, 1, model, root), PROXY: proxy}
    config = EvaluateConfig.model_validate(
        {
            "judges": [{"model": str(path), "name": name} for name, path in judges.items()],
            "prompts": 200,
            "precision": "bf16",
            "sampling": {"max_response_tokens": TOKENS},
        }
    )
    found: Tree = {"accuracy": accuracy(proxy)}
    for method, trained in policies.items():
        models = {UNTOUCHED: base, method: trained}
        prompts = dict.fromkeys(models, rows / "evaluation")
        export = evaluate_models(models, prompts, config, seed, stages)
        found[method] = read_evaluation(export)
    return name, found


def accuracy(model: Path) -> Tree:
    """What the manifest of a reward model says about held-out comparisons."""
    metrics = json.loads((model / "manifest.json").read_text())["metrics"]
    return {name: value for name, value in metrics.items() if "accuracy" in name}


def show(result: Tree) -> None:
    """A table of the policies, and the accuracies of the reward models."""
    console = Console(width=140)
    console.print(f"at commit {result['commit']}")
    table = Table(title="Against the untouched instruct model, independent draws")
    columns = ("policy", "seed", "win rate by the judge", "at equal length", "by the proxy")
    for column in (*columns, "KL, nats", "tokens", "ended"):
        table.add_column(column, justify="right")
    for seed, of in result["parts"].items():
        console.print(f"{seed if seed == JUDGE else f'{PROXY} of seed {seed}'}: {of['accuracy']}")
        methods = [name for name in of if name != "accuracy"]
        for name in (UNTOUCHED, *methods) if methods else ():
            evaluation = of[methods[0] if name == UNTOUCHED else name]
            summary, rates = evaluation["policies"][name], ["", "", ""]
            if name != UNTOUCHED:
                by_judge, by_proxy = (evaluation["win_rates"][j] for j in (JUDGE, PROXY))
                rates = [rate(by_judge), rate(by_judge["length_controlled"]), rate(by_proxy)]
            numbers = (f"{summary['kl']:.2f}", f"{summary['response_tokens']:.1f}")
            table.add_row(name, seed, *rates, *numbers, f"{summary['eos_fraction']:.1%}")
    console.print(table)


def rate(row: Tree | None) -> str:
    return f"{row['rate']:.3f} [{row['lower']:.3f}, {row['upper']:.3f}]" if row else "-"


if __name__ == "__main__":
    main()
