"""What reads the report of the split: metrics, a summary for the terminal, a check of a run."""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from rlhf_pipeline.config.rewards import Scorer, reads_references
from rlhf_pipeline.errors import DataError


def _total(groups: Iterable[Mapping[str, Any]], name: str) -> int:
    """A number of all groups together; counts by reason are added up."""
    counts = (group[name] for group in groups)
    return sum(count if isinstance(count, int) else sum(count.values()) for count in counts)


def headline(report: dict[str, Any]) -> dict[str, float]:
    """The report as metrics: rows, bad, merged and dropped rows, prompts, tokens, files."""
    sources, files = report["sources"].values(), report["files"]
    metrics = {
        "data/rows": _total(sources, "rows"),
        "data/bad_rows": _total(sources, "bad"),
        "data/duplicates_merged": _total(sources, "duplicates_merged"),
        "data/near_duplicates": _total(sources, "near_duplicates"),
        "data/distinct_prompts": sum(report["distinct_prompts"].values()),
        "data/dropped_rows": _total(files.values(), "dropped"),
        "data/truncated_texts": _total(files.values(), "truncated"),
        "data/tokens": sum(_total(file["tokens"].values(), "total") for file in files.values()),
    }
    for path, file in files.items():
        metrics[f"data/{path.removesuffix('.arrow').replace('/', '_')}_rows"] = file["rows"]
    if report["pretraining"]:
        metrics["data/pretraining_blocks"] = report["pretraining"]["blocks"]
    return {name: float(value) for name, value in metrics.items()}


def print_summary(report: dict[str, Any], console: Console) -> None:
    """Print a summary for a terminal of 80 columns, without reasons."""
    sources = report["sources"].values()
    unused = {
        "bad": "bad", "skipped": "skipped", "beyond fractions": "left_out_by_fraction",
        "merged": "duplicates_merged", "near held-out prompts": "repeats_of_held_out",
    }  # fmt: skip
    counts = {title: _total(sources, name) for title, name in unused.items()}
    listed = [f"{count:,} {title}" for title, count in counts.items() if count]
    title = ", ".join([f"Prepared data: {_total(sources, 'rows'):,} rows read", *listed])
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    table.add_column("")
    for name in ("rows", "validation rows", "merged", "dropped", "cut"):
        table.add_column(name, justify="right", no_wrap=True)
    for folder, group in groupby(report["files"].items(), lambda item: item[0].partition("/")[0]):
        files = dict(group)
        validation = files.get(f"{folder}/validation.arrow", {"rows": 0})["rows"]
        names = ("rows", "duplicates_merged", "dropped", "truncated")
        rows, *others = (_total(files.values(), name) for name in names)
        table.add_row(folder, *(f"{count:,}" for count in (rows - validation, validation, *others)))
    console.print(table)
    if report["unserved"]:
        console.print(f"No row can serve {' or '.join(report['unserved'])}: weight 0")
    near = _total(sources, "near_duplicates")
    if near and report["settings"]["near_duplicates"] == "keep":
        console.print(f"WARNING: training includes {near:,} near duplicates of held-out prompts")


def require_true_answers(split: Path, rewards: Sequence[Scorer], judges: Sequence[Scorer]) -> None:
    """Raise DataError if prompts of the prepared files lack true answers that somebody reads."""
    given: dict[str, Sequence[Any]] = {"ppo": rewards, "evaluation": judges}
    readers = {name: [one.label for one in g if reads_references(one)] for name, g in given.items()}
    report = json.loads((split / "report.json").read_text())
    for path, counts in report["without_reference"].items():
        if names := readers[path.partition("/")[0]]:
            listed = ", ".join(f"{source} {count}" for source, count in counts.items())
            raise DataError(
                f"split: found prompts without a true answer in {path} ({listed}), expected one "
                f"for each, as {', '.join(names)} reads it. Fix: set split.without_reference to "
                "drop, which keeps such prompts out of PPO and the final evaluation, or set "
                "columns.reference of the source"
            )
