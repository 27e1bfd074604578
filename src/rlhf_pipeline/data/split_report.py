"""What became of the data, for people: a page, a figure of the lengths, and a few lines for the terminal.

The report is a dict of JSON types, as `report.json` holds it:

    sources           label -> rows; bad and passed_over by reason; left_out_by_fraction; duplicates_merged; parts -> rows
    distinct_prompts  part -> number
    files             path -> rows; duplicates_merged; dropped and truncated by reason; tokens: column -> total, max, p50,
                      p90, p99
    overlap           "test and validation" -> prompts that both hold
    lengths           "prompt" and "response" -> limit; counts: length in tokens, before the limit -> number
    pretraining       None, or sources (without parts), documents, tokens, block_tokens, blocks, tokens_left_out
    settings          the configuration's weights, fractions, over_long_prompts, over_long_responses, sft_loss
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from rlhf_pipeline.config.split import PHASES
from rlhf_pipeline.data import length_histogram

FIGURE = "lengths.png"
"""Where the page looks for the figure: beside itself."""

_PARTS = (*PHASES, "validation", "test")
_FOLDERS = (*PHASES, "evaluation", "pretraining")

_LEARNED = {
    "response": "the tokens of the final response",
    "assistant": "the tokens of every assistant turn",
    "all": "all tokens, the prompt's too",
}
_FATE = {"drop": "dropped", "truncate": "cut"}


# --- the page -------------------------------------------------------------------------------------


def render_markdown(report: dict[str, Any]) -> str:
    """The whole report as Markdown; labels and reasons are shown as they are, never interpreted."""
    sections = [_sources(report), _parts(report), _files(report), _lengths(report)]
    if report["pretraining"] is not None:
        sections.append(_pretraining(report["pretraining"]))
    return "\n".join(["# The prepared data\n", *(line for section in sections for line in section)])


def _sources(report: dict[str, Any]) -> Iterator[str]:
    sources: dict[str, Any] = report["sources"]
    yield "## What was read\n"
    yield from _sums(
        ("source", "rows", "bad", "passed over", "beyond fraction", "merged", "used"),
        {
            label: (*_read(source), *_left_out(source), sum(source["parts"].values()))
            for label, source in sources.items()
        },
    )
    yield "Merged rows are in an earlier source too, with the same prompt and the same answers.\n"
    yield from _reasons("source", sources, {"bad": "bad", "passed_over": "passed over"})


def _read(source: dict[str, Any]) -> tuple[int, ...]:
    """Rows, and those that hold no record: bad, passed over."""
    return source["rows"], sum(source["bad"].values()), sum(source["passed_over"].values())


def _left_out(source: dict[str, Any]) -> tuple[int, ...]:
    """Records that are not used: beyond the fraction, merged."""
    return source["left_out_by_fraction"], source["duplicates_merged"]


def _parts(report: dict[str, Any]) -> Iterator[str]:
    prompts, settings = report["distinct_prompts"], report["settings"]
    total = sum(prompts.values())
    yield "## Who gets which prompts\n"
    yield from _table(
        ("part", "distinct prompts", "share", "wished"),
        [
            (part, prompts[part], prompts[part] / total, wished)
            for part, wished in _wished(settings).items()
        ],
    )
    weights = " : ".join(f"{weight:g}" for weight in settings["weights"])
    yield (
        f"The phases divide what validation and test leave by the weights {weights}. Shares differ from the wished "
        "ones where prompts cannot serve every phase.\n"
    )
    yield _overlap(report["overlap"])
    yield "Rows of each source:\n"
    yield from _sums(
        ("source", *_PARTS),
        {
            label: [source["parts"].get(part, 0) for part in _PARTS]
            for label, source in report["sources"].items()
        },
    )


def _wished(settings: dict[str, Any]) -> dict[str, float]:
    """Part to the share of all distinct prompts that the configuration asks for."""
    held_out = {part: float(settings[f"{part}_fraction"]) for part in ("validation", "test")}
    rest = 1 - sum(held_out.values())
    weights = dict(zip(PHASES, settings["weights"], strict=True))
    return {
        phase: rest * weight / sum(weights.values()) for phase, weight in weights.items()
    } | held_out


def _overlap(overlap: dict[str, int]) -> str:
    shared = [f"{pair} share {count:,}" for pair, count in overlap.items() if count]
    if shared:
        return f"**Prompts are in two parts:** {'; '.join(shared)}.\n"
    return f"No prompt is in two parts: each of the {len(overlap)} pairs of parts was compared and shares 0 prompts.\n"


def _files(report: dict[str, Any]) -> Iterator[str]:
    files = _in_order(report["files"])
    yield "## What each phase reads\n"
    yield from _table(
        ("file", "rows", "merged", "dropped", "cut"),
        [(path, *_written(file)) for path, file in files.items()],
    )
    yield (
        "PPO and the evaluation read a prompt once, however many rows have it: the others are merged. SFT learns "
        f"{_LEARNED[report['settings']['sft_loss']]}.\n"
    )
    yield from _reasons("file", files, {"dropped": "dropped", "truncated": "cut"})
    yield from _table(
        ("file", "column", "tokens", "median", "90%", "99%", "longest"),
        [
            (path, column, *(tokens[key] for key in ("total", "p50", "p90", "p99", "max")))
            for path, file in files.items()
            for column, tokens in file["tokens"].items()
        ],
    )


def _written(file: dict[str, Any]) -> tuple[int, ...]:
    """Rows of a file, and the rows that were merged, dropped and cut on the way."""
    dropped, cut = (sum(file[kind].values()) for kind in ("dropped", "truncated"))
    return file["rows"], file["duplicates_merged"], dropped, cut


def _in_order(files: dict[str, Any]) -> dict[str, Any]:
    """The files from left to right."""
    return dict(
        sorted(files.items(), key=lambda item: (_FOLDERS.index(item[0].partition("/")[0]), item[0]))
    )


def _lengths(report: dict[str, Any]) -> Iterator[str]:
    yield f"## How long the texts are\n\n![Lengths of prompts and responses in tokens]({FIGURE})\n"
    for name, lengths in report["lengths"].items():
        counts = _counts(lengths)
        total = sum(counts.values())
        over = sum(count for length, count in counts.items() if length > lengths["limit"])
        fate = _FATE.get(report["settings"][f"over_long_{name}s"])
        found = (
            f"{over:,} of {total:,} ({over / total:.1%}), {fate}" if over else f"none of {total:,}"
        )
        yield f"- {name}s of more than max_{name}_tokens = {lengths['limit']:,}: {found}"
    yield ""


def _pretraining(pretraining: dict[str, Any]) -> Iterator[str]:
    sources: dict[str, Any] = pretraining["sources"]
    yield "## Text for PPO's language-model loss\n"
    yield from _table(
        ("source", "rows", "bad", "passed over"),
        [(label, *_read(source)) for label, source in sources.items()],
    )
    yield from _reasons("source", sources, {"bad": "bad", "passed_over": "passed over"})
    yield (
        f"{pretraining['documents']:,} documents of {pretraining['tokens']:,} tokens fill {pretraining['blocks']:,} "
        f"blocks of {pretraining['block_tokens']:,} tokens; {pretraining['tokens_left_out']:,} tokens at the end, less "
        "than a block, are left out.\n"
    )


def _reasons(owner: str, groups: Mapping[str, Any], kinds: Mapping[str, str]) -> Iterator[str]:
    """Rows by reason, the most frequent first; nothing where there is none."""
    rows = [
        (name, count, fate, reason)
        for name, group in groups.items()
        for kind, fate in kinds.items()
        for reason, count in sorted(group[kind].items(), key=lambda item: (-item[1], item[0]))
    ]
    if rows:
        yield from _table((owner, "rows", "", "reason"), rows)


def _sums(header: Sequence[str], numbers: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """Numbers by source, and their sums where there are several."""
    rows: list[tuple[str | int, ...]] = [(label, *row) for label, row in numbers.items()]
    if len(rows) > 1:
        rows.append(
            ("all sources", *(sum(column) for column in zip(*numbers.values(), strict=True)))
        )
    yield from _table(header, rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str | int | float]]) -> Iterator[str]:
    """A Markdown table: whole numbers and shares to the right, words to the left."""
    yield f"| {' | '.join(header)} |"
    yield f"|{'|'.join(':---' if isinstance(cell, str) else '---:' for cell in rows[0])}|"
    for row in rows:
        yield f"| {' | '.join(map(_cell, row))} |"
    yield ""


def _cell(value: str | int | float) -> str:
    """A share as percentage; words on one line, shown as they are."""
    if isinstance(value, str):
        return re.sub(r"([\\`*\[\]<&|~$]|\b_|_\b)", r"\\\1", " ".join(value.split()))
    return f"{value:.1%}" if isinstance(value, float) else f"{value:,}"


# --- the terminal ---------------------------------------------------------------------------------


def print_summary(report: dict[str, Any], console: Console) -> None:
    """What the split made, for a terminal of 80 columns; reasons are left to the page."""
    sources = [(*_read(source), *_left_out(source)) for source in report["sources"].values()]
    rows, *unused = (sum(numbers) for numbers in zip(*sources, strict=True))
    named = zip(("bad", "passed over", "beyond fractions", "merged"), unused, strict=True)
    title = ", ".join(
        [
            f"Prepared data: {rows:,} rows read",
            *(f"{count:,} {name}" for name, count in named if count),
        ]
    )
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    table.add_column("")
    for name in ("rows", "validation rows", "merged", "dropped", "cut"):
        table.add_column(name, justify="right", no_wrap=True)
    for folder, files in _by_folder(report["files"]).items():
        rows, merged, dropped, cut = (
            sum(column) for column in zip(*map(_written, files.values()), strict=True)
        )
        validation = files["validation.arrow"]["rows"] if "validation.arrow" in files else 0
        table.add_row(
            folder,
            *(f"{count:,}" for count in (rows - validation, validation, merged, dropped, cut)),
        )
    console.print(table)


def _by_folder(files: dict[str, Any]) -> dict[str, dict[str, Any]]:
    folders: dict[str, dict[str, Any]] = {}
    for path, file in _in_order(files).items():
        folder, _, name = path.partition("/")
        folders.setdefault(folder, {})[name] = file
    return folders


# --- the figure -----------------------------------------------------------------------------------


def plot_lengths(report: dict[str, Any], path: Path) -> None:
    """Draw how long prompts and responses are, against their limits, as PNG. The same report gives the same bytes."""
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(10, 3.8), dpi=160, layout="constrained"
    )  # no pyplot: it would keep the figure
    for axes, (name, lengths) in zip(figure.subplots(1, 2), report["lengths"].items(), strict=True):
        length_histogram.draw(axes, name, _counts(lengths), lengths["limit"])
    figure.savefig(path, format="png", metadata={"Software": None})


def _counts(lengths: dict[str, Any]) -> dict[int, int]:
    """Length to number; JSON's keys are strings."""
    return {int(length): count for length, count in lengths["counts"].items()}
