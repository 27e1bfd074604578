"""Commands of the project: `kedro run` with readable errors, and `kedro rlhf ...`.

Each command imports what it needs when it is called: every `kedro` command loads this module.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from kedro.framework.cli.project import run as kedro_run
from kedro.framework.cli.utils import _split_params
from kedro.framework.startup import ProjectMetadata
from kedro.io import CatalogProtocol

_ENV = click.option("--env", "-e", help="Environment in conf/, as for `kedro run`.")
_PARAMS = click.option(
    "--params", default="", callback=_split_params, help="Parameters, as for `kedro run`."
)


class Command(click.Command):
    """A command whose errors are one message each; `--traceback` shows the stack as well."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(["--traceback"], is_flag=True, help="Show the stack of an error.")
        )

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        from rlhf_pipeline.explain import explained_errors

        with explained_errors(show_traceback=ctx.params.pop("traceback")):
            return super().invoke(ctx)


@click.group(name="rlhf-pipeline")
def cli() -> None:
    """Commands of this project."""


@cli.command(cls=Command, params=list(kedro_run.params), help=kedro_run.help)
def run(pipeline: str | None, pipelines: list[str], **options: Any) -> Any:
    """Call Kedro's own `run` after a check of the names in its options."""
    from rlhf_pipeline.commands.names import check_names

    if pipeline and pipelines:
        raise click.UsageError("use either --pipeline or --pipelines")
    names = [pipeline] if pipeline else list(pipelines)  # --pipeline is deprecated in Kedro
    check_names(names, options)
    return kedro_run.callback(pipeline=None, pipelines=names, **options)


@cli.group()
def rlhf() -> None:
    """Show results, and clean up what no result needs."""


@rlhf.command(cls=Command)
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

    from rlhf_pipeline.commands.names import check_names
    from rlhf_pipeline.commands.status import show
    from rlhf_pipeline.commands.status import status as plan

    check_names([pipeline], {})
    with _catalog(metadata, env, params) as catalog:
        # A pipe has no width: one line for each stage.
        console = Console(width=None if sys.stdout.isatty() else 500)
        show(plan(pipelines[pipeline], catalog), console)


@rlhf.command(cls=Command)
@click.option("--yes", is_flag=True, help="Remove; without it the command only lists.")
@click.option(
    "--unfinished", is_flag=True, help="Also unfinished stages that could resume from a checkpoint."
)
@click.option(
    "--versions",
    is_flag=True,
    help="Also published versions, except the newest of each data set and registered ones.",
)
@_ENV
@_PARAMS
@click.pass_obj
def clean(
    metadata: ProjectMetadata, env: str | None, params: dict[str, Any], **options: bool
) -> None:
    """Remove work directories that no published version needs, and interrupted publications."""
    from rich.console import Console

    from rlhf_pipeline.commands.clean import clean as clean_up

    with _catalog(metadata, env, params) as catalog:
        clean_up(catalog, Console(), Path(metadata.project_path), **options)


@rlhf.command(cls=Command)
@click.argument("policy", default="champion")
@_ENV
@_PARAMS
@click.pass_obj
def lineage(
    metadata: ProjectMetadata, policy: str, env: str | None, params: dict[str, Any]
) -> None:
    """Show what POLICY was made from, down to the data, and verify every byte.

    POLICY is a version or an alias of the registered model, or the folder of an artifact; the
    default is the champion.
    """
    from rich.console import Console

    from rlhf_pipeline.commands.lineage import lineage as walk

    with _catalog(metadata, env, params) as catalog:
        walk(policy, catalog, Console(), Path(metadata.project_path))


@rlhf.command(cls=Command)
@_ENV
@_PARAMS
@click.pass_obj
def runs(metadata: ProjectMetadata, env: str | None, params: dict[str, Any]) -> None:
    """List the published evaluations, newest last."""
    from rich.console import Console

    from rlhf_pipeline.commands.runs import runs as show

    with _catalog(metadata, env, params) as catalog:
        show(catalog, Console())


@rlhf.command(cls=Command)
@click.argument("policies", nargs=-1, required=True)
@_ENV
@_PARAMS
@click.pass_obj
def compare(
    metadata: ProjectMetadata, policies: tuple[str, ...], env: str | None, params: dict[str, Any]
) -> None:
    """Show what differs between POLICIES, and whether one is better than another.

    POLICIES are versions or aliases of the registered model, or folders of artifacts. The first
    ones are the baselines of those that follow.
    """
    from rich.console import Console

    from rlhf_pipeline.commands.compare import compare as show

    with _catalog(metadata, env, params) as catalog:
        show(policies, catalog, Console(), Path(metadata.project_path))


@rlhf.command(cls=Command)
@click.option("--port", default=5000, show_default=True, help="Port at 127.0.0.1.")
@click.pass_obj
def ui(metadata: ProjectMetadata, port: int) -> None:
    """Show runs, metrics and registered models in MLflow, on this machine alone."""
    from rich.console import Console

    from rlhf_pipeline.commands.ui import serve

    serve(metadata.project_path, port, Console())


@contextmanager
def _catalog(
    metadata: ProjectMetadata, env: str | None, params: dict[str, Any]
) -> Iterator[CatalogProtocol]:
    from kedro.framework.session import KedroSession

    with KedroSession.create(metadata.project_path, env=env, runtime_params=params) as session:
        yield session.load_context().catalog
