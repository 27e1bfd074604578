"""`kedro rlhf prove`: does training on this machine resume and repeat with the same bits?"""

import json
import random
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import click
import numpy as np
from rich.console import Console

from rlhf_pipeline.commands.command import Command, pipeline_option, plain_table
from rlhf_pipeline.commands.miniature import Miniature
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.kedro_run.artifacts import Ledger
from rlhf_pipeline.runtime.certificates import Certificate, Property
from rlhf_pipeline.runtime.job import LAST_SEAL, LaunchedJob
from rlhf_pipeline.runtime.manifest import Manifest
from rlhf_pipeline.runtime.metrics_file import read_json_lines
from rlhf_pipeline.stages.processes import kill_launch

ROUNDING = 1e-5
"""Relative difference below which two numbers may be sums of the same numbers in another order."""
TRIES = 10
"""Kills of one stage that may come too late."""


@dataclass(frozen=True)
class Observed:
    """What a finished training left."""

    steps: list[dict[str, Any]]
    """The lines of metrics, with what was read and sampled, without times."""
    weights: Mapping[str, str]
    """Digests of the files of weights."""
    optimizer: Mapping[str, str]
    """Digests of the files of the last checkpoint with the optimizer's states."""
    folder: Path
    seconds: float


@click.command(cls=Command)
@click.argument("properties", nargs=-1, type=click.Choice(get_args(Property)))
@pipeline_option
@click.option(
    "--steps",
    type=click.IntRange(min=3),
    default=6,
    show_default=True,
    help="Steps of each training.",
)
@click.option(
    "--kills", type=click.IntRange(min=1), default=1, show_default=True, help="Kills of each stage."
)
def prove(
    ledger: Ledger, configuration: Mapping[str, Any], console: Console, project: Path,
    properties: Sequence[Property], pipeline: str, steps: int, kills: int,
) -> None:  # fmt: skip
    """Train a few steps of each stage, kill and resume them, and compare every bit.

    PROPERTIES are resume and repeat; the default is both. Model, data, parameters and machines are
    those of the project, but for the number of steps. Weights, optimizer states, the rows and
    answers of each step and all metrics are compared. A certificate in the workspace has what was
    equal, and `kedro rlhf status` shows it for trainings that differ in their length alone. The
    command fails if a bit differs, and names the first step and tensor.
    """
    found: dict[str, Certificate] = {}
    wanted = properties or get_args(Property)
    with console.status("preparing models and data") as status:
        proof = Proof(Miniature(ledger, configuration, project, pipeline, ".prove", status), steps)
        for stage, first in proof.whole().items():
            certificate = proof.certificate(stage, first)
            for _ in range(kills if "resume" in wanted else 0):
                step, again = proof.resumed(stage, first)
                certificate.note("resume", f"killed after step {step}", difference(first, again))
            if "repeat" in wanted:
                again = proof.repeated(stage)
                certificate.note("repeat", "trained again", difference(first, again))
            found[stage] = certificate
            certificate.write(ledger.workspace)
            proof.restore(stage, first)  # later stages start from what they started from at first
    table = plain_table("stage", *wanted)
    for stage, certificate in found.items():
        table.add_row(stage, *(certificate.words(each) for each in wanted))
    console.print(table)
    if differing := [line for each in found.values() for line in each.differences()]:
        raise StageError("\n".join([*differing, f"The trainings are in {proof.root}"]))
    shutil.rmtree(proof.root)


