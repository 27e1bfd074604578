"""Does training on two nodes survive the loss of a node? Needs root and network namespaces.

    python benchmarks/node_kills.py                    # 10 losses
    python benchmarks/node_kills.py --kills 2 --stages ppo

The nodes are network namespaces with addresses of their own; sshd and pdsh start the ranks. Node 1
is lost during the start of a stage, at a random moment of training, or while a checkpoint is being
written. Either all its processes are killed, or its cable is cut. Requirements: `kedro run` on node
0 ends within 60 seconds and names the node; no process is left on either node; the same command
resumes; the final weights and metrics equal those of an uninterrupted run bit for bit. Results:
benchmarks/results/node-kills/.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kills import PROJECT, Kill, TooLateError, result, steps_taken
from rich.console import Console
from rich.table import Table

from rlhf_pipeline.commands.prove import difference

sys.path.append(str(PROJECT / "tests"))
from nodes import Nodes, missing, programs, ssh_servers

RESULTS = PROJECT / "benchmarks" / "results" / "node-kills"
STEPS = {  # 6 to 12 steps
    "sft": {"sft.epochs": 2, "sft.batch_size": 32},
    "reward_model": {"reward_model.batch_size": 32},
    "ppo": {"ppo.steps": 6},
}
MOMENTS = ("start", "middle", "checkpoint")
WAYS = ("killed", "cut off")
LIMIT_S = 60.0
"""Seconds within which the run must end after the loss of a node."""


def main() -> int:
    """Lose a node, resume, compare; print a row for each loss."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--stages", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if (reason := missing()) is not None:
        raise SystemExit(f"no nodes: {reason}")
    shutil.rmtree(RESULTS, ignore_errors=True)
    RESULTS.mkdir(parents=True)
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{RESULTS}/mlflow.db"
    nodes, draw = Nodes(RESULTS), random.Random(arguments.seed)
    expected: dict[str, dict[str, Any]] = {}
    rows = []
    try:
        complete(nodes, start(nodes, "--to-nodes=reward_model", {}))
        for number in range(arguments.kills):
            stage = arguments.stages[number % len(arguments.stages)]
            if stage not in expected:
                expected[stage] = uninterrupted(nodes, stage)
            moment = MOMENTS[number // len(arguments.stages) % len(MOMENTS)]
            way = WAYS[number % len(WAYS)]
            rows.append(lose_and_compare(nodes, stage, moment, way, expected[stage], draw))
            (RESULTS / "node_kills.json").write_text(json.dumps(rows, indent=2))
            show(rows)
    finally:
        nodes.remove()
    return 0 if all(passes(row) for row in rows) else 1


def uninterrupted(nodes: Nodes, stage: str) -> dict[str, Any]:
    """The result of a stage that loses no node."""
    begin = fresh(nodes, stage)
    complete(nodes, start(nodes, f"--nodes={stage}", parameters(stage)))
    return result(workspace(nodes, stage), begin)


def lose_and_compare(
    nodes: Nodes,
    stage: str,
    moment: str,
    way: str,
    expected: dict[str, Any],
    draw: random.Random,
) -> dict[str, Any]:
    """Lose node 1 during a stage, and resume; return how the run ended and how results compare."""
    while True:
        begin = fresh(nodes, stage)
        written = nodes.output(0).stat().st_size
        run = start(nodes, f"--nodes={stage}", parameters(stage))
        try:
            wait_for(random_moment(moment, expected, draw), run, nodes, stage)
            break
        except TooLateError:
            complete(nodes, run)
    at_step = steps_taken(workspace(nodes, stage))
    ended_s = lose(nodes, way, run)
    left = processes_left(nodes)
    with nodes.output(0).open() as file:
        file.seek(written)
        message = file.read()
    nodes.plug(1)
    for number in (0, 1):
        nodes.kill(number)
    run.wait()
    complete(nodes, start(nodes, f"--nodes={stage}", parameters(stage)))
    found = result(workspace(nodes, stage), begin)
    return {
        "stage": stage,
        "moment": moment,
        "node 1": way,
        "at_step": at_step,
        "ended_s": ended_s,
        "named": f"node {nodes.addresses[1]} is lost: " in message
        or "node node-1 (rank 1) is lost: " in message,
        "left": left,
        "resumed_from": found["resumed_from"],
        "difference": difference(expected["observed"], found["observed"]),
    }


def random_moment(moment: str, expected: dict[str, Any], draw: random.Random) -> Kill:
    """When to lose the node: a number of steps, then seconds, then perhaps the next checkpoint."""
    steps = len(expected["observed"].steps)
    if moment == "start":
        return Kill(moment, 0, draw.random() * expected["start_s"] / 2)
    return Kill(
        moment, draw.randrange(1, steps - 3), draw.random() * expected["observed"].seconds / steps
    )


def wait_for(kill: Kill, driver: subprocess.Popen[bytes], nodes: Nodes, stage: str) -> None:
    """Wait for a moment of a stage. Raises TooLateError if the run ends before it."""
    folder = workspace(nodes, stage)

    def wait(condition: Callable[[], object]) -> None:
        while not condition():
            if driver.poll() is not None:
                raise TooLateError
            time.sleep(0.001)

    wait(lambda: any(folder.glob("*/heartbeats/driver.json")))
    wait(lambda: steps_taken(folder) >= kill.step)
    moment = time.monotonic() + kill.after_s
    wait(lambda: time.monotonic() > moment)
    if kill.target == "checkpoint":
        wait(lambda: any(folder.glob("*/checkpoints/step-*.partial")))
    if any(folder.glob("*/export/manifest.json")):
        raise TooLateError


def lose(nodes: Nodes, way: str, driver: subprocess.Popen[bytes]) -> float | None:
    """Lose node 1; the seconds until the run on node 0 has failed, None if it has not."""
    begin = time.monotonic()
    if way == "killed":
        nodes.kill(1)
    else:
        nodes.unplug(1)
    try:
        code = driver.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        return None
    return time.monotonic() - begin if code == 1 else None


def processes_left(nodes: Nodes) -> int:
    """The processes on both nodes after some time: a node that was cut off notices it later."""
    deadline = time.monotonic() + LIMIT_S / 2
    while (left := len(programs(nodes))) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def start(nodes: Nodes, chosen: str, options: dict[str, object]) -> subprocess.Popen[bytes]:
    """Start a run on both nodes by ssh; a node that was killed needs a new server."""
    # Each stage has parameters of its own, so the published inputs of a later one differ.
    return nodes.start_run("--env=tiny", chosen, inputs="newest", **ssh_servers(nodes), **options)


def complete(nodes: Nodes, run: subprocess.Popen[bytes]) -> None:
    """Wait until a run has ended without error."""
    if run.wait() != 0:
        raise SystemExit(f"a run failed, see {nodes.output(0)}")


def parameters(stage: str) -> dict[str, object]:
    """Some seconds of training with a checkpoint every second step, to which both ranks write."""
    engines = ["ppo.actor", "ppo.critic"] if stage == "ppo" else [stage]
    zero = {f"{engine}.deepspeed.zero_stage": 2 for engine in engines}
    return {**STEPS[stage], f"{stage}.checkpoint_every": 2, f"{stage}.evaluations": 1, **zero}


def workspace(nodes: Nodes, stage: str) -> Path:
    """The folder of a stage."""
    return nodes.root / "07_workspace" / stage


def fresh(nodes: Nodes, stage: str) -> float:
    """Remove what there is of a stage; return the time."""
    shutil.rmtree(workspace(nodes, stage), ignore_errors=True)
    return time.time()


def passes(row: dict[str, Any]) -> bool:
    equal = row["left"] == 0 and row["difference"] is None
    return equal and row["ended_s"] is not None and row["named"]


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"{sum(map(passes, rows))} of {len(rows)} lost nodes passed")
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        table.add_row(
            *(f"{value:.1f}" if isinstance(value, float) else str(value) for value in row.values())
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(main())
