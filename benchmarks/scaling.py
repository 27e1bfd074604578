"""How time and memory of a PPO iteration grow: one quantity changes, the others stay.

    python benchmarks/scaling.py                            # all quantities
    python benchmarks/scaling.py --quantities=batch,ranks

The quantities are those of `ppo_iteration.Work`, and the number of ranks. The prompts are those of
HH-RLHF (the file in HH_RLHF_PATH, or the hub). Results: a table, and
benchmarks/results/scaling/scaling.json and scaling.png.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from matplotlib import pyplot as plt
from ppo_iteration import OURS, RESULTS, WARM_UP, Work, job_of, prepare, started
from rich.console import Console
from rich.table import Table

FOLDER = RESULTS.parent / "scaling"
BASE = Work(layers=4, hidden=256, batch=16)
CORES = os.cpu_count() or 1
CHANGES = {
    "batch": [4, 8, 16, 32, 64],
    "prompt_tokens": [64, 128, 256, 384],
    "response_tokens": [16, 32, 64, 128],
    "vocabulary": [2048, 8192, 16384],
    "hidden": [128, 256, 512, 768],
    "layers": [2, 4, 8, 12],
    "ranks": sorted({1, 2, CORES}),
}
TITLES = {
    "batch": "responses",
    "prompt_tokens": "tokens of the longest prompt",
    "response_tokens": "tokens of a response",
    "vocabulary": "vocabulary",
    "hidden": "width of the models",
    "layers": "layers of the models",
    "ranks": "ranks",
}
ROUNDS = 5


@dataclass(frozen=True)
class Point:
    """One measurement."""

    quantity: str
    value: int
    seconds: float
    """Median of an iteration."""
    memory: int
    """Peak bytes of all ranks; pages that they share count once."""


def main() -> None:
    """Measure, show, plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quantities", default=",".join(CHANGES))
    quantities = parser.parse_args().quantities.split(",")
    FOLDER.mkdir(parents=True, exist_ok=True)
    points: list[Point] = []
    for quantity in quantities:
        for value in CHANGES[quantity]:
            points.append(measure(quantity, value))
            (FOLDER / "scaling.json").write_text(json.dumps([asdict(p) for p in points], indent=2))
    show(points)
    plot(points, FOLDER / "scaling.png")


def measure(quantity: str, value: int) -> Point:
    """Take some iterations with one quantity changed."""
    ranks = value if quantity == "ranks" else CORES
    work = BASE if quantity == "ranks" else replace(BASE, **{quantity: value})
    made = replace(work, batch=BASE.batch)  # the batch changes no input
    name = "-".join(str(number) for number in asdict(made).values())
    job = job_of(work, "fp32", prepare(made, FOLDER / name), FOLDER / "run")
    with started(OURS, job, ranks) as contestant:
        for _ in range(WARM_UP):
            contestant.warm_up()
        for _ in range(ROUNDS):
            contestant.iterate()
    return Point(quantity, value, statistics.median(contestant.seconds), contestant.memory)


def show(points: list[Point]) -> None:
    """Print the table."""
    table = Table(title="One PPO iteration, median")
    for column in ("quantity", "value", "seconds", "GB"):
        table.add_column(column, justify="right")
    for point in points:
        table.add_row(
            TITLES[point.quantity], str(point.value), f"{point.seconds:.2f}",
            f"{point.memory / 1e9:.2f}",
        )  # fmt: skip
    Console().print(table)


def plot(points: list[Point], file: Path) -> None:
    """Draw a column for each quantity: seconds above, memory below."""
    quantities = list(dict.fromkeys(point.quantity for point in points))
    figure, axes = plt.subplots(
        2, len(quantities), figsize=(2.4 * len(quantities), 4.4), sharex="col", sharey="row",
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for column, quantity in enumerate(quantities):
        own = [point for point in points if point.quantity == quantity]
        values = [point.value for point in own]
        axes[0, column].plot(values, [point.seconds for point in own], marker="o")
        axes[1, column].plot(values, [point.memory / 1e9 for point in own], marker="o")
        axes[1, column].set_xlabel(TITLES[quantity])
    for row, name in enumerate(("seconds", "GB")):
        axes[row, 0].set_ylabel(name)
        axes[row, 0].set_ylim(bottom=0)
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
