"""Does training that is killed and resumed equal uninterrupted training, bit for bit?

    python benchmarks/kills.py                                    # 10 kills of each stage
    python benchmarks/kills.py --kills 2 --stages ppo --zero 2 --precision bf16

Each kill is a SIGKILL at a random moment of training or, one in five, of the start. It ends the
whole process group, one rank, or the driver (`kedro run`); every fourth one ends the group while a
checkpoint is being written. Then the same command runs again. Requirements: 10 seconds after the
kill, no process is left; weights, optimizer states, rows, answers and metrics of each step equal
those of an uninterrupted run bit for bit, as `kedro rlhf prove` compares them; MLflow has one
finished run of the stage with every step once. Results: benchmarks/results/kills/.
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from rlhf_pipeline.commands.prove import difference, observe

PROJECT = Path(__file__).parents[1]
RESULTS = PROJECT / "benchmarks" / "results" / "kills"
STEPS = {"sft": "sft.epochs=15", "reward_model": "reward_model.epochs=8", "ppo": "ppo.steps=20"}
TARGETS = ("group", "rank", "driver")

Setting = tuple[int, str, str]
"""ZeRO stage, precision, and further parameters."""


class TooLateError(Exception):
    """The stage finished before the kill."""


@dataclass(frozen=True)
class Kill:
    """The target and the moment of a kill."""

    target: str
    """One of TARGETS, or `checkpoint`: the group, while it writes the next checkpoint."""
    step: int
    """Lines of metrics to wait for; 0: none."""
    after_s: float
    """Seconds to wait after that."""


def main() -> int:
    """Kill, resume, compare; print a row for each kill."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10, help="for each stage and setting")
    parser.add_argument("--stages", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--zero", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--params", default="", help="further ones, as for `kedro run`")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    shutil.rmtree(RESULTS, ignore_errors=True)
    RESULTS.mkdir(parents=True)
    further = arguments.params
    kedro("--to-nodes=reward_model", RESULTS / "root", RESULTS / "mlflow.db", further).wait()
    settings = [
        (zero, precision, further)
        for zero in arguments.zero
        for precision in arguments.precision
        if zero or precision == "fp32"
    ]
    rows = []
    for stage in arguments.stages:
        uninterrupted: dict[Setting, dict[str, Any]] = {}
        for number in range(arguments.kills):
            setting = settings[number % len(settings)]
            if setting not in uninterrupted:
                uninterrupted[setting] = run_stage(stage, setting, "uninterrupted")
            rows.append(kill_and_compare(stage, setting, number, uninterrupted[setting], draw))
            (RESULTS / "kills.json").write_text(json.dumps(rows, indent=2))
            show(rows)
    return 0 if all(passes(row) for row in rows) else 1


def kill_and_compare(
    stage: str, setting: Setting, number: int, expected: dict[str, Any], draw: random.Random
) -> dict[str, Any]:
    """Kill a stage at a random moment and resume it; return how the result compares."""
    target = "checkpoint" if number % 4 == 3 else TARGETS[number % 3]
    while True:
        kill = random_kill(target, expected, draw)
        try:
            found = run_stage(stage, setting, f"kill-{number}", kill, draw)
            break
        except TooLateError:
            continue
    return {
        "stage": stage,
        "zero": setting[0],
        "precision": setting[1],
        "kill": target,
        "at_step": found["killed_at_step"],
        "resumed_from": found["resumed_from"],
        "left": found["left"],
        "difference": difference(expected["observed"], found["observed"]),
        "one_run": found["runs"] == ["FINISHED"],
        "logged_once": found["logged"] == steps_of(found["observed"].steps),
    }


def random_kill(target: str, expected: dict[str, Any], draw: random.Random) -> Kill:
    """A kill during training, or with probability 1/5 during the start."""
    steps = len(expected["observed"].steps)
    if target == "checkpoint" or draw.random() > 0.2:
        longest_s = expected["observed"].seconds / steps
        return Kill(target, draw.randrange(1, steps - 3), draw.random() * longest_s)
    return Kill(target, 0, draw.random() * expected["start_s"] / 2)


def run_stage(
    stage: str,
    setting: Setting,
    name: str,
    kill: Kill | None = None,
    draw: random.Random | None = None,
) -> dict[str, Any]:
    """Run a stage from its beginning to its end, with one kill in between if one is given.

    Raises:
        TooLateError: the stage finished before the kill.
    """
    root, store = RESULTS / "root", RESULTS / f"{stage}-{name}-{setting[0]}-{setting[1]}.db"
    workspace, parameters = root / "07_workspace" / stage, stage_parameters(stage, *setting)
    shutil.rmtree(workspace, ignore_errors=True)
    store.unlink(missing_ok=True)
    start = time.time()
    found: dict[str, Any] = {}
    process = kedro(f"--nodes={stage}", root, store, parameters)
    if kill is not None and draw is not None:
        found = execute(kill, process, workspace, draw)
        process = kedro(f"--nodes={stage}", root, store, parameters)
    if process.wait() != 0:
        raise SystemExit(f"{stage} {name} failed, see {RESULTS / 'run.log'}")
    return found | result(workspace, start) | tracked(store, stage)


