"""Show the report of the split: as a page, as a figure, and in the terminal.

The report is a dict of JSON types, stored as `report.json`:

    sources           label -> rows; bad and skipped rows by reason; left_out_by_fraction;
                      duplicates_merged; parts -> rows
    distinct_prompts  part -> number
    files             path -> rows; duplicates_merged; dropped and truncated by reason;
                      tokens: column -> total, max, p50, p90, p99; in the order of the phases
    overlap           "test and validation" -> number of prompts in both
    lengths           "prompt" and "response" -> limit; counts: length in tokens, before the
                      limit -> number
    pretraining       None, or sources (without parts), documents, tokens, block_tokens, blocks,
                      tokens_left_out
    examples          what it shows -> segments: text, and whether the model learns it
    settings          of the configuration: weights, fractions, over_long_prompts,
                      over_long_responses, sft_loss
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from rlhf_pipeline.config.split import PHASES
from rlhf_pipeline.data import length_histogram

FIGURE = "lengths.png"
"""File name of the figure, in the folder of the page."""

SHOWN_CHARACTERS = 2_000
"""Characters that the page shows of an example."""

_PARTS = (*PHASES, "validation", "test")

_LEARNED = {
    "response": "the tokens of the final response",
    "assistant": "the tokens of every assistant turn",
    "all": "all tokens, including the prompt",
}
_OVER_LONG_ACTION = {"drop": "dropped", "truncate": "cut"}
_FATES = {"bad": "bad", "skipped": "skipped", "dropped": "dropped", "truncated": "cut"}
"""Counts by reason in the report, and what became of these rows."""


def render_markdown(report: dict[str, Any]) -> str:
    """Render the report as Markdown. Labels and reasons are escaped."""
    lines = ["# Prepared data\n"]
    lines += _sources_section(report)
    lines += _parts_section(report)
    lines += _files_section(report)
    lines += _lengths_section(report)
    lines += _examples_section(report)
    if report["pretraining"] is not None:
        lines += _pretraining_section(report["pretraining"])
    return "\n".join(lines)


def _sources_section(report: dict[str, Any]) -> Iterator[str]:
    sources: dict[str, Any] = report["sources"]
    yield "## Rows of each source\n"
    yield from _table_with_sums(
        ("source", "rows", "bad", "skipped", "beyond fraction", "merged", "used"),
        {
            label: (*_rows_unused(source), sum(source["parts"].values()))
            for label, source in sources.items()
        },
    )
    yield "Merged rows repeat a row of an earlier source: same prompt, same answers.\n"
    yield from _reasons_table("source", sources)


def _rows_read(source: dict[str, Any]) -> tuple[int, ...]:
    """All rows, bad rows, skipped rows."""
    return source["rows"], sum(source["bad"].values()), sum(source["skipped"].values())


def _rows_unused(source: dict[str, Any]) -> tuple[int, ...]:
    """All rows; bad and skipped rows; rows beyond the fraction; merged rows."""
    return *_rows_read(source), source["left_out_by_fraction"], source["duplicates_merged"]


def _parts_section(report: dict[str, Any]) -> Iterator[str]:
    prompts, settings = report["distinct_prompts"], report["settings"]
    total = sum(prompts.values())
    yield "## Prompts of each part\n"
    yield from _table(
        ("part", "distinct prompts", "share", "requested"),
        [
            (part, prompts[part], prompts[part] / total, requested)
            for part, requested in _requested_shares(settings).items()
        ],
    )
    weights = " : ".join(f"{weight:g}" for weight in settings["weights"])
    yield (
        f"The weights {weights} divide all prompts outside validation and test. Shares differ from "
        "the requested ones if some prompts cannot serve every phase.\n"
    )
    yield (
        f"No prompt is in two parts: all {len(report['overlap'])} pairs of parts were compared.\n"
    )
    yield "Rows of each source and part:\n"
    yield from _table_with_sums(
        ("source", *_PARTS),
        {
            label: [source["parts"].get(part, 0) for part in _PARTS]
            for label, source in report["sources"].items()
        },
    )


def _requested_shares(settings: dict[str, Any]) -> dict[str, float]:
    """Part -> share of all distinct prompts that the configuration requests."""
    held_out = {part: float(settings[f"{part}_fraction"]) for part in ("validation", "test")}
    rest = 1 - sum(held_out.values())
    weights = dict(zip(PHASES, settings["weights"], strict=True))
    return {
        phase: rest * weight / sum(weights.values()) for phase, weight in weights.items()
    } | held_out


def _files_section(report: dict[str, Any]) -> Iterator[str]:
    files = report["files"]
    yield "## Files of each phase\n"
    yield from _table(
        ("file", "rows", "merged", "dropped", "cut"),
        [(path, *_rows_written(file)) for path, file in files.items()],
    )
    yield (
        "The files of PPO and evaluation contain each prompt once; further rows of the prompt are "
        f"merged. SFT learns {_LEARNED[report['settings']['sft_loss']]}.\n"
    )
    yield from _reasons_table("file", files)
    yield from _table(
        ("file", "column", "tokens", "median", "90%", "99%", "longest"),
        [
            (path, column, *(tokens[key] for key in ("total", "p50", "p90", "p99", "max")))
            for path, file in files.items()
            for column, tokens in file["tokens"].items()
        ],
    )


def _rows_written(file: dict[str, Any]) -> tuple[int, ...]:
    """Rows of a file, and the number of merged, dropped and cut rows."""
    dropped, cut = (sum(file[kind].values()) for kind in ("dropped", "truncated"))
    return file["rows"], file["duplicates_merged"], dropped, cut


def _lengths_section(report: dict[str, Any]) -> Iterator[str]:
    yield f"## Lengths\n\n![Lengths of prompts and responses in tokens]({FIGURE})\n"
    for name, lengths in report["lengths"].items():
        counts = _counts(lengths)
        total = sum(counts.values())
        over = sum(count for length, count in counts.items() if length > lengths["limit"])
        action = _OVER_LONG_ACTION.get(report["settings"][f"over_long_{name}s"])
        some = f"{over:,} of {total:,} ({over / total:.1%}), {action}" if over else ""
        found = some or f"none of {total:,}"
        yield f"- {name}s longer than max_{name}_tokens = {lengths['limit']:,}: {found}"
    yield ""


def _examples_section(report: dict[str, Any]) -> Iterator[str]:
    yield "## Examples\n"
    yield "The first row of each phase, as the model sees it. It learns the marked tokens.\n"
    for name, segments in report["examples"].items():
        yield f"**{name}**\n"
        yield f"{_example(segments)}\n"


def _example(segments: Sequence[tuple[str, bool]]) -> str:
    """An example as HTML inside Markdown; learned tokens are marked."""
    room, parts = SHOWN_CHARACTERS, []
    for text, learned in segments:
        shown = escape(text[:room])
        parts.append(f"<mark>{shown}</mark>" if learned and shown else shown)
        room -= min(room, len(text))
    more = " ..." if sum(len(text) for text, _ in segments) > SHOWN_CHARACTERS else ""
    return f"<pre style='white-space: pre-wrap'>{''.join(parts)}{more}</pre>"


def _pretraining_section(pretraining: dict[str, Any]) -> Iterator[str]:
    sources: dict[str, Any] = pretraining["sources"]
    yield "## Text for PPO's language-model loss\n"
    yield from _table(
        ("source", "rows", "bad", "skipped"),
        [(label, *_rows_read(source)) for label, source in sources.items()],
    )
    yield from _reasons_table("source", sources)
    yield (
        f"{pretraining['documents']:,} documents with {pretraining['tokens']:,} tokens fill "
        f"{pretraining['blocks']:,} blocks of {pretraining['block_tokens']:,} tokens. The last "
        f"{pretraining['tokens_left_out']:,} tokens do not fill a block and are left out.\n"
    )


def _reasons_table(owner: str, groups: Mapping[str, Any]) -> Iterator[str]:
    """A table of rows by reason, most frequent first; nothing if there are no reasons."""
    rows = [
        (name, count, fate, reason)
        for name, group in groups.items()
        for kind, fate in _FATES.items()
        for reason, count in sorted(
            group.get(kind, {}).items(), key=lambda item: (-item[1], item[0])
        )
    ]
    if rows:
        yield from _table((owner, "rows", "", "reason"), rows)


def _table_with_sums(header: Sequence[str], numbers: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """A table of numbers by source, with sums if there are several sources."""
    rows: list[tuple[str | int, ...]] = [(label, *row) for label, row in numbers.items()]
    if len(rows) > 1:
        rows.append(("all sources", *map(sum, zip(*numbers.values(), strict=True))))
    yield from _table(header, rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str | int | float]]) -> Iterator[str]:
    """A Markdown table; numbers are aligned right, text left."""
    yield f"| {' | '.join(header)} |"
    yield f"|{'|'.join(':---' if isinstance(cell, str) else '---:' for cell in rows[0])}|"
    for row in rows:
        yield f"| {' | '.join(map(_cell, row))} |"
    yield ""


def _cell(value: str | int | float) -> str:
    """Format a cell: a share as percentage, text escaped and on one line."""
    if isinstance(value, str):
        return re.sub(r"([\\`*\[\]<&|~$]|\b_|_\b)", r"\\\1", " ".join(value.split()))
    return f"{value:.1%}" if isinstance(value, float) else f"{value:,}"


def print_summary(report: dict[str, Any], console: Console) -> None:
    """Print a summary for a terminal of 80 columns, without reasons."""
    sources = map(_rows_unused, report["sources"].values())
    rows, *unused = (sum(numbers) for numbers in zip(*sources, strict=True))
    named = zip(("bad", "skipped", "beyond fractions", "merged"), unused, strict=True)
    counts = [f"{count:,} {name}" for name, count in named if count]
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


def plot_lengths(report: dict[str, Any], path: Path) -> None:
    """Draw the lengths of prompts and responses as PNG. The same report gives the same bytes."""
    from matplotlib.figure import Figure

    # Not pyplot, which would keep the figure in memory.
    figure = Figure(figsize=(10, 3.8), dpi=160, layout="constrained")
    for axes, (name, lengths) in zip(figure.subplots(1, 2), report["lengths"].items(), strict=True):
        length_histogram.draw(axes, name, _counts(lengths), lengths["limit"])
    figure.savefig(path, format="png", metadata={"Software": None})


def _counts(lengths: dict[str, Any]) -> dict[int, int]:
    """Length -> number, as integers; the keys of JSON are strings."""
    return {int(length): count for length, count in lengths["counts"].items()}
