import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import click
from kedro.framework.project import pipelines
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node
from rich.console import Console

from rlhf_pipeline.commands.command import Command, pipeline_option, plain_table
from rlhf_pipeline.config.stages import shares_text
from rlhf_pipeline.datasets.artifact import ArtifactDataset
from rlhf_pipeline.kedro_run.checks import before_run
from rlhf_pipeline.kedro_run.hooks import run_context
from rlhf_pipeline.pipelines.table import PASSES_ON, RUN, kinds_of_results, stage_specs
from rlhf_pipeline.runtime.manifest import NAME, Manifest
from rlhf_pipeline.stages.cache.planning import PlannedStage, Planner, downstream
from rlhf_pipeline.stages.cache.workspace import RECIPE

STYLES = {
    "finished": "green",
    "reuse": "green",
    "resume": "yellow",
    "run": "cyan",
    "may run": "cyan",
}


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
    return Row(run.title, planned.state, run.fingerprint[:8], "; ".join(details))


def _versions(catalog: CatalogProtocol, name: str) -> list[Path] | None:
    """The published versions of an artifact, oldest first; None for any other dataset."""
    dataset = catalog.get(name)
    return dataset.versions() if isinstance(dataset, ArtifactDataset) else None
