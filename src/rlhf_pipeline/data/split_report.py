"""The report of the split: `report.json`, its metrics, a summary for the terminal."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, compress, groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rich import box
from rich.console import Console
from rich.table import Table

from rlhf_pipeline.config.rewards import Scorer, reads_references
from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.data.blend import Blend
from rlhf_pipeline.data.phase_files import Part, PhaseFile, parts, summary
from rlhf_pipeline.data.record_files import RowCounts
from rlhf_pipeline.data.token_contract import Tokenizer
from rlhf_pipeline.errors import DataError

_READ = ("prompt", "response", "chosen", "rejected")
_UNSERVABLE = "none of the phases that may use the source can use the record"
_DROPPED = "its prompt has no true answer (split.without_reference is drop)"


def build_report(
    config: SplitConfig,
    labels: Sequence[str],
    counts: Sequence[RowCounts],
    plan: Blend,
    files: Mapping[str, PhaseFile],
    lengths: Mapping[str, Counter[int]],
) -> dict[str, Any]:
    """The report as JSON types, without `examples`, and with None as `pretraining`.

    `lengths` are those of "prompt" and "response" before the limits: length -> number of texts.
    Raises AssertionError if two parts share a conversation.
    """
    own = parts(config)
    return {
        "sources": _sources(config, labels, counts, plan),
        "distinct_prompts": {part: plan.distinct(plan.prompt_keys, part) for part in own},
        "conversations": {part: plan.distinct(plan.conversation_keys, part) for part in own},
        "serves": plan.kinds(),
        "unserved": config.unserved(plan.kinds()),
        "without_reference": _without_reference(labels, plan, files),
        "files": {path: file.describe() for path, file in files.items()},
        "overlap": _overlap(files, plan, own),
        "lengths": {
            name: {
                "limit": (limit := getattr(config, f"max_{name}_tokens")),
                "texts": found.total(),
                "longer": sum(n for length, n in found.items() if length > limit),
                **(summary(found) if found else {}),
            }
            for name, found in lengths.items()
        },
        "pretraining": None,
        "settings": config.model_dump(
            mode="json",
            include={
                "weights", "validation_fraction", "test_fraction", "near_duplicates",
                "without_reference", "over_long_prompts", "over_long_responses", "sft_loss",
            },
        ),
    }  # fmt: skip


def _sources(
    config: SplitConfig, labels: Sequence[str], counts: Sequence[RowCounts], plan: Blend
) -> dict[str, Any]:
    described, drops_near = {}, config.near_duplicates == "drop"
    has_answers = plan.references.null_count < len(plan.references)
    for index, (label, count) in enumerate(zip(labels, counts, strict=True)):
        of_row = plan.parts[plan.starts[index] : plan.starts[index + 1]]
        fates = {name: numbers[index] for name, numbers in plan.counts.items()}
        unused = Counter({_UNSERVABLE: fates["unservable"], _DROPPED: fates["dropped"]})
        described[label] = {
            "rows": count.rows,
            "bad": count.bad,
            "skipped": count.skipped + unused,
            "left_out_by_fraction": fates["left_out"],
            "duplicates_merged": fates["merged"],
            "repeats_of_held_out": fates["in_test"] + drops_near * fates["near"],
            "near_duplicates": fates["near"],
            "without_reference": fates["unanswered"] if has_answers else 0,
            "parts": {
                part: int((of_row == number).sum()) for number, part in enumerate(parts(config))
            },
        }
    return described


def _without_reference(
    labels: Sequence[str], plan: Blend, files: Mapping[str, PhaseFile]
) -> dict[str, dict[str, int]]:
    """Path -> source -> prompts without a true answer, of the files with true answers."""
    has_none = ~plan.references.is_valid().to_numpy(zero_copy_only=False)
    counted = {}
    for path, file in files.items():
        rows = np.concatenate(file.written)
        rows = rows[has_none[rows]]
        if "reference" in file.table.schema.names and len(rows):
            sources = np.searchsorted(plan.starts, rows, side="right") - 1
            counted[path] = dict(Counter(labels[source] for source in sources.tolist()))
    return counted


def _overlap(files: Mapping[str, PhaseFile], plan: Blend, parts: Sequence[Part]) -> dict[str, int]:
    """The numbers of conversations that each two parts share in the written files."""
    found = {}
    for part in parts:
        rows = [rows for file in files.values() if file.table.part == part for rows in file.written]
        found[part] = np.unique(plan.conversation_keys[np.concatenate(rows)].view("V16"))
    shared = {
        f"{one} and {other}": len(np.intersect1d(found[one], found[other], assume_unique=True))
        for one, other in combinations(parts, 2)
    }
    if any(shared.values()):
        raise AssertionError(f"parts share conversations: {shared}")
    return shared


def first_examples(folder: Path, tokenizer: Tokenizer) -> dict[str, dict[str, str]]:
    """The first training row of each phase as the model reads it: phase -> column -> text.

    Column `learned` has the tokens of the response that SFT learns.
    """
    examples = {}
    for phase in ("sft", "reward_model", "ppo"):
        with pa.ipc.open_stream(folder / phase / "train.arrow") as stream:
            rows = (row for batch in stream for row in batch.slice(0, 1).to_pylist())
            row: dict[str, Any] = next(rows, {})
        columns = {name: row[f"{name}_ids"] for name in _READ if f"{name}_ids" in row}
        if "loss_mask" in row:
            columns["learned"] = list(compress(row["response_ids"], row["loss_mask"]))
        examples[phase] = {
            name: str(tokenizer.decode(ids, skip_special_tokens=False))
            for name, ids in columns.items()
        }
    return examples


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
