"""`kedro rlhf report`, `runs` and `compare`: the evaluations, their pages, and their policies."""

import webbrowser
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rlhf_pipeline.commands.command import Command, plain_table, show_link
from rlhf_pipeline.config.evaluate import REWARD_MODEL
from rlhf_pipeline.errors import ArtifactError, as_typed
from rlhf_pipeline.kedro_run.artifacts import Ledger, Policy
from rlhf_pipeline.runtime.files import write_atomically
from rlhf_pipeline.runtime.manifest import Manifest, verify
from rlhf_pipeline.tracking.registration import conditions, read_registration
from rlhf_pipeline.tracking.traces import log_answers
from rlhf_pipeline.verdict.answers import (
    Answer,
    complete_judges,
    judge_title,
    read_answers,
    scores_by,
)
from rlhf_pipeline.verdict.comparison import BASE_MODEL, baseline_of, read_evaluation
from rlhf_pipeline.verdict.page import evaluation_page, is_current
from rlhf_pipeline.verdict.statistics import ALPHA, standardized_gain, win_rate
from rlhf_pipeline.verdict.words import ABSENT, METRICS, counted, metric_value, title


@click.command(cls=Command)
@click.argument("evaluation", required=False)
@click.option(
    "--open/--no-open",
    "show",
    default=True,
    help="Open the page in a browser, which is the default.",
)
@click.option(
    "--traces", is_flag=True, help="Log every answer to MLflow, for its own evaluation pages."
)
def report(
    ledger: Ledger, console: Console, evaluation: str | None, show: bool, traces: bool
) -> None:
    """Show the page of EVALUATION with its verdict, results, curves and answers.

    EVALUATION is a version that `kedro rlhf runs` lists, or the folder of an evaluation. The name
    of a policy (a version or an alias of the registered model, or a folder) selects the newest
    evaluation of that policy. The default is the newest of all evaluations. If the page does not
    exist yet, or it or the evaluation was changed, the command makes it.

    With --traces, MLflow gets two runs with a trace for each answer and the scores of all judges.
    `mlflow.genai.compare_evaluations` compares such runs.
    """
    folder = ledger.evaluation(evaluation).resolve()
    page = ledger.beside(folder, "page") or folder.with_name(f"{folder.name}.html")
    verify(folder)
    if not page.is_file() or not is_current(page.read_bytes().decode(errors="replace"), folder):
        models = [path for path, _ in ledger.ancestors(folder)]
        registered = ledger.beside(folder, "registration")
        is_here = registered and registered.is_file()
        registration = read_registration(registered) if registered and is_here else None
        page.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(page, evaluation_page(folder, models, registration, ledger.workspace))
    link = page.resolve().as_uri()
    show_link(console, "page", link)
    if traces:
        compared, given = read_evaluation(folder), read_answers(folder)
        pair = {name: given[name] for name in (baseline_of(compared), compared["candidate"])}
        judges = complete_judges([each for answers in pair.values() for each in answers])
        fingerprint = Manifest.read(folder).fingerprint
        with console.status("logging each answer"):
            logged = log_answers(ledger.project, fingerprint, pair, judges)
        for policy, run in logged.items():
            console.print(f"{policy}: MLflow run {run}")
    if show:
        webbrowser.open(link)


@click.command(cls=Command)
def runs(ledger: Ledger, console: Console) -> None:
    """List the published evaluations, the newest one last."""
    found = {Manifest.read(folder).fingerprint: folder for folder in ledger.evaluations}
    if not found:
        console.print(as_typed("No evaluation is published here. Fix: `kedro run --pipeline=full`"))
        return
    table = plain_table("version", "policy", "seed", "win rate against the baseline", "judge", "KL")
    faults = []
    for folder in sorted(found.values(), key=lambda folder: folder.parent.name):
        try:
            compared = read_evaluation(folder, earlier=True)
        except ArtifactError as error:
            faults.append(str(error))
            continue
        candidate, judge = compared["candidate"], compared["judge"]
        rate = compared["win_rates"][judge]
        table.add_row(
            folder.parent.name,
            candidate,
            str(Manifest.read(folder).seed),
            f"{rate['rate']:.1%} [{rate['lower']:.1%}, {rate['upper']:.1%}]",
            "reward model" if judge == REWARD_MODEL else judge,
            metric_value(compared["policies"][candidate], "kl", "z.2f").partition(" [")[0],
        )
    console.print(table)
    if faults:
        raise ArtifactError("\n".join(faults))


