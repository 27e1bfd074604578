"""Commands of the project: `kedro rlhf ...`.

Each command imports what it needs when it is called: every `kedro` command loads this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from kedro.framework.cli.project import run  # noqa: F401 - for Kedro
from kedro.framework.cli.utils import _split_params
from kedro.framework.startup import ProjectMetadata
from kedro.io import CatalogProtocol

_ENV = click.option("--env", "-e", help="Environment in conf/, as for `kedro run`.")
_PARAMS = click.option(
    "--params", default="", callback=_split_params, help="Parameters, as for `kedro run`."
)


@click.group(name="rlhf-pipeline")
def cli() -> None:
    """Commands of this project."""


@cli.group()
def rlhf() -> None:
    """Show and clean up the results of the stages."""


@rlhf.command()
@click.option(
    "--pipeline", "-p", default="__default__", show_default="full", help="Registered pipeline."
)
@_ENV
@_PARAMS
@click.pass_obj
def status(
    metadata: ProjectMetadata, pipeline: str, env: str | None, params: dict[str, Any]
) -> None:
    """Show what each stage would do (reuse its result, resume, or run), and why."""
    from kedro.framework.project import pipelines
    from rich.console import Console

    from rlhf_pipeline.commands.status import show
    from rlhf_pipeline.commands.status import status as plan

    if pipeline not in pipelines:
        raise click.BadParameter(
            f"no pipeline {pipeline!r}; the pipelines are {', '.join(pipelines)}",
            param_hint="--pipeline",
        )
    with _catalog(metadata, env, params) as catalog:
        show(plan(pipelines[pipeline], catalog), Console())


@rlhf.command()
@click.option("--yes", is_flag=True, help="Remove; without it the command only lists.")
@click.option(
    "--unfinished",
    is_flag=True,
    help="Also unfinished stages that could resume from a checkpoint.",
)
@_ENV
@_PARAMS
@click.pass_obj
def clean(
    metadata: ProjectMetadata, yes: bool, unfinished: bool, env: str | None, params: dict[str, Any]
) -> None:
    """Remove work directories that no published version needs, and interrupted publications."""
    from rich.console import Console

    from rlhf_pipeline.commands.clean import clean as clean_up

    with _catalog(metadata, env, params) as catalog:
        clean_up(catalog, Console(), yes=yes, unfinished=unfinished)


@contextmanager
def _catalog(
    metadata: ProjectMetadata, env: str | None, params: dict[str, Any]
) -> Iterator[CatalogProtocol]:
    from kedro.framework.session import KedroSession

    with KedroSession.create(metadata.project_path, env=env, runtime_params=params) as session:
        yield session.load_context().catalog
