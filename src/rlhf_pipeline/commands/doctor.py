"""`kedro rlhf doctor`: can this machine run the configuration?"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import click
from kedro.io import CatalogProtocol
from rich.console import Console
from rich.markup import escape

from rlhf_pipeline.commands.command import Command, json_option, plain_table
from rlhf_pipeline.commands.machine_checks import CHECKS, Check, Setup, Unfit
from rlhf_pipeline.config.block import leaves
from rlhf_pipeline.errors import PipelineError, without_secrets
from rlhf_pipeline.pipelines.table import parameter_blocks
from rlhf_pipeline.runtime.job import as_json as plain_values

STYLES = {"ok": "green", "warning": "yellow", "failure": "bold red"}


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    check: str
    state: Literal["ok", "warning", "failure"]
    found: str
    fix: str = ""
    """What to do; empty if the state is ok."""


@click.command(cls=Command)
@json_option
def doctor(catalog: CatalogProtocol, console: Console, as_json: bool) -> None:
    """Check whether this machine can run the configuration; each finding comes with its fix.

    The exit code is 1 if a check fails, and 0 after warnings.
    """
    setup = setup_of(catalog)
    findings = [examine(name, check, setup) for name, check in CHECKS.items()]
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        table = plain_table("check", "state")
        table.add_column("found", overflow="fold")
        for finding in findings:
            fix = f"\nFix: {finding.fix}" if finding.fix else ""
            state = f"[{STYLES[finding.state]}]{finding.state}"
            table.add_row(f"[bold]{finding.check}", state, escape(finding.found + fix))
        console.print(table)
    if any(finding.state == "failure" for finding in findings):
        raise click.exceptions.Exit(1)


def setup_of(catalog: CatalogProtocol) -> Setup:
    """What the checks look at, from the parameters of a run."""
    blocks = {name: catalog.load(f"params:{name}") for name in parameter_blocks()}
    values = dict(leaves(plain_values(blocks)))
    compiled = (("offload_optimizer", True), ("generator", "vllm"))
    return Setup(
        root=Path(catalog.load("workspace")).absolute().parent,
        launch=blocks["launch"],
        compiles=tuple(
            f"{name} ({json.dumps(value)})"
            for name, value in values.items()
            if (name.rpartition(".")[2], value) in compiled
        ),
        precisions=sorted(
            {v for name, v in values.items() if name.endswith(".precision")} - {None}
        ),
    )


def examine(name: str, check: Check, setup: Setup) -> Finding:
    """What a check finds. An error of one check does not hide the findings of the others."""
    try:
        return Finding(name, "ok", check(setup))
    except Unfit as unfit:
        return Finding(name, "warning" if unfit.is_warning else "failure", unfit.found, unfit.fix)
    except PipelineError as error:
        found, _, fix = error.message.partition(" Fix: ")
    except Exception as error:
        found = f"{type(error).__name__}: {error}".partition("\n")[0]
        fix = "repair what the message names"
    return Finding(name, "failure", without_secrets(found), without_secrets(fix))
