"""`kedro rlhf study`: recipes times training seeds, each a cached run, and one page."""

import json
import webbrowser
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, cast, get_args

import click
from rich.console import Console
from rich.markup import escape

from rlhf_pipeline.commands.command import Command, plain_table, show_link
from rlhf_pipeline.commands.study_runs import Evaluations, Recipe, Runs, Unit, Vary, recipes_of
from rlhf_pipeline.commands.study_verdict import study_verdict
from rlhf_pipeline.config.block import leaves
from rlhf_pipeline.errors import ConfigError, StageError
from rlhf_pipeline.kedro_run.artifacts import Ledger
from rlhf_pipeline.runtime.files import write_atomically
from rlhf_pipeline.runtime.manifest import json_digest
from rlhf_pipeline.tracking.studies import log_study
from rlhf_pipeline.verdict.answers import judge_title
from rlhf_pipeline.verdict.page import decimals, render
from rlhf_pipeline.verdict.recipes import Estimate, median_seed
from rlhf_pipeline.verdict.words import ABSENT


@click.command(cls=Command)
@click.option("--pipelines", "named", default="", help="Pipelines, such as full,dpo,grpo.")
@click.option(
    "--recipes",
    "file",
    type=click.Path(path_type=Path),
    help="File of YAML with further recipes, NAME: {pipeline: grpo, params: {grpo.kl.coef: 0.1}}.",
)
@click.option(
    "--seeds", type=click.IntRange(min=1), default=5, show_default=True, help="Training seeds."
)
@click.option(
    "--vary",
    type=click.Choice(get_args(Vary)),
    default="training",
    show_default=True,
    help="What a seed changes: the training of the policy, or also data, SFT and reward model.",
)
@click.option(
    "--budget",
    metavar="UNIT=N",
    help="What each training of a policy may take: answers=3072, steps=100 or seconds=600.",
)
@click.option(
    "--register", "registered", metavar="RECIPE", help="Register the median model of this recipe."
)
@click.option("--open/--no-open", "show", default=True, help="Open the page, which is the default.")
def study(
    ledger: Ledger, configuration: Mapping[str, Any], console: Console, project: Path, named: str,
    file: Path | None, seeds: int, vary: Vary, budget: str | None, registered: str | None,
    show: bool,
) -> None:  # fmt: skip
    """Train recipes with several seeds each, and say which recipe is shown to be better.

    A recipe is a pipeline with its parameters. Each of its seeds is a `kedro run` that ends with
    the evaluation. Finished stages are reused, so a repeated command resumes, and more seeds add to
    the same study. The untouched model, the baseline at lower temperatures, and the best of several
    of its answers take part.
    """
    recipes = recipes_of(named, file)
    chosen = [each for each in recipes if each.name == registered]
    if registered is not None and not chosen:
        raise ConfigError(f"--register: found {registered!r}, expected a recipe of this study")
    runs = Runs(project, configuration, vary, amount_of(budget))
    runs.require_comparable(recipes)
    evaluations, versions, faults = train(recipes, range(1, seeds + 1), runs, console)
    complete = [each for each in recipes if len(evaluations[each.name]) == seeds]
    if not complete:
        raise StageError("\n".join(faults))
    found = study_verdict(complete, evaluations, runs)
    found |= {"vary": vary, "budget": budget, "faults": faults}
    given = [leaves(configuration["runtime_params"]), configuration["env"]]
    key = json_digest([recipes, vary, budget, given, found.pop("conditions")])
    folder = ledger.workspace.parent / "08_reporting" / "study" / key[:8]
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "study.json", json.dumps(found, indent=2, default=asdict))
    write_atomically(folder / "study.html", page := render("study.html.j2", data=None, **found))
    rates = {row["name"]: row["rate"].mean for row in found["rows"]}
    name = f"study {' '.join(each.name for each in recipes)}"
    print_study(found, console)
    log_study(project, key, name, versions, rates, page, found["conclusion"])
    for recipe in [each for each in chosen if each in complete]:
        register(recipe, evaluations, found, runs)
    link = (folder / "study.html").resolve().as_uri()
    show_link(console, "page", link)
    if show:
        webbrowser.open(link)
    if faults:
        raise StageError("\n".join(faults))


