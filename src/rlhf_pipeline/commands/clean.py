"""`kedro rlhf clean`: show or remove what no published version needs."""

from __future__ import annotations

from pathlib import Path

from kedro.framework.project import pipelines
from kedro.io import CatalogProtocol
from rich.console import Console
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
    if leftovers:
        console.print(_table(leftovers, root))
    for path, why in kept.items():
        console.print(f"kept: {_name(path, root)}: {why}", highlight=False, soft_wrap=True)
    if not leftovers:
        console.print("Nothing to remove.")
    elif not yes:
        freed = _bytes(sum(leftover.freed for leftover in leftovers))
        console.print(
            f"Nothing was removed. `kedro rlhf clean --yes` frees {freed}.",
            highlight=False,
            soft_wrap=True,
        )
    else:
        freed_bytes = 0
        for leftover in leftovers:
            if holder := remove(leftover, workspace):
                console.print(
                    f"kept: {_name(leftover.path, root)}: in use by {holder}",
                    highlight=False,
                    soft_wrap=True,
                )
            else:
                freed_bytes += leftover.freed
        console.print(f"Removed; {_bytes(freed_bytes)} freed.", highlight=False)


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
        table.add_column(name, justify="right", no_wrap=True, footer=_bytes(sum(sizes)))
    for row in leftovers:
        table.add_row(_name(row.path, root), row.why, _bytes(row.size), _bytes(row.freed))
    return table


def _name(path: Path, root: Path) -> str:
    return str(path.relative_to(root) if path.is_relative_to(root) else path)


def _bytes(count: int) -> str:
    """A rounded size with a decimal unit: 1.2 GB is 1.2e9 bytes."""
    size, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"
