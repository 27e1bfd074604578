"""`kedro rlhf compare`: what differs between policies, and whether one is better."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kedro.io import CatalogProtocol
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rlhf_pipeline.commands.artifacts import all_artifacts, ancestors, folder_of, places
from rlhf_pipeline.config.block import leaves
from rlhf_pipeline.evaluation.comparison import Answer, read_answers, scores_by
from rlhf_pipeline.evaluation.report import METRICS, judge_title
from rlhf_pipeline.runtime.manifest import Manifest, content_digest
from rlhf_pipeline.statistics import ALPHA, standardized_gain, win_rate

ABSENT = "-"


@dataclass(frozen=True)
class Policy:
    """A policy, what it was made from, and its evaluation."""

    name: str
    """As it was asked for."""
    folder: Path
    stages: dict[str, Manifest]
    """The manifests of the policy and of all artifacts that it was made from, by stage."""
    evaluation: Path | None
    """The newest evaluation of the policy. None: there is none."""

    @property
    def own(self) -> Manifest:
        """The manifest of the policy itself."""
        return Manifest.read(self.folder)

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Its metrics in the evaluation."""
        if self.evaluation is None:
            return {}
        compared = json.loads((self.evaluation / "evaluation.json").read_text())
        found: dict[str, float] = compared["policies"][self.own.stage]
        return found

    @cached_property
    def answers(self) -> list[Answer]:
        """Its answers in the evaluation."""
        return [] if self.evaluation is None else read_answers(self.evaluation)[self.own.stage]

    def parameters(self) -> dict[str, Any]:
        """The parameters and the seeds of all stages, by their dotted names."""
        found = {}
        for stage, manifest in self.stages.items():
            found[f"{stage}: seed"] = manifest.seed
            found |= dict(leaves(manifest.config))
        return found


def compare(
    names: Sequence[str], catalog: CatalogProtocol, console: Console, project: Path
) -> None:
    """Print the parameters and data that differ, the metrics, and every pair of policies.

    A name is a version or an alias of the registered model, or a folder. Raises ArtifactError if
    there is none of such a name.
    """
    artifacts = all_artifacts(catalog, Path(catalog.load("workspace")))
    policies = [find(name, artifacts, catalog, project) for name in names]
    for table in (parameter_table(policies), recipe_table(policies), metric_table(policies)):
        console.print(table if table.row_count else f"{table.title}: none", "")
    for number, candidate in enumerate(policies):
        for baseline in policies[:number]:
            for line in verdicts(candidate, baseline, len(policies)):
                console.print(line, highlight=False)


def find(name: str, artifacts: list[Path], catalog: CatalogProtocol, project: Path) -> Policy:
    """The policy with a name."""
    folder = folder_of(name, catalog, project)
    stages = {m.stage: m for _, m in ancestors(folder, places(artifacts))}
    stage, digest = Manifest.read(folder).stage, content_digest(folder)
    evaluations = [
        path
        for path in artifacts
        if (path / "evaluation.json").is_file()
        and Manifest.read(path).inputs.get(f"{stage}_model") == digest
        and stage in json.loads((path / "evaluation.json").read_text())["policies"]
    ]
    return Policy(name, folder, stages, evaluations[-1] if evaluations else None)


def parameter_table(policies: Sequence[Policy]) -> Table:
    """The parameters that differ."""
    found = [policy.parameters() for policy in policies]
    return differences("parameters that differ", policies, found)


def recipe_table(policies: Sequence[Policy]) -> Table:
    """The stages whose recipes differ: fingerprints of parameters, inputs, code and versions."""
    found = [
        {stage: manifest.fingerprint[:8] for stage, manifest in policy.stages.items()}
        for policy in policies
    ]
    return differences("recipes that differ", policies, found)


def differences(
    title: str, policies: Sequence[Policy], found: Sequence[Mapping[str, Any]]
) -> Table:
    """One row for each name whose values differ between the policies that have it."""
    table = table_of(title, policies)
    for name in dict.fromkeys(name for values in found for name in values):
        row = [str(values[name]) if name in values else None for values in found]
        if len({*row} - {None}) > 1:
            table.add_row(name, *(escape(value or ABSENT) for value in row))
    return table


def metric_table(policies: Sequence[Policy]) -> Table:
    """The metrics of the evaluations with their intervals."""
    table = table_of("evaluation", policies)
    metrics = [policy.metrics for policy in policies]
    names = dict.fromkeys(
        name for found in metrics for name in found if not name.endswith(("_lower", "_upper"))
    )
    for name in names:
        label, form = METRICS.get(name, (name.replace("_", " "), "z.2f"))
        table.add_row(label, *(value_of(found, name, form) for found in metrics))
    return table


def value_of(metrics: Mapping[str, float], name: str, form: str) -> str:
    """A metric with its interval."""
    if name not in metrics:
        return ABSENT
    ends = [metrics[f"{name}{end}"] for end in ("_lower", "_upper") if f"{name}{end}" in metrics]
    interval = f" \\[{', '.join(f'{end:{form}}' for end in ends)}]" if ends else ""
    return f"{metrics[name]:{form}}{interval}"


def table_of(title: str, policies: Sequence[Policy]) -> Table:
    """An empty table with a column for each policy."""
    table = Table(box=None, padding=(0, 2, 0, 0), title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for policy in policies:
        table.add_column(escape(f"{policy.name} ({policy.own.stage})"), justify="right")
    return table


def verdicts(candidate: Policy, baseline: Policy, policies: int) -> list[str]:
    """How the candidate's answers compare with those of the baseline to the same prompts.

    The intervals are wider for more policies, so that all pairs together err in 5% of cases at most
    (Bonferroni).
    """
    pair = f"{candidate.name} and {baseline.name}"
    ours, theirs = candidate.answers, baseline.answers
    same = [answer.prompt for answer in ours] == [answer.prompt for answer in theirs]
    if not ours or not same:
        return [f"{pair}: no paired comparison, because they did not answer the same prompts"]
    alpha = ALPHA / (policies * (policies - 1) / 2)
    lines = []
    for judge in ours[0].scores:
        if any(answer.scores.get(judge) is None for answer in (*ours, *theirs)):
            continue
        scores = scores_by(ours, judge), scores_by(theirs, judge)
        rate, (gain, lower, upper) = win_rate(*scores, alpha), standardized_gain(*scores, alpha)
        preferred = (
            f"{rate.rate:.1%} ({100 * (1 - alpha):.4g}%: {rate.lower:.1%} to {rate.upper:.1%})"
        )
        lines.append(
            f"{pair}: {judge_title(judge)} prefers {candidate.name} on {preferred} of {rate.n} "
            f"prompts; gain {gain:+.2f} ({lower:+.2f} to {upper:+.2f}) of the scores' spread"
        )
    return lines
