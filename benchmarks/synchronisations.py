"""How often does the host wait for the device in each phase of each program?

    python benchmarks/synchronisations.py

Runs the environment `tiny` once, then every training program and the evaluation again on a pretend
accelerator (`tests/strict_device.py`), without a GPU, on one rank. A wait is everything that
`torch.cuda.set_sync_debug_mode` would report: `.item()`, `.tolist()`, `.cpu()`, a tensor as a truth
value, a shape that depends on values, and a blocking copy to the device. The table separates waits
of this project's code from those of libraries. Results: benchmarks/results/synchronisations/.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

PROJECT = Path(__file__).parents[1]
RESULTS = PROJECT / "benchmarks" / "results" / "synchronisations"
PROGRAMS = {
    "sft": "training.sft",
    "reward_model": "training.reward_model",
    "ppo": "training.ppo",
    "evaluate": "evaluation.evaluate",
}
"""Module of each stage's program."""
Row = dict[str, Any]


def main() -> None:
    """Run, count, print."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    shutil.rmtree(RESULTS, ignore_errors=True)
    RESULTS.mkdir(parents=True)
    run_tiny(RESULTS / "root")
    sys.path.insert(0, str(PROJECT / "tests"))
    rows = [row for stage in PROGRAMS for row in count(stage)]
    (RESULTS / "synchronisations.json").write_text(json.dumps(rows, indent=2))
    show(rows)


def run_tiny(root: Path) -> None:
    """Run the whole pipeline with the environment `tiny`; it leaves the job of each stage."""
    kedro = [str(Path(sys.executable).with_name("kedro")), "run", "--env=tiny", "--pipeline=full"]
    environment = os.environ | {"MLFLOW_TRACKING_URI": f"sqlite:///{root.parent}/mlflow.db"}
    subprocess.run([*kedro, f"--params=root={root}"], cwd=PROJECT, env=environment, check=True)


def count(stage: str) -> Iterator[Row]:
    """Run the program of a stage again; yield the waits of each of its phases."""
    from strict_device import StrictDevice

    from rlhf_pipeline.runtime import heartbeat
    from rlhf_pipeline.runtime.job import LaunchedJob

    (written,) = (RESULTS / "root" / "07_workspace" / stage).glob("*/job.json")
    directory = RESULTS / stage
    directory.mkdir()
    job = replace(LaunchedJob.read(written), directory=directory, resume_from=None)
    heartbeat.at("loading")
    with StrictDevice() as strict, counted_work() as work:
        import_module(f"rlhf_pipeline.{PROGRAMS[stage]}").main(job)
    own = Counter(wait.phase for wait in strict.waits if wait.own)
    libraries = Counter(wait.phase for wait in strict.waits if not wait.own)
    for phase in dict.fromkeys(wait.phase for wait in strict.waits):
        yield {
            "stage": stage,
            "phase": phase,
            "optimizer steps": work["optimizer steps", phase],
            "tokens": work["tokens", phase],
            "own": own[phase],
            "libraries": libraries[phase],
            "places": dict(
                Counter(str(wait) for wait in strict.waits if wait.own and wait.phase == phase)
            ),
        }


@contextmanager
def counted_work() -> Iterator[Counter[tuple[str, str]]]:
    """Count optimizer steps, and tokens of a batch of responses, by phase."""
    from deepspeed import DeepSpeedEngine

    from rlhf_pipeline.rollout import transformers_generator
    from rlhf_pipeline.runtime import heartbeat

    work: Counter[tuple[str, str]] = Counter()

    def counting(kind: str, method: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            work[kind, heartbeat._here.phase] += 1
            return method(*arguments, **options)

        return call

    step = counting("optimizer steps", DeepSpeedEngine.step)
    sampled = counting("tokens", transformers_generator.sampled)
    with (
        mock.patch.object(DeepSpeedEngine, "step", step),
        mock.patch.object(transformers_generator, "sampled", sampled),
    ):
        yield work


def show(rows: list[Row]) -> None:
    """Print a table of the phases, then the places of this project's waits."""
    from rich.console import Console
    from rich.table import Table

    columns = ("stage", "phase", "optimizer steps", "tokens", "own", "libraries")
    table = Table(*columns, title="waits of the host for the device")
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    places = Table("stage", "phase", "place", "waits", title="waits of this project's code")
    for row in rows:
        for place, waits in row["places"].items():
            places.add_row(row["stage"], row["phase"], place, str(waits))
    Console().print(table)
    Console().print(places)


if __name__ == "__main__":
    main()
