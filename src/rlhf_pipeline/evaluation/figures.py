"""The figure of an evaluation: win rates, distributions of scores, score against KL."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_pipeline.config.evaluate import REWARD_MODEL
from rlhf_pipeline.evaluation.comparison import Answer, deciding_judge

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIGURE = "comparison.png"
"""File name of the figure, in the folder of the report."""

_BLUE, _GREY, _ORANGE = "#4477aa", "#bbbbbb", "#ee7733"  # safe for colour blindness


def plot_comparison(
    evaluation: dict[str, Any], answers: dict[str, list[Answer]], path: Path
) -> None:
    """Draw the evaluation as PNG. The same evaluation gives the same bytes."""
    from matplotlib.figure import Figure

    baseline, candidate, *_ = answers
    judge = deciding_judge(evaluation["win_rates"])
    # Not pyplot, which would keep the figure in memory.
    figure = Figure(figsize=(13, 3.8), dpi=130, layout="constrained")
    wins, scores, kl = figure.subplots(1, 3)
    _draw_wins(wins, evaluation["win_rates"], candidate)
    _draw_scores(scores, {name: answers[name] for name in (baseline, candidate)}, judge)
    _draw_kl(kl, answers[candidate], judge, candidate)
    for axes in (wins, scores, kl):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png", metadata={"Software": None})


def _draw_wins(axes: Axes, rates: dict[str, dict[str, Any]], candidate: str) -> None:
    """One bar for each judge: wins, ties and losses of the candidate."""
    labels, left = [_label(judge) for judge in rates], [0.0] * len(rates)
    for kind, color in (("wins", _BLUE), ("ties", _GREY), ("losses", _ORANGE)):
        shares = [rate[kind] / rate["n"] for rate in rates.values()]
        axes.barh(labels, shares, left=left, color=color, label=kind, height=0.5)
        left = [start + share for start, share in zip(left, shares, strict=True)]
    axes.axvline(0.5, color="0.25", linewidth=1, linestyle="--")
    axes.set(title=f"{candidate.upper()} against SFT, by judge", xlim=(0, 1))
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.invert_yaxis()
    axes.legend(ncols=3, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.1))


def _draw_scores(axes: Axes, answers: dict[str, list[Answer]], judge: str) -> None:
    """The distribution of the deciding judge's scores, for both policies."""
    scores = {name: [a.scores[judge] or 0.0 for a in given] for name, given in answers.items()}
    together = [score for given in scores.values() for score in given]
    limits = (min(together), max(together) + 1e-9)
    for (name, given), color in zip(scores.items(), (_ORANGE, _BLUE), strict=True):
        axes.hist(given, bins=24, range=limits, color=color, alpha=0.6, label=name.upper())
    axes.set(title=f"Scores of {_label(judge)}", xlabel="score", ylabel="answers")
    axes.locator_params(axis="x", nbins=5)
    axes.legend(frameon=False)


def _draw_kl(axes: Axes, answers: list[Answer], judge: str, candidate: str) -> None:
    """Each answer's score against its KL: a cloud that rises and then falls shows exploitation."""
    axes.plot(
        [a.kl for a in answers],
        [a.scores[judge] or 0.0 for a in answers],
        ".",
        color=_BLUE,
        alpha=0.5,
    )
    axes.set(
        title=f"{candidate.upper()}: score against KL",
        xlabel="log ratio to SFT of the answer, nats",
        ylabel=f"score of {_label(judge)}",
    )


def _label(judge: str) -> str:
    return "reward model" if judge == REWARD_MODEL else judge
