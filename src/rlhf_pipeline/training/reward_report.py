"""The report of a reward model: what its accuracy on held-out comparisons does not show."""

import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import BaseModel, BeforeValidator, Field, ValidationError
from torch import Tensor

from rlhf_pipeline.config.base_model import positions_in
from rlhf_pipeline.config.training import FrozenDeepSpeedConfig, RewardModelConfig
from rlhf_pipeline.data.records import Conversation
from rlhf_pipeline.data.template import render_prompts, render_responses
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.data.tokenization import encode
from rlhf_pipeline.distributed.batches import even_share, load_rows
from rlhf_pipeline.distributed.lean_deepspeed import get_accelerator
from rlhf_pipeline.distributed.loading import frozen_model
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.models.forward import sequence_scores
from rlhf_pipeline.models.loading import load_tokenizer
from rlhf_pipeline.models.scalar_head import load_scores
from rlhf_pipeline.models.sequences import Sequences, collate
from rlhf_pipeline.rollout.scoring import by_micro_batches
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.statistics import calibration, rank_correlation, rate_interval
from rlhf_pipeline.training.pairs import Pairs
from rlhf_pipeline.training.supervised import BLOCK

T = TypeVar("T")
Score = Callable[[Sequences], Tensor]
"""The score of each response, (B,); equally many responses on each rank."""

REPORT = "reward_report.json"
BENCHMARK = "benchmark"  # input of the job: the file of `reward_model.benchmark`


def _as_messages(prompt: Any) -> Any:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


class BenchmarkRow(BaseModel):
    """A line of a benchmark."""

    prompt: Annotated[Conversation, BeforeValidator(_as_messages)] = Field(min_length=1)
    chosen: str
    rejected: list[str] = Field(min_length=1)


@dataclass(frozen=True)
class Benchmark:
    """All answers of `reward_model.benchmark` as tokens, those of a row after each other."""

    sizes: list[int]  # answers of each row; the first one is the chosen one
    prompt_ids: list[list[int]]
    response_ids: list[list[int]]


def read_benchmark(job: LaunchedJob, contract: TokenContract) -> Benchmark | None:
    """Read and tokenize the benchmark; None if it is not set.

    Raises DataError if a line is not a `BenchmarkRow`, or is too long for the model.
    """
    if BENCHMARK not in job.inputs:
        return None
    place, model = f"reward_model.benchmark: {job.inputs[BENCHMARK]}", job.inputs["sft_model"]
    rows: list[BenchmarkRow] = []
    for number, line in enumerate(job.inputs[BENCHMARK].read_text("utf-8").splitlines(), start=1):
        try:
            rows.append(BenchmarkRow.model_validate_json(line))
        except ValidationError as error:
            fault = error.errors()[0]
            found = str(fault["loc"][0]) if fault["loc"] else "no JSON object"
            raise DataError(
                f"{place}, line {number}: found {found} ({fault['msg']}), expected prompt, chosen "
                "and a list rejected"
            ) from None
    if not rows:
        raise DataError(f"{place}: found no line, expected at least 1")
    tokenizer = load_tokenizer(model, trust_remote_code=job.trust_remote_code)
    answers = [
        (f"{place}, line {number}", row.prompt, text)
        for number, row in enumerate(rows, start=1)
        for text in (row.chosen, *row.rejected)
    ]
    names, prompts, texts = (list(column) for column in zip(*answers, strict=True))
    before = render_prompts(tokenizer, names, prompts)
    after = render_responses(tokenizer, contract, names, prompts, before, texts)
    ids = encode(before, tokenizer), encode([text or "" for text in after], tokenizer)
    limit = positions_in(model)
    for name, prompt_ids, response_ids in zip(names, *ids, strict=True):
        if limit is not None and len(prompt_ids) + len(response_ids) > limit:
            raise DataError(
                f"{name}: found {len(prompt_ids) + len(response_ids)} tokens, expected at most the "
                f"model's {limit} positions. Fix: remove the line"
            )
    return Benchmark([1 + len(row.rejected) for row in rows], *ids)


def write_report(
    job: LaunchedJob,
    config: RewardModelConfig,
    contract: TokenContract,
    world: World,
    benchmark: Benchmark | None,
) -> dict[str, float]:
    """Write `reward_report.json` into the export, and return its main numbers as metrics.

    The exported model scores the held-out comparisons and the benchmark.
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
    if benchmark is not None:
        report["benchmark"] = found = best_of_all(benchmark, contract, score, world)
        ends = {"": "rate", "_lower": "lower", "_upper": "upper"}
        metrics |= {f"benchmark/accuracy{suffix}": found[key] for suffix, key in ends.items()}
    if world.rank == 0:
        (job.export / REPORT).write_text(json.dumps(report, indent=2))
    return {name: value for name, value in metrics.items() if value is not None}


def on_all_ranks(count: int, work: Callable[[np.ndarray], Sequence[T]], world: World) -> list[T]:
    """One result for each of `count` rows, as JSON; `work` gets the numbers of some rows."""
    own, found = even_share(np.arange(count), world), dict[int, T]()
    for start in range(0, len(own), BLOCK):
        rows = own[start : start + BLOCK]
        found |= zip(rows.tolist(), work(rows), strict=True)
    results = {row: result for part in world.gather([*found.items()]) for row, result in part}
    return [results[row] for row in range(count)]


def held_out(
    folder: Path, contract: TokenContract, score: Score, world: World
) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Source, scores and tokens of the chosen and the rejected answer, (N,), (N, 2), (N, 2)."""
    table = load_rows(folder / "validation.arrow", world)

    def work(rows: np.ndarray) -> list[tuple[str, list[float], list[int]]]:
        columns = table.columns(rows)
        answers = Pairs.collate(columns, contract.pad_id).answers
        scores, tokens = score(answers), answers.action_mask.sum(1)
        sources = [name.rpartition(":")[0] for name in columns["id"]]
        pairs = scores.view(-1, 2).tolist(), tokens.view(-1, 2).tolist()
        return list(zip(sources, *pairs, strict=True))

    sources, scores, tokens = zip(*on_all_ranks(table.num_rows, work, world), strict=True)
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


def best_of_all(
    benchmark: Benchmark, contract: TokenContract, score: Score, world: World
) -> dict[str, float]:
    """How often the chosen answer has a higher score than all rejected ones."""

    def work(rows: np.ndarray) -> list[float]:
        prompts, answers = (
            [ids[row] for row in rows] for ids in (benchmark.prompt_ids, benchmark.response_ids)
        )
        return [float(one) for one in score(collate(prompts, answers, contract.pad_id))]

    scores = iter(on_all_ranks(sum(benchmark.sizes), work, world))
    rows = ([*islice(scores, size)] for size in benchmark.sizes)
    return _rate(np.array([row[0] > max(row[1:]) for row in rows], float))


def _rate(right: np.ndarray) -> dict[str, float]:
    """A share of rows with its 95% interval; a tie is half right."""
    rate, n = float(right.mean()), len(right)
    lower, upper = rate_interval(rate, n, int((right == 0.5).sum()))
    return {"rate": rate, "lower": lower, "upper": upper, "n": n}
