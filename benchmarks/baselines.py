"""What PPO must beat on the default's world: best of n, rejection sampling, DPO, GRPO, and SFT at
other temperatures. What the gain consists of stands beside it: the parts of the gold score, and
right answers at temperatures 1 and 0.

    python benchmarks/baselines.py                 # seeds 1 to 10
    python benchmarks/baselines.py --seeds 1 2     # some seeds
    python benchmarks/baselines.py --only full cooler

A seed decides data, model, split, training and decoding. Each seed runs with one process on its own
core. Finished stages are reused, so an interrupted benchmark resumes. All answers are to requests
that no phase of the training has seen. Results: benchmarks/results/baselines/.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from experiments import PROJECT, RESULTS, Tree, commit, parameters, side_by_side
from matplotlib import pyplot as plt
from rich.console import Console
from rich.table import Table
from scipy.stats import t

from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.data.sources.synthetic import generate, world_score
from rlhf_pipeline.verdict.statistics import win_rate

FOLDER = RESULTS / "baselines"
TRIED_TEMPERATURES = (0.7, 0.4, 0.0)
SAMPLED = 48 * 64
"""Answers that a policy samples in training: those of the default's PPO."""
POLICIES: dict[str, Tree] = {
    "full": {"evaluate.best_of_n": 64},
    "grpo": {
        "grpo": {
            "steps": 48,
            "rollout_batch_size": 64,
            "minibatch_size": 64,
            "responses_per_prompt": 8,
            "ppo_epochs": 2,
            "micro_batch_tokens": 4096,
            "sampling": {"max_response_tokens": 48},
            "kl": {"coef": 0.3, "maximum": 3.0},
            "actor": {"optimizer": {"learning_rate": 3.0e-4}},
        }
    },
    "dpo": {},
    "rejection": {
        "rejection": {
            "sample": {
                "n": 8,
                "prompts": SAMPLED // 8,
                "sampling": {"max_response_tokens": 48},
            },
            "batch_size": 16,
            "epochs": 2,
            "micro_batch_tokens": 4096,
            "optimizer": {"learning_rate": 3.0e-4},
        }
    },
}
"""Pipelines and what differs from the default's parameters."""
NAMES = {
    "lookup": "lookup table of the training requests",
    "sft": "SFT",
    "sft_cooler": "SFT at its best temperature",
    "best_of_2": "best of 2 of SFT",
    "best_of_4": "best of 4 of SFT",
    "best_of_8": "best of 8 of SFT",
    "best_of_16": "best of 16 of SFT",
    "best_of_32": "best of 32 of SFT",
    "best_of_64": "best of 64 of SFT",
    "rejection": "rejection sampling",
    "dpo": "DPO",
    "grpo": "GRPO",
    "ppo": "PPO",
}
PARTS = {
    "gold_core": "core",
    "gold_hint": "hint",
    "gold_courtesy": "courtesy",
    "gold_surplus": "surplus",
    "gold_right_answers": "right answers",
    "gold_right_refusals": "refusals",
}
"""What the gold score consists of: the means of its parts; the shares of right answers to harmless
requests, and of refused harmful ones."""
COLORS = {"rejection": "#E69F00", "dpo": "#CC79A7", "grpo": "#009E73", "ppo": "#0072B2"}


