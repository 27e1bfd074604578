"""The charts of a page as data, which the script of the page draws."""

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlhf_pipeline.config.policies import POLICIES
from rlhf_pipeline.verdict.comparison import baseline_of, reward_title
from rlhf_pipeline.verdict.words import titles

POINTS = 400
"""Points of a line; those of a longer training are means over equally many steps."""

Records = Sequence[Mapping[str, Any]]
"""The lines of a `metrics.jsonl`."""


@dataclass(frozen=True)
class Chart:
    """One chart. A series has name, x and y; `dots` draws its points, `texts` names them."""

    title: str
    note: str
    """What healthy looks like, in a sentence."""
    x: str
    series: Sequence[Mapping[str, Any]]
    kind: str = "line"
    """`line`, `points`, or `histogram`, whose x are the edges of the bars."""
    value: str = ""
    """The number beside the title: the metric of the exported model."""
    healthy: Sequence[float] | None = None
    """The band of y that is healthy."""
    mark: float | None = None
    """The step of the exported model."""


class Curve(NamedTuple):
    """A row of the table `charts.toml`."""

    title: str
    metric: str
    note: str
    band: Sequence[float] | None = None


OF_A_REWARD = "it rises if you care about it; the others should not fall for it."
_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ON_PROMPTS, OTHERS = ([Curve(**row) for row in _TABLE[kind]] for kind in ("on_prompts", "others"))


def training_charts(
    stage: str, records: Records, exported: Mapping[str, float], score: str
) -> Iterator[Chart]:
    """The charts of a stage, of batches and held-out rows: one for each metric that it has.

    `exported` are the metrics of the exported model; `score` is the title of PPO's score.
    """
    present = {each for record in records for each in record["metrics"]}
    curves = OTHERS
    if stage in POLICIES:
        rewards = [
            Curve(f"Reward: {reward_title([metric.partition('/')[2]])}", metric, OF_A_REWARD)
            for metric in sorted(each for each in present if each.startswith("reward/"))
        ]
        of_score = Curve(score, "objective/score", "it rises, then levels off.")
        curves = [of_score, *rewards, *ON_PROMPTS]
    for heading, pattern, note, healthy in curves:
        metric = pattern.format(stage)
        names = {metric: "training", f"validation/{metric.partition('/')[2]}": "held-out"}
        lines = [line(names[each], records, each) for each in names if each in present]
        lines = [each for each in lines if each["y"]]
        known = [exported[each] for each in names if each in exported]
        if lines:
            yield Chart(
                heading, f"Healthy: {note}", "step", lines, healthy=healthy,
                value=f"{known[-1]:z#.3g}" if known else "", mark=exported.get("step"),
            )  # fmt: skip


def line(name: str, records: Records, metric: str) -> dict[str, Any]:
    """A metric by its step, at most `POINTS` points; held-out metrics have dots."""
    found = [(r["step"], r["metrics"][metric]) for r in records if metric in r["metrics"]]
    found = [(step, value) for step, value in found if math.isfinite(value)]
    size = math.ceil(len(found) / POINTS) or 1
    groups = [found[start : start + size] for start in range(0, len(found), size)]
    return {
        "name": name,
        "x": [group[-1][0] for group in groups],
        "y": [short(sum(value for _, value in group) / len(group)) for group in groups],
        "dots": metric.startswith("validation/"),
    }


def short(value: float) -> float:
    """The number, rounded to five digits."""
    return float(f"{value:.5g}")


def frontier(records: Records, score: str, evaluation: Mapping[str, Any]) -> Iterator[Chart]:
    """Charts of scores against the square root of the KL.

    They show the path of the candidate's training, both policies, and the best of n answers of the
    baseline. The score of an evaluation is that of the reward model, so it is shown only if the
    training optimized nothing else.
    Gao, Schulman, Hilton, "Scaling Laws for Reward Model Overoptimization", 2023.
    """
    names, baseline = titles(evaluation), baseline_of(evaluation)
    candidate, policies = evaluation["candidate"], evaluation["policies"]
    note = "Healthy: it rises to the right. A curve that bends down shows over-optimization."
    for metric, heading in (("score", score), ("gold_score", "Gold score")):
        kl, measured = "validation/kl", f"validation/{metric}"
        paths = {
            names[candidate]: [
                (found[kl], found[measured], f"step {step}")
                for step, found in ((record["step"], record["metrics"]) for record in records)
                if {kl, measured} <= found.keys() and math.isfinite(found[measured])
            ]
        }
        if metric != "score" or evaluation["rewards"] in ([], ["trained"]):
            paths["test prompts"] = [
                (policies[policy]["kl"], policies[policy][metric], names[policy])
                for policy in (baseline, candidate)
                if {"kl", metric} <= policies[policy].keys()
            ]
            paths[f"best of n by {names[baseline]}"] = [
                (each["kl"], each[metric], f"best of {each['n']}")
                for each in evaluation.get("best_of_n", []) if metric in each
            ]  # fmt: skip
        series = [
            {"name": name, "x": [short(math.sqrt(max(0.0, x))) for x, *_ in path],
             "y": [short(y) for _, y, _ in path], "texts": [text for *_, text in path],
             "dots": True}
            for name, path in paths.items() if path
        ]  # fmt: skip
        if series:
            x = f"√KL from {names[baseline]}, KL in nats"
            yield Chart(f"{heading} against √KL", note, x, series)


def histogram(title: str, note: str, x: str, values: Mapping[str, Sequence[float]]) -> Chart:
    """The distributions of several policies, by their names, in common bars."""
    together = np.concatenate([np.asarray(given, dtype=float) for given in values.values()])
    edges = np.histogram_bin_edges(together, bins=24)
    series = [
        {"name": name, "x": [*map(short, edges)], "y": np.histogram(given, edges)[0].tolist()}
        for name, given in values.items()
    ]
    return Chart(title, note, x, series, kind="histogram")
