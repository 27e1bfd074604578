import time
from functools import partial
from os.path import relpath

import click
from rich.console import Console
from rich.filesize import decimal

from rlhf_pipeline.commands.command import Command, plain_table
from rlhf_pipeline.commands.miniature import FOLDERS
from rlhf_pipeline.errors import as_typed
from rlhf_pipeline.kedro_run.artifacts import Ledger
from rlhf_pipeline.pipelines.table import stage_specs
from rlhf_pipeline.runtime.job import DRY_RUNS, JUDGE_REPLIES
from rlhf_pipeline.stages.cache.workspace import DAMAGED, downloads, remove, survey


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
    show = partial(console.print, highlight=False, soft_wrap=True)
    published = [path for dataset in datasets for path in dataset.versions()]
    partials = [path for dataset in datasets for path in dataset.abandoned()]
    replies = [path for path in (workspace / JUDGE_REPLIES,) if path.is_dir()]
    used = [time.strftime("%Y-%m-%d %H:%M", time.localtime(p.stat().st_mtime)) for p in replies]
    of_replies = f"replies of chat models, last used {''.join(used)}"
    short = [workspace.parent / name for name in FOLDERS]
    reasons = {
        "left by an interrupted publication": partials,
        "a download, which is repeated when needed": downloads(workspace),
        "left by a short run that failed": [each for each in short if each.is_dir()],
        "damaged, set aside": workspace.glob(f"*/*/*{DAMAGED}*"),
        "memory of checks, which are repeated when needed": workspace.glob(DRY_RUNS),
        f"{of_replies}; asked for again when needed": replies if unfinished else (),
    }
    unwanted = {path: why for why, paths in reasons.items() for path in paths}
    leftovers, kept = survey(workspace, stage_specs(), published, unwanted, unfinished=unfinished)
    if not unfinished:
        kept |= dict.fromkeys(replies, f"{of_replies}; --unfinished removes them")
    freed = sum(leftover.freed for leftover in leftovers)
    if leftovers:
        table = plain_table(show_footer=True, footer_style="bold")
        table.add_column("directory", overflow="fold", footer="total")
        table.add_column("why", overflow="fold")
        table.add_column("frees", justify="right", no_wrap=True, footer=decimal(freed))
        for row in leftovers:
            table.add_row(relpath(row.path, workspace.parent), row.why, decimal(row.freed))
        console.print(table)
    for leftover in leftovers if yes else ():
        if holder := remove(leftover, workspace):
            kept[leftover.path] = f"in use by {holder}"
            freed -= leftover.freed
    for path, why in kept.items():
        show(f"kept: {relpath(path, workspace.parent)}: {why}")
    if not leftovers:
        show("Nothing to remove.")
    elif yes:
        show(f"Removed; {decimal(freed)} freed.")
    else:
        command = as_typed("kedro rlhf clean --yes")
        show(f"Nothing was removed. `{command}` frees {decimal(freed)}.")
