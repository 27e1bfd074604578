"""The report of a reward model: what its accuracy on held-out comparisons does not show."""

import gc
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from rlhf_pipeline.config.training import FrozenDeepSpeedConfig, RewardModelConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.batches import by_micro_batches, even_share, load_rows
from rlhf_pipeline.distributed.engine import frozen_model
from rlhf_pipeline.distributed.lean_deepspeed import get_accelerator
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.models.forward import sequence_scores
from rlhf_pipeline.models.scalar_head import load_scores
from rlhf_pipeline.models.sequences import Sequences
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.statistics import calibration, rank_correlation, rate_interval
from rlhf_pipeline.training.pairs import Pairs
from rlhf_pipeline.training.supervised import BLOCK

Score = Callable[[Sequences], Tensor]
"""The score of each response, (B,); equally many responses on each rank."""

REPORT = "reward_report.json"


def write_report(
    job: LaunchedJob,
    config: RewardModelConfig,
    contract: TokenContract,
    world: World,
) -> dict[str, float]:
    """Write `reward_report.json` into the export, and return its main numbers as metrics.

    The exported model scores the held-out comparisons.
    """
    gc.collect()  # the model in training
    get_accelerator().empty_cache()
    heartbeat.at("evaluation")
    settings = FrozenDeepSpeedConfig(
        zero_stage=3 if config.deepspeed.zero_stage == 3 else 0,
        precision=config.deepspeed.precision,
    )
    world.barrier()  # the first rank has exported the model
    load = partial(load_scores, job.export, trust_remote_code=job.trust_remote_code)
    model, tokens = frozen_model(load, settings, world), config.micro_batch_tokens
    score = partial(by_micro_batches, sequence_scores, model, tokens=tokens, world=world)
    report = describe(*held_out(job.inputs["comparisons"], contract, score, world))
    metrics = {
        "validation/accuracy_lower": report["accuracy"]["lower"],
        "validation/accuracy_upper": report["accuracy"]["upper"],
        "validation/calibration_error": report["calibration"]["error"],
        "validation/length_correlation": report["length_correlation"],
        "validation/accuracy_half_1": report["halves"][0],
        "validation/accuracy_half_2": report["halves"][1],
    }
    if world.rank == 0:
        (job.export / REPORT).write_text(json.dumps(report, indent=2))
    return {name: value for name, value in metrics.items() if value is not None}


def held_out(
    folder: Path, contract: TokenContract, score: Score, world: World
) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Source, scores and tokens of the chosen and the rejected answer, (N,), (N, 2), (N, 2).

    The ranks divide the comparisons, and exchange their results as JSON.
    """
    table = load_rows(folder / "validation.arrow", world)
    own, found = even_share(np.arange(table.num_rows), world), []
    for start in range(0, len(own), BLOCK):
        rows = own[start : start + BLOCK]
        columns = table.columns(rows)
        answers = Pairs.collate(columns, contract.pad_id).answers
        sources = [name.rpartition(":")[0] for name in columns["id"]]
        scores, tokens = score(answers).view(-1, 2), answers.action_mask.sum(1).view(-1, 2)
        found += zip(rows.tolist(), sources, scores.tolist(), tokens.tolist(), strict=True)
    by_row = {row: result for part in world.gather(found) for row, *result in part}
    results = [by_row[row] for row in range(table.num_rows)]
    sources, scores, tokens = zip(*results, strict=True)
    return list(sources), np.array(scores), np.array(tokens)


def describe(sources: Sequence[str], scores: np.ndarray, tokens: np.ndarray) -> dict[str, Any]:
    """The report on held-out comparisons, as JSON types; see `held_out`.

    The halves are the even and the odd rows, because a table is in the order of its sources.
    """
    margins = scores[:, 0] - scores[:, 1]
    right, of_source = (np.sign(margins) + 1) / 2, np.array(sources)
    error, bins = calibration(margins.tolist())
    return {
        "pairs": len(margins),
        "accuracy": _rate(right),
        "margin": float(margins.mean()),
        "calibration": {"error": error, "bins": bins},
        "sources": {name: _rate(right[of_source == name]) for name in sorted({*sources})},
        "length_correlation": rank_correlation(scores.ravel().tolist(), tokens.ravel().tolist()),
        "halves": [float(half.mean()) if len(half) else None for half in (right[::2], right[1::2])],
    }


def _rate(right: np.ndarray) -> dict[str, float]:
    """A share of rows with its 95% interval; a tie is half right."""
    rate, n = float(right.mean()), len(right)
    lower, upper = rate_interval(rate, n, int((right == 0.5).sum()))
    return {"rate": rate, "lower": lower, "upper": upper, "n": n}
