"""Over-optimization of the reward model (Gao et al. 2022): gold and proxy score against KL to SFT.

    python benchmarks/overoptimization.py                 # seeds 1 and 2
    python benchmarks/overoptimization.py --seeds 1       # one seed

The proxies are reward models that are trained on 10%, 30% and 100% of the comparisons. The actor
learns faster than by default, so that a short run over-optimizes. Each proxy is optimized without a
constraint, with a bound on the KL, and with the default's KL. All scores are of unseen requests.
The gate judges each exported policy twice: by the gold score, and by the proxy, as where nobody
knows the gold score. Results and plot: benchmarks/results/overoptimization/.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments import (
    RESULTS,
    Start,
    commit,
    compare,
    history,
    parameters,
    prepare,
    side_by_side,
    train,
    train_reward_model,
)
from panels import panels
from rich.console import Console
from rich.table import Table

from rlhf_pipeline.config.evaluate import RegisterConfig
from rlhf_pipeline.config.rewards import GOLD, REWARD_MODEL
from rlhf_pipeline.verdict.answers import read_answers
from rlhf_pipeline.verdict.comparison import Standing, read_evaluation
from rlhf_pipeline.verdict.gate import Evidence, decide

SHARES = (0.1, 0.3, 1.0)
"""Of the comparisons, for a proxy."""
RECIPE = {"steps": 24, "evaluations": 12, "actor": {"optimizer": {"learning_rate": 1.0e-3}}}
UNCHANGED = {"steps": 1, "evaluations": 1, "actor": {"optimizer": {"learning_rate": 1.0e-12}}}
"""A step that changes nothing: it scores the SFT model on the same prompts with the same draws."""
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "none": {"coef": 0.0, "maximum": None},
    "maximum 2": {"coef": 0.0, "maximum": 2.0},
    "coef 0.1": {"coef": 0.1, "maximum": None},
}
COLORS = dict(zip(SHARES, ("#D55E00", "#E69F00", "#0072B2"), strict=True))
STYLES = dict(zip(CONSTRAINTS, ("-", ":", "--"), strict=True))
MARKERS = dict(zip(CONSTRAINTS, "osD", strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of runs and results")
    arguments = parser.parse_args()
    folder = arguments.results / "overoptimization"
    folder.mkdir(parents=True, exist_ok=True)
    starts = list(
        side_by_side(prepare, [(seed, arguments.results / "workspace") for seed in arguments.seeds])
    )
    settings = [(share, name) for share in SHARES for name in CONSTRAINTS]
    rows: list[dict[str, Any]] = []
    for row in side_by_side(run, [(begin, *setting) for setting in settings for begin in starts]):
        rows = sorted([*rows, row], key=lambda row: (row["share"], row["constraint"], row["seed"]))
        (folder / "overoptimization.json").write_text(
            json.dumps({"commit": commit(), "runs": rows}, indent=1)
        )
        show(rows)
    plot(rows, folder / "overoptimization.png")


def run(begin: Start, share: float, constraint: str) -> dict[str, Any]:
    """Optimize one proxy on one seed; return its held-out scores."""
    begin = replace(begin, reward_model=train_reward_model(begin, {"epochs": share}))
    changes = RECIPE | {"kl": CONSTRAINTS[constraint]}
    policy = train(begin, changes)
    unchanged = changes | UNCHANGED
    course = evaluations(train(begin, unchanged)) + evaluations(policy)
    exported = int(json.loads((policy / "manifest.json").read_text())["metrics"]["step"])
    return {
        "share": share,
        "constraint": constraint,
        "seed": begin.seed,
        "steps": int(history(policy)[-1]["step"]),
        "exported": next(point for point in course[1:] if point["step"] == exported),
        "refused": refusals(begin, policy),
        "course": course,
    }


def refusals(begin: Start, policy: Path) -> dict[str, list[str]]:
    """The conditions of the gate that a policy fails, by the judge that decides."""
    export = compare(begin, policy)
    evaluation, answers = read_evaluation(export), read_answers(export)
    given = parameters()["register"] | {"require_independent_judge": False}  # what else refuses?
    config = RegisterConfig.model_validate(given)
    evidence = Evidence(
        candidate=answers[evaluation["candidate"]],
        baseline=answers["sft"],
        judge=GOLD,
        standing=Standing("independent"),
        accuracy=evaluation["accuracy"],
    )
    return {
        judge: decide(replace(evidence, judge=judge), config).refusals
        for judge in (GOLD, REWARD_MODEL)
    }


def evaluations(policy: Path) -> list[dict[str, float]]:
    """KL, proxy and gold score at each evaluation."""
    names = {"kl": "validation/kl", "proxy": "validation/score", "gold": "validation/gold_score"}
    steps = [step for step in history(policy) if "validation/score" in step]
    return [
        {"step": step["step"]} | {short: step[name] for short, name in names.items()}
        for step in steps
    ]


def show(rows: list[dict[str, Any]]) -> None:
    """All runs so far: best and last gold score, and that of the exported model."""
    table = Table(title="Gold and proxy score on unseen requests")
    columns = (
        "best gold",
        "at KL",
        "last gold",
        "last proxy",
        "last KL",
        "exported gold",
        "exported proxy",
        "exported KL",
        "gate, gold",
        "gate, proxy",
    )
    for column in ("pairs", "constraint", "seed", "steps", *columns):
        table.add_column(column, justify="right")
    for row in rows:
        best, last = max(row["course"], key=lambda point: point["gold"]), row["course"][-1]
        numbers = [best["gold"], best["kl"], last["gold"], last["proxy"], last["kl"]]
        numbers += [row["exported"][key] for key in ("gold", "proxy", "kl")]
        conditions = (row["refused"][judge] for judge in (GOLD, REWARD_MODEL))
        table.add_row(
            f"{row['share']:.0%}",
            row["constraint"],
            str(row["seed"]),
            str(row["steps"]),
            *(f"{number:.2f}" for number in numbers),
            *(f"no: {len(failed)}" if failed else "yes" for failed in conditions),
        )
    Console(width=170).print(table)


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    """Gold and proxy score against sqrt(KL), as in Gao et al.; one column per seed."""
    seeds = sorted({row["seed"] for row in rows})
    y_labels = ("gold score, held out", "proxy: reward model's score, held out")
    with panels(
        file, seeds, y_labels=y_labels, x_label="sqrt(KL to SFT), sqrt(nats)", size=(4.4, 6.4)
    ) as of_seed:
        for row in rows:
            at = [max(point["kl"], 0.0) ** 0.5 for point in row["course"]]
            how = row["constraint"]
            for panel, name in zip(of_seed(row["seed"]), ("gold", "proxy"), strict=True):
                values = [point[name] for point in row["course"]]
                panel.plot(
                    at,
                    values,
                    color=COLORS[row["share"]],
                    label=f"{row['share']:.0%} of the pairs, {how}",
                    linestyle=STYLES[how],
                    marker=MARKERS[how],
                    markersize=4,
                    linewidth=1.3,
                )


if __name__ == "__main__":
    main()
