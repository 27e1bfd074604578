"""Commands of the project: `kedro run` with readable errors, and `kedro rlhf ...`.

Every `kedro` command loads this module. A command of `kedro rlhf` is the function of its name in a
module of `commands/`, which is imported when the command is called.
"""

import tomllib
from pathlib import Path
from typing import Any

import click
from kedro.framework.cli.project import run as kedro_run
from kedro.framework.cli.utils import LazyGroup

from rlhf_pipeline.commands.command import CONFIGURATION, Command, check_names
from rlhf_pipeline.config.doors import Door

COMMANDS: dict[str, list[str]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
"""The module of each command, and its line in the list of commands."""
COMMAND = Door("command", {n: f"rlhf_pipeline.commands.{m}:{n}" for n, (m, _) in COMMANDS.items()})


class CommandGroup(LazyGroup):
    """A group that lists its commands without their imports."""

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            lines = {name: f"See {place}." for name, place in COMMAND.names().items()}
            lines |= {name: summary for name, (_, summary) in COMMANDS.items()}
            formatter.write_dl(sorted(lines.items()))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A command of ours, without a look at installed packages, or one of theirs."""
        if cmd_name not in self.lazy_subcommands and cmd_name in (found := COMMAND.names()):
            self.lazy_subcommands[cmd_name] = found[cmd_name].replace(":", ".")
        return super().get_command(ctx, cmd_name)


@click.group(name="rlhf-pipeline")
def cli() -> None:
    """Commands of this project."""


# Kedro's help of --params still allows a colon, which Kedro refuses.
PARAMS = [*(option for option in kedro_run.params if option.name != "params"), CONFIGURATION[-1]]


@cli.command(cls=Command, params=PARAMS, help=kedro_run.help)
def run(pipeline: str | None, pipelines: list[str], **options: Any) -> Any:
    """Call Kedro's own `run` after a check of the names in its options."""
    if pipeline and pipelines:
        raise click.UsageError("use either --pipeline or --pipelines")
    names = [pipeline] if pipeline else list(pipelines)  # --pipeline is deprecated in Kedro
    check_names(names, options)
    return kedro_run.callback(pipeline=None, pipelines=names, **options)


@cli.group(
    cls=CommandGroup,
    lazy_subcommands={n: place.replace(":", ".") for n, place in COMMAND.builtin.items()},
)
def rlhf() -> None:
    """Commands for planning runs, and for showing and using their results."""
