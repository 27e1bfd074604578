"""The report of the split: counts of rows, prompts and tokens, and an example of each phase.

It is a dict of JSON types, stored as `report.json`:

    sources           label -> rows; bad and skipped rows by reason; left_out_by_fraction;
                      duplicates_merged; repeats_of_held_out (left out); near_duplicates of
                      held-out rows; rows without_reference if others have one; parts -> rows
    distinct_prompts  part -> number
    conversations     part -> number
    without_reference path -> source -> prompts without a true answer, of files with true answers
    files             path -> rows; duplicates_merged; dropped and truncated by reason;
                      tokens: column -> total, max, p50, p90, p99; in the order of the phases
    overlap           "test and validation" -> number of conversations in both
    lengths           "prompt" and "response" -> limit; number of texts; of them longer than the
                      limit; total, max, p50, p90, p99 of their tokens before the limit
    pretraining       None, or sources (without parts), documents, tokens, block_tokens, blocks,
                      tokens_left_out
    examples          what it shows -> segments: text, and whether the model learns it
    settings          of the configuration: weights, fractions, near_duplicates, without_reference,
                      over_long_prompts, over_long_responses, sft_loss
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.data.blend import Blend
from rlhf_pipeline.data.parts import PARTS, Part
from rlhf_pipeline.data.phase_files import PhaseFile, summary
from rlhf_pipeline.data.record_files import RowCounts
from rlhf_pipeline.data.token_contract import Tokenizer

Segment = tuple[str, bool]
"""Text, and whether the model learns its tokens."""

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
    """The report (see above) without pretraining; one label and count per source.

    `lengths` are those of "prompt" and "response" before the limits: length -> number of texts.
    """
    return {
        "sources": _describe_sources(config, labels, counts, plan),
        "distinct_prompts": {part: plan.distinct(plan.prompt_keys, part) for part in PARTS},
        "conversations": {part: plan.distinct(plan.conversation_keys, part) for part in PARTS},
        "without_reference": _without_reference(labels, plan, files),
        "files": {path: file.describe() for path, file in files.items()},
        "overlap": overlap(files, plan),
        "lengths": {
            name: {
                "limit": (limit := getattr(config, f"max_{name}_tokens")),
                "texts": counts.total(),
                "longer": sum(n for length, n in counts.items() if length > limit),
                **(summary(counts) if counts else {}),
            }
            for name, counts in lengths.items()
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


def headline(report: dict[str, Any]) -> dict[str, float]:
    """The report as metrics: rows, bad, merged and dropped rows, prompts, tokens, files."""
    sources, files = report["sources"].values(), report["files"]
    metrics = {
        "data/rows": sum(source["rows"] for source in sources),
        "data/bad_rows": sum(sum(source["bad"].values()) for source in sources),
        "data/duplicates_merged": sum(source["duplicates_merged"] for source in sources),
        "data/near_duplicates": sum(source["near_duplicates"] for source in sources),
        "data/distinct_prompts": sum(report["distinct_prompts"].values()),
        "data/dropped_rows": sum(sum(file["dropped"].values()) for file in files.values()),
        "data/truncated_texts": sum(sum(file["truncated"].values()) for file in files.values()),
        "data/tokens": sum(
            tokens["total"] for file in files.values() for tokens in file["tokens"].values()
        ),
    }
    metrics |= {
        f"data/{path.removesuffix('.arrow').replace('/', '_')}_rows": file["rows"]
        for path, file in files.items()
    }
    if report["pretraining"]:
        metrics["data/pretraining_blocks"] = report["pretraining"]["blocks"]
    return {name: float(value) for name, value in metrics.items()}


def overlap(files: Mapping[str, PhaseFile], plan: Blend) -> dict[str, int]:
    """Count the conversations that each two parts share in the written files.

    Raises AssertionError if two parts share a conversation.
    """
    found: dict[Part, np.ndarray] = {}
    for part in PARTS:
        written = [np.empty(0, np.int64)]
        for file in files.values():
            written += file.written if file.table.part == part else []
        found[part] = np.unique(plan.conversation_keys[np.concatenate(written)].view("V16"))
    shared = {
        f"{one} and {other}": len(np.intersect1d(found[one], found[other], assume_unique=True))
        for one, other in combinations(PARTS, 2)
    }
    if any(shared.values()):
        raise AssertionError(f"parts share conversations: {shared}")
    return shared


def _without_reference(
    labels: Sequence[str], plan: Blend, files: Mapping[str, PhaseFile]
) -> dict[str, dict[str, int]]:
    """Path -> source -> prompts without a true answer, of the files with true answers."""
    has_none = ~plan.references.is_valid().to_numpy(zero_copy_only=False)
    counted = {}
    for path, file in files.items():
        rows = np.concatenate([np.empty(0, np.int64), *file.written])
        rows = rows[has_none[rows]]
        if "reference" in file.table.schema.names and len(rows):
            sources = np.searchsorted(plan.starts, rows, side="right") - 1
            counted[path] = dict(Counter(labels[source] for source in sources.tolist()))
    return counted


def _describe_sources(
    config: SplitConfig, labels: Sequence[str], counts: Sequence[RowCounts], plan: Blend
) -> dict[str, Any]:
    described, drops_near = {}, config.near_duplicates == "drop"
    has_answers = plan.references.null_count < len(plan.references)
    for index, (label, count) in enumerate(zip(labels, counts, strict=True)):
        parts = plan.parts[plan.starts[index] : plan.starts[index + 1]]
        fates = {name: numbers[index] for name, numbers in plan.counts.items()}
        described[label] = {
            "rows": count.rows,
            "bad": count.bad,
            "skipped": count.skipped
            + Counter({_UNSERVABLE: fates["unservable"], _DROPPED: fates["dropped"]}),
            "left_out_by_fraction": fates["left_out"],
            "duplicates_merged": fates["merged"],
            "repeats_of_held_out": fates["in_test"] + drops_near * fates["near"],
            "near_duplicates": fates["near"],
            "without_reference": fates["unanswered"] if has_answers else 0,
            "parts": {part: int((parts == number).sum()) for number, part in enumerate(PARTS)},
        }
    return described


def first_examples(folder: Path, tokenizer: Tokenizer) -> dict[str, list[Segment]]:
    """The first row of each training file as segments of text, by what it shows.

    Special tokens are written out. `folder` contains the files of `phase_files.TABLES`.
    """

    def text(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    examples: dict[str, list[Segment]] = {}
    if row := _first_row(folder / "sft" / "train.arrow"):
        ids = row["prompt_ids"] + row["response_ids"]
        mask = [False] * len(row["prompt_ids"]) + row["loss_mask"]
        examples["SFT"] = [
            (text([token for token, _ in group]), learned)
            for learned, group in groupby(zip(ids, mask, strict=True), key=itemgetter(1))
        ]
    if row := _first_row(folder / "reward_model" / "train.arrow"):
        for answer in ("chosen", "rejected"):
            segments = [(text(row["prompt_ids"]), False), (text(row[f"{answer}_ids"]), True)]
            examples[f"reward model, {answer} answer"] = segments
    if row := _first_row(folder / "ppo" / "train.arrow"):
        examples["PPO, prompt"] = [(text(row["prompt_ids"]), False)]
    return examples


def _first_row(path: Path) -> dict[str, Any] | None:
    with pa.ipc.open_stream(path) as stream:
        return next((batch.slice(0, 1).to_pylist()[0] for batch in stream if len(batch)), None)
