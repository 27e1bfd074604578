"""Is PPO stable with several epochs, pooled batches and small minibatches, on several seeds?

    python benchmarks/stability.py                 # seeds 1 to 3
    python benchmarks/stability.py --seeds 1 2 --settings plain "4 epochs"

All other parameters have their defaults. Every setting uses the same number of prompts and
responses, the same learning rates and KL settings; the last one adds `kl.stop_update`. Results and
plot: benchmarks/results/stability/. The exit code is 0 if every run except those of "all three"
stays within the KL bound and the mean win rate on gold of each setting is at most 0.03 below that
of the plain setting.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments import RESULTS, Start, commit, compare, history, prepare, side_by_side, train
from panels import panels
from rich.console import Console
from rich.table import Table

from rlhf_pipeline.errors import StageError
from rlhf_pipeline.verdict.comparison import read_evaluation

PLAIN = "plain"
KL = {"coef": 0.1, "maximum": 3.0}
ALL_THREE = {"ppo_epochs": 4, "rollout_batches": 4, "steps": 12, "minibatch_size": 32}
SETTINGS: dict[str, dict[str, Any]] = {
    PLAIN: {"ppo_epochs": 1},
    "4 epochs": {"ppo_epochs": 4},
    "4 batches": {"ppo_epochs": 1, "rollout_batches": 4, "steps": 12, "minibatch_size": 64},
    "half minibatches": {"ppo_epochs": 1, "minibatch_size": 32},
    "all three": ALL_THREE,
    "all three, stop_update": ALL_THREE | {"kl": {"stop_update": 0.005}},
}
UNSTABLE = "all three"
"""Shown for comparison: without `kl.stop_update`, it diverges on some seeds."""
TOLERANCE = 0.03
COLORS = dict(
    zip(SETTINGS, ("#000000", "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7"), strict=True)
)  # Okabe and Ito


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of runs and results")
    arguments = parser.parse_args()
    folder = arguments.results / "stability"
    folder.mkdir(parents=True, exist_ok=True)
    starts = list(
        side_by_side(prepare, [(seed, arguments.results / "workspace") for seed in arguments.seeds])
    )
    rows: list[dict[str, Any]] = []
    for row in side_by_side(
        run, [(start, name) for start in starts for name in arguments.settings]
    ):
        rows = sorted(
            [*rows, row], key=lambda row: (list(SETTINGS).index(row["setting"]), row["seed"])
        )
        (folder / "stability.json").write_text(
            json.dumps({"commit": commit(), "runs": rows}, indent=1)
        )
        show(rows)
    plot(rows, folder / "stability.png")
    demanded = [row for row in rows if row["setting"] != UNSTABLE]
    return (
        0
        if all(map(stable, demanded))
        and min(differences(demanded).values(), default=0.0) >= -TOLERANCE
        else 1
    )


def run(start: Start, name: str) -> dict[str, Any]:
    """Run one setting on one seed; return its results, or `error` if PPO exported nothing."""
    try:
        changes = SETTINGS[name]
        policy = train(start, changes | {"kl": KL | changes.get("kl", {})})
    except StageError as error:
        return {"setting": name, "seed": start.seed, "error": str(error)}
    evaluation, steps = read_evaluation(compare(start, policy)), history(policy)
    config = json.loads((policy / "manifest.json").read_text())["config"]["ppo"]
    gold, ppo = evaluation["win_rates"]["gold"], evaluation["policies"]["ppo"]
    held_out = [step for step in steps if "validation/score" in step]
    return {
        "setting": name,
        "seed": start.seed,
        "win_rate": gold["rate"],
        "lower": gold["lower"],
        "upper": gold["upper"],
        "gold": ppo["gold_score"],
        "sft_gold": evaluation["policies"]["sft"]["gold_score"],
        "kl": ppo["kl"],
        "largest_kl": max(step["objective/kl"] for step in steps),
        "largest_update": max(step["policy/approx_kl"] for step in steps),
        "clipped": max(step["policy/clip_fraction"] for step in steps),
        "last_gold": held_out[-1]["validation/gold_score"],
        "share_of_steps": steps[-1]["step"] / config["steps"],
        "course": [
            {
                "responses": step["step"]
                * config["rollout_batches"]
                * config["rollout_batch_size"],
                "kl": step["validation/kl"],
                "gold": step["validation/gold_score"],
                "score": step["validation/score"],
            }
            for step in held_out
        ],
    }


def stable(row: dict[str, Any]) -> bool:
    """Whether the run took all its steps (no NaN, no KL above the bound) and ended above SFT."""
    return bool(
        "error" not in row and row["share_of_steps"] == 1 and row["last_gold"] > row["sft_gold"]
    )


def differences(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Mean win rate of each setting minus that of the plain one, over their common seeds."""
    rates = {(row["setting"], row["seed"]): row["win_rate"] for row in rows if "error" not in row}
    return {
        name: fmean(
            rates[name, seed] - rates[PLAIN, seed]
            for (n, seed) in rates
            if n == name and (PLAIN, seed) in rates
        )
        for name in SETTINGS
        if any(n == name and (PLAIN, seed) in rates for n, seed in rates)
    }


def show(rows: list[dict[str, Any]]) -> None:
    """All runs so far."""
    table = Table(title="PPO against SFT on the gold score, by setting")
    columns = (
        "win_rate lower upper sft_gold gold last_gold kl largest_kl largest_update clipped".split()
    )
    for column in ("setting", "seed", *columns, "stable"):
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        numbers = ["-" if "error" in row else f"{row[column]:.3f}" for column in columns]
        table.add_row(row["setting"], str(row["seed"]), *numbers, "yes" if stable(row) else "no")
    Console(width=160).print(table)
    Console().print({name: round(difference, 3) for name, difference in differences(rows).items()})


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    """Held-out gold score and KL over the responses so far, one line per setting."""
    seeds = sorted({row["seed"] for row in rows})
    y_labels = ("gold score, held out", "KL to SFT, nats")
    with panels(
        file, seeds, y_labels=y_labels, x_label="responses trained on", size=(3.2, 5)
    ) as of_seed:
        for row in (row for row in rows if "error" not in row):
            for panel, name in zip(of_seed(row["seed"]), ("gold", "kl"), strict=True):
                at, values = (
                    [point[key] for point in row["course"]] for key in ("responses", name)
                )
                panel.plot(
                    at,
                    values,
                    color=COLORS[row["setting"]],
                    label=row["setting"],
                    marker="o",
                    markersize=3,
                )


if __name__ == "__main__":
    raise SystemExit(main())