@click.command(cls=Command)
@click.argument("policies", nargs=-1, required=True)
def compare(ledger: Ledger, console: Console, policies: Sequence[str]) -> None:
    """Show what differs between POLICIES, and whether one is better than another.

    POLICIES are versions or aliases of the registered model, or folders of artifacts. Each policy
    is compared with all those before it.
    """
    found = [ledger.policy(name) for name in policies]
    for table in (
        difference_table("parameters", found, Policy.parameters),
        difference_table("recipes", found, recipes),
        metric_table(found),
    ):
        console.print(table if table.row_count else f"{table.title}: none", "")
    pairs = list(combinations(found, 2))
    for baseline, candidate in pairs:
        for line in verdicts(candidate, baseline, len(pairs)):
            console.print(line, highlight=False, soft_wrap=True)


def recipes(policy: Policy) -> dict[str, str]:
    """The fingerprint of each stage: of its parameters, inputs, code and versions."""
    return {stage: manifest.fingerprint[:8] for stage, manifest in policy.made_from.items()}


def difference_table(
    title: str, policies: Sequence[Policy], values_of: Callable[[Policy], Mapping[str, Any]]
) -> Table:
    """One row for each name whose values differ between the policies that have it."""
    table, found = table_of(f"{title} that differ", policies), [*map(values_of, policies)]
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
    is_base = all("sft" not in p.made_from and BASE_MODEL in p.made_from for p in policies)
    for name in names:
        label, form = METRICS.get(name, (name.replace("_", " "), "z.2f"))
        label = label.replace("SFT", title(BASE_MODEL)) if is_base else label
        table.add_row(label, *(escape(metric_value(found, name, form)) for found in metrics))
    return table


def table_of(title: str, policies: Sequence[Policy]) -> Table:
    """An empty table with a column for each policy."""
    table = plain_table("", title=title, title_justify="left")
    for policy in policies:
        table.add_column(escape(f"{policy.name} ({policy.stage})"), justify="right")
    return table


def verdicts(candidate: Policy, baseline: Policy, pairs: int) -> list[str]:
    """How the candidate's answers compare with those of the baseline to the same prompts.

    The intervals of all pairs and judges together err in 5% of cases at most (Bonferroni).
    """
    pair = f"{candidate.name} and {baseline.name}"
    missing = [policy.name for policy in (candidate, baseline) if not policy.evaluations]
    if missing:
        return [f"{pair}: no comparison, because no evaluation of {' or '.join(missing)} is here"]
    found = paired(candidate, baseline)
    if found is None:
        return [f"{pair}: no comparison, because no evaluation had the same prompts and judges"]
    ours, theirs = found
    judges, lines = complete_judges([*ours, *theirs]), []
    intervals = pairs * len(judges) * 2  # a win rate and a gain for each judge
    alpha = ALPHA / intervals
    level = f"{100 * (1 - alpha):.4g}% for each of {intervals} intervals, 95% for all"
    for judge in judges:
        scores = scores_by(ours, judge), scores_by(theirs, judge)
        rate, (gain, lower, upper) = win_rate(*scores, alpha), standardized_gain(*scores, alpha)
        lines.append(
            f"{pair}: {judge_title(judge)} prefers {candidate.name} on {rate.rate:.1%} "
            f"({level}: {rate.lower:.1%} to {rate.upper:.1%}) of "
            f"{counted(rate.n, len(ours) // rate.n)}, with equal draws; gain {gain:+.2f} "
            f"({lower:+.2f} to {upper:+.2f}) of the scores' spread"
        )
    return lines


def paired(candidate: Policy, baseline: Policy) -> tuple[list[Answer], list[Answer]] | None:
    """The answers of both to the same prompts under the same conditions, the newest ones."""
    for ours, our_name in candidate.evaluations:
        for theirs, their_name in baseline.evaluations:
            if ours == theirs or conditions(ours) == conditions(theirs):
                return read_answers(ours)[our_name], read_answers(theirs)[their_name]
    return None
