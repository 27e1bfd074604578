"""What a check finds, what it looks at, and how all checks run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.errors import PipelineError, without_secrets
from rlhf_pipeline.stages.launch.resources import node_layout, visible_gpus

State = Literal["ok", "warning", "failure"]

BUDGET_S = 30.0
"""Seconds until a program of a check counts as failed. The slowest imports torch, which takes some
seconds on a cold disk."""


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    check: str
    state: State
    found: str
    fix: str = ""
    """What to do; empty if the state is ok."""


@dataclass(frozen=True)
class Setup:
    """A configuration and the machine that is to run it."""

    root: Path
    """Folder of all results."""
    launch: LaunchConfig
    compiles: tuple[str, ...]
    """The parameters, with values, for which a machine with GPUs compiles code at first use."""
    precisions: Sequence[str] = ("fp32",)
    """The default precision, and those of the configuration."""

    @cached_property
    def gpus(self) -> int:
        """GPUs that training programs may use. Raises ConfigError if they cannot be counted."""
        return len(visible_gpus())

    @cached_property
    def ranks(self) -> int:
        """Training processes on this machine."""
        return node_layout(self.launch, self.gpus).ranks[0]


Check = Callable[[Setup], Finding]
"""A check. Its name is the first column; an error that it raises is a failure."""


def run_checks(checks: Sequence[Check], setup: Setup) -> list[Finding]:
    """The findings of all checks, in order. An error of one does not hide the others."""
    return [_run(check, setup) for check in checks]


def _run(check: Check, setup: Setup) -> Finding:
    title = check.__name__.replace("_", " ")
    try:
        return check(setup)
    except PipelineError as error:
        found, _, fix = error.message.partition(" Fix: ")
        return Finding(title, "failure", without_secrets(found), without_secrets(fix))
    except Exception as error:
        found = without_secrets(f"{type(error).__name__}: {error}".partition("\n")[0])
        return Finding(title, "failure", found, "repair what the message names")
