"""Is training that was killed and started again the training that was not? Kills it at random moments and compares, bit by bit.

    python benchmarks/kills.py                                    # 10 kills of each stage
    python benchmarks/kills.py --kills 2 --stages ppo --zero 2 --precision bf16

Each kill is a SIGKILL at a random moment, of training or, one in five, of the start: to the whole process group, to one
rank, or to the driver, the `kedro run` itself; every fourth waits for a checkpoint that is being written. The same command
is then run again. What must hold: 10 seconds after the kill no process is left; the final weights are those of an
undisturbed run to the bit; every step is in metrics.jsonl once, with the same numbers; MLflow has one finished run of the
stage, and there, too, every step once. Results: benchmarks/results/kills/.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

PROJECT = Path(__file__).parents[1]
RESULTS = PROJECT / "benchmarks" / "results" / "kills"
STEPS = {"sft": "sft.epochs=15", "reward_model": "reward_model.epochs=8", "ppo": "ppo.steps=20"}
TARGETS = ("group", "rank", "driver")


@dataclass(frozen=True)
class Kill:
    """Whom to kill, and when."""

    whom: str
    """One of TARGETS; or `checkpoint`: the group, while it writes the first checkpoint after that moment."""
    step: int
    """Not before so many lines of metrics; 0: from the start."""
    after_s: float


def main() -> int:
    """Kill, run again, compare; a row for each kill."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10, help="for each stage and setting")
    parser.add_argument("--stages", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--zero", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    shutil.rmtree(RESULTS, ignore_errors=True)
    RESULTS.mkdir(parents=True)
    kedro("--to-nodes=reward_model", RESULTS / "root", RESULTS / "mlflow.db").wait()
    settings = [
        (zero, precision)
        for zero in arguments.zero
        for precision in arguments.precision
        if zero or precision == "fp32"
    ]
    rows = []
    for stage in arguments.stages:
        undisturbed: dict[tuple[int, str], dict[str, Any]] = {}
        for number in range(arguments.kills):
            setting = settings[number % len(settings)]
            if setting not in undisturbed:
                undisturbed[setting] = attempt(stage, setting, "undisturbed", None, draw)
            expected = undisturbed[setting]
            whom = "checkpoint" if number % 4 == 3 else TARGETS[number % 3]
            training = whom == "checkpoint" or draw.random() > 0.2
            steps = len(expected["metrics"])
            longest_s = expected["training_s"] / steps if training else expected["start_s"] / 2
            kill = Kill(
                whom, draw.randrange(1, steps - 3) if training else 0, draw.random() * longest_s
            )
            found = attempt(stage, setting, f"kill-{number}", kill, draw)
            rows.append(
                {
                    "stage": stage,
                    "zero": setting[0],
                    "precision": setting[1],
                    "kill": whom,
                    "at_step": found["killed_at_step"],
                    "resumed_from": found["resumed_from"],
                    "left": found["left"],
                    "same_weights": found["weights"] == expected["weights"],
                    "same_metrics": found["metrics"] == expected["metrics"],
                    "one_run": found["runs"] == ["FINISHED"],
                    "logged_once": found["logged"] == steps_of(found["metrics"]),
                }
            )
            (RESULTS / "kills.json").write_text(json.dumps(rows, indent=2))
            show(rows)
    return 0 if all(passes(row) for row in rows) else 1


def attempt(
    stage: str, setting: tuple[int, str], name: str, kill: Kill | None, draw: random.Random
) -> dict[str, Any]:
    """One stage from its beginning to its end, killed once on the way if `kill` says so."""
    root, store = RESULTS / "root", RESULTS / f"{stage}-{name}-{setting[0]}-{setting[1]}.db"
    workspace, parameters = root / "07_workspace" / stage, stage_parameters(stage, *setting)
    shutil.rmtree(workspace, ignore_errors=True)
    start = time.time()
    found: dict[str, Any] = {"killed_at_step": None, "left": 0}
    process = kedro(f"--nodes={stage}", root, store, parameters)
    if kill is not None:
        found |= end(process, kill, workspace, draw)
        process = kedro(f"--nodes={stage}", root, store, parameters)
    if process.wait() != 0:
        raise SystemExit(f"{stage} {name} failed, see {RESULTS / 'run.log'}")
    (directory,) = workspace.iterdir()
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    manifest = json.loads((directory / "export" / "manifest.json").read_text())
    return found | {
        "start_s": records[0]["time"] - start,
        "training_s": records[-1]["time"] - records[0]["time"],
        "resumed_from": json.loads((directory / "job.json").read_text())["resume_from"],
        "weights": {name: entry["sha256"] for name, entry in manifest["files"].items()},
        "metrics": [
            (r["step"], {k: v for k, v in r["metrics"].items() if not k.startswith("time/")})
            for r in records
        ],
        **tracked(store, stage),
    }


def stage_parameters(stage: str, zero: int, precision: str) -> str:
    """What makes the stage train for some seconds, with a checkpoint after every third step."""
    blocks = ["ppo.actor", "ppo.critic"] if stage == "ppo" else [stage]
    engine = {"zero_stage": zero, "precision": precision}
    engines = [
        f"{block}.deepspeed.{key}={value}" for block in blocks for key, value in engine.items()
    ]
    return ",".join([STEPS[stage], f"{stage}.checkpoint_every=3", *engines])


def kedro(nodes: str, root: Path, store: Path, parameters: str = "") -> subprocess.Popen[bytes]:
    """A `kedro run` of the smallest environment."""
    command = [str(Path(sys.executable).with_name("kedro")), "run", "--env=tiny", nodes]
    command.append(f"--params=root={root}" + (f",{parameters}" if parameters else ""))
    environment = os.environ | {"MLFLOW_TRACKING_URI": f"sqlite:///{store}"}
    with (RESULTS / "run.log").open("a") as log:
        return subprocess.Popen(
            command, cwd=PROJECT, env=environment, stdout=log, stderr=subprocess.STDOUT
        )


def end(
    driver: subprocess.Popen[bytes], kill: Kill, workspace: Path, draw: random.Random
) -> dict[str, Any]:
    """Kill, then wait until nothing of it runs any more, 10 seconds at most."""
    while driver.poll() is None and steps_taken(workspace) < kill.step:
        time.sleep(0.005)
    since = time.monotonic()
    while driver.poll() is None and time.monotonic() - since < kill.after_s:
        time.sleep(0.005)
    while (
        kill.whom == "checkpoint"
        and driver.poll() is None
        and not any(workspace.glob("*/checkpoints/step-*.partial"))
    ):
        time.sleep(0.001)
    family = psutil.Process(driver.pid).children(recursive=True) if driver.poll() is None else []
    ranks = [process for process in family if "RANK" in environment_of(process)]
    found = {"killed_at_step": steps_taken(workspace) if driver.poll() is None else None}
    if kill.whom == "driver" or not ranks:
        driver.kill()
    elif kill.whom == "rank":
        draw.choice(ranks).kill()
    else:
        os.killpg(os.getpgid(ranks[0].pid), signal.SIGKILL)
    _, alive = psutil.wait_procs(family, timeout=10)
    if driver.poll() is None:
        driver.wait()
    return found | {"left": len(alive)}


def steps_taken(workspace: Path) -> int:
    """Lines of metrics so far; the stage has one work directory."""
    return sum(file.read_bytes().count(b"\n") for file in workspace.glob("*/metrics.jsonl"))


def environment_of(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def tracked(store: Path, stage: str) -> dict[str, Any]:
    """Status of every MLflow run of the stage, and the steps at which they have each metric of the training loop."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{store}")
    experiment = client.get_experiment_by_name("rlhf-pipeline")
    runs = client.search_runs([experiment.experiment_id], f"tags.`rlhf.stage` = '{stage}'")
    logged = {
        name: [
            point.step for run in runs for point in client.get_metric_history(run.info.run_id, name)
        ]
        for name in {
            name
            for run in runs
            for name in run.data.metrics
            if "/" in name and not name.startswith(("time/", "best/"))
        }
    }
    return {"runs": [run.info.status for run in runs], "logged": logged}


def steps_of(records: list[tuple[int, dict[str, float]]]) -> dict[str, list[int]]:
    """The steps at which metrics.jsonl has each metric."""
    return {
        name: [step for step, values in records if name in values]
        for _, values in records
        for name in values
    }


def passes(row: dict[str, Any]) -> bool:
    return (
        row["at_step"] is not None
        and row["left"] == 0
        and all(row[name] for name in ("same_weights", "same_metrics", "one_run", "logged_once"))
    )


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"{sum(map(passes, rows))} of {len(rows)} kills left no trace")
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        table.add_row(
            *(f"{value:.1f}" if isinstance(value, float) else str(value) for value in row.values())
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(main())
