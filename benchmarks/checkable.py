"""What is each method worth on a task that a program checks? A real model, three seeds.

    python benchmarks/checkable.py MODEL            # a folder or an id on the hub
    python benchmarks/checkable.py MODEL --seeds 1  # fewer seeds
    python benchmarks/checkable.py MODEL --alone 40 # only the untouched model, with 40 tokens
    python benchmarks/checkable.py --draw           # the table and the plot of what is finished

The task is sums of a number from 1 to 9 and one from 1 to 30. The reward is 1 if the last number of
an answer is right. Every method starts from the untouched model, trains adapters in bf16, and
samples about the same number of answers; the sums of the test are in no other part. A seed decides
the order of the prompts and all answers; each run has one core. Results:
benchmarks/results/checkable/.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from experiments import LAUNCH, RESULTS, Tree, commit, history, side_by_side

from rlhf_pipeline.config.base_model import BaseModelConfig
from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.config.policies import GRPOConfig
from rlhf_pipeline.config.sample import RejectionConfig
from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.pipelines.evaluate import evaluate_models
from rlhf_pipeline.pipelines.ppo import grpo
from rlhf_pipeline.pipelines.preparation import base_model, split
from rlhf_pipeline.pipelines.supervised import rejection
from rlhf_pipeline.stages.job import RunContext
from rlhf_pipeline.stages.run import StageRunner
from rlhf_pipeline.verdict.statistics import cross_pairs, difference, share_with_interval

STEPS, PROMPTS, ANSWERS, TOKENS = 10, 8, 8, 10
REWARDS = [{"reference": "last_number"}]
DATA = {
    "sources": [{"name": "files", "columns": {"prompt": "question", "reference": "answer"}}],
    "weights": [0, 0, 1],
    "validation_fraction": 0.05,
    "test_fraction": 0.25,
    "near_duplicates": "keep",  # all questions have the same words
    "max_prompt_tokens": 40,
    "max_response_tokens": TOKENS,
}
MODEL = {
    "deepspeed": {"zero_stage": 1, "precision": "bf16"},
    "optimizer": {"learning_rate": 3e-4, "weight_decay": 0.0},
    "lora": {"rank": 16, "alpha": 32},
}
COMMON = {
    "steps": STEPS,
    "rollout_batch_size": PROMPTS * ANSWERS,
    "responses_per_prompt": ANSWERS,
    "minibatch_size": PROMPTS * ANSWERS // 2,  # two updates a step, so that ratios matter
    "micro_batch_tokens": 2048,
    "rewards": REWARDS,
    "sampling": {"max_response_tokens": TOKENS},
    "kl": {"coef": 0.02, "place": "loss", "maximum": 20.0},
    "evaluations": 1,
    "evaluation_prompts": 32,
    "actor": MODEL,
}
ALONE, SCORE = "untouched", "objective/score"
METHODS: dict[str, Tree] = {
    "GRPO": {},
    "RLOO": {"advantage": "rloo"},
    "PPO": {"advantage": "gae", "critic": MODEL, "value_clip_range": None, "lam": 1.0},
    "GSPO": {
        "importance": "sequence",
        "denominator": "sequences",
        "clip_range": 3e-4,
        "clip_range_high": 4e-4,
    },
    "GRPO, drop": {"equal_groups": "drop"},
    # Six steps, because each has further rounds: all methods sample about 640 answers.
    "GRPO, resample": {"equal_groups": "resample", "maximum_resamples": 4, "steps": 6},
}
REJECTION = "rejection"
ROUNDS = 3


def sums() -> list[Tree]:
    """Every sum of a number from 1 to 9 and one from 1 to 30, in both orders."""
    pairs = {pair for a in range(1, 10) for b in range(1, 31) for pair in ((a, b), (b, a))}
    system = {"role": "system", "content": "Answer with a number."}

    def row(a: int, b: int) -> Tree:
        question = {"role": "user", "content": f"What is {a} + {b}?"}
        return {"question": [system, question], "answer": str(a + b)}

    return [row(*pair) for pair in sorted(pairs)]


def main() -> int:
    """Train what is missing, one run a core, then evaluate, and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--methods", nargs="+", default=[*METHODS, REJECTION])
    parser.add_argument("--alone", type=int, metavar="TOKENS")
    parser.add_argument("--draw", action="store_true")
    given, root = parser.parse_args(), RESULTS / "checkable"
    if given.alone:
        for seed, right in side_by_side(alone, [(s, given, root) for s in given.seeds]):
            print(f"seed {seed}:", "{:.3f} [{:.3f}, {:.3f}]".format(*share_with_interval(right)))
        return 0
    if not given.draw:
        prepare(given.model, root)
        tasks = [(m, s, given.model, root) for s in given.seeds for m in given.methods]
        for row in side_by_side(train, tasks):
            print(json.dumps(row), flush=True)
        for rows in side_by_side(judge, [(s, given.model, root) for s in given.seeds]):
            print(json.dumps(rows), flush=True)
    return report(root)


