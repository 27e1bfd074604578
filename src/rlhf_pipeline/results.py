"""Printing of the results of a run."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from rlhf_pipeline.data.split_report import print_summary
from rlhf_pipeline.evaluation.report import print_table
from rlhf_pipeline.stage_registry import policy_stages
from rlhf_pipeline.stages.events import StageListener, StageRun, Status


class SplitSummary(StageListener):
    """Prints the report of a split when it finishes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def stage_ended(self, run: StageRun, status: Status, metrics: dict[str, float]) -> None:
        """Print the report's table."""
        if run.stage == "split" and status == "FINISHED" and not run.cached:
            report = json.loads((run.export / "report.json").read_text(encoding="utf-8"))
            print_summary(report, self._console)


def print_results(results: dict[str, Any], console: Console) -> None:
    """Print the comparison, the paths of all artifacts, and the registered versions.

    `results` maps names of data sets to the path of an artifact, or to the registration.
    """
    show = partial(console.print, highlight=False, soft_wrap=True)
    for name, result in results.items():
        if name.endswith("evaluation"):
            evaluation = json.loads((result / "evaluation.json").read_text())
            policy = policy_stages()[evaluation["candidate"]].SPEC
            print_table(evaluation, policy.caveats, console)
    show("")
    for name, result in results.items():
        if isinstance(result, Path):
            show(f"{name:>15}  {result}")
    for name, result in results.items():
        if name.endswith("registration"):
            show("\n".join(_registration(result)))


def _registration(registration: dict[str, Any]) -> list[str]:
    """The aliases of the model, the reasons against a promotion, and the page of the comparison."""
    aliases = ", ".join(
        f"{alias} = version {version}" for alias, version in sorted(registration["aliases"].items())
    )
    refusals = [f"{'':>15}  not promoted: {reason}" for reason in registration["refusals"]]
    compare = f"http://127.0.0.1:5000{registration['compare']}"
    return [
        f"{registration['model']:>15}  {aliases}",
        *refusals,
        f"{'compare':>15}  make ui, then {compare}",
    ]
