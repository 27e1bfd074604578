"""Does this project learn as TRL does? Both train on the same task with the same recipe.

    python benchmarks/parity.py                              # all methods, five seeds
    python benchmarks/parity.py --seeds 1 --methods ppo dpo  # some of them

The task is in `parity_task.py`, the recipe in `parity_recipe.py`. PPO is that of the last TRL that
has it; the others are those of the newest one. Both sides start from the same files and read the
same prompts, pairs or answers in the same order; each draws its own responses. One evaluator
measures the final policies of both on held-out prompts and pairs.

Runs take turns on one core, and finished ones are reused. Results: a table, and in
benchmarks/results/parity/ the raw data parity.json and the plot parity.png.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import runpy
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments import RESULTS, commit
from panels import panels
from parity_recipe import ON_ROWS, RECIPES, base
from ppo_iteration import install_trl
from rich.console import Console
from rich.table import Table

from rlhf_pipeline.verdict.statistics import mean_with_interval

SIDES = {"ours": "#0072B2", "trl": "#D55E00"}  # Okabe and Ito
MARGIN = 0.05
"""Two means are equivalent if they differ by less than 5% of the range of the score, which is 1."""
FINAL = {
    "ppo": "proxy", "grpo": "score", "rloo": "score", "dpo": "accuracy", "kto": "accuracy",
    "distill": "score",
}  # fmt: skip
"""What each method maximizes, in the words of `parity_task.evaluate`."""
ALL_STEPS = "mean of all steps"
WITHOUT_RANGE = dict.fromkeys(ON_ROWS, ("kl", "margin", "loss"))
WITHOUT_RANGE |= {"distill": ("teacher_kl", "tokens")}
CURVES = {
    "dpo": ("accuracy", "margin"), "kto": ("loss", "good"), "distill": ("kl", "tokens")
}  # fmt: skip
"""What each step of a method records; of the others, score and KL."""
DRAWN = ("ppo", "grpo", "rloo", "dpo", "kto")
"""Methods in the plot, whose curves fit one scale."""


@dataclass(frozen=True)
class Comparison:
    """Means over the seeds, and the 90% interval of the mean difference of paired seeds."""

    ours: float
    trl: float
    difference: float
    lower: float
    upper: float

    @classmethod
    def of(cls, ours: Sequence[float], trl: Sequence[float]) -> Comparison:
        """One value of each side for each seed. One seed has an endless interval."""
        differences = [own - other for own, other in zip(ours, trl, strict=True)]
        interval = (differences[0], -math.inf, math.inf)
        if len(differences) > 1:
            interval = mean_with_interval(differences, alpha=0.1)
        return cls(fmean(ours), fmean(trl), *interval)

    def equivalent(self, margin: float) -> str:
        """Whether the true difference is within the margin, by two one-sided tests at 5% each.

        yes: both reject a difference beyond the margin, so the 90% interval is inside; no: the
        interval is outside; else undecided. Source: Schuirmann 1987,
        https://doi.org/10.1007/BF01068419.
        """
        if -margin < self.lower and self.upper < margin:
            return "yes"
        return "no" if self.lower > margin or self.upper < -margin else "undecided"


def main() -> None:
    """Run what is missing, then compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--methods", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--results", type=Path, default=RESULTS / "parity")
    options = parser.parse_args()
    os.environ |= {
        "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    import parity_ours  # noqa: F401 -- torch and deepspeed, once for all runs

    runs = []
    for seed, method, side in product(options.seeds, options.methods, SIDES):
        runs.append(result(seed, method, side, options.results / str(seed)))
        (options.results / "parity.json").write_text(json.dumps(runs, indent=1))
    show(runs)
    plot(runs, options.results / "parity.png")


def result(seed: int, method: str, side: str, root: Path) -> dict[str, Any]:
    """Train and evaluate, unless that is done; what is known of the run."""
    folder = root / f"{method}-{side}"
    if not (file := folder / "result.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        from parity_task import prepare

        once = get_context("fork").Process(target=prepare, args=(seed, root))
        once.start()
        once.join()
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        started = [
            get_context("fork").Process(target=run, args=(seed, method, side, folder, rank, port))
            for rank in range(RECIPES[method].ranks)
        ]
        for process in started:
            process.start()
        for process in started:
            process.join()
        if not file.exists():
            codes = [process.exitcode for process in started]
            raise SystemExit(
                f"{folder}: found exit codes {codes} and no result. See its files log*"
            )
    found = dict(json.loads(file.read_text()))
    print(f"seed {seed}, {method}, {side}: {found['seconds']:.0f} s, {found['final']}", flush=True)
    return found


def run(seed: int, method: str, side: str, folder: Path, rank: int, port: int) -> None:
    """Train in this process, a copy of one that has imported what takes long; then evaluate."""
    from parity_task import evaluate, prepare

    with (folder / f"log{rank or ''}").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    inputs, begin = prepare(seed, folder.parent), time.monotonic()
    if side == "trl":
        sys.path.insert(0, str(install_trl("ppo" if method == "ppo" else "grpo")))
    if (ranks := RECIPES[method].ranks) > 1 or side == "ours":
        os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{ranks}"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    job = {"method": method, "seed": seed, "folder": str(folder)}
    job["inputs"] = {name: str(path) for name, path in inputs.items()}
    program = str(Path(__file__).with_name(f"parity_{side}.py"))
    sys.argv = [program, json.dumps(job)]
    runpy.run_path(program, run_name="__main__")  # other ranks exit in it
    found = {
        "method": method, "side": side, "seed": seed, "commit": commit(),
        "seconds": time.monotonic() - begin,
        "steps": json.loads((folder / "steps.json").read_text()),
        "final": evaluate(folder / "final", inputs, seed),
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(found))


def comparisons(runs: list[dict[str, Any]]) -> dict[tuple[str, str], Comparison]:
    """The comparisons by method and measure: final policies, and the mean score of all steps."""
    found = {}
    for method in dict.fromkeys(run["method"] for run in runs):
        own, other = (
            sorted(
                (run for run in runs if (run["method"], run["side"]) == (method, side)),
                key=lambda run: run["seed"],
            )
            for side in SIDES
        )
        kind = base(method)
        for name in (FINAL[kind], *WITHOUT_RANGE.get(kind, ("kl", "tokens"))):
            values = ([run["final"][name] for run in each] for each in (own, other))
            found[method, name] = Comparison.of(*values)
        curve, _ = CURVES.get(kind, ("score", "kl"))
        means = ([fmean(step[curve] for step in run["steps"]) for run in e] for e in (own, other))
        found[method, "kl of all steps" if curve == "kl" else ALL_STEPS] = Comparison.of(*means)
    return found


def show(runs: list[dict[str, Any]]) -> None:
    """Print the table. What has no range has no margin of equivalence either."""
    table = Table(title="Parity of learning with TRL, means over the seeds")
    for column in ("method", "measure", "ours", "TRL", "difference", "90% interval", "equivalent"):
        table.add_column(column, justify="right")
    for (method, name), each in comparisons(runs).items():
        has_range = name in (FINAL[base(method)], ALL_STEPS)
        table.add_row(
            method, name, f"{each.ours:.3f}", f"{each.trl:.3f}", f"{each.difference:+.3f}",
            f"[{each.lower:+.3f}, {each.upper:+.3f}]",
            each.equivalent(MARGIN) if has_range else "-",
        )  # fmt: skip
    Console(width=130).print(table)


def plot(runs: list[dict[str, Any]], file: Path) -> None:
    """Score and KL of each step: the mean over the seeds, and their range. For DPO they are the
    accuracy and the margin, and for KTO the loss and the reward of good answers, divided by beta,
    so that they are in nats, too."""
    y_labels = "score", "KL, nats"
    methods = [m for m in dict.fromkeys(run["method"] for run in runs) if m in DRAWN]
    titles = [method.upper() for method in methods]
    with panels(
        file, titles, y_labels=y_labels, x_label="step", size=(3.2, 5), title="{}"
    ) as of_method:
        for method, (side, color) in product(methods, SIDES.items()):
            own = [run["steps"] for run in runs if (run["method"], run["side"]) == (method, side)]
            kind = base(method)
            unit = RECIPES[method].kl_coef if kind in ON_ROWS else 1.0
            curves = zip(CURVES.get(kind, ("score", "kl")), (1.0, unit), strict=True)
            for panel, (name, scale) in zip(of_method(method.upper()), curves, strict=True):
                steps = [[step[name] / scale for step in at] for at in zip(*own, strict=True)]
                at = range(1, len(steps) + 1)
                lowest, highest = [min(values) for values in steps], [max(v) for v in steps]
                panel.fill_between(at, lowest, highest, color=color, alpha=0.15, linewidth=0)
                label = {"ours": "rlhf-pipeline", "trl": "TRL"}[side]
                panel.plot(at, [fmean(values) for values in steps], color=color, label=label)


if __name__ == "__main__":
    main()