def prepare(model: str, root: Path) -> tuple[Path, Path, StageRunner]:
    """The untouched model as a checkpoint, and the prompts."""
    stages = StageRunner(RunContext(root / "workspace", LAUNCH))
    file = root / "sums.jsonl"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(each) + "\n" for each in sums()))
    given = DATA | {"sources": [{**DATA["sources"][0], "path": str(file)}]}
    data = SplitConfig.model_validate(given)
    base = base_model(BaseModelConfig(path=model), data, 1, stages)
    return base, split(base, data, None, 1, stages), stages


def policy(method: str, seed: int, model: str, root: Path) -> Path:
    """The policy that a method trains."""
    base, rows, stages = prepare(model, root)
    if method != REJECTION:
        config = GRPOConfig.model_validate(COMMON | METHODS[method])
        return grpo(rows, base, base, None, config, seed, stages)
    sample = {
        "n": ANSWERS,
        "prompts": STEPS * PROMPTS // ROUNDS,
        "validation_prompts": 16,
        "rewards": REWARDS,
        "min_score": 1.0,
        "cut_answers": "keep",  # at first nearly all are cut, which the other methods allow, too
        "sampling": COMMON["sampling"],
    }
    given = MODEL | {"sample": sample, "rounds": ROUNDS, "batch_size": 16, "epochs": 2}
    config = RejectionConfig.model_validate(given | {"micro_batch_tokens": 2048})
    return rejection(rows, base, base, None, config, seed, stages)


def train(method: str, seed: int, model: str, root: Path) -> Tree:
    """Train one policy; what its last steps measured."""
    trained = policy(method, seed, model, root)
    found = {"method": method, "seed": seed, "commit": commit(), "history": history(trained)}
    (root / f"train-{method}-{seed}.json").write_text(json.dumps(found))
    return {"method": method, "seed": seed, "last": found["history"][-1:]}


def judge(seed: int, model: str, root: Path) -> Tree:
    """Let the policies of a seed answer the test questions; the right ones by method."""
    base, rows, stages = prepare(model, root)
    names = {name.replace(", ", "-"): name for name in (*METHODS, REJECTION)}
    done = {
        key: name for key, name in names.items() if (root / f"train-{name}-{seed}.json").exists()
    }
    models = {ALONE: base} | {key: policy(name, seed, model, root) for key, name in done.items()}
    export = answers(models, rows, TOKENS, seed, stages)
    found = {"seed": seed, "commit": commit()} | summary(export, {ALONE: ALONE} | done)
    (root / f"test-{seed}.json").write_text(json.dumps(found))
    return {name: np.mean(right) for name, right in found["right"].items()}


def alone(seed: int, given: argparse.Namespace, root: Path) -> tuple[int, list[list[float]]]:
    """Whether the answers of the untouched model are right with more tokens, by question."""
    base, rows, stages = prepare(given.model, root)
    models = {ALONE: base, "again": base}  # a comparison needs two
    export = answers(models, rows, given.alone, seed, stages)
    return seed, summary(export, {ALONE: ALONE})["right"][ALONE]


def answers(
    models: dict[str, Path], rows: Path, tokens: int, seed: int, stages: StageRunner
) -> Path:
    """Two answers of each model to each question of the test."""
    config = EvaluateConfig.model_validate(
        {"judges": REWARDS, "sampling": {"max_response_tokens": tokens}, "prompts": 120,
         "precision": "bf16", "answers_per_prompt": 2}
    )  # fmt: skip
    prompts = dict.fromkeys(models, rows / "evaluation")
    return evaluate_models(models, prompts, config, seed, stages)