def amount_of(budget: str | None) -> tuple[Unit, float] | None:
    """The unit and the amount of --budget. Raises ConfigError for another value."""
    if budget is None:
        return None
    unit, _, amount = budget.partition("=")
    if unit not in get_args(Unit) or not amount.isdigit() or int(amount) == 0:
        units = ", ".join(get_args(Unit))
        raise ConfigError(f"--budget: found {budget!r}, expected UNIT=N with one of {units}")
    return cast(Unit, unit), float(amount)


def train(
    recipes: Sequence[Recipe], seeds: Sequence[int], runs: Runs, console: Console
) -> tuple[Evaluations, list[str], list[str]]:
    """All runs: the evaluations, the versions of the runs that made them now, and the faults.

    All recipes have the first seed before one has the second. A stage that fails ends its own run
    alone.
    """
    evaluations: Evaluations = {each.name: {} for each in recipes}
    versions, faults, total = list[str](), list[str](), len(recipes) * len(seeds)
    for number, (seed, recipe) in enumerate(product(seeds, recipes), start=1):
        console.print(f"run {number} of {total}: {escape(recipe.name)}, seed {seed}", style="bold")
        try:
            evaluations[recipe.name][seed], version = runs.run(recipe, runs.of_seed(recipe, seed))
            versions += [version] if version else []
        except StageError as error:
            faults.append(f"{recipe.name}, seed {seed}: {error.message}")
            console.print(escape(faults[-1]), style="red")
    return evaluations, versions, faults


def register(
    recipe: Recipe, evaluations: Evaluations, found: Mapping[str, Any], runs: Runs
) -> None:
    """Register the median model of a recipe. The gate judges the recipe, too: it promotes only if
    the recipe is shown to be better than the baseline."""
    row = next(row for row in found["rows"] if row["name"] == recipe.name)
    seed = median_seed(row["rates"])
    params = runs.of_seed(recipe, seed)
    if not row["better"]:
        params["register.promote"] = "never"
    with runs.session(params) as (session, _):
        session.run(pipeline_names=[recipe.pipeline])


def print_study(found: Mapping[str, Any], console: Console) -> None:
    """Print a row for each recipe and baseline, the pairs, and the conclusion."""
    table = plain_table("recipe", "rate against the baseline", "seeds", "between seeds", "prompts")
    for name in ("at equal length", "KL", "accuracy", "answers", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found["rows"]:
        shown = " ".join(f"{rate:.3f}" for rate in row["rates"].values())
        costs = [f"{row[each]:,.0f}" if row[each] else ABSENT for each in ("answers", "seconds")]
        spread = [f"{row[each]:.3f}" for each in ("between_sd", "prompts_error")]
        numbers = map(decimals, (row["equal_length"], row["kl"], row["accuracy"]))
        table.add_row(escape(row["name"]), interval(row["rate"]), shown, *spread, *numbers, *costs)
    console.print(table, "")
    pairs = plain_table("pair", "difference", "shown to be better")
    for pair in found["pairs"]:
        both = escape(f"{pair.first} - {pair.second}")
        pairs.add_row(both, interval(pair.difference, "+"), escape(pair.shown or "none"))
    console.print(pairs, "")
    console.print(f"{judge_title(found['judge']).capitalize()} decides. {found['conclusion']}")


def interval(found: Estimate, sign: str = "") -> str:
    """A mean and its interval, within what a rate or a difference of rates can be."""
    lower, upper = max(found.lower, -1.0 if sign else 0.0), min(found.upper, 1.0)
    return f"{found.mean:{sign}.3f} [{lower:{sign}.3f}, {upper:{sign}.3f}]"
