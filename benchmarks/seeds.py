"""Does PPO beat SFT on the gold score, on every seed? Run the default pipeline on several seeds.

    python benchmarks/seeds.py                 # seeds 1 to 5
    python benchmarks/seeds.py --seeds 1 2     # some seeds

A seed decides data, model, split, training and decoding. Results: benchmarks/results/seeds/.
The exit code is 0 if every seed has a win rate of independent answers of at least 0.70 with a 95%
interval above 0.60. The paired win rate, of answers with equal draws, stands beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

PROJECT = Path(__file__).parents[1]
RESULTS = PROJECT / "benchmarks" / "results" / "seeds"
MIN_RATE, MIN_LOWER = 0.70, 0.60


def main() -> int:
    """Run the seeds one after the other; print a row for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    seeds = parser.parse_args().seeds
    rows = []
    for seed in seeds:
        rows.append(run(seed))
        (RESULTS / "seeds.json").write_text(json.dumps(rows, indent=2))
        show(rows)
    return 0 if all(passes(row) for row in rows) else 1


def run(seed: int) -> dict[str, float]:
    """Run the full pipeline with its own data folder and tracking store."""
    root = RESULTS / str(seed)
    root.mkdir(parents=True, exist_ok=True)
    command = [
        str(Path(sys.executable).with_name("kedro")),
        "run",
        "--pipeline=full",
        f"--params=seed={seed},root={root}",
    ]
    start = time.monotonic()
    with (root / "run.log").open("w") as log:
        environment = os.environ | {"MLFLOW_TRACKING_URI": f"sqlite:///{root}/mlflow.db"}
        subprocess.run(
            command, cwd=PROJECT, env=environment, stdout=log, stderr=subprocess.STDOUT, check=True
        )
    newest = root / "08_reporting" / "evaluation" / "latest"
    evaluation = json.loads((newest / "evaluation.json").read_text())
    models = {
        name: json.loads(path.read_text())["metrics"] for name, path in manifests(root).items()
    }
    gold = evaluation["win_rates"]["gold"]
    return {
        "seed": seed,
        "minutes": (time.monotonic() - start) / 60,
        "rm_accuracy": models["reward_model"]["validation/accuracy"],
        "sft_gold": evaluation["policies"]["sft"]["gold_score"],
        "ppo_gold": evaluation["policies"]["ppo"]["gold_score"],
        "kl": evaluation["policies"]["ppo"]["kl"],
        "win_rate": gold["rate"],
        "lower": gold["lower"],
        "upper": gold["upper"],
        "paired": gold["paired"]["rate"],
    }


def manifests(root: Path) -> dict[str, Path]:
    """The newest manifest of each published model."""
    folders = (root / "06_models").iterdir()
    return {folder.name: folder / "latest" / "manifest.json" for folder in folders}


def passes(row: dict[str, float]) -> bool:
    """Whether PPO is better than SFT by a margin that chance does not explain."""
    return row["win_rate"] >= MIN_RATE and row["lower"] > MIN_LOWER


def show(rows: list[dict[str, float]]) -> None:
    """All rows so far."""
    table = Table(title="PPO against SFT, by the gold score")
    columns = ("seed", "minutes", "RM accuracy", "SFT gold", "PPO gold", "KL", "win rate")
    for column in (*columns, "95% interval", "paired", "passes"):
        table.add_column(column, justify="right")
    for row in rows:
        numbers = ("minutes", "rm_accuracy", "sft_gold", "ppo_gold", "kl")
        table.add_row(
            f"{row['seed']:.0f}",
            *(f"{row[key]:.2f}" for key in numbers),
            f"{row['win_rate']:.3f}",
            f"[{row['lower']:.3f}, {row['upper']:.3f}]",
            f"{row['paired']:.3f}",
            "yes" if passes(row) else "no",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    raise SystemExit(main())