def summary(export: Path, names: dict[str, str]) -> dict[str, Any]:
    """Whether each answer to each question is right, and the KL, by method."""
    right: dict[str, dict[int, list[float]]] = {name: {} for name in names.values()}
    kl: dict[str, list[float]] = {name: [] for name in names.values()}
    for line in (export / "answers.jsonl").read_text().splitlines():
        answer = json.loads(line)
        if answer["policy"] in names:
            name = names[answer["policy"]]
            right[name].setdefault(answer["row"], []).append(answer["last_number_score"])
            kl[name].append(answer["kl"])
    return {
        "right": {name: [rows[row] for row in sorted(rows)] for name, rows in right.items()},
        "kl": {name: float(np.mean(values)) for name, values in kl.items()},
    }


def report(root: Path) -> int:
    """Print the table and save the plot of what is finished. The exit code is 0 if a method has
    three times the accuracy of the untouched model, from below 30%, on every seed."""
    tests = [json.loads(file.read_text()) for file in sorted(root.glob("test-*.json"))]
    names = [ALONE, *METHODS, REJECTION]
    print("| method | seed | accuracy | 95% interval | minus untouched | minus GRPO | KL, nats |")
    print("|---|---:|---:|---|---|---|---:|")
    for name in names:
        for test in (test for test in tests if name in test["right"]):
            right, others = test["right"][name], test["right"]
            share, lower, upper = share_with_interval(right)
            gains = [
                "" if name == other or other not in others else signed(right, others[other])
                for other in (ALONE, "GRPO")
            ]
            print(
                f"| {name} | {test['seed']} | {share:.3f} | [{lower:.3f}, {upper:.3f}] | "
                f"{' | '.join(gains)} | {test['kl'][name]:.1f} |"
            )
    tripled = [
        all(
            np.mean(test["right"].get(name, 0)) >= 3 * np.mean(test["right"][ALONE])
            and np.mean(test["right"][ALONE]) < 0.3
            for test in tests
        )
        for name in names[1:]
    ]
    print(
        "tripled on every seed:", ", ".join(n for n, t in zip(names[1:], tripled, strict=True) if t)
    )
    plot(root, names[1:], tests)
    return 0 if any(tripled) else 1


def signed(right: list[list[float]], other: list[list[float]]) -> str:
    """The difference of two accuracies with its interval, from independent answers."""
    found = difference(*cross_pairs(right, other))
    return "{:+.3f} [{:+.3f}, {:+.3f}]".format(*found)


def plot(root: Path, names: list[str], tests: list[Tree]) -> None:
    """The reward over the answers sampled, a line for each seed, and the accuracy on the test."""
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for index, name in enumerate(names):
        color = f"C{index}"
        for file in sorted(root.glob(f"train-{name}-*.json")):
            rows = [row for row in json.loads(file.read_text())["history"] if SCORE in row]
            further = np.array([row.get("rollout/resampled", 0) for row in rows])
            sampled = np.cumsum(PROMPTS * ANSWERS * (1 + further))
            is_first = file.stem.endswith("-1")
            left.plot(sampled, [row[SCORE] for row in rows], color=color, label=name * is_first)
    for index, name in enumerate([*names, ALONE]):
        for test in (test for test in tests if name in test["right"]):
            share, lower, upper = share_with_interval(test["right"][name])
            at = index + 0.2 * (test["seed"] - 2)
            color = "gray" if name == ALONE else f"C{index}"
            ends = [[share - lower], [upper - share]]
            right.errorbar(at, share, yerr=ends, fmt="o", color=color, markersize=4)
    left.set(xlabel="answers sampled", ylabel="reward of the trained groups", ylim=(0, 1))
    right.set(ylabel="accuracy on unseen sums, 95%", ylim=(0, 1))
    right.set_xticks(range(len(names) + 1), [*names, ALONE], rotation=30, ha="right")
    left.legend(frameon=False, fontsize=8)
    figure.savefig(root / "checkable.png", dpi=110)


if __name__ == "__main__":
    raise SystemExit(main())
