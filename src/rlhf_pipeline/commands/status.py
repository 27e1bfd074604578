"""`kedro rlhf status` and `kedro rlhf doctor`: what a run would do here, and whether it can."""

import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import click
from kedro.framework.project import pipelines
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node
from rich.console import Console
from rich.markup import escape

from rlhf_pipeline.commands.command import Command, pipeline_option, plain_table
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.config.stages import shares_text
from rlhf_pipeline.datasets.artifact import ArtifactDataset
from rlhf_pipeline.errors import PipelineError, as_typed, without_secrets
from rlhf_pipeline.kedro_run.checks import before_run
from rlhf_pipeline.kedro_run.hooks import run_context
from rlhf_pipeline.pipelines.table import PASSES_ON, RUN, kinds_of_results, stage_specs
from rlhf_pipeline.runtime.certificates import certificate_of
from rlhf_pipeline.runtime.manifest import NAME, Manifest
from rlhf_pipeline.sizing.fit import size_text
from rlhf_pipeline.sizing.hardware import GIB
from rlhf_pipeline.stages.cache.planning import PlannedStage, Planner, downstream
from rlhf_pipeline.stages.cache.workspace import RECIPE
from rlhf_pipeline.stages.launch.failure import log_tail, logged_cause
from rlhf_pipeline.stages.launch.node_program import NodeProgram, on_several_machines
from rlhf_pipeline.stages.launch.resources import gpu_count, node_layout

START_S = 60.0
"""Seconds in which a rank must start on every machine: DeepSpeed's launchers import torch."""
State = Literal["ok", "warning", "failure"]
STYLES = {
    **dict.fromkeys(("finished", "reuse", "ok"), "green"),
    **dict.fromkeys(("resume", "warning"), "yellow"),
    **dict.fromkeys(("run", "may run"), "cyan"),
    "failure": "bold red",
}
"""The colours of states, of stages and of findings."""


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    stage: str
    state: str
    recipe: str = ""
    details: str = ""


@click.command(cls=Command)
@pipeline_option
def status(catalog: CatalogProtocol, console: Console, pipeline: str) -> None:
    """Show what each stage would do, and why.

    A stage reuses its finished result, resumes from a checkpoint, or runs. No stage is launched;
    what `kedro run` tries out before its first stage is tried out here, too.
    """
    table = plain_table("stage", "would", "recipe")
    table.add_column("", overflow="fold")
    for row in planned_rows(pipelines[pipeline], catalog):
        state = f"[{STYLES.get(row.state, 'default')}]{row.state}"
        table.add_row(f"[bold]{row.stage}", state, row.recipe, row.details)
    console.print(table)
    console.print(f"[dim]{shares_text(catalog.load('params:split'))}", highlight=False)


def planned_rows(pipeline: Pipeline, catalog: CatalogProtocol) -> list[Row]:
    """What the stages of a pipeline would do, in order; the nodes run with a `Planner`.

    Raises the errors that `kedro run` raises before the first launch.
    """
    before_run(pipeline, catalog)
    planner = RUN["stages"] = Planner(run_context(catalog))
    rows: list[Row] = []
    results: dict[str, Path] = {}
    for node in pipeline.nodes:
        known = len(planner.stages)
        extra = _visit(node, catalog, results, planner)
        rows += [_row(stage, node, catalog) for stage in list(planner.stages.values())[known:]]
        rows += [extra] if extra is not None else []
    return rows


def _visit(
    node: Node, catalog: CatalogProtocol, results: dict[str, Path], planner: Planner
) -> Row | None:
    """Plan the stages of a node; return a row if its own stage cannot be planned."""
    (output,) = node.outputs
    if node.name not in stage_specs():
        registers = kinds_of_results().get(output) == "registration"
        launches = "; may evaluate the champion first" if registers else ""
        return Row(node.name, "run", details=f"every time{launches}")
    missing = [
        name for name in node.inputs if name not in results and _versions(catalog, name) == []
    ]
    if missing:
        results[output] = planner.add_pending(node.name)
        return Row(node.name, "fail", details=f"no version of {', '.join(missing)} is published")
    inputs = {
        name: results[name] if name in results else catalog.load(name) for name in node.inputs
    }
    known = len(planner.stages)
    try:
        results[output] = node.func(*inputs.values())
        if node.name in PASSES_ON and results[output] == inputs[PASSES_ON[node.name]]:
            return Row(node.name, "skip", details=f"null: {PASSES_ON[node.name]} is passed on")
    except FileNotFoundError:
        # The node reads a result that is still pending, so its own stage cannot be planned.
        started = list(planner.stages.values())[known:]
        paths = [path for path in inputs.values() if isinstance(path, Path)]
        pending = [stage.run.title for stage in started if stage.state not in ("finished", "reuse")]
        pending += filter(None, map(planner.pending_stage, paths))
        if not pending:
            raise
        results[output] = planner.add_pending(node.name)
        if any(Path(catalog.load("workspace"), node.name).glob(f"*/{RECIPE}")):
            return Row(node.name, "may run", details=downstream(pending))
        return Row(node.name, "run", details=f"{downstream(pending)}; never run here")
    return None