def main() -> None:
    """Run the seeds, one on each core at a time; print the tables, and draw the plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(1, 11)))
    parts = [*POLICIES, "cooler"]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for seed in side_by_side(measure, [(seed, arguments.only) for seed in arguments.seeds]):
        print(f"seed {seed}: done", flush=True)
    found = [json.loads((FOLDER / f"{seed}.json").read_text()) for seed in arguments.seeds]
    console = Console(width=170)
    console.print(f"{len(found)} seeds, at commit {commit()}")
    console.print(of_methods(found))
    console.print(of_parts(found))
    of = dict(zip(arguments.seeds, found, strict=True))
    console.print(of_seeds(of))
    console.print(of_temperatures(of))
    plot(found, FOLDER / "baselines.png")


def measure(seed: int, parts: list[str]) -> int:
    """Run the parts on one seed, and write what each one found to the seed's file."""
    from rlhf_pipeline import run

    root, file = FOLDER / str(seed), FOLDER / f"{seed}.json"
    root.mkdir(parents=True, exist_ok=True)
    found: Tree = json.loads(file.read_text()) if file.is_file() else {}
    log = os.open(root / "run.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)

    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{root}/mlflow.db"

    def ran(pipeline: str, changes: Tree) -> Any:
        common = {"seed": seed, "root": str(root), "launch.processes": 1}
        return run(pipeline, params=common | changes, project=PROJECT)

    for part in parts:
        if part == "cooler":
            found["temperatures"] = temperatures(ran)
            best = max(found["temperatures"], key=lambda row: row["gold_score"])
            found["sft_cooler"] = best
        else:
            result = ran(part, POLICIES[part])
            found |= rows_of(result.evaluation)
            if part == "full":
                found |= {"lookup": lookup(seed), "full": verdict(result, root)}
        file.write_text(json.dumps(found, indent=2))
    return seed


def rows_of(evaluation: Tree) -> Tree:
    """The figures of SFT and of the candidate, and of the best of several answers of SFT."""
    controlled = evaluation["win_rates"]["gold"].get("length_controlled")
    rows = {name: figures(row) for name, row in evaluation["policies"].items()}
    rows[evaluation["candidate"]] |= ends(evaluation, "gold")
    if controlled:
        rows[evaluation["candidate"]]["length_controlled"] = controlled["rate"]
    best = {f"best_of_{row['n']}": figures(row) for row in evaluation.get("best_of_n") or []}
    return rows | {name: row for name, row in best.items() if name in NAMES}


def ends(evaluation: Tree, judge: str) -> Tree:
    """The candidate's win rate by a judge with its interval."""
    return {key: evaluation["win_rates"][judge][key] for key in ("rate", "lower", "upper")}


def figures(row: Tree) -> Tree:
    """What the tables show of a policy."""
    shown = ("gold_score", "score", "kl", "response_tokens", *PARTS)
    return {key: row[key] for key in shown if key in row}


def temperatures(ran: Callable[[str, Tree], Any]) -> list[Tree]:
    """SFT at lower temperatures against SFT at temperature 1, and PPO against SFT at equal ones."""
    usual = ran("full", POLICIES["full"]).answers["sft_again"]  # independent of the draws below
    rows = []
    for temperature in TRIED_TEMPERATURES:
        sampling = {"evaluate.sampling.temperature": temperature, "evaluate.best_of_n": 0}
        result = ran("full", sampling)
        won = win_rate(gold(result.answers["sft"]), gold(usual))
        row = figures(result.evaluation["policies"]["sft"]) | {"temperature": temperature}
        row |= {"rate": won.rate, "lower": won.lower, "upper": won.upper, "kl": None}
        ppo = figures(result.evaluation["policies"]["ppo"]) | ends(result.evaluation, "gold")
        rows.append(row | {"ppo": ppo})
    return rows


def gold(answers: list[Any]) -> list[float]:
    """The gold score of each answer."""
    return [float(one.scores["gold"]) for one in answers]


def lookup(seed: int) -> Tree:
    """Answer each test request by the preferred answer of the same training request.

    A request that is not in the table gets the answer of a random one.
    """
    training, test = SplitConfig.model_validate(parameters()["split"]).sources
    known: dict[str, str] = {}
    for _, row in generate(training, seed):
        known.setdefault(row.prompt[-1].content, row.chosen or "")
    rng, answers, hits = Random(seed), list(known.values()), 0
    scores = []
    for prompt in {row.prompt[-1].content: None for _, row in generate(test, seed)}:
        hits += prompt in known
        scores.append(world_score(prompt, known.get(prompt) or rng.choice(answers)))
    return {"gold_score": statistics.mean(scores), "hits": hits, "requests": len(scores)}


def verdict(result: Any, root: Path) -> Tree:
    """What the gate decided about PPO, and the gold scores of both policies."""
    (file,) = (root / "08_reporting/registration.json").glob(f"{result.version}/*.json")
    decided = json.loads(file.read_text())
    failed = [one["what"] for one in decided["verdict"]["checks"] if not one["passed"]]
    policies = result.evaluation["policies"]
    gold = {name: policies[name]["gold_score"] for name in ("sft", "ppo")}
    own = {"promoted": decided["promoted"], "failed": failed, "gold": gold}
    return own | ends(result.evaluation, "gold")


def of_methods(found: list[Tree]) -> Table:
    """A row for each method: the mean over the seeds, with its 95% interval (Student's t)."""
    table = Table(title="Unseen requests: mean over the seeds and its 95% interval")
    for column in (
        "",
        "gold",
        "reward model",
        "win rate by gold",
        "at equal length",
        "KL",
        "tokens",
        "gold minus best of n",
    ):
        table.add_column(column, justify="right" if column else "left")
    keys = ("gold_score", "score", "rate", "length_controlled", "kl", "response_tokens")
    for name, title in NAMES.items():
        rows = [one[name] for one in found if name in one]
        if rows:
            cells = ([row[key] for row in rows if row.get(key) is not None] for key in keys)
            compared = [
                one for one in found if name in COLORS and {name, "best_of_2"} <= one.keys()
            ]
            above = [above_frontier(one, name) for one in compared]
            table.add_row(title, *map(shown, [*cells, above]))
    return table


def above_frontier(one: Tree, name: str) -> float:
    """A policy's gold score minus that of the best of n of SFT at the same KL.

    The frontier is linear in the square root of KL, and constant beyond its last point.
    """
    several = [each for each in NAMES if each.startswith("best_of") and each in one]
    points = [one[each] for each in ("sft", *several)]
    at = [math.sqrt(max(each["kl"], 0.0)) for each in points]
    gold_scores = [each["gold_score"] for each in points]
    frontier = np.interp(math.sqrt(max(one[name]["kl"], 0.0)), at, gold_scores)
    return float(one[name]["gold_score"] - frontier)


def shown(values: list[float]) -> str:
    """A mean with the half width of its interval."""
    if len(values) < 2:
        return f"{values[0]:.2f}" if values else "-"
    half = t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.mean(values):.2f}±{half:.2f}"


