"""Build the report of the split, and the metrics that summarize it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.data.blend import Blend
from rlhf_pipeline.data.parts import PARTS, Part
from rlhf_pipeline.data.phase_files import PhaseFile
from rlhf_pipeline.data.row_counts import RowCounts
from rlhf_pipeline.data.tokenization import Tokenized

_UNSERVABLE = "none of the phases that may train on the source can use the record"


@dataclass
class Lengths:
    """Lengths in tokens of all tokenized texts, before the limits: length -> number."""

    prompts: Counter[int] = field(default_factory=Counter)
    responses: Counter[int] = field(default_factory=Counter)

    def add(self, rows: Sequence[Tokenized]) -> None:
        """Count the texts of a batch."""
        self.prompts.update(len(row.prompt) for row in rows)
        self.responses.update(
            len(ids) for row in rows for ids in (row.chosen, row.rejected) if ids is not None
        )


def build_report(
    config: SplitConfig,
    labels: Sequence[str],
    counts: Sequence[RowCounts],
    plan: Blend,
    files: Mapping[str, PhaseFile],
    lengths: Lengths,
) -> dict[str, Any]:
    """The report (see `split_report`) without pretraining; one label and count per source."""
    return {
        "sources": _describe_sources(labels, counts, plan),
        "distinct_prompts": {part: plan.distinct_prompts(part) for part in PARTS},
        "files": {path: file.describe() for path, file in files.items()},
        "overlap": overlap(files, plan),
        "lengths": {
            name: {"limit": limit, "counts": dict(sorted(counted.items()))}
            for name, counted, limit in (
                ("prompt", lengths.prompts, config.max_prompt_tokens),
                ("response", lengths.responses, config.max_response_tokens),
            )
        },
        "pretraining": None,
        "settings": config.model_dump(
            mode="json",
            include={
                "weights", "validation_fraction", "test_fraction",
                "over_long_prompts", "over_long_responses", "sft_loss",
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
    """Count the prompts that each two parts share in the written files.

    Raises:
        AssertionError: two parts share a prompt.
    """
    prompts: dict[Part, np.ndarray] = {}
    for part in PARTS:
        written = [
            rows for file in files.values() if file.table.part == part for rows in file.written
        ]
        prompts[part] = (
            np.unique(plan.prompt_keys[np.concatenate(written)].view("V16"))
            if written
            else np.empty(0, "V16")
        )
    shared = {
        f"{one} and {other}": len(np.intersect1d(prompts[one], prompts[other], assume_unique=True))
        for one, other in combinations(PARTS, 2)
    }
    if any(shared.values()):
        raise AssertionError(f"parts share prompts: {shared}")
    return shared


def _describe_sources(
    labels: Sequence[str], counts: Sequence[RowCounts], plan: Blend
) -> dict[str, Any]:
    described = {}
    for index, (label, count) in enumerate(zip(labels, counts, strict=True)):
        parts = plan.parts[plan.starts[index] : plan.starts[index + 1]]
        described[label] = {
            "rows": count.rows,
            "bad": count.bad,
            "passed_over": count.skipped + Counter({_UNSERVABLE: plan.unservable[index]}),
            "left_out_by_fraction": plan.left_out[index],
            "duplicates_merged": plan.merged[index],
            "parts": {part: int((parts == number).sum()) for number, part in enumerate(PARTS)},
        }
    return described
