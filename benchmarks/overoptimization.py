"""Over-optimization of the reward model (Gao et al. 2022): gold and proxy score against KL to SFT.

    python benchmarks/overoptimization.py                 # seeds 1 and 2
    python benchmarks/overoptimization.py --seeds 1       # one seed

The proxy is a reward model that is trained on a third of the comparisons. The actor learns faster
than by default, so that a short run over-optimizes. Each KL coefficient runs without a bound, then
0 again with `kl.maximum`, and an adaptive one with `kl.target`. All scores are of held-out prompts.
Results and plot: benchmarks/results/overoptimization/.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments import (
    RESULTS,
    Start,
    commit,
    history,
    prepare,
    side_by_side,
    train,
    train_reward_model,
)
from panels import panels
from rich.console import Console
from rich.table import Table

WEAK_PROXY = {"epochs": 0.3}
RECIPE = {"steps": 24, "evaluations": 12, "actor": {"optimizer": {"learning_rate": 5.0e-4}}}
UNCHANGED = {"steps": 1, "evaluations": 1, "actor": {"optimizer": {"learning_rate": 1.0e-12}}}
"""A step that changes nothing: it scores the SFT model on the same prompts with the same draws."""
KL_SETTINGS: dict[str, dict[str, Any]] = {
    **{f"coef {coef:g}": {"coef": coef, "maximum": None} for coef in (0.0, 0.03, 0.1, 0.3)},
    "coef 0, maximum 1": {"coef": 0.0, "maximum": 1.0},
    "adaptive, target 1": {"coef": 0.03, "maximum": None, "target": 1.0, "horizon": 50},
}
COLORS = dict(
    zip(
        KL_SETTINGS, ("#D55E00", "#E69F00", "#009E73", "#0072B2", "#000000", "#CC79A7"), strict=True
    )
)
MARKERS = dict(zip(KL_SETTINGS, "osD^Xv", strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of runs and results")
    arguments = parser.parse_args()
    folder = arguments.results / "overoptimization"
    folder.mkdir(parents=True, exist_ok=True)
    starts = list(
        side_by_side(start, [(seed, arguments.results / "workspace") for seed in arguments.seeds])
    )
    rows: list[dict[str, Any]] = []
    for row in side_by_side(run, [(begin, name) for begin in starts for name in KL_SETTINGS]):
        rows = sorted(
            [*rows, row], key=lambda row: (list(KL_SETTINGS).index(row["setting"]), row["seed"])
        )
        (folder / "overoptimization.json").write_text(
            json.dumps({"commit": commit(), "runs": rows}, indent=1)
        )
        show(rows)
    plot(rows, folder / "overoptimization.png")


def start(seed: int, workspace: Path) -> Start:
    """Run everything before PPO, with the weaker reward model."""
    begin = prepare(seed, workspace)
    return replace(begin, reward_model=train_reward_model(begin, WEAK_PROXY))


def run(begin: Start, name: str) -> dict[str, Any]:
    """Run one setting on one seed; return its held-out scores, and those of the exported model."""
    policy = train(begin, RECIPE | {"kl": KL_SETTINGS[name]})
    course = evaluations(train(begin, UNCHANGED)) + evaluations(policy)
    exported = int(json.loads((policy / "manifest.json").read_text())["metrics"]["step"])
    return {
        "setting": name,
        "seed": begin.seed,
        "steps": int(history(policy)[-1]["step"]),
        "exported": next(point for point in course[1:] if point["step"] == exported),
        "course": course,
    }


def evaluations(policy: Path) -> list[dict[str, float]]:
    """KL, proxy and gold score at each evaluation."""
    names = {"kl": "validation/kl", "proxy": "validation/score", "gold": "validation/gold_score"}
    steps = [step for step in history(policy) if "validation/score" in step]
    return [
        {"step": step["step"]} | {short: step[name] for short, name in names.items()}
        for step in steps
    ]


def show(rows: list[dict[str, Any]]) -> None:
    """All runs so far: best and last gold score, and that of the exported model."""
    table = Table(title="Held-out gold score and proxy score by KL setting")
    columns = (
        "best gold",
        "at KL",
        "last gold",
        "last proxy",
        "last KL",
        "exported gold",
        "exported proxy",
        "exported KL",
    )
    for column in ("setting", "seed", "steps", *columns):
        table.add_column(column, justify="right")
    for row in rows:
        best, last = max(row["course"], key=lambda point: point["gold"]), row["course"][-1]
        numbers = [best["gold"], best["kl"], last["gold"], last["proxy"], last["kl"]]
        numbers += [row["exported"][key] for key in ("gold", "proxy", "kl")]
        table.add_row(
            row["setting"],
            str(row["seed"]),
            str(row["steps"]),
            *(f"{number:.2f}" for number in numbers),
        )
    Console(width=140).print(table)


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    """Gold and proxy score against sqrt(KL), as in Gao et al.; one column per seed."""
    seeds = sorted({row["seed"] for row in rows})
    y_labels = ("gold score, held out", "proxy: reward model's score, held out")
    with panels(
        file, seeds, y_labels=y_labels, x_label="sqrt(KL to SFT), sqrt(nats)", size=(4.4, 6.4)
    ) as of_seed:
        for row in rows:
            at = [max(point["kl"], 0.0) ** 0.5 for point in row["course"]]
            style = {
                "linestyle": "--" if "," in row["setting"] else "-",
                "marker": MARKERS[row["setting"]],
                "markersize": 4,
            }
            for panel, name in zip(of_seed(row["seed"]), ("gold", "proxy"), strict=True):
                values = [point[name] for point in row["course"]]
                panel.plot(
                    at,
                    values,
                    color=COLORS[row["setting"]],
                    label=row["setting"],
                    linewidth=1.3,
                    **style,
                )


if __name__ == "__main__":
    main()
