import time
from functools import partial
from pathlib import Path
from typing import Any

import click
from kedro_datasets.json import JSONDataset
from rich.console import Console
from rich.filesize import decimal

from rlhf_pipeline.commands.artifacts import Ledger, datasets_of
from rlhf_pipeline.commands.command import Command, plain_table
from rlhf_pipeline.datasets.artifact import PageDataset
from rlhf_pipeline.errors import ArtifactError, as_typed, without_secrets
from rlhf_pipeline.pipelines.table import stage_specs
from rlhf_pipeline.runtime.job import DRY_RUNS, JUDGE_REPLIES
from rlhf_pipeline.runtime.manifest import Manifest, content_digest
from rlhf_pipeline.stages.cache.cleaning import remove, survey
from rlhf_pipeline.stages.cache.workspace import DAMAGED, downloads
from rlhf_pipeline.tracking.registration import read_registration
from rlhf_pipeline.tracking.registry import registered_sources
from rlhf_pipeline.tracking.store import tracking_uri


@click.command(cls=Command)
@click.option("--yes", is_flag=True, help="Remove the files instead of listing them.")
@click.option(
    "--unfinished",
    is_flag=True,
    help="Include unfinished stages, which could still resume, and replies of chat models.",
)
@click.option(
    "--versions",
    is_flag=True,
    help="Include published versions that are neither the newest nor registered.",
)
def clean(ledger: Ledger, console: Console, yes: bool, unfinished: bool, versions: bool) -> None:
    """List or remove the files that no published version needs.

    These are work directories, downloads, and the remains of interrupted publications.
    """
    workspace, datasets = ledger.workspace, ledger.datasets.values()
    root, show = workspace.parent, partial(console.print, highlight=False, soft_wrap=True)
    published = [path for dataset in datasets for path in dataset.versions(strict=True)]
    local = [dataset for dataset in datasets if dataset.store is None]
    older = [path for dataset in local for path in dataset.versions()[:-1]]
    unwanted = {
        path: "left by an interrupted publication"
        for dataset in datasets
        for path in dataset.abandoned()
    }
    unwanted |= dict.fromkeys(downloads(workspace), "a download, which is repeated when needed")
    unwanted |= dict.fromkeys(workspace.glob(f"*/*/*{DAMAGED}*"), "damaged, set aside")
    if (tried := workspace / DRY_RUNS).is_dir():
        unwanted[tried] = "memory of checks, which are repeated when needed"
    replies, kept_replies = workspace / JUDGE_REPLIES, {}
    if replies.is_dir():
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(replies.stat().st_mtime))
        why = f"replies of chat models, last used {used}"
        if unfinished:
            unwanted[replies] = f"{why}; asked for again when needed"
        else:
            kept_replies = {replies: f"{why}; --unfinished removes them"}
    if versions:
        for fault in filter(None, (dataset.clock_fault() for dataset in datasets)):
            raise ArtifactError(fault)
        show(f"registry: {without_secrets(tracking_uri(ledger.project))}")
        older = _not_registered(older, ledger)
        unwanted |= dict.fromkeys(older, "an older version, not registered")
        pages = [
            page for page in datasets_of(PageDataset, ledger.catalog).values() if page.store is None
        ]
        unwanted |= {
            page.parent: "an older page" for each in pages for page in each.versions()[:-1]
        }
        published = [path for path in published if path not in older]
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
    if older and not versions:
        show(f"{len(older)} versions are older; --versions removes those that are not registered.")


def _not_registered(older: list[Path], ledger: Ledger) -> list[Path]:
    """The versions that neither the registry nor a registration published here names."""
    named: dict[Path, Any] = {}
    for dataset in datasets_of(JSONDataset, ledger.catalog).values():
        if (file := Path(str(dataset._filepath))).stem.endswith("registration"):
            named |= {path: read_registration(path) for path in file.glob(f"*/{file.name}")}
    registered = registered_sources(ledger.project)
    models = {model for model, _ in registered}
    for path, each in named.items():
        if each["model"] not in models:
            uri = tracking_uri(ledger.project)
            raise ArtifactError(
                f"--versions: found no {each['model']} in the registry at {uri}, "
                "expected this registered model. Fix: set MLFLOW_TRACKING_URI as for the runs; if "
                f"the model was deleted on purpose, remove {path.parent}"
            )
    contents = named.values()
    digests = {digest for each in contents for digest in each.get("digests", {}).values()}
    # Registrations of earlier versions have no digests: all models of their stages are kept.
    stages = {stage for each in contents if "digests" not in each for stage in each["versions"]}
    folders = {Path(source).resolve() for _, source in registered}
    return [
        path
        for path in older
        if path.resolve() not in folders
        and content_digest(path) not in digests
        and Manifest.read(path).stage not in stages
    ]


def _name(path: Path, root: Path) -> str:
    return str(path.relative_to(root) if path.is_relative_to(root) else path)
