"""The report of an evaluation: the candidate, PPO or DPO, beside SFT; its text and its figure.

The evaluation is a dict of JSON types:

    candidate   "ppo" or "dpo"
    prompts     number of prompts
    decoding    settings of the decoding
    judge       the judge that decides about a promotion
    independent whether the candidate's training has not optimized that judge
    optimized   the judges that it has optimized
    reward_model_accuracy_lower     lower end of the 95% interval on its held-out accuracy
    policies    by policy: metrics; `m_lower` and `m_upper` are the 95% interval of the metric `m`
    win_rates   of the candidate against SFT, by judge
    variants    win rates by judge, by variant of the candidate, such as "ppo_ema"
    slices      win rates by judge, by source of the prompts; empty for a single source
    smallest_visible_win_rate       see `statistics.smallest_visible_win_rate`
    samples     pairs of answers with their scores
    largest_gains   the pairs with the largest gains by the deciding judge
    largest_losses  the pairs with the largest losses
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from rlhf_pipeline.config.evaluate import REWARD_MODEL
from rlhf_pipeline.evaluation.comparison import BASELINE, Answer, judge_title, score_name
from rlhf_pipeline.statistics import smallest_visible_win_rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIGURE = "comparison.png"
"""File name of the figure, in the folder of the report."""

_BLUE, _GREY, _ORANGE = "#4477aa", "#bbbbbb", "#ee7733"  # safe for colour blindness

METRICS = {
    "kl": ("KL from SFT (nats)", "z.2f"),
    "sft_perplexity": ("perplexity by SFT", "z.2f"),
    "response_tokens": ("response tokens", "z.1f"),
    "eos_fraction": ("ended by itself", "z.3f"),
    "truncated_fraction": ("cut at the limit", "z.3f"),
    "refusal_fraction": ("opens like a refusal", "z.3f"),
    "distinct_1": ("distinct words", "z.3f"),
    "distinct_2": ("distinct word pairs", "z.3f"),
    "repetition": ("repeated word triples of an answer", "z.3f"),
    "phrase_share": ("answers with the most common four words", "z.3f"),
}
"""Metric to its label and number format; z: a rounded zero has no sign. The report shows the
judges' scores before them."""

ABSENT = "-"

BAR = 40
"""Columns of the bar of wins, ties and losses."""

KINDS = {
    "wins": ("\N{FULL BLOCK}", "green"),
    "ties": ("\N{MEDIUM SHADE}", "yellow"),
    "losses": ("\N{LIGHT SHADE}", "red"),
}
"""Outcome of a prompt to its character and colour in the bar."""


def render_markdown(evaluation: dict[str, Any], caveats: Mapping[str, str]) -> str:
    """Render the whole report as Markdown; texts of models are shown literally.

    `caveats` are what to bear in mind about the candidate's win rate, by judge.
    """
    candidate = evaluation["candidate"]
    title = _title(candidate)
    decoding = ", ".join(f"{name} {value}" for name, value in evaluation["decoding"].items())
    same = f"Both answered the same {evaluation['prompts']} held-out prompts ({decoding})."
    lines = [f"# {title} against SFT", "", same, ""]
    lines += _markdown_table(evaluation, BASELINE, candidate)
    lines += ["", "Intervals are 95%.", "", f"![Win rates, scores and KL]({FIGURE})", ""]
    lines += ["## Which answer is better?", ""]
    visible = f"{smallest_visible_win_rate(evaluation['prompts']):.1%}"
    lines += [
        "Two equal policies have 50%; a tie counts half. With this number of prompts, four of five "
        f"evaluations show that a policy with a true win rate of {visible} is better.",
        "",
    ]
    for judge, rate in evaluation["win_rates"].items():
        counts = ", ".join(f"{rate[kind]} {kind}" for kind in KINDS)
        found = f"It {_preference(rate, candidate)}: {counts}. {caveats.get(judge, '')}".rstrip()
        lines += [f"**{_verdict(judge, rate, candidate)}** {found}", ""]
    for variant, rates in evaluation["variants"].items():
        lines += [f"## {_title(variant)} beside {title}", ""]
        lines += [*_markdown_table(evaluation, candidate, variant), ""]
        for judge, rate in rates.items():
            lines += [f"{judge_title(judge).capitalize()} {_preference(rate, variant)}.", ""]
    judge = judge_title(evaluation["judge"])
    for heading, samples in (
        (f"Largest gains by {judge}", evaluation["largest_gains"]),
        (f"Largest losses by {judge}", evaluation["largest_losses"]),
        ("Samples", evaluation["samples"]),
    ):
        table = _answers_table(samples, candidate) if samples else ["None."]
        lines += [f"## {heading}", "", *table, ""]
    return "\n".join(lines)


