"""Commands of the project: `kedro run` with readable errors, and `kedro rlhf ...`.

The work of a command is the function of its name in `commands/`, imported when it is called: every
`kedro` command loads this module.
"""

import os
import sys
from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import yaml
from kedro.framework.cli.project import run as kedro_run
from kedro.framework.cli.utils import _split_params, validate_conf_source
from kedro.framework.project import LOGGING
from kedro.framework.startup import ProjectMetadata
from kedro.io import CatalogProtocol

_COUNT = click.IntRange(min=1)
_GGUF = click.Choice(("f32", "f16", "bf16", "q8_0"))
_PRECISION = click.Choice(["fp32", "bf16", "fp16"])


def console(width: int = 500) -> Any:
    """A console for the output. A pipe has no width of its own: its rows have up to `width`
    characters, so that none is cut."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else width, highlight=False)


def work(name: str) -> Callable[..., Any]:
    """The function that does the work of a command."""
    found: Callable[..., Any] = getattr(import_module(f"rlhf_pipeline.commands.{name}"), name)
    return found


class Command(click.Command):
    """A command whose errors are one message each; `--traceback` shows the stack as well."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(["--traceback"], is_flag=True, help="Show the stack of an error.")
        )

    def invoke(self, ctx: click.Context) -> Any:
        from rlhf_pipeline.explain import explained_errors

        with explained_errors(show_traceback=ctx.params.pop("traceback")):
            if isinstance(ctx.obj, ProjectMetadata):
                enter(Path(ctx.obj.project_path))
            return super().invoke(ctx)


def enter(project: Path) -> None:
    """Work in the folder of the project, to which paths in its configuration are relative."""
    if project == Path.cwd():
        return
    click.echo(f"in {project}, where relative paths start", err=True)
    os.chdir(project)
    logging_file = project / "conf" / "logging.yml"
    if logging_file.is_file() and "KEDRO_LOGGING_CONFIG" not in os.environ:
        LOGGING.configure(yaml.safe_load(logging_file.read_text(encoding="utf-8")))


_ENV = click.option("--env", "-e", help="Environment in conf/, as for `kedro run`.")
_CONF = click.option("--conf-source", callback=validate_conf_source, help="In place of conf/.")
_PARAMS = click.option("--params", default="", callback=_split_params, help="As for `kedro run`.")
_PIPELINE = click.option(
    "--pipeline", "-p", default="__default__", show_default="full", help="Registered pipeline."
)


