"""The page of an evaluation: one file of HTML that needs no network.

It is made of finished artifacts alone: the evaluation, and the models with the metrics of their
training.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf_pipeline.config.block import leaves
from rlhf_pipeline.runtime.certificates import certificate_for
from rlhf_pipeline.runtime.manifest import Manifest, content_digest, verified
from rlhf_pipeline.runtime.metrics_file import answers_in, read_curves, read_json_lines
from rlhf_pipeline.runtime.usage import forecast_of, usage_of
from rlhf_pipeline.sizing.hardware import GIB
from rlhf_pipeline.verdict.answers import ANSWERS, judge_title, score_name
from rlhf_pipeline.verdict.charts import Chart, Records, frontier, histogram, short, training_charts
from rlhf_pipeline.verdict.comparison import BASELINE, baseline_of, read_evaluation, reward_title
from rlhf_pipeline.verdict.gate import outcome
from rlhf_pipeline.verdict.words import (
    ABSENT,
    caveat,
    metric_rows,
    road,
    sentence,
    summary,
    titles,
    verdict,
)

Answers = Mapping[str, Sequence[Mapping[str, Any]]]
"""The lines of `answers.jsonl`, by policy."""
REWARD_REPORT = "reward_report.json"
_SEAL = "\n<!-- evaluation "
"""Begins the last line of a page: SHA-256 of what it shows, and of the lines before."""


def evaluation_page(
    evaluation: Path,
    artifacts: Iterable[Path],
    registration: Mapping[str, Any] | None,
    workspace: Path | None = None,
) -> str:
    """The page of an evaluation; it shows the models among the artifacts that it was made from.

    The workspace knows what they took, what was forecast, and what was proven of their trainings.
    Raises ArtifactError if a file was changed.
    """
    compared = read_evaluation(evaluation)
    manifest = Manifest.read(evaluation)
    models: dict[str, Manifest] = {}
    records: dict[str, Records] = {}
    reward_report = None
    for folder in reversed([*artifacts]):  # of several rounds, the last comes first
        made = Manifest.read(folder)
        models[made.stage], records[made.stage] = made, read_curves(folder)
        if made.stage == "reward_model" and (folder / REWARD_REPORT).is_file():
            reward_report = json.loads(verified(folder, REWARD_REPORT).read_text())
    answers: dict[str, list[dict[str, Any]]] = {}
    for answer in read_json_lines(verified(evaluation, ANSWERS)):
        answers.setdefault(answer["policy"], []).append(answer)
    trained = [*(made for made in models.values() if records[made.stage]), manifest]
    names, policy, judge = titles(compared), compared["candidate"], compared["judge"]
    candidate = names[policy]
    heading = verdict(judge, compared["win_rates"][judge], candidate)
    if registration is not None:
        promoted = outcome(registration["promoted"], registration["verdict"])
        heading = sentence(f"{candidate} is {promoted}.")
    text = render(
        "evaluation.html.j2",
        heading=heading,
        summary=summary(compared),
        compared=compared,
        road=road(compared),
        names=names,
        baseline=names[baseline_of(compared)],
        caveats={judge: caveat(compared, judge) for judge in compared["win_rates"]},
        registration=registration,
        manifest=manifest,
        reward_report=reward_report,
        models=models,
        took=took(trained, workspace) if workspace else [],
        metrics=metric_rows(compared),
        data=_table(compared, answers),
        sections=[*_sections(compared, models, records, answers)],
        sampled=answers_in(records.get(policy, [])),
    )
    return _sealed(text, evaluation)


def took(made: Iterable[Manifest], workspace: Path) -> list[list[str]]:
    """What stages took beside what was forecast, and what was proven: a row for each stage of which
    something is known on this machine."""
    rows = []
    for each in made:
        usage, forecast = usage_of(workspace, each), forecast_of(workspace, each)
        proof = certificate_for(workspace, each)
        if usage is None and proof is None:
            continue
        whole = usage is not None and not usage.resumed  # else a part of the time is not known
        rows.append(
            [
                each.stage,
                f"{usage.seconds:.0f} s" if usage and whole else ABSENT,
                "{1:.0f} s [{0:.0f} s, {2:.0f} s]".format(*forecast.seconds)
                if forecast
                else ABSENT,
                f"{usage.peak / GIB:.2f}" if usage and usage.peak else ABSENT,
                f"{forecast.peak / GIB:.2f}" if forecast else ABSENT,
                proof.summary() if proof else ABSENT,
            ]
        )
    return rows


def is_current(page: str, evaluation: Path) -> bool:
    """Whether a page shows the evaluation as it is now, and is as it was made."""
    return page == _sealed(page.rpartition(_SEAL)[0], evaluation)


def _sealed(text: str, evaluation: Path) -> str:
    own = hashlib.sha256(text.encode()).hexdigest()
    return f"{text}{_SEAL}{content_digest(evaluation)}, page {own} -->\n"


def render(template: str, **values: Any) -> str:
    """Fill a template; it escapes every value."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    templates = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.policies["json.dumps_kwargs"] = {"default": asdict}
    templates.filters |= {each.__name__: each for each in (judge_title, leaves, decimals)}
    return templates.get_template(template).render(values)


