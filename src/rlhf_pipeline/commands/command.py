"""What all commands share: readable errors, the configuration that they read, and their output."""

import inspect
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import yaml
from kedro.framework.cli.utils import _split_params, validate_conf_source
from kedro.framework.project import LOGGING, pipelines
from kedro.framework.startup import ProjectMetadata
from kedro.pipeline import Pipeline

from rlhf_pipeline.config.block import leaves
from rlhf_pipeline.errors import ConfigError, suggestion

if TYPE_CHECKING:
    from kedro.framework.session import KedroSession
    from rich.console import Console
    from rich.table import Table

    from rlhf_pipeline.kedro_run.artifacts import Ledger

CONFIGURATION: tuple[click.Parameter, ...] = (
    click.Option(["--env", "-e"], help="Kedro configuration environment, a folder of conf/."),
    click.Option(
        ["--conf-source"],
        callback=validate_conf_source,
        help="Path of the folder of configuration to read instead of conf/.",
    ),
    click.Option(
        ["--params"],
        default="",
        callback=_split_params,
        help="Parameters to change, separated by commas. Example: seed=5,ppo.steps=100",
    ),
)
"""The options of `kedro run` that choose a configuration."""
pipeline_option = click.option(
    "--pipeline",
    "-p",
    default="__default__",
    help="Name of the registered pipeline.  [default: full]",
)
gpus_option = click.option(
    "--gpus",
    metavar="8x80",
    help="Hardware: GPUs x GiB each (8x80), or nodes x GPUs x GiB (2x8x80).",
)

ENV = "rlhf_pipeline.env"
"""Where a command finds the environment of its catalog in the `meta` of its context."""


class Command(click.Command):
    """A command whose errors are one message each; `--traceback` shows the stack as well.

    Its function also gets those of `catalog`, `ledger` (of all artifacts), `project` (a folder) and
    `console` that it names. A command that names the catalog or the ledger has the options of
    `kedro run` that choose one, and `configuration` is what they say, for further sessions. The
    name in an option `--pipeline` is checked.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        function: Any = self.callback
        self._named = {*inspect.signature(function).parameters}
        self._reads = bool(self._named & {"catalog", "ledger"})
        self.params += CONFIGURATION if self._reads else ()
        self.params.append(
            click.Option(["--traceback"], is_flag=True, help="Show the stack of an error.")
        )

    def invoke(self, ctx: click.Context) -> Any:
        from rlhf_pipeline.kedro_run.explain import explained_errors

        show_traceback = ctx.params.pop("traceback")
        with explained_errors(show_traceback=show_traceback), ExitStack() as sessions:
            given: dict[str, Any] = {}
            if isinstance(ctx.obj, ProjectMetadata):
                given["project"] = Path(ctx.obj.project_path)
                enter(given["project"])
            if "console" in self._named:
                given["console"] = console()
            if pipeline := ctx.params.get("pipeline"):
                check_names([pipeline], {})
            if self._reads:
                from kedro.framework.session import KedroSession

                from rlhf_pipeline.kedro_run.artifacts import Ledger

                env, source, params = (ctx.params.pop(str(each.name)) for each in CONFIGURATION)
                ctx.meta[ENV] = env
                given["configuration"] = {
                    "env": env,
                    "conf_source": source,
                    "runtime_params": params,
                }
                session = KedroSession.create(given["project"], **given["configuration"])
                given["catalog"] = sessions.enter_context(session).load_context().catalog
                given["ledger"] = Ledger(given["catalog"], given["project"])
            ctx.params |= {name: given[name] for name in self._named & given.keys()}
            return super().invoke(ctx)


@contextmanager
def opened(
    project: Path, configuration: Mapping[str, Any], params: Mapping[str, Any]
) -> Iterator[tuple["KedroSession", "Ledger"]]:
    """A session of a command's configuration with further parameters, and its ledger."""
    from kedro.framework.session import KedroSession
    from omegaconf import OmegaConf

    from rlhf_pipeline.kedro_run.artifacts import Ledger

    changes = OmegaConf.create()
    for name, value in [*leaves(configuration["runtime_params"]), *leaves(params)]:
        OmegaConf.update(changes, name, value)
    options = {**configuration, "runtime_params": OmegaConf.to_container(changes)}
    with KedroSession.create(project, **options) as session:
        yield session, Ledger(session.load_context().catalog, project)


def enter(project: Path) -> None:
    """Work in the folder of the project, to which paths in its configuration are relative."""
    if project == Path.cwd():
        return
    click.echo(f"in {project}, where relative paths start", err=True)
    os.chdir(project)
    logging_file = project / "conf" / "logging.yml"
    if logging_file.is_file() and "KEDRO_LOGGING_CONFIG" not in os.environ:
        LOGGING.configure(yaml.safe_load(logging_file.read_text(encoding="utf-8")))


def console(width: int = 500) -> "Console":
    """A console for the output.

    A pipe has no width of its own: its rows have up to `width` characters, so that none is cut.
    """
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else width, highlight=False)


def plain_table(
    *columns: str, numbers: Iterable[str] = (), gap: int = 2, **options: Any
) -> "Table":
    """An empty table without lines, whose cells stay on one line; `numbers` are on the right."""
    from rich.table import Table

    table = Table(box=None, padding=(0, gap, 0, 0), header_style="dim", **options)
    for name in columns:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def show_link(console: "Console", name: str, address: str) -> None:
    """Print an address that a terminal can open."""
    text = f"{name}: [link={address}]{address}[/link]"
    console.print(text, highlight=False, soft_wrap=True)


OPTIONS = {
    "--from-nodes": ("from_nodes", "nodes"),
    "--to-nodes": ("to_nodes", "nodes"),
    "--nodes": ("node_names", "nodes"),
    "--from-inputs": ("from_inputs", "data sets"),
    "--to-outputs": ("to_outputs", "data sets"),
    "--load-versions": ("load_versions", "data sets"),
}
"""Options of `kedro run` that name something: the parameter of Kedro's function, and what."""


def check_names(chosen: Sequence[str], options: Mapping[str, Any]) -> None:
    """Check the chosen pipelines, and the nodes and data sets in the options of `kedro run`.

    Raises ConfigError with one line for each unknown name.
    """
    known = [name for name in pipelines if name != "__default__"]
    named = [name for name in chosen if name != "__default__"]
    faults = list(_unknown("--pipeline", named, known, "pipelines"))
    if not faults:
        pipeline = sum((pipelines[name] for name in chosen or ["__default__"]), Pipeline([]))
        parameters = ("parameters", "params")  # `parameters` and `params:NAME`
        names = {
            "nodes": [node.name for node in pipeline.nodes],
            "data sets": sorted(
                name for name in pipeline.datasets() if name.partition(":")[0] not in parameters
            ),
        }
        for option, (key, kind) in OPTIONS.items():
            faults += _unknown(option, options.get(key) or (), names[kind], kind)
    if faults:
        raise ConfigError("\n".join(faults))


def _unknown(option: str, names: Iterable[str], known: Collection[str], kind: str) -> Iterator[str]:
    for name in names:
        if name not in known:
            listed = ", ".join(known)
            yield f"{option}: found {name!r}{suggestion(name, known)}; the {kind} are {listed}"