def _row(planned: PlannedStage, node: Node, catalog: CatalogProtocol) -> Row:
    run, details = planned.run, list(planned.reasons)
    if planned.state == "finished":
        finished_at = (run.export / NAME).stat().st_mtime
        details.append(time.strftime("%Y-%m-%d %H:%M", time.localtime(finished_at)))
        versions = (_versions(catalog, node.outputs[0]) if run.stage == node.name else None) or []
        same = (path for path in versions if Manifest.read(path).fingerprint == run.fingerprint)
        details += [f"run {path.parent.name}" for path in islice(same, 1)]
    if planned.state == "reuse":
        details.append("from the store")
    if planned.state == "resume":
        # A run checks the bytes; if they are damaged it resumes from an earlier checkpoint.
        details.insert(0, f"from step {run.resume_from}")
    ranks = int(run.recipe.get("processes", 1))
    workspace = run.directory.parents[1]
    if found := certificate_of(workspace, run.stage, run.config, run.versions, ranks):
        details.append(found.summary())
    return Row(run.title, planned.state, run.fingerprint[:8], "; ".join(details))


def _versions(catalog: CatalogProtocol, name: str) -> list[Path] | None:
    """The published versions of an artifact, oldest first; None for any other dataset."""
    dataset = catalog.get(name)
    return dataset.versions() if isinstance(dataset, ArtifactDataset) else None


@dataclass(frozen=True)
class Finding:
    """What a check finds, and the fix if that is no good."""

    state: State
    found: str
    fix: str = ""


@click.command(cls=Command)
@pipeline_option
def doctor(catalog: CatalogProtocol, console: Console, pipeline: str) -> None:
    """Check whether this machine can run a pipeline.

    Each finding comes with its fix. The exit code is 1 if a check fails, and 0 if all checks pass
    or only warn.
    """
    root = Path(catalog.load("workspace")).absolute().parent
    launch = catalog.load("params:launch")
    checks: dict[str, Callable[[], Finding]] = {
        "disk": partial(disk, root),
        "nodes": partial(nodes, launch, root),
        "run": partial(run, pipelines[pipeline], catalog),
    }
    findings = {name: examine(check) for name, check in checks.items()}
    table = plain_table("check", "state")
    table.add_column("found", overflow="fold")
    for name, finding in findings.items():
        fix = f"\nFix: {finding.fix}" if finding.fix else ""
        state = f"[{STYLES[finding.state]}]{finding.state}"
        table.add_row(f"[bold]{name}", state, escape(finding.found + fix))
    console.print(table)
    if any(finding.state == "failure" for finding in findings.values()):
        raise click.exceptions.Exit(1)


def examine(check: Callable[[], Finding]) -> Finding:
    """What a check finds. An error of one check does not hide the findings of the others."""
    try:
        return check()
    except PipelineError as error:
        found, _, fix = error.message.partition("Fix: ")
    except Exception as error:
        found = f"{type(error).__name__}: {error}".partition("\n")[0]
        fix = "repair what the message names"
    return Finding("failure", without_secrets(found.rstrip()), without_secrets(fix))


def disk(root: Path) -> Finding:
    """Space for results where they are written; stages check the exact need before they write.

    One checkpoint of a model of 0.6 billion parameters has 10 GiB.
    """
    folder = next(path for path in (root, *root.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    found = f"{size_text(free)} free for {root}"
    if free >= 10 * GIB:
        return Finding("ok", found)
    fix = as_typed("`kedro rlhf clean`, or another folder with --params=root=FOLDER")
    return Finding("warning" if free >= GIB else "failure", found, fix)


def nodes(launch: LaunchConfig, root: Path) -> Finding:
    """Every rank starts: its machine has the driver's files, code and libraries."""
    if launch.mode == "local":
        return Finding("ok", "this machine trains alone")
    layout = node_layout(launch, gpu_count())
    root.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="nodes-", dir=root.resolve()) as folder:
        rank = NodeProgram("platform", folder)  # of Python: it needs neither torch nor a job
        program = on_several_machines(rank, launch, layout)
        code = None
        with program.running() as process, suppress(subprocess.TimeoutExpired):
            code = process.wait(START_S)
        if code == 0:
            return Finding("ok", f"{program.ranks} ranks start on {len(layout.ranks)} machines")
        tail = log_tail(Path(folder))
        cause = f"found ranks that do not start within {START_S:g} s{tail}"
        if code is not None:
            cause = logged_cause(Path(folder)) or f"found exit code {code}{tail}"
        fix = "correct what the output names; this machine must be the first one"
        return Finding("failure", cause, fix)


def run(pipeline: Pipeline, catalog: CatalogProtocol) -> Finding:
    """The pipeline can start: stores answer, data and functions are sound, each stage fits."""
    before_run(pipeline, catalog)
    return Finding("ok", "it passes the checks before its first stage")
