"""Read the report of the split: as a page of Markdown, in the terminal, and for true answers."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import accumulate, groupby
from math import ceil
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich import box
from rich.console import Console
from rich.table import Table

from rlhf_pipeline.config.reward_files import reads_references
from rlhf_pipeline.config.rewards import Judge, Reward
from rlhf_pipeline.config.split import PHASES
from rlhf_pipeline.errors import DataError

_BARS = 16
"""Largest number of bars of a histogram, without that of the tail."""
_BAR_WIDTH = 24

SHOWN_CHARACTERS = 2_000
"""Characters that the page shows of an example."""

_PARTS = (*PHASES, "validation", "test")
_FATES = {"bad": "bad", "skipped": "skipped", "dropped": "dropped", "truncated": "cut"}
"""Counts by reason in the report, and what became of these rows."""

_Cells = Sequence[str | int | float]


def render_markdown(report: dict[str, Any]) -> str:
    """Render the report as Markdown, by `split_page.md.j2`. Labels and reasons are escaped."""
    environment = Environment(  # noqa: S701 - the page is Markdown, see `_cell` and `_shown`
        loader=FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {"cell": _cell, "number": "{:g}".format, "reasons": _reasons}
    environment.filters["shown"] = _shown
    sources, files = report["sources"], report["files"]
    texts = report["pretraining"] or {"sources": {}}
    prompts, conversations = report["distinct_prompts"], report["conversations"]
    total = sum(conversations.values())
    requested = _requested_shares(report["settings"])
    page = environment.get_template("split_page.md.j2").render(
        report
        | {
            "parts": [*_PARTS],
            "used_rows": _with_sums(
                (label, *_rows_unused(source), sum(source["parts"].values()))
                for label, source in sources.items()
            ),
            "shares": [
                (part, prompts[part], found := conversations[part], found / total, share)
                for part, share in requested.items()
            ],
            "part_rows": _with_sums(
                (label, *(source["parts"].get(part, 0) for part in _PARTS))
                for label, source in sources.items()
            ),
            "file_rows": [(path, *_rows_written(file)) for path, file in files.items()],
            "token_rows": [
                (path, column, *(tokens[key] for key in ("total", "p50", "p90", "p99", "max")))
                for path, file in files.items()
                for column, tokens in file["tokens"].items()
            ],
            "lengths": [
                (*_over_limit(name, one), histogram(_counts(one), one["limit"]))
                for name, one in report["lengths"].items()
            ],
            "text_rows": [(label, *_rows_read(one)) for label, one in texts["sources"].items()],
        }
    )
    return page.rstrip("\n") + "\n"


def _rows_read(source: dict[str, Any]) -> tuple[int, ...]:
    """All rows, bad rows, skipped rows."""
    return source["rows"], sum(source["bad"].values()), sum(source["skipped"].values())


def _rows_unused(source: dict[str, Any]) -> tuple[int, ...]:
    """All rows; bad and skipped rows; rows beyond the fraction, merged, near held-out ones."""
    names = ("left_out_by_fraction", "duplicates_merged", "repeats_of_held_out")
    return *_rows_read(source), *(source[name] for name in names)


def _rows_written(file: dict[str, Any]) -> tuple[int, ...]:
    """Rows of a file, and the number of merged, dropped and cut rows."""
    dropped, cut = (sum(file[kind].values()) for kind in ("dropped", "truncated"))
    return file["rows"], file["duplicates_merged"], dropped, cut


def _requested_shares(settings: dict[str, Any]) -> dict[str, float]:
    """Part -> share of all conversations that the configuration requests."""
    held_out = {part: float(settings[f"{part}_fraction"]) for part in ("validation", "test")}
    rest = 1 - sum(held_out.values())
    weights = dict(zip(PHASES, settings["weights"], strict=True))
    return {
        phase: rest * weight / sum(weights.values()) for phase, weight in weights.items()
    } | held_out


def _over_limit(name: str, lengths: dict[str, Any]) -> tuple[str, int, int, int]:
    """Name and limit of a length, the number of texts above the limit, and of all texts."""
    counts = _counts(lengths)
    over = sum(count for length, count in counts.items() if length > lengths["limit"])
    return name, lengths["limit"], over, sum(counts.values())


def histogram(counts: Mapping[int, int], limit: int) -> list[_Cells]:
    """Range, number, share and bar: ranges of equal width, none with lengths on both sides of the
    limit.

    They cover 99% of the lengths, and the limit if it is near or exceeded; one more range is for
    the tail.
    """
    if not counts:
        return []
    lengths, total = sorted(counts), sum(counts.values())
    longest, shorter = lengths[-1], accumulate(counts[length] for length in lengths)
    end = next(n for n, rows in zip(lengths, shorter, strict=True) if 100 * rows >= 99 * total)
    if longest > limit or limit <= 3 * end:
        end = max(end, limit)
    width = ceil(end / _BARS)
    tail = ceil((end - limit) / width)
    bars = Counter[int]()
    for length, count in counts.items():
        bars[min((length - limit - 1) // width, tail)] += count
    rows: list[_Cells] = []
    for number in range(min(bars), max(bars) + 1):
        start = limit + number * width
        label = (
            f"{max(start + 1, lengths[0]):,} to {longest if number == tail else start + width:,}"
        )
        bar = ("\N{FULL BLOCK}" if number < 0 else "\N{MEDIUM SHADE}") * ceil(
            _BAR_WIDTH * bars[number] / max(bars.values())
        )
        rows.append((label, bars[number], bars[number] / total, bar))
    return rows


def _with_sums(rows: Iterator[_Cells]) -> list[_Cells]:
    found = list(rows)
    sums = [sum(column) for column in list(zip(*found, strict=True))[1:]]
    return [*found, ("all sources", *sums)] if len(found) > 1 else found


def _reasons(groups: Mapping[str, Any]) -> list[_Cells]:
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
    sources = map(_rows_unused, report["sources"].values())
    rows, *unused = (sum(numbers) for numbers in zip(*sources, strict=True))
    names = ("bad", "skipped", "beyond fractions", "merged", "near held-out prompts")
    counts = [f"{count:,} {name}" for name, count in zip(names, unused, strict=True) if count]
    title = ", ".join([f"Prepared data: {rows:,} rows read", *counts])
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    table.add_column("")
    for name in ("rows", "validation rows", "merged", "dropped", "cut"):
        table.add_column(name, justify="right", no_wrap=True)
    for folder, group in groupby(report["files"].items(), lambda item: item[0].partition("/")[0]):
        files = dict(group)
        columns = zip(*map(_rows_written, files.values()), strict=True)
        rows, merged, dropped, cut = map(sum, columns)
        validation = files.get(f"{folder}/validation.arrow", {"rows": 0})["rows"]
        numbers = (rows - validation, validation, merged, dropped, cut)
        table.add_row(folder, *(f"{count:,}" for count in numbers))
    console.print(table)
    near = sum(source["near_duplicates"] for source in report["sources"].values())
    if near and report["settings"]["near_duplicates"] == "keep":
        console.print(f"WARNING: training includes {near:,} near duplicates of held-out prompts")


def _counts(lengths: dict[str, Any]) -> dict[int, int]:
    """Length -> number, as integers; the keys of JSON are strings."""
    return {int(length): count for length, count in lengths["counts"].items()}


def require_true_answers(split: Path, rewards: Sequence[Reward], judges: Sequence[Judge]) -> None:
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