def result(workspace: Path, start: float) -> dict[str, Any]:
    """What a stage that began at `start` left in its only work directory, and how long it took."""
    (directory,) = workspace.iterdir()
    kept = workspace.parents[1] / "kept" / str(time.time_ns())  # the next run replaces it
    first = json.loads((directory / "metrics.jsonl").read_text().partition("\n")[0])
    return {
        "start_s": first["time"] - start,
        "resumed_from": json.loads((directory / "job.json").read_text())["resume_from"],
        "observed": observe(shutil.copytree(directory, kept)),
    }


def stage_parameters(stage: str, zero: int, precision: str, further: str) -> str:
    """Parameters for some seconds of training with a checkpoint every third step."""
    blocks = ["ppo.actor", "ppo.critic"] if stage == "ppo" else [stage]
    blocks = [block for block in blocks if f"{block}=null" not in further.split(",")]
    engine = {"zero_stage": zero, "precision": precision}
    engines = [
        f"{block}.deepspeed.{key}={value}" for block in blocks for key, value in engine.items()
    ]
    given = [further, STEPS[stage], f"{stage}.checkpoint_every=3", *engines]
    return ",".join(filter(None, given))


def kedro(nodes: str, root: Path, store: Path, parameters: str = "") -> subprocess.Popen[bytes]:
    """Start a `kedro run` of the environment tiny."""
    command = [str(Path(sys.executable).with_name("kedro")), "run", "--env=tiny", nodes]
    # Each stage has parameters of its own, so the published inputs of a later one differ.
    common = f"root={root},inputs=newest,launch.deterministic=true"  # which a CPU does without
    command.append(f"--params={common}" + (f",{parameters}" if parameters else ""))
    environment = os.environ | {"MLFLOW_TRACKING_URI": f"sqlite:///{store}"}
    with (RESULTS / "run.log").open("a") as log:
        return subprocess.Popen(
            command, cwd=PROJECT, env=environment, stdout=log, stderr=subprocess.STDOUT
        )


def execute(
    kill: Kill, driver: subprocess.Popen[bytes], workspace: Path, draw: random.Random
) -> dict[str, Any]:
    """Kill; then wait until no process is left, at most 10 seconds.

    Raises:
        TooLateError: the stage finished before the kill.
    """
    wait_while(driver, lambda: steps_taken(workspace) < kill.step)
    moment = time.monotonic() + kill.after_s
    wait_while(driver, lambda: time.monotonic() < moment)
    if kill.target == "checkpoint":
        partial = "*/checkpoints/step-*.partial"
        wait_while(driver, lambda: not any(workspace.glob(partial)))
    driver.send_signal(signal.SIGSTOP)  # it starts and reaps no process from now on
    try:
        if any(workspace.glob("*/export/manifest.json")):
            raise TooLateError
        programs = psutil.Process(driver.pid).children(recursive=True)
        ranks = [process for process in programs if "RANK" in environment_of(process)]
        killed_at_step = steps_taken(workspace)
        if kill.target == "driver" or not ranks:
            driver.kill()
        elif kill.target == "rank":
            draw.choice(ranks).kill()
        else:
            os.killpg(os.getpgid(ranks[0].pid), signal.SIGKILL)
    except (TooLateError, psutil.NoSuchProcess, ProcessLookupError):
        driver.kill()
        driver.wait()
        raise TooLateError from None
    driver.send_signal(signal.SIGCONT)
    _, left = psutil.wait_procs(programs, timeout=10)
    driver.wait()
    return {"killed_at_step": killed_at_step, "left": len(left)}


def wait_while(driver: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
    """Wait as long as the driver runs and the condition is true."""
    while driver.poll() is None and condition():
        time.sleep(0.001)


def steps_taken(workspace: Path) -> int:
    """Lines of metrics so far. The stage has one work directory."""
    return sum(file.read_bytes().count(b"\n") for file in workspace.glob("*/metrics.jsonl"))


def environment_of(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def tracked(store: Path, stage: str) -> dict[str, Any]:
    """Status of every MLflow run of the stage, and the logged steps of each training metric."""
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
            if "/" in name and not name.startswith(("time/", "exported/"))
        }
    }
    return {"runs": [run.info.status for run in runs], "logged": logged}


def steps_of(records: list[dict[str, Any]]) -> dict[str, list[int]]:
    """The steps of each metric in metrics.jsonl."""
    return {
        name: [record["step"] for record in records if name in record["metrics"]]
        for name in {name for record in records for name in record["metrics"]}
    }


def passes(row: dict[str, Any]) -> bool:
    equal = row["left"] == 0 and row["difference"] is None
    return equal and row["one_run"] and row["logged_once"]


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"{sum(map(passes, rows))} of {len(rows)} kills passed")
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        table.add_row(
            *(f"{value:.1f}" if isinstance(value, float) else str(value) for value in row.values())
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(main())