class Proof:
    """The short trainings of one pipeline."""

    def __init__(self, miniature: Miniature, steps: int) -> None:
        self._miniature, self._steps, self.root = miniature, steps, miniature.root
        self._workspace = miniature.workspace

    def whole(self) -> dict[str, Observed]:
        """Train all stages without an interruption."""
        self._miniature.prepare()
        run = self._start(*self._miniature.stages)  # not all of them are needed by the last one
        self._miniature.finish(run, "prove, training to compare with")
        return {stage: self._observed(stage) for stage in self._miniature.stages}

    def resumed(self, stage: str, first: Observed) -> tuple[int, Observed]:
        """Train a stage, kill it at a random instant, and resume it: the last step before."""
        for _ in range(TRIES):
            shutil.rmtree(self._workspace / stage)
            after = random.randrange(1, len(first.steps))
            driver = self._start(stage)
            while driver.poll() is None and self._written(stage) < after:
                time.sleep(0.005)
            time.sleep(random.random() * first.seconds / len(first.steps))
            driver.kill()  # its guard ends the ranks, as after a crash of the machine
            driver.wait()
            for directory in (self._workspace / stage).glob("*"):
                kill_launch(f" {directory.resolve()}")
            if not any((self._workspace / stage).glob("*/export/manifest.json")):
                return self._written(stage), self._train(stage, "resuming after a kill")
        raise StageError(f"prove: {stage} ended before {TRIES} kills. Fix: more --steps")

    def restore(self, stage: str, first: Observed) -> None:
        """Put the first training of a stage back."""
        shutil.rmtree(self._workspace / stage)
        shutil.copytree(first.folder, self._workspace / stage / first.folder.name)

    def repeated(self, stage: str) -> Observed:
        """Train a stage again from its start."""
        shutil.rmtree(self._workspace / stage)
        return self._train(stage, "training again")

    def certificate(self, stage: str, first: Observed) -> Certificate:
        """A certificate without tries, for trainings like the first one."""
        job = LaunchedJob.read(first.folder / "job.json")
        ranks = Manifest.read(first.folder / "export").ranks
        digests = {"weights": first.weights, "optimizer": first.optimizer}
        return Certificate.of(stage, job.config, job.versions, ranks, job.seed, digests)

    def _train(self, stage: str, what: str) -> Observed:
        """Train a stage and what it needs, or resume it."""
        self._miniature.finish(self._start(stage), f"prove {stage}, {what}")
        return self._observed(stage)

    def _start(self, *stages: str) -> "subprocess.Popen[bytes]":
        """Start the `kedro run` of stages and what they need, which reuses the finished ones."""
        saved = max(1, self._steps // 3)
        short = [
            pair
            for each in self._miniature.stages
            for pair in self._miniature.short(each, self._steps, saved)
        ]
        return self._miniature.start(dict(short), f"--to-nodes={','.join(stages)}")

    def _written(self, stage: str) -> int:
        files = (self._workspace / stage).glob("*/metrics.jsonl")
        return sum(file.read_bytes().count(b"\n") for file in files)

    def _observed(self, stage: str) -> Observed:
        folder = self._miniature.folder(stage)
        kept = self.root / "kept" / stage / str(time.time_ns()) / folder.name
        return observe(shutil.copytree(folder, kept))  # the next training replaces it


def observe(folder: Path) -> Observed:
    """What a finished training left in its work directory."""
    records = read_json_lines(folder / "metrics.jsonl")
    seconds = records[-1]["time"] - records[0]["time"]
    files = Manifest.read(folder / "export").files
    weights = {n: e.sha256 for n, e in files.items() if n.endswith(".safetensors")}
    sealed = json.loads((folder / LAST_SEAL).read_text())
    optimizer = {n: e["sha256"] for n, e in sealed.items() if n != "loop.json"}  # it has times
    return Observed([*map(_without_times, records)], weights, optimizer, folder, seconds)


def _without_times(record: Mapping[str, Any]) -> dict[str, Any]:
    metrics = {n: x for n, x in record["metrics"].items() if not n.startswith("time/")}
    return {name: x for name, x in record.items() if name != "time"} | {"metrics": metrics}


def difference(first: Observed, other: Observed) -> str | None:
    """The first difference between two trainings in words, with its likely cause; None if all is
    equal."""
    for one, two in zip(first.steps, other.steps, strict=False):
        where, seen = f"step {one['step']}", [each.get("saw", {}) for each in (one, two)]
        for name, cause in (
            ("rows", "other rows: the order of the data is not restored"),
            ("samples", "other answers to the same prompts: random draws or weights differ"),
        ):
            if seen[0].get(name) != seen[1].get(name):
                return f"{where}: {cause}"
        differing = [n for n, x in one["metrics"].items() if two["metrics"].get(n) != x]
        if differing:
            name = differing[0]
            values = one["metrics"][name], two["metrics"].get(name)
            return f"{where}: {name} is {values[0]!r} and {values[1]!r}{_size(*values)}"
    if len(first.steps) != len(other.steps):
        return f"found {len(first.steps)} and {len(other.steps)} lines of metrics"
    for name, digest in first.weights.items():
        if other.weights.get(name) != digest:
            files = [each.folder / "export" / name for each in (first, other)]
            return f"{name}: {first_tensor(*files)}"
    for name, digest in first.optimizer.items():
        if other.optimizer.get(name) != digest:
            return f"{name} of the last checkpoint differs: a state is not restored"
    return None


def _size(one: float, other: float | None) -> str:
    if other is None:
        return ""
    relative = abs(one - other) / max(abs(one), abs(other), 1e-30)
    if relative > ROUNDING:
        return f", {relative:.1%} apart: no rounding, so weights or states before it differ"
    return (
        f", {relative:.0e} apart, as by rounding: sums in another order. On GPUs, "
        "launch.deterministic=true makes them repeat"
    )


def first_tensor(one: Path, other: Path) -> str:
    """The first tensor in which two files differ, and by how much at most."""
    pairs = zip(_tensors(one), _tensors(other), strict=True)
    for (name, ours), (_, theirs) in pairs:
        if not np.array_equal(ours, theirs, equal_nan=True):
            return f"the first tensor that differs is {name}, by {abs(ours - theirs).max():.1e}"
    return "their headers differ"


def _tensors(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a file of safetensors by name, as float64."""
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    for name, entry in sorted(header.items()):
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            data = content[start + begin : start + end]
            if entry["dtype"] == "BF16":  # the upper half of a float32
                numbers = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
            else:
                form = {"F32": "<f4", "F16": "<f2"}.get(entry["dtype"], "u1")
                numbers = np.frombuffer(data, form)
            yield name, numbers.astype(np.float64)