def of_seeds(found: dict[int, Tree]) -> Table:
    """A row for each seed: PPO against SFT, what the gate made of it, and right answers."""
    table = Table(title="PPO against SFT by the gold score, independent draws")
    columns = ("seed", "win rate", "promoted", "table knows", "right answers at T = 0: SFT", "PPO")
    for column in columns:
        table.add_column(column, justify="right")
    for seed, one in found.items():
        full, table_of = (one.get(key, {}) for key in ("full", "lookup"))
        known = f"{table_of['hits']} of {table_of['requests']}" if table_of else "-"
        greedy = [row for row in one.get("temperatures", []) if row["temperature"] == 0]
        right = [f"{row['gold_right_answers']:.3f}" for g in greedy for row in (g, g["ppo"])]
        cells = rate(full), decision(full), known, *(right or "--")
        table.add_row(str(seed), *cells)
    return table


def of_parts(found: list[Tree]) -> Table:
    """SFT and PPO at each temperature: what the gold score consists of, means over the seeds."""
    table = Table(title="What the gold score consists of")
    for column in ("temperature", "policy", "gold", *PARTS.values()):
        table.add_column(column, justify="right")
    for temperature, pairs in by_temperature(found).items():
        for number, policy in enumerate(("SFT", "PPO")):
            rows = [pair[number] for pair in pairs]
            values = ([row[key] for row in rows if key in row] for key in ("gold_score", *PARTS))
            table.add_row(f"{temperature:g}", policy, *map(shown, values))
    return table


def by_temperature(found: list[Tree]) -> dict[float, list[tuple[Tree, Tree]]]:
    """The figures of SFT and PPO with each seed, by temperature."""
    of: dict[float, list[tuple[Tree, Tree]]] = {}
    for one in found:
        if "full" in one:
            of.setdefault(1.0, []).append((one["sft"], one["ppo"]))
        for row in one.get("temperatures", []):
            of.setdefault(row["temperature"], []).append((row, row["ppo"]))
    return of


def of_temperatures(found: dict[int, Tree]) -> Table:
    """A row for each temperature: means of SFT and PPO over the seeds, and the seeds' win rates."""
    table = Table(title="SFT and PPO at equal temperatures")
    for column in ("temperature", "SFT gold", "PPO gold", "win rates by gold", "lowest lower end"):
        table.add_column(column, justify="right")
    for temperature, pairs in by_temperature(list(found.values())).items():
        scores = (shown([pair[of_ppo]["gold_score"] for pair in pairs]) for of_ppo in (0, 1))
        rates, lowers = ([ppo[key] for _, ppo in pairs] for key in ("rate", "lower"))
        spread = f"{min(rates):.3f} to {max(rates):.3f}"
        table.add_row(f"{temperature:g}", *scores, spread, f"{min(lowers):.3f}")
    return table


def rate(row: Tree) -> str:
    return f"{row['rate']:.3f} [{row['lower']:.3f}, {row['upper']:.3f}]" if "rate" in row else "-"


def decision(row: Tree) -> str:
    if "promoted" not in row:
        return "-"
    return "yes" if row["promoted"] else f"no: {row['failed'][0]}"


def plot(found: list[Tree], file: Path) -> None:
    """Gold score against the square root of KL: a point for each seed, and the best of n."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    several = [name for name in NAMES if name.startswith("best_of")]
    best = [[one[name] for one in found if name in one] for name in ("sft", *several)]
    curve = [
        (math.sqrt(statistics.mean(row["kl"] for row in rows)),
         statistics.mean(row["gold_score"] for row in rows))
        for rows in best if rows
    ]  # fmt: skip
    axes.plot(*zip(*curve, strict=True), "ko-", label="best of 1, 2, 4, ... 64 of SFT", zorder=3)
    for name, color in COLORS.items():
        rows = [one[name] for one in found if name in one]
        points = [(math.sqrt(max(row["kl"], 0)), row["gold_score"]) for row in rows]
        if points:
            axes.scatter(*zip(*points, strict=True), color=color, label=NAMES[name])
    axes.set_xlabel("square root of KL from SFT (nats per response)")
    axes.set_ylabel("gold score on unseen requests")
    axes.legend(frameon=False)
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
