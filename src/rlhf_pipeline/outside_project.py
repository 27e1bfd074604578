"""What `kedro run` and `kedro rlhf` say outside of a project; a hook of Kedro's command line."""

import shlex
from pathlib import Path

from kedro.framework.cli.hooks import cli_hook_impl


@cli_hook_impl(tryfirst=True)
def before_command_run(project_metadata: object, command_args: list[str]) -> None:
    """End a command that needs a project if there is none here or above."""
    if project_metadata is None and command_args[:1] in (["run"], ["rlhf"]):
        command = shlex.join(command_args)
        raise SystemExit(
            f"kedro {command}: found no project in {Path.cwd()} or above it, expected one. Fix: "
            f"change to the folder of your project, or write `rlhf-pipeline {command}`, which "
            "works in any folder: it keeps its results there, and has a configuration"
        )
