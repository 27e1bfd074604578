"""Read the report of the split: as a page of Markdown, in the terminal, and for true answers."""

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich import box
from rich.console import Console
from rich.table import Table

from rlhf_pipeline.config.rewards import Judge, SampleReward, reads_references
from rlhf_pipeline.errors import DataError

SHOWN_CHARACTERS = 2_000
"""Characters that the page shows of an example."""

_FATES = {"bad": "bad", "skipped": "skipped", "dropped": "dropped", "truncated": "cut"}
"""Counts by reason in the report, and what became of these rows."""


def render_markdown(report: dict[str, Any]) -> str:
    """Render the report as Markdown, by `split_page.md.j2`. Labels and reasons are escaped."""
    environment = Environment(  # noqa: S701 - the page is Markdown, see `_cell` and `_shown`
        loader=FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "cell": _cell, "number": "{:g}".format, "reasons": _reasons, "shown": _shown,
        "total": lambda counts: _cell(sum(counts.values())),
    }  # fmt: skip
    page = environment.get_template("split_page.md.j2").render(report)
    return page.rstrip("\n") + "\n"


def _reasons(groups: Mapping[str, Any]) -> list[tuple[str, int, str, str]]:
    """Group, count, fate and reason of the rows, the most frequent reason of a group first."""
    return [
        (name, count, fate, reason)
        for name, group in groups.items()
        for kind, fate in _FATES.items()
        for reason, count in sorted(
            group.get(kind, {}).items(), key=lambda item: (-item[1], item[0])
        )
    ]


def _cell(value: str | int | float) -> str:
    """Format a cell: a share as percentage, text escaped and on one line."""
    if isinstance(value, str):
        return re.sub(r"([\\`*\[\]<&|~$]|\b_|_\b)", r"\\\1", " ".join(value.split()))
    return f"{value:.1%}" if isinstance(value, float) else f"{value:,}"


def _shown(segments: Sequence[tuple[str, bool]]) -> str:
    """The beginning of an example as HTML; learned tokens are marked."""
    room, parts = SHOWN_CHARACTERS, []
    for text, learned in segments:
        shown = escape(text[:room])
        parts.append(f"<mark>{shown}</mark>" if learned and shown else shown)
        room -= min(room, len(text))
    more = " ..." if sum(len(text) for text, _ in segments) > SHOWN_CHARACTERS else ""
    return "".join(parts) + more


def print_summary(report: dict[str, Any], console: Console) -> None:
    """Print a summary for a terminal of 80 columns, without reasons."""
    sources = report["sources"].values()
    unused = {
        "bad": sum(sum(source["bad"].values()) for source in sources),
        "skipped": sum(sum(source["skipped"].values()) for source in sources),
        "beyond fractions": sum(source["left_out_by_fraction"] for source in sources),
        "merged": sum(source["duplicates_merged"] for source in sources),
        "near held-out prompts": sum(source["repeats_of_held_out"] for source in sources),
    }
    rows = sum(source["rows"] for source in sources)
    counts = [f"{count:,} {name}" for name, count in unused.items() if count]
    title = ", ".join([f"Prepared data: {rows:,} rows read", *counts])
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    table.add_column("")
    for name in ("rows", "validation rows", "merged", "dropped", "cut"):
        table.add_column(name, justify="right", no_wrap=True)
    for folder, group in groupby(report["files"].items(), lambda item: item[0].partition("/")[0]):
        files = dict(group)
        validation = files.get(f"{folder}/validation.arrow", {"rows": 0})["rows"]
        numbers = (
            sum(file["rows"] for file in files.values()) - validation,
            validation,
            sum(file["duplicates_merged"] for file in files.values()),
            sum(sum(file["dropped"].values()) for file in files.values()),
            sum(sum(file["truncated"].values()) for file in files.values()),
        )
        table.add_row(folder, *(f"{count:,}" for count in numbers))
    console.print(table)
    near = sum(source["near_duplicates"] for source in sources)
    if near and report["settings"]["near_duplicates"] == "keep":
        console.print(f"WARNING: training includes {near:,} near duplicates of held-out prompts")


def require_true_answers(
    split: Path, rewards: Sequence[SampleReward], judges: Sequence[Judge]
) -> None:
    """Raise DataError if prompts lack the true answers that rewards or judges read.

    `split` is the folder of the prepared files, whose report has the counts by source.
    """
    given: dict[str, Sequence[Any]] = {"ppo": rewards, "evaluation": judges}
    readers = {name: [one.label for one in g if reads_references(one)] for name, g in given.items()}
    missing = json.loads((split / "report.json").read_text()).get("without_reference")
    if missing is None and any(readers.values()):
        raise DataError(
            "split: found one of an earlier version, expected one that counts true answers. Fix: "
            "`kedro run --from-nodes=split`"
        )
    for path, counts in (missing or {}).items():
        if names := readers[path.partition("/")[0]]:
            listed = ", ".join(f"{source} {count}" for source, count in counts.items())
            raise DataError(
                f"split: found prompts without a true answer in {path} ({listed}), expected one "
                f"for each, as {', '.join(names)} reads it. Fix: set split.without_reference to "
                "drop, which keeps such prompts out of PPO and the final evaluation, or set "
                "columns.reference of the source"
            )