def _answers_table(samples: list[dict[str, Any]], candidate: str) -> Iterator[str]:
    yield f"| | prompt | SFT | {_title(candidate)} |"
    yield "|---:|:---|:---|:---|"
    for number, sample in enumerate(samples, start=1):
        answers = [
            f"{cell(sample[policy])}<br>({_scores(sample, policy)})"
            for policy in (BASELINE, candidate)
        ]
        yield f"| {number} | {cell(sample['prompt'])} | {' | '.join(answers)} |"


def print_summary(evaluation: dict[str, Any], caveats: Mapping[str, str], console: Console) -> None:
    """Print the verdict in one sentence for each judge, the deciding one first, and its bar."""
    candidate, rates = evaluation["candidate"], evaluation["win_rates"]
    deciding = evaluation["judge"]
    console.print(Text(summary(evaluation, caveats)))
    console.print(_bar(rates[deciding], candidate))


def summary(evaluation: dict[str, Any], caveats: Mapping[str, str]) -> str:
    """The verdict of the deciding judge, with a reward model's caveat; then the other judges."""
    candidate, rates = evaluation["candidate"], evaluation["win_rates"]
    deciding = evaluation["judge"]
    rate = rates[deciding]
    sentences = [
        f"{_verdict(deciding, rate, candidate).removesuffix('.')}: it "
        f"{_preference(rate, candidate)}."
    ]
    sentences += [caveats[deciding]] if deciding == REWARD_MODEL and deciding in caveats else []
    sentences += [
        f"{judge_title(judge).capitalize()} prefers it on {_interval(rate)}."
        for judge, rate in rates.items()
        if judge != deciding
    ]
    return " ".join(sentences)


def _preference(rate: dict[str, float], policy: str) -> str:
    return f"prefers {_title(policy)}'s answer to SFT's on {_interval(rate)} of {rate['n']} prompts"


def _interval(rate: dict[str, float]) -> str:
    return f"{rate['rate']:.1%} (95%: {rate['lower']:.1%} to {rate['upper']:.1%})"


def _bar(rate: dict[str, float], candidate: str) -> Text:
    """Wins, ties and losses as a bar of characters that differ without colours, too."""
    edges = [0.0]
    for kind in KINDS:
        edges.append(edges[-1] + rate[kind] / rate["n"] * BAR)
    blocks = [
        (character * (round(end) - round(start)), colour)
        for (character, colour), start, end in zip(
            KINDS.values(), edges[:-1], edges[1:], strict=True
        )
    ]
    counts = ", ".join(f"{rate[kind]} {kind}" for kind in KINDS)
    return Text.assemble((_title(candidate), "bold"), " ", *blocks, (" SFT", "bold"), f"  {counts}")


def _markdown_table(evaluation: dict[str, Any], first: str, other: str) -> list[str]:
    lines = [f"| | {_title(first)} | {_title(other)} | difference |", "|:---|---:|---:|---:|"]
    return lines + [f"| {' | '.join(row)} |" for row in rows(evaluation, first, other)]


def _title(policy: str) -> str:
    return policy.upper().replace("_", " ")