def on_catalog(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `kedro run` that name a catalog, the catalog, the project."""

    @_ENV
    @_CONF
    @_PARAMS
    @click.pass_obj
    @wraps(function)
    def command(metadata: Any, env: Any, conf_source: Any, params: Any, **options: Any) -> None:
        from kedro.framework.session import KedroSession

        root = metadata.project_path
        with KedroSession.create(
            root, env=env, conf_source=conf_source, runtime_params=params
        ) as session:
            function(session.load_context().catalog, root, **options)

    return command


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
    """Show results, use them, and clean up what no result needs."""


@rlhf.command(cls=Command)
@_PIPELINE
@on_catalog
def status(catalog: CatalogProtocol, _: Path, pipeline: str) -> None:
    """Show what each stage would do (reuse its result, resume, or run), and why."""
    from kedro.framework.project import pipelines

    from rlhf_pipeline.commands.names import check_names
    from rlhf_pipeline.commands.status import show

    check_names([pipeline], {})
    show(work("status")(pipelines[pipeline], catalog), console())


@rlhf.command(cls=Command)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@on_catalog
def doctor(catalog: CatalogProtocol, project: Path, as_json: bool) -> None:
    """Check whether this machine can run the configuration; each finding comes with its fix.

    The exit code is 1 if a check fails, and 0 after warnings.
    """
    from rlhf_pipeline.commands.doctor import show

    findings = work("doctor")(catalog)
    show(findings, console(), as_json=as_json)
    if any(finding.state == "failure" for finding in findings):
        raise click.exceptions.Exit(1)


@rlhf.command(cls=Command)
@_ENV
@_CONF
@_PARAMS
@_PIPELINE
@click.option("--model", metavar="NAME", help="A published model, such as opt-1.3b.")
@click.option("--gpu", metavar="NAME", help="In place of the GPUs at hand: a100-80, or GiB.")
@click.option("--gpus", metavar="8x80", help="GPUs x GiB, or nodes x GPUs x GiB (2x8x80).")
@click.option("--check", is_flag=True, help="Check jobs and DeepSpeed settings instead.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.pass_obj
def plan(metadata: ProjectMetadata, check: bool, **options: Any) -> None:
    """Show memory, steps and disk of each stage before anything is loaded, and whether it fits."""
    if check:
        options.pop("as_json")
    work("check" if check else "plan")(metadata.project_path, console(width=100), **options)


@rlhf.command(cls=Command)
@click.option("--yes", is_flag=True, help="Remove; without it the command only lists.")
@click.option("--unfinished", is_flag=True, help="Also remove unfinished stages that could resume.")
@click.option(
    "--versions", is_flag=True, help="Also remove versions that are neither newest nor registered."
)
@on_catalog
def clean(catalog: CatalogProtocol, project: Path, **options: bool) -> None:
    """Remove work directories that no published version needs, and interrupted publications."""
    work("clean")(catalog, console(), project, **options)


@rlhf.command(cls=Command)
@click.argument("policy", default="champion")
@on_catalog
def lineage(catalog: CatalogProtocol, project: Path, policy: str) -> None:
    """Show what POLICY was made from, down to the data, and verify every byte.

    POLICY is a version or an alias of the registered model, or the folder of an artifact; the
    default is the champion.
    """
    work("lineage")(policy, catalog, console(), project)


@rlhf.command(cls=Command)
@on_catalog
def runs(catalog: CatalogProtocol, _: Path) -> None:
    """List the published evaluations, newest last."""
    work("runs")(catalog, console())


@rlhf.command(cls=Command)
@click.argument("policies", nargs=-1, required=True)
@click.option("--page", type=click.Path(dir_okay=False, path_type=Path), help="Write a page, too.")
@click.option("--overwrite", is_flag=True, help="Replace an earlier page.")
@on_catalog
def compare(catalog: CatalogProtocol, project: Path, policies: Any, **options: Any) -> None:
    """Show what differs between POLICIES, and whether one is better than another.

    POLICIES are versions or aliases of the registered model, or folders of artifacts. The first
    ones are the baselines of those that follow.
    """
    work("compare")(policies, catalog, console(), project, **options)


@rlhf.command(cls=Command)
@click.argument("evaluation", required=False)
@click.option("--open/--no-open", "show", default=True, help="Open the page in a browser.")
@on_catalog
def report(catalog: CatalogProtocol, project: Path, evaluation: str | None, show: bool) -> None:
    """Show the page of EVALUATION: verdict, results, curves, answers.

    EVALUATION is a version of `kedro rlhf runs`, a folder, or a policy as for `kedro rlhf compare`;
    the default is the newest one.
    """
    work("report")(evaluation, catalog, console(), project, show=show)


@rlhf.command(cls=Command)
@click.argument("evaluation", required=False)
@click.option("--pairs", help="File with columns prompt, first, second, instead of EVALUATION.")
@click.option("--output", help="File of the votes.  [default: 01_raw/votes.jsonl of the data]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of this machine.")
@click.option("--port", default=8700, show_default=True, help="Port there; 0: a free one.")
@on_catalog
def label(catalog: CatalogProtocol, project: Path, **given: Any) -> None:
    """Let people compare answers on a page; their votes are data for `split`.

    EVALUATION is a version of an evaluation, its folder, or a policy as for `kedro rlhf compare`.
    """
    if (given["evaluation"] is None) == (given["pairs"] is None):
        raise click.UsageError("use either EVALUATION or --pairs")
    work("label")(catalog, project, **given)


@rlhf.command(cls=Command)
@click.option("--port", default=5000, show_default=True, help="Port at 127.0.0.1.")
@click.pass_obj
def ui(metadata: ProjectMetadata, port: int) -> None:
    """Show runs, metrics and registered models in MLflow, on this machine alone."""
    from rlhf_pipeline.commands.ui import serve

    serve(metadata.project_path, port, console())


@rlhf.command(cls=Command)
@click.argument("names", nargs=-1, required=True, metavar="[POLICY] DESTINATION")
@click.option("--dtype", "precision", type=_PRECISION, help="By default as they were saved.")
@click.option("--max-shard-size", default="5GB", show_default=True, help="Of a file of weights.")
@click.option("--adapter", "base", metavar="BASE", help="The LoRA adapter alone, for this model.")
@click.option("--gguf", type=_GGUF, help="Also a file for llama.cpp; needs its converter.")
@click.option("--license", "license_name", default="unknown", help="Yours, for the model card.")
@click.option("--overwrite", is_flag=True, help="Replace an earlier export.")
@on_catalog
def export(catalog: CatalogProtocol, project: Path, names: tuple[str, ...], **options: Any) -> None:
    """Write POLICY with a model card to DESTINATION, for transformers alone.

    DESTINATION is a folder or any fsspec URL (s3://...). The last file, SHA256SUMS, has the digest
    of every other file.
    """
    if len(names) > 2:
        raise click.UsageError(f"found {len(names)} names, expected [POLICY] DESTINATION")
    policy, destination = ("champion", *names)[-2:]
    work("export")(policy, destination, catalog, console(), project, **options)


@rlhf.command(cls=Command)
@click.argument("policy", default="champion")
@click.option("--port", default=8000, show_default=True)
@click.option("--host", default="127.0.0.1", show_default=True, help="0.0.0.0 is every network.")
@click.option("--batch-size", default=32, show_default=True, type=_COUNT, help="At a time.")
@click.option("--max-tokens", default=1024, show_default=True, type=_COUNT, help="Of an answer.")
@on_catalog
def serve(catalog: CatalogProtocol, project: Path, policy: str, **options: Any) -> None:
    """Serve POLICY to OpenAI's clients until Ctrl-C, on this machine alone."""
    from rlhf_pipeline.commands.artifacts import policy_of

    work("serve")(policy_of(policy, catalog, project), policy, **options)


@rlhf.command(cls=Command)
@click.argument("policy", default="champion")
@click.option("--compare", metavar="POLICY", help="A second policy, for every question.")
@click.option("--max-tokens", default=512, show_default=True, type=_COUNT, help="Of an answer.")
@click.option("--temperature", default=1.0, show_default=True, type=click.FloatRange(0, 2))
@click.option("--seed", type=int, help="Repeats an answer.")
@on_catalog
def chat(
    catalog: CatalogProtocol, project: Path, policy: str, compare: str | None, **settings: Any
) -> None:
    """Talk to POLICY in the terminal."""
    from rlhf_pipeline.commands.artifacts import policy_of

    find = partial(policy_of, catalog=catalog, project=project)
    work("chat")([policy, *([compare] if compare else [])], find, console(), **settings)


@rlhf.command(cls=Command)
@click.argument("model", required=False)
@click.option("--gpus", help="GPUs x GiB of each, such as 1x24, or nodes x GPUs x GiB: 2x8x80.")
@click.option(
    "--method", type=click.Choice(["full", "lora", "qlora"]), default="full", show_default=True
)
@click.option("--output", type=click.Path(path_type=Path), help="In place of conf/<preset>.")
@click.option("--overwrite", is_flag=True, help="Replace an environment.")
@click.option("--list", "listing", is_flag=True, help="Show what fits where; write nothing.")
@click.option("--common", is_flag=True, help="Write the presets that this repository has in conf/.")
@click.pass_obj
def preset(
    metadata: ProjectMetadata, model: Any, gpus: Any, method: Any, common: bool, **options: Any
) -> None:
    """Write an environment for MODEL, such as opt-1.3b, on the GPUs of --gpus.

    Its hyper-parameters are published ones, and its memory settings the cheapest that fit.
    """
    from rlhf_pipeline.commands.preset import show_table, write
    from rlhf_pipeline.presets.preset import COMMON

    if options.pop("listing"):
        show_table(console(), model)
        return
    if not common and (model is None or gpus is None):
        raise click.UsageError("use MODEL and --gpus, or --list")
    project = Path(metadata.project_path)
    chosen: Any = COMMON if common else ((model, gpus, method),)
    for name, size, way in chosen:
        write(name, size, way, project, console(), **options)
