import time
from functools import partial
from pathlib import Path

import click
from rich.console import Console
from rich.filesize import decimal

from rlhf_pipeline.commands.artifacts import Ledger
from rlhf_pipeline.commands.command import Command, plain_table
from rlhf_pipeline.errors import as_typed
from rlhf_pipeline.pipelines.table import stage_specs
from rlhf_pipeline.runtime.job import DRY_RUNS, JUDGE_REPLIES
from rlhf_pipeline.stages.cache.cleaning import remove, survey
from rlhf_pipeline.stages.cache.workspace import DAMAGED, downloads


@click.command(cls=Command)
@click.option("--yes", is_flag=True, help="Remove the files instead of listing them.")
@click.option(
    "--unfinished",
    is_flag=True,
    help="Include unfinished stages, which could still resume, and replies of chat models.",
)
def clean(ledger: Ledger, console: Console, yes: bool, unfinished: bool) -> None:
    """List or remove the files that no published version needs.

    These are work directories, downloads, and the remains of interrupted publications.
    """
    workspace, datasets = ledger.workspace, ledger.datasets.values()
    root, show = workspace.parent, partial(console.print, highlight=False, soft_wrap=True)
    published = [path for dataset in datasets for path in dataset.versions(strict=True)]
    unwanted = {
        path: "left by an interrupted publication"
        for dataset in datasets
        for path in dataset.abandoned()
    }
    unwanted |= dict.fromkeys(downloads(workspace), "a download, which is repeated when needed")
    unwanted |= dict.fromkeys(workspace.glob(f"*/*/*{DAMAGED}*"), "damaged, set aside")
    if (tried := workspace / DRY_RUNS).is_dir():
        unwanted[tried] = "memory of checks, which are repeated when needed"
    kept_replies = {}
    if (replies := workspace / JUDGE_REPLIES).is_dir():
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(replies.stat().st_mtime))
        why = f"replies of chat models, last used {used}"
        if unfinished:
            unwanted[replies] = f"{why}; asked for again when needed"
        else:
            kept_replies = {replies: f"{why}; --unfinished removes them"}
    leftovers, kept = survey(workspace, stage_specs(), published, unwanted, unfinished=unfinished)
    freed = sum(leftover.freed for leftover in leftovers)
    if leftovers:
        table = plain_table(show_footer=True, footer_style="bold")
        table.add_column("directory", overflow="fold", footer="total")
        table.add_column("why", overflow="fold")
        table.add_column("frees", justify="right", no_wrap=True, footer=decimal(freed))
        for row in leftovers:
            table.add_row(_name(row.path, root), row.why, decimal(row.freed))
        console.print(table)
    for path, why in (kept | kept_replies).items():
        show(f"kept: {_name(path, root)}: {why}")
    if not leftovers:
        show("Nothing to remove.")
    elif not yes:
        command = as_typed("kedro rlhf clean --yes")
        show(f"Nothing was removed. `{command}` frees {decimal(freed)}.")
    else:
        for leftover in leftovers:
            if holder := remove(leftover, workspace):
                show(f"kept: {_name(leftover.path, root)}: in use by {holder}")
                freed -= leftover.freed
        show(f"Removed; {decimal(freed)} freed.")


def _name(path: Path, root: Path) -> str:
    return str(path.relative_to(root) if path.is_relative_to(root) else path)
