"""What the evaluations of a study say: a row for each recipe and baseline, and their pairs."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from math import sqrt
from pathlib import Path
from statistics import mean
from typing import Any

from rlhf_pipeline.commands.study_runs import Cost, Evaluations, Recipe, Runs, cost
from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.config.rewards import REWARD_MODEL, PairwiseJudge
from rlhf_pipeline.pipelines.evaluate import UNTOUCHED
from rlhf_pipeline.runtime.manifest import Manifest
from rlhf_pipeline.tracking.registration import conditions
from rlhf_pipeline.verdict.answers import Answer, complete_judges, read_answers
from rlhf_pipeline.verdict.charts import Chart, short
from rlhf_pipeline.verdict.comparison import (
    FURTHER,
    baseline_of,
    deciding_judge,
    read_evaluation,
    read_standings,
    worst,
)
from rlhf_pipeline.verdict.recipes import (
    against,
    conclusion,
    estimate,
    pairs_of,
)
from rlhf_pipeline.verdict.statistics import ALPHA
from rlhf_pipeline.verdict.words import caveat, titles

Answers = Mapping[str, list[Answer]]
"""The answers of an evaluation, by policy."""
MOST_ANSWERS = 64
"""Of the baseline to a prompt, of which the best one counts."""


def study_verdict(
    recipes: Sequence[Recipe], evaluations: Evaluations, runs: Runs
) -> dict[str, Any]:
    """The rows, the pairs and the conclusion of a study whose runs are finished."""
    first = evaluations[recipes[0].name]
    seeds, same_prompts = [*first], runs.vary == "training"
    for seed in seeds:
        asked_alike = {str(conditions(evaluations[each.name][seed])) for each in recipes}
        assert len(asked_alike) == 1, "`require_comparable` has seen to it"
    read = {r.name: [read_evaluation(evaluations[r.name][s]) for s in seeds] for r in recipes}
    judge = common_judge([each for several in read.values() for each in several])
    config = EvaluateConfig.model_validate(Manifest.read(first[seeds[0]]).config["evaluate"])
    in_pairs = judge in {each.label for each in config.judges if isinstance(each, PairwiseJudge)}
    drawn = [draws_of_baseline(read_answers(first[seed])) for seed in seeds]
    with runs.session({}) as (_, ledger):
        costs = {r.name: [cost(ledger, r, evaluations[r.name][s]) for s in seeds] for r in recipes}
    rows = [recipe_row(each, read[each.name], judge, costs[each.name]) for each in recipes]
    outcomes = dict[str, list[list[float]]]()
    for recipe in recipes:
        ours = [read_answers(evaluations[recipe.name][seed])[recipe.policy] for seed in seeds]
        outcomes[recipe.name] = [
            against(*both, judge, one_each=in_pairs) for both in zip(ours, drawn, strict=True)
        ]
    prompts = len(outcomes[recipes[0].name][0])
    sampled = max(each.answers for several in costs.values() for each in several)
    n = min(MOST_ANSWERS, max(2, sampled // prompts))
    title = titles(read[recipes[0].name][0])[baseline_of(read[recipes[0].name][0])]
    asked = seeds[:1] if same_prompts else seeds  # all seeds share the baseline and its prompts
    several = []
    for seed, theirs in zip(asked, drawn, strict=False):
        made = runs.baselines(recipes[0], seed, first[seed], None if in_pairs else n)
        several.append(baseline_outcomes(made, theirs, judge, n, in_pairs=in_pairs))
    others = {title: [[0.5] * len(row) for row in outcomes[recipes[0].name]]}  # a tie with itself
    for name, own in (best_baselines(several, title, n) | others).items():
        outcomes[name] = own * (len(seeds) // len(own))
        rows.append(dict.fromkeys(("kl", "accuracy", "equal_length", "answers", "seconds")))
        rows[-1] |= {"name": name, "pipeline": None, "params": {}, "kls": []}
    alpha = ALPHA / len(recipes)
    for row in rows:
        own = outcomes[row["name"]]
        row["rate"] = found_rate = estimate(own, same_prompts=same_prompts)
        row["rates"] = dict(zip(seeds, map(mean, own), strict=True)) if row["pipeline"] else {}
        row["between_sd"] = sqrt(found_rate.between)
        row["prompts_error"] = sqrt(found_rate.rest / len(own) + found_rate.prompts)
        lower = estimate(own, same_prompts=same_prompts, alpha=alpha).lower
        row["better"] = len(seeds) > 1 and lower > 0.5
    baselines = [row["name"] for row in rows if row["pipeline"] is None]
    pairs = pairs_of(outcomes, same_prompts=same_prompts, baselines=baselines)
    means = {row["name"]: row["rate"].mean for row in rows}
    concluded = conclusion(pairs, means, len(seeds))
    return {
        "conditions": conditions(first[seeds[0]]),
        "judge": judge,
        "caveats": [*dict.fromkeys(caveat(each, judge) for own in read.values() for each in own)],
        "baseline": title,
        "seeds": seeds,
        "prompts": prompts,
        "rows": sorted(rows, key=lambda row: -row["rate"].mean),
        "pairs": pairs,
        "conclusion": concluded,
        "charts": [against_kl(rows, title)],
    }


def recipe_row(
    recipe: Recipe, read: Sequence[Mapping[str, Any]], judge: str, costs: Sequence[Cost]
) -> dict[str, Any]:
    """What a row shows beside rates: means over the evaluations and costs of the seeds."""
    found = [each["policies"][recipe.policy] for each in read]
    controlled = [each["win_rates"][judge]["length_controlled"] for each in read]
    kls = [each.get("kl") for each in found]
    return {
        "name": recipe.name,
        "pipeline": recipe.pipeline,
        "params": dict(recipe.params),
        "kl": mean_of(kls),
        "kls": kls,
        "accuracy": mean_of(each.get("strict_accuracy") for each in found),
        "equal_length": mean_of(each and each["rate"] for each in controlled),
        "answers": mean(each.answers for each in costs),
        "seconds": mean(each.seconds for each in costs),
    }


def common_judge(evaluations: Sequence[Mapping[str, Any]]) -> str:
    """The judge that decides for all: each judge has its worst standing in any evaluation."""
    read = [read_standings(each) for each in evaluations]
    return deciding_judge({judge: worst(*(each[judge] for each in read)) for judge in read[0]})


def draws_of_baseline(answers: Answers) -> list[Answer]:
    """All draws of the baseline, by prompt."""
    baseline = next(iter(answers))
    every = [*answers[baseline], *answers.get(f"{baseline}{FURTHER}", [])]
    return sorted(every, key=lambda answer: (answer.row, answer.draw))


def baseline_outcomes(
    evaluations: Mapping[float, Path], drawn: list[Answer], judge: str, n: int, *, in_pairs: bool
) -> dict[str | float, list[float]]:
    """The outcomes of what costs no training against the baseline, by prompt: those of the baseline
    at other temperatures by temperature, `untouched`, and `best`, the best of n answers by the
    reward model, or else by the judge, against another one.

    A judge of pairs compares only `untouched`: its scores are not those of single answers.
    """
    usual, *others = evaluations  # the temperature of the project is the first
    answers, inputs = read_answers(evaluations[usual]), Manifest.read(evaluations[usual]).inputs
    found: dict[str | float, list[float]] = {}
    if inputs["sft_model"] != inputs["untouched_model"]:
        found["untouched"] = against(answers[UNTOUCHED.name], drawn, judge, one_each=in_pairs)
    if in_pairs:
        return found
    for temperature in others:
        cooler = read_answers(evaluations[temperature])
        found[temperature] = against(cooler[next(iter(cooler))], drawn, judge)
    own = draws_of_baseline(answers)
    by = REWARD_MODEL if REWARD_MODEL in complete_judges(own) else judge
    prompts = [[*group] for _, group in groupby(own, key=lambda answer: answer.row)]
    if usual:  # at temperature 0 all answers are the same
        best = [max(each[:n], key=lambda answer: float(answer.scores[by] or 0)) for each in prompts]
        found["best"] = against(best, [each[n] for each in prompts], judge)
    return found


def best_baselines(
    several: Sequence[Mapping[str | float, list[float]]], title: str, n: int
) -> dict[str, list[list[float]]]:
    """The outcomes of the baselines by the name of their row. Of the temperatures it is the best
    one on these prompts, so its rate is rather too high."""
    titles_of: dict[str | float, str] = {
        "untouched": "the untouched model",
        "best": f"best of {n} of {title}",
    }
    cooler = [each for each in several[0] if isinstance(each, float)]
    if cooler:
        best = max(cooler, key=lambda t: mean(mean(each[t]) for each in several))
        titles_of[best] = f"{title} at temperature {best:g}"
    return {
        name: [each[key] for each in several]
        for key, name in titles_of.items()
        if key in several[0]
    }


def mean_of(values: Iterable[float | None]) -> float | None:
    """The mean; None if a value is missing."""
    found = [*values]
    known = [each for each in found if each is not None]
    return mean(known) if len(known) == len(found) else None


def against_kl(rows: Sequence[Mapping[str, Any]], title: str) -> Chart:
    """The rate of every seed against its KL."""
    series = [
        {"name": row["name"], "x": [short(sqrt(max(0.0, kl))) for kl in row["kls"]],
         "y": [short(rate) for rate in row["rates"].values()],
         "texts": [f"seed {seed}" for seed in row["rates"]], "dots": True}
        for row in rows if row["kls"] and None not in row["kls"]
    ]  # fmt: skip
    note = "A point is a seed. Healthy: the points of a recipe are close to each other."
    return Chart("Rate against √KL", note, f"√KL from {title}, KL in nats", series, kind="points")