def rows(evaluation: dict[str, Any], first: str, other: str) -> list[tuple[str, str, str, str]]:
    """(label, first, other, difference) of every metric of either policy; unknown metrics last."""
    ours, theirs = evaluation["policies"][first], evaluation["policies"][other]
    present = {name: None for name in (*ours, *theirs) if not name.endswith(("_lower", "_upper"))}
    known = {
        score_name(judge): (f"{'reward model' if judge == REWARD_MODEL else judge} score", "z.2f")
        for judge in evaluation["win_rates"]
    } | METRICS
    found = []
    for name in [*filter(present.__contains__, known), *(n for n in present if n not in known)]:
        label, form = known.get(name, (name, ".4g"))
        both = name in ours and name in theirs
        difference = f"{theirs[name] - ours[name]:+{form}}" if both else ABSENT
        found.append(
            (label, metric_value(ours, name, form), metric_value(theirs, name, form), difference)
        )
    return found


def metric_value(metrics: Mapping[str, float], name: str, form: str) -> str:
    """A metric with its interval."""
    if name not in metrics:
        return ABSENT
    ends = (f"{name}_lower", f"{name}_upper")
    interval = ", ".join(f"{metrics[end]:{form}}" for end in ends if end in metrics)
    return f"{metrics[name]:{form}}" + (f" [{interval}]" if interval else "")


def _verdict(judge: str, rate: dict[str, float], candidate: str) -> str:
    if rate["lower"] > 0.5:
        found = f"{_title(candidate)} is better"
    elif rate["upper"] < 0.5:
        found = f"{_title(candidate)} is worse"
    else:
        found = "no difference is shown"
    return f"By {judge_title(judge)}, {found}."


def _scores(sample: dict[str, Any], policy: str) -> str:
    """The scores of one policy's answer, by judge."""
    scores = {
        name.removeprefix(f"{policy}_"): score
        for name, score in sample.items()
        if name.startswith(f"{policy}_") and score is not None
    }
    return ", ".join(f"{judge} {score:z.2f}" for judge, score in scores.items())


def cell(text: str) -> str:
    """Text as one Markdown table cell that shows it literally."""
    literal = re.sub(r"([\\`*_\[\]|~$])", r"\\\1", text.replace("&", "&amp;").replace("<", "&lt;"))
    return "<br>".join(literal.splitlines())


def plot_comparison(
    evaluation: dict[str, Any], answers: dict[str, list[Answer]], path: Path
) -> None:
    """Draw the evaluation as PNG. The same evaluation gives the same bytes."""
    from matplotlib.figure import Figure

    baseline, candidate, *_ = answers
    judge = evaluation["judge"]
    # Not pyplot, which would keep the figure in memory.
    figure = Figure(figsize=(13, 3.8), dpi=130, layout="constrained")
    wins, scores, kl = figure.subplots(1, 3)
    _draw_wins(wins, evaluation["win_rates"], candidate)
    _draw_scores(scores, {name: answers[name] for name in (baseline, candidate)}, judge)
    _draw_kl(kl, answers[candidate], judge, candidate)
    for axes in (wins, scores, kl):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png", metadata={"Software": None})


def _draw_wins(axes: "Axes", rates: dict[str, dict[str, Any]], candidate: str) -> None:
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


def _draw_scores(axes: "Axes", answers: dict[str, list[Answer]], judge: str) -> None:
    """The distribution of the deciding judge's scores, for both policies."""
    scores = {name: [a.scores[judge] or 0.0 for a in given] for name, given in answers.items()}
    together = [score for given in scores.values() for score in given]
    limits = (min(together), max(together) + 1e-9)
    for (name, given), color in zip(scores.items(), (_ORANGE, _BLUE), strict=True):
        axes.hist(given, bins=24, range=limits, color=color, alpha=0.6, label=name.upper())
    axes.set(title=f"Scores of {_label(judge)}", xlabel="score", ylabel="answers")
    axes.locator_params(axis="x", nbins=5)
    axes.legend(frameon=False)


def _draw_kl(axes: "Axes", answers: list[Answer], judge: str, candidate: str) -> None:
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