def decimals(value: float | None) -> str:
    """The number with two decimals; the sign for an absent value if it is None."""
    return ABSENT if value is None else f"{value:z.2f}"


def _sections(
    compared: Mapping[str, Any],
    models: Mapping[str, Manifest],
    records: Mapping[str, Records],
    answers: Answers,
) -> Iterator[tuple[str, str, list[Chart]]]:
    candidate, baseline, names = compared["candidate"], baseline_of(compared), titles(compared)
    score = f"Score of {reward_title(compared['rewards'] or ['trained'])}"

    def training(stage: str) -> list[Chart]:
        exported = models[stage].metrics if stage in models else {}
        return [*training_charts(stage, records.get(stage, []), exported, score)]

    def distribution(name: str, note: str, x: str, field: str) -> Chart:
        both = {names[policy]: answers[policy] for policy in (candidate, baseline)}
        values = {policy: [a[field] for a in given] for policy, given in both.items()}
        return histogram(name, f"Suspicious: {note}", x, values)

    saturated = "one tall bar. A saturated judge gives all answers one score."
    distributions = [
        distribution(f"Scores of {judge_title(judge)}", saturated, "score", score_name(judge))
        for judge in compared["win_rates"]
    ]
    limit = "a bar at the limit, where answers are cut."
    distributions.append(distribution("Length of an answer", limit, "tokens", "response_tokens"))
    trains = (
        "Training is measured on batches, points on held-out rows. The dashed line is the exported "
        "model, whose value stands beside the title. A steep start can leave the chart."
    )
    path = "Points of a training are on held-out prompts, those of policies on the test prompts."
    sections = (
        (f"Training of {names[candidate]}", trains, training(candidate)),
        ("Score and KL", path, [*frontier(records.get(candidate, []), score, compared)]),
        ("Distributions", "Both policies on the test prompts.", distributions),
        ("Reward model", trains, training("reward_model")),
        ("SFT", trains, training(BASELINE)),
    )
    yield from (section for section in sections if section[2])


def _table(compared: Mapping[str, Any], answers: Answers) -> dict[str, Any]:
    """The rows of the table of answers, each with a pair of values, or the KL, for each column.

    The columns of the judges come first, the deciding one before the others.
    """
    candidate, baseline = compared["candidate"], baseline_of(compared)
    judges = sorted(compared["win_rates"], key=lambda judge: judge != compared["judge"])
    names = [judge_title(judge).removeprefix("the ").removesuffix(" judge") for judge in judges]
    has_kl = "kl" in compared["policies"][candidate]
    columns = [{"name": name, "judge": True, "digits": 2} for name in names]
    columns += [{"name": "tokens", "judge": False, "digits": 0}]
    columns += [{"name": "KL", "judge": False, "digits": 2}] if has_kl else []
    rows = [
        {
            "n": number,
            "p": pair[0]["prompt"],
            "a": [answer["response"] for answer in pair],
            "source": pair[0].get("source"),
            "v": [
                *([short(answer[score_name(judge)]) for answer in pair] for judge in judges),
                [answer["response_tokens"] for answer in pair],
                *([[short(pair[1]["kl"])]] if has_kl else []),
            ],
        }
        for number, pair in enumerate(zip(answers[baseline], answers[candidate], strict=True), 1)
    ]
    unit = "pairs" if compared["answers_per_prompt"] > 1 else "prompts"
    policies = [titles(compared)[each].removeprefix("the ") for each in (baseline, candidate)]
    return {"names": policies, "unit": unit, "columns": columns, "rows": rows}
