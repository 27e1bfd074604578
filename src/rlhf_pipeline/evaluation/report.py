"""The evaluation's report: SFT beside the candidate, PPO or DPO; the win rate in plain words, and pairs of answers to read.

The evaluation is a dict of JSON types: "candidate", "ppo" or "dpo"; "prompts" (their number) and "decoding", shared by
both policies; "policies", where a metric `m` of "sft" or the candidate may have its 95% interval beside it as `m_lower`
and `m_upper`; "win_rates" of the candidate by "score" (the reward model) and by "gold" (the judge, where there is one);
"variants" of the candidate, "ppo_ema", with their win rates; "samples", pairs of answers with scores.
"""

from __future__ import annotations

import re
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

METRICS = {
    "score": ("reward model score", ".2f"),
    "gold_score": ("gold score", ".2f"),
    "kl": ("KL from SFT (nats)", ".2f"),
    "response_tokens": ("response tokens", ".1f"),
    "eos_fraction": ("ended by itself", ".3f"),
    "distinct_1": ("distinct words", ".3f"),
    "distinct_2": ("distinct word pairs", ".3f"),
}
"""Metric to its name for readers and the format of its numbers, in the report's order."""

JUDGES = {"score": "the reward model", "gold": "the gold judge"}

CAVEATS = {
    "ppo": {
        "score": "PPO was trained to please the reward model, so this judge leans towards it.",
        "gold": "PPO never saw this judge's scores.",
    },
    "dpo": {
        "score": "DPO and the reward model learned from the same comparisons, so this judge leans towards it.",
        "gold": "DPO never saw this judge's scores.",
    },
}
"""What to bear in mind about a candidate's win rate by a judge."""

ABSENT = "-"


def render_markdown(evaluation: dict[str, Any]) -> str:
    """The whole report as Markdown; text from models is shown as it is, never interpreted."""
    candidate = evaluation["candidate"]
    name = candidate.upper()
    lines = [f"# {name} against SFT", "", _setting(evaluation), ""]
    lines += [f"| | SFT | {name} | difference |", "|:---|---:|---:|---:|"]
    policies = evaluation["policies"]
    lines += [f"| {' | '.join(row)} |" for row in _rows(policies["sft"], policies[candidate])]
    lines += ["", "Intervals are 95%.", "", "## Which answer is better?", ""]
    for judge, rate in evaluation["win_rates"].items():
        lines += [f"**{_verdict(judge, rate, candidate)}** {_win_rate(judge, rate, candidate)}", ""]
    for variant, rates in evaluation["variants"].items():
        lines += [
            f"## {_title(variant)} beside {name}",
            "",
            f"| | {name} | {_title(variant)} | difference |",
        ]
        lines += ["|:---|---:|---:|---:|"]
        lines += [f"| {' | '.join(row)} |" for row in _rows(policies[candidate], policies[variant])]
        lines += [
            "",
            *(f"{_variant_rate(variant, judge, rate)}" for judge, rate in rates.items()),
            "",
        ]
    lines += ["## Samples", "", f"| | prompt | SFT | {name} |", "|---:|:---|:---|:---|"]
    for number, sample in enumerate(evaluation["samples"], start=1):
        answers = [
            f"{_cell(sample[name])}<br>({_scores(sample, name)})" for name in ("sft", candidate)
        ]
        lines.append(f"| {number} | {_cell(sample['prompt'])} | {' | '.join(answers)} |")
    return "\n".join(lines) + "\n"


def print_table(evaluation: dict[str, Any], console: Console) -> None:
    """The comparison and the win rates for a terminal of 80 columns; the samples are left to the report."""
    candidate = evaluation["candidate"]
    name = candidate.upper()
    policies = evaluation["policies"]
    console.print(
        _table(f"{name} against SFT", ("SFT", name), _rows(policies["sft"], policies[candidate]))
    )
    console.print(Text(f"{_setting(evaluation)} Intervals are 95%."))
    for judge, rate in evaluation["win_rates"].items():
        console.print()
        console.print(
            Text.assemble(
                (_verdict(judge, rate, candidate), "bold"), " ", _win_rate(judge, rate, candidate)
            )
        )

    for variant, rates in evaluation["variants"].items():
        rows = _rows(policies[candidate], policies[variant])
        console.print()
        console.print(_table(f"{_title(variant)} beside {name}", (name, _title(variant)), rows))
        for judge, rate in rates.items():
            console.print(Text(_variant_rate(variant, judge, rate)))


