"""Stage program: a Bradley-Terry reward model, from the SFT or a base model with a scalar head.

    deepspeed --module rlhf_pipeline.training.reward_model job.json

The exported model then scores the held-out comparisons once more, for `reward_report.json`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pyarrow as pa
from torch import Tensor, nn

from rlhf_pipeline.config.doors import REWARD_LOSS, call_with
from rlhf_pipeline.config.evaluate import FoldConfig
from rlhf_pipeline.config.training import FrozenModelConfig, RewardModelConfig
from rlhf_pipeline.data.record_files import mapped
from rlhf_pipeline.data.token_contract import common_contract
from rlhf_pipeline.distributed.batches import Rows, by_micro_batches, even_share, load_rows
from rlhf_pipeline.distributed.engine import free_memory, frozen_model, untrained
from rlhf_pipeline.distributed.optimizer_step import Sums
from rlhf_pipeline.distributed.world import World, join
from rlhf_pipeline.models.forward import sequence_scores
from rlhf_pipeline.models.scalar_head import load_scores, store_score_mean
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.program import run_program
from rlhf_pipeline.training.preferences import PairTask, chosen_and_rejected, pairs, ranking_sums
from rlhf_pipeline.training.supervised import BLOCK, Batch, as_validation, train
from rlhf_pipeline.verdict.statistics import (
    calibration,
    difference,
    rank_correlation,
    rate_interval,
)


@dataclass(frozen=True)
class RewardModelTask(PairTask):
    """`reward_model.loss` on the scores of two answers, each at the last token of its answer."""

    config: RewardModelConfig
    name: str = "reward_model"

    def loss(self, model: nn.Module, batch: Batch, pairs: Tensor) -> tuple[Tensor, Sums]:
        chosen, rejected = chosen_and_rejected(sequence_scores(model, batch.answers))
        loss = REWARD_LOSS.load(self.config.loss)
        total, _ = call_with(loss, self.config, chosen_scores=chosen, rejected_scores=rejected)
        sums = {
            **ranking_sums(chosen, rejected),
            "nll": total,
            "chosen_squared": chosen.detach().double().square().sum(),
        }
        return total / pairs, sums

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Loss, accuracy (a tie counts half), mean margin; mean and deviation of chosen scores."""
        pairs = sums["pairs"]
        mean = sums["chosen"] / pairs
        variance = max(0.0, sums["chosen_squared"] / pairs - mean**2)
        return {
            "loss": sums["nll"] / pairs,
            "accuracy": sums["correct"] / pairs,
            "margin": sums["margin"] / pairs,
            "chosen_score_mean": mean,
            "chosen_score_std": variance**0.5,
        }


def main(job: LaunchedJob) -> dict[str, float]:
    """Train; export the model with the lowest held-out loss, and store its mean chosen score."""
    config = job.block("reward_model", RewardModelConfig)
    start = "sft_model" if "sft_model" in job.inputs else "base_model"
    own = {name: job.inputs[name] for name in (start, "comparisons")}
    task = RewardModelTask(common_contract(own), config)
    world = join(job.seed, timeout_s=job.collective_timeout_s)
    is_fold = "fold" in job.config
    read = partial(rows_of_fold, job.block("fold", FoldConfig)) if is_fold else Rows.read
    metrics = train(job, config, task, untrained, world, start=start, rows="comparisons", read=read)
    if world.rank == 0:
        store_score_mean(job.export, metrics["validation/chosen_score_mean"])
    return metrics | write_report(job, task, world, read)


def rows_of_fold(fold: FoldConfig, file: Path) -> Rows:
    """The rows of `train.arrow` that are in a fold for `validation.arrow`, else the others."""
    table = mapped(file.with_name("train.arrow"))
    prompts = table.column("prompt_ids").to_pylist()
    keys = [crc32(np.array(ids, np.int32).tobytes()) for ids in prompts]
    ranks = {key: rank for rank, key in enumerate(sorted({*keys}))}  # so that no fold is empty
    own = [ranks[key] % fold.of == fold.number for key in keys]
    held_out = file.stem == "validation"
    return Rows.of(table.filter(pa.array([one == held_out for one in own])))


def write_report(
    job: LaunchedJob, task: RewardModelTask, world: World, read: Callable[[Path], Rows]
) -> dict[str, float]:
    """Write `reward_report.json` on the exported model; return its main numbers as metrics."""
    free_memory()  # of the model in training
    heartbeat.begin_phase("evaluation")
    settings = FrozenModelConfig().beside(task.config.deepspeed)
    world.barrier()  # the first rank has exported the model
    load = partial(load_scores, job.export, trust_remote_code=job.trust_remote_code)
    model = frozen_model(load, settings, world)
    table = load_rows(job.inputs["comparisons"] / "validation.arrow", world, read)
    report = describe(*held_out(model, table, task, world))
    if world.rank == 0:
        (job.export / "reward_report.json").write_text(json.dumps(report, indent=2))
    metrics = {
        "accuracy_lower": report["accuracy"]["lower"],
        "accuracy_upper": report["accuracy"]["upper"],
        "accuracy_over_length": report["over_length"]["difference"],
        "calibration_error": report["calibration"]["error"],
        "length_correlation": report["length_correlation"],
        "accuracy_half_1": report["halves"][0],
        "accuracy_half_2": report["halves"][1],
    }
    return as_validation({name: value for name, value in metrics.items() if value is not None})


def held_out(
    model: nn.Module, table: Rows, task: RewardModelTask, world: World
) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Source, scores and tokens of the chosen and the rejected answer, (N,), (N, 2), (N, 2).

    The ranks divide the comparisons.
    """
    tokens = task.config.micro_batch_tokens
    own, found = even_share(np.arange(table.num_rows), world), list[Any]()
    for start in range(0, len(own), BLOCK):
        rows = own[start : start + BLOCK]
        columns = table.columns(rows)
        answers = pairs(columns, task.contract.pad_id).answers
        sources = [name.rpartition(":")[0] for name in columns["id"]]
        scores = by_micro_batches(sequence_scores, model, answers, tokens, world)
        lengths = answers.action_mask.sum(1)
        both = (each.view(-1, 2).tolist() for each in (scores, lengths))
        found += zip(rows.tolist(), sources, *both, strict=True)
    by_row = {row: result for part in world.gather(found) for row, *result in part}
    results = [by_row[row] for row in range(table.num_rows)]
    of_source, of_score, of_length = zip(*results, strict=True)
    return list(of_source), np.array(of_score), np.array(of_length)


def describe(sources: Sequence[str], scores: np.ndarray, tokens: np.ndarray) -> dict[str, Any]:
    """The report on held-out comparisons, as JSON types; see `held_out`.

    `over_length` is the accuracy minus that of a judge who prefers the longer answer: a model that
    measures length has none. The halves are the even and the odd rows, because a table is
    in the order of its sources.
    """
    margins = scores[:, 0] - scores[:, 1]
    right, of_source = (np.sign(margins) + 1) / 2, np.array(sources)
    longer = (np.sign(tokens[:, 0] - tokens[:, 1]) + 1) / 2
    # A tie is a 0 and a 1, as `difference` compares zeros and ones.
    both = (np.stack([np.floor(each), np.ceil(each)], 1).tolist() for each in (right, longer))
    over_length = difference(*both)
    error, bins = calibration(margins.tolist())
    return {
        "pairs": len(margins),
        "accuracy": _rate(right),
        "over_length": dict(zip(("difference", "lower", "upper"), over_length, strict=True)),
        "margin": float(margins.mean()),
        "margin_square": float(np.square(margins).mean()),
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


if __name__ == "__main__":
    run_program(main)
