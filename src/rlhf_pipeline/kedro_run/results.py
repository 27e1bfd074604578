"""The results of a run that it prints at its end."""

import json
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from rlhf_pipeline.config.evaluate import CHAMPION
from rlhf_pipeline.config.stages import unused_rows
from rlhf_pipeline.data.split_report import print_summary as print_split
from rlhf_pipeline.errors import as_typed, short_path
from rlhf_pipeline.pipelines.table import kinds_of_results
from rlhf_pipeline.stages.job import StageListener, StageRun, Status
from rlhf_pipeline.verdict.answers import judge_title
from rlhf_pipeline.verdict.comparison import BASE_MODEL, read_evaluation
from rlhf_pipeline.verdict.gate import outcome
from rlhf_pipeline.verdict.words import hardly_learned, print_summary


class StageSummary(StageListener):
    """Prints what a user should know about a finished stage."""

    def __init__(self, console: Console, nodes: Collection[str], blocks: Mapping[str, Any]) -> None:
        self._console = console
        self._nodes, self._blocks = nodes, blocks

    def stage_ended(self, run: StageRun, status: Status, metrics: dict[str, float]) -> None:
        """Print the table of a new split's report, and what the run leaves of it; say if the base
        model has no chat template, or tokens without an embedding."""
        show = partial(self._console.print, highlight=False, soft_wrap=True)
        if run.stage == "split" and status == "FINISHED":
            report = json.loads((run.export / "report.json").read_text(encoding="utf-8"))
            if not run.cached:
                print_split(report, self._console)
            if text := unused_rows(report, self._nodes, self._blocks):
                show(escape(text))
        if metrics.get("base_model/has_chat_template") == 0:
            show("base_model: found no chat template; turns are written as Human: and Assistant:")
        if shown := hardly_learned(metrics):
            show(escape(f"{run.stage}: it hardly learned: {shown}"))
        if added := metrics.get("base_model/new_tokens"):
            text = f"found {added:g} added tokens without an embedding; theirs are untrained"
            show(f"base_model: {text}")


def print_results(results: dict[str, Any], console: Console, env: str | None = None) -> None:
    """Print the verdict, the page or else the artifacts, and the registered versions.

    `results` maps names of data sets to the path of an artifact or a page, or to the registration;
    `env` is the environment of the run.
    """
    show = partial(console.print, highlight=False, soft_wrap=True)
    show("")
    shown = {name: path for name, path in results.items() if isinstance(path, Path)}
    kinds = kinds_of_results()
    compared = {name: path for name, path in shown.items() if kinds.get(name) == "evaluation"}
    if compared:
        shown = {}
    for name, path in compared.items():
        evaluation = read_evaluation(path)
        candidate = evaluation["candidate"]
        print_summary(evaluation, console)
        show("")
        page = results.get(f"{name}_page")
        shown |= {"page": page} if page else {"evaluation": path}
        if f"{candidate}_model" in results:
            shown["model"] = results[f"{candidate}_model"]
    for name, path in shown.items():
        show(f"{name:>12}  [link={path.as_uri()}]{escape(short_path(path))}[/link]")
    for name, result in results.items():
        if kinds.get(name) == "registration":
            show("\n".join(_registration(result, env)))


def _registration(registration: dict[str, Any], env: str | None) -> list[str]:
    """The aliases of the model, the verdict of the gate, and how to compare the policies."""
    aliases = ", ".join(
        f"{alias} = version {version}"
        + " (not trained here)" * (version == registration["versions"].get(BASE_MODEL))
        for alias, version in sorted(registration["aliases"].items())
    )
    verdict = registration["verdict"]
    conditions, refusals = len(verdict["checks"]), verdict["refusals"]
    held = f"{conditions - len(refusals)} of {conditions} conditions hold"
    found = outcome(registration["promoted"], verdict)
    judge = judge_title(verdict["judge"])
    has_rival = not registration["promoted"] and CHAMPION in registration["aliases"]
    rivals = f"sft-baseline {CHAMPION}" if has_rival else "sft-baseline"
    option = "" if env is None else f" --env={env}"
    attempt = f"attempt {verdict['tries']} on this test set"
    return [
        f"{'registry':>12}  {registration['model']}: {aliases}",
        f"{'gate':>12}  {found}: {held} (judge: {judge}; {attempt})",
        *(f"{'':>12}  {escape(reason)}" for reason in refusals),
        f"{'compare':>12}  {as_typed('kedro rlhf compare')} {rivals} candidate{option}",
    ]