def _table(title: str, policies: tuple[str, str], rows: list[tuple[str, str, str, str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    table.add_column("")
    for column in (*policies, "difference"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))  # Text: an interval's brackets are no markup
    return table


def _title(policy: str) -> str:
    return policy.upper().replace("_", " ")


def _variant_rate(variant: str, judge: str, rate: dict[str, float]) -> str:
    return (
        f"By {JUDGES[judge]}, {_title(variant)}'s answer is better than SFT's on {rate['rate']:.1%} of {rate['n']} prompts, "
        f"with 95% confidence between {rate['lower']:.1%} and {rate['upper']:.1%}."
    )


def _setting(evaluation: dict[str, Any]) -> str:
    decoding = ", ".join(f"{name} {value}" for name, value in evaluation["decoding"].items())
    return f"Both answered the same {evaluation['prompts']} held-out prompts ({decoding})."


def _rows(first: dict[str, float], other: dict[str, float]) -> list[tuple[str, str, str, str]]:
    """(metric, first, other, difference) for every metric that either policy has; unknown ones last, by their own names."""
    present = {name: None for name in (*first, *other) if not name.endswith(("_lower", "_upper"))}
    rows = []
    for name in [
        *filter(present.__contains__, METRICS),
        *(name for name in present if name not in METRICS),
    ]:
        label, form = METRICS.get(name, (name, ".4g"))
        difference = (
            f"{other[name] - first[name]:+{form}}" if name in first and name in other else ABSENT
        )
        rows.append((label, _value(first, name, form), _value(other, name, form), difference))
    return rows


def _value(metrics: dict[str, float], name: str, form: str) -> str:
    if name not in metrics:
        return ABSENT
    interval = [
        f"{metrics[f'{name}_{end}']:{form}}"
        for end in ("lower", "upper")
        if f"{name}_{end}" in metrics
    ]
    return f"{metrics[name]:{form}}" + (f" [{', '.join(interval)}]" if interval else "")


def _verdict(judge: str, rate: dict[str, float], candidate: str) -> str:
    if rate["lower"] > 0.5:
        found = f"{candidate.upper()} is better"
    elif rate["upper"] < 0.5:
        found = f"{candidate.upper()} is worse"
    else:
        found = "no difference is shown"
    return f"By {JUDGES[judge]}, {found}."


def _win_rate(judge: str, rate: dict[str, float], candidate: str) -> str:
    where = (
        "above" if rate["lower"] > 0.5 else "below" if rate["upper"] < 0.5 else "on both sides of"
    )
    return (
        f"It prefers {candidate.upper()}'s answer to SFT's on {rate['rate']:.1%} of {rate['n']} prompts: "
        f"{rate['wins']} wins, {rate['ties']} ties (each counts half), {rate['losses']} losses. "
        f"With 95% confidence the true rate is between {rate['lower']:.1%} and {rate['upper']:.1%}, "
        f"{where} the 50% of two equal policies. {CAVEATS[candidate][judge]}"
    )


def _scores(sample: dict[str, Any], name: str) -> str:
    gold = sample.get(f"{name}_gold")
    return f"score {sample[f'{name}_score']:.2f}" + ("" if gold is None else f", gold {gold:.2f}")


def _cell(text: str) -> str:
    """Text as one Markdown table cell that shows it literally."""
    literal = re.sub(r"([\\`*_\[\]|~$])", r"\\\1", text.replace("&", "&amp;").replace("<", "&lt;"))
    return "<br>".join(literal.splitlines())
