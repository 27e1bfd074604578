"""`kedro rlhf clean`: show or remove what no published version needs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from kedro.framework.project import pipelines
from kedro.io import CatalogProtocol
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from rlhf_pipeline.datasets.artifact import ArtifactDataset
from rlhf_pipeline.stage_registry import stage_specs
from rlhf_pipeline.stages.cache.cleaning import Leftover, remove, survey


def clean(catalog: CatalogProtocol, console: Console, *, yes: bool, unfinished: bool) -> None:
    """Show what no published version needs; with `yes`, remove it."""
    workspace: Path = catalog.load("workspace")
    names = {name for pipeline in pipelines.values() for name in pipeline.all_outputs()}
    found = (catalog.get(name) for name in sorted(names))
    datasets = [dataset for dataset in found if isinstance(dataset, ArtifactDataset)]
    published = [path for dataset in datasets for path in dataset.versions()]
    abandoned = [path for dataset in datasets for path in dataset.abandoned()]
    leftovers, kept = survey(workspace, stage_specs(), published, abandoned, unfinished=unfinished)
    root = workspace.parent
    show = partial(console.print, highlight=False, soft_wrap=True)
    if leftovers:
        console.print(_table(leftovers, root))
    for path, why in kept.items():
        show(f"kept: {_name(path, root)}: {why}")
    freed = sum(leftover.freed for leftover in leftovers)
    if not leftovers:
        show("Nothing to remove.")
    elif not yes:
        show(f"Nothing was removed. `kedro rlhf clean --yes` frees {decimal(freed)}.")
    else:
        for leftover in leftovers:
            if holder := remove(leftover, workspace):
                show(f"kept: {_name(leftover.path, root)}: in use by {holder}")
                freed -= leftover.freed
        show(f"Removed; {decimal(freed)} freed.")


def _table(leftovers: list[Leftover], root: Path) -> Table:
    table = Table(
        box=None, padding=(0, 2, 0, 0), header_style="dim", show_footer=True, footer_style="bold"
    )
    table.add_column("directory", overflow="fold", footer="total")
    table.add_column("why", overflow="fold")
    for name, sizes in (
        ("size", [row.size for row in leftovers]),
        ("frees", [row.freed for row in leftovers]),
    ):
        table.add_column(name, justify="right", no_wrap=True, footer=decimal(sum(sizes)))
    for row in leftovers:
        table.add_row(_name(row.path, root), row.why, decimal(row.size), decimal(row.freed))
    return table


def _name(path: Path, root: Path) -> str:
    return str(path.relative_to(root) if path.is_relative_to(root) else path)
