"""What a check finds, what it looks at, and how all checks run at once."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Thread
from typing import Literal

from rlhf_pipeline.config.base_model import BaseModelConfig
from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.errors import PipelineError, without_secrets
from rlhf_pipeline.stages.launch.layout import node_layout
from rlhf_pipeline.stages.launch.resources import visible_gpus
from rlhf_pipeline.storage.store import Store

State = Literal["ok", "warning", "failure"]

BUDGET_S = 60.0
"""Seconds until a check counts as failed. The slowest starts ranks on other machines: DeepSpeed's
launchers there import torch, which takes some seconds on a cold disk."""


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

    project: Path
    root: Path
    """Folder of all results."""
    launch: LaunchConfig
    base_model: BaseModelConfig
    split: SplitConfig
    evaluate: EvaluateConfig
    compiles: tuple[str, ...]
    """The parameters, with values, for which a machine with GPUs compiles code at first use."""
    precisions: Sequence[str] = ("fp32",)
    """The default precision, and those of the configuration."""
    store: Store | None = None
    """The store for stages and checkpoints."""

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


def run_checks(
    checks: Sequence[Check], setup: Setup, *, budget_s: float = BUDGET_S
) -> list[Finding]:
    """Run all checks at once; return their findings in order after at most `budget_s` seconds.

    A check that takes longer is a failure, and does not delay the end of the process.
    """
    waiting = [(_title(check), _start(check, setup)) for check in checks]
    wait([future for _, future in waiting], timeout=budget_s)
    return [_result(title, future, budget_s) for title, future in waiting]


def _start(check: Check, setup: Setup) -> Future[Finding]:
    future: Future[Finding] = Future()

    def work() -> None:
        try:
            future.set_result(check(setup))
        except Exception as error:  # a check must not hide the others
            future.set_exception(error)

    Thread(target=work, daemon=True).start()
    return future


def _result(title: str, future: Future[Finding], budget_s: float) -> Finding:
    if not future.done():
        fix = "look for a network or a disk that does not answer"
        return Finding(title, "failure", f"no answer within {budget_s:g} s", fix)
    try:
        return future.result()
    except PipelineError as error:
        found, _, fix = error.message.partition(" Fix: ")
        return Finding(title, "failure", without_secrets(found), without_secrets(fix))
    except Exception as error:
        found = without_secrets(f"{type(error).__name__}: {error}".partition("\n")[0])
        return Finding(title, "failure", found, "repair what the message names")


def _title(check: Check) -> str:
    return check.__name__.replace("_", " ")
