"""Stage program: answers of a policy, scored, as rows for SFT or DPO.

    deepspeed --module rlhf_pipeline.evaluation.sample job.json

    train.arrow, validation.arrow   rows with the tokens of generation, in the columns of the split
    samples.jsonl                   prompts, answers and scores, and which answers are in the rows

One model at a time is in memory: the policy answers all prompts of a round, then each source of
rewards scores all answers. Nothing is saved on the way; an interrupted stage begins again.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from rlhf_pipeline.config.rewards import INPUT_PREFIX, TrainedReward
from rlhf_pipeline.config.sample import Kind, SampleConfig, TableConfig
from rlhf_pipeline.data.phase_files import COMPARISON, DEMONSTRATION
from rlhf_pipeline.data.record_files import ArrowWriter
from rlhf_pipeline.data.token_contract import common_contract
from rlhf_pipeline.distributed.batches import Rows, even_share, load_rows, sampled_rows, step_rows
from rlhf_pipeline.distributed.engine import free_memory
from rlhf_pipeline.distributed.world import join
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.evaluation.comparison import Answer
from rlhf_pipeline.evaluation.evaluate import answer, as_text, gather, judged
from rlhf_pipeline.evaluation.judges import AnswerBatch, Judge, by_reward_model, by_source
from rlhf_pipeline.evaluation.setup import Setup, with_model
from rlhf_pipeline.models.loading import load_policy, load_tokenizer
from rlhf_pipeline.models.scalar_head import load_scores
from rlhf_pipeline.rollout.generation import load_generator
from rlhf_pipeline.rollout.records import Scored, ended
from rlhf_pipeline.rollout.reward_sources import load_source
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.metrics_file import MetricsFile
from rlhf_pipeline.runtime.program import run_program

PARTS = ("train", "validation")
Sample = dict[str, Any]
"""A prompt with its answers, a line of `samples.jsonl`."""
Chosen = tuple[int, ...] | None
"""The numbers of the best answer and, for comparisons, of the worst one. None: no row."""


def main(job: LaunchedJob) -> dict[str, float]:
    """Answer, score, choose; write the rows and all answers."""
    table = job.block("table", TableConfig)
    (place,) = job.config.keys() - {"table"}  # such as rejection.sample
    config, trust = job.block(place, SampleConfig), job.trust_remote_code
    contract = common_contract(
        {name: path for name, path in job.inputs.items() if not name.startswith(INPUT_PREFIX)}
    )
    world = join(job.seed, timeout_s=job.collective_timeout_s)
    tokenizer = load_tokenizer(job.inputs["policy"], trust_remote_code=trust)
    files = [load_rows(job.inputs["prompts"] / f"{part}.arrow", world) for part in PARTS]
    prompts, (count, others) = Rows.joined(files), (file.num_rows for file in files)
    drawn = step_rows(count, min(count, config.prompts or count), table.round - 1, job.seed)
    held_out = count + sampled_rows(others, config.validation_prompts, job.seed)
    own = np.concatenate([even_share(rows, world) for rows in (np.unique(drawn), held_out)])
    common, columns = config.answering(), prompts.columns(own)
    setup = Setup(job.seed, common, contract, tokenizer, own, columns, trust, world)
    first = (table.round - 1) * config.n
    answers = partial(answer_all, config=config, setup=setup, first=first, place=place)
    batches = with_model(load_policy, job.inputs["policy"], setup, answers)
    draws = score_all(batches, job, config, setup, place)
    ids = token_ids(batches, setup)
    if world.rank != 0:
        return {}
    job.export.mkdir(exist_ok=True)
    contract.write(job.export)
    columns = prompts.columns(np.array(sorted(ids)))
    samples: list[Sample] = [
        {
            "part": PARTS[row >= count],
            **{name: columns[name][i] for name in ("id", "prompt_ids", "messages")},
            "response_ids": ids[row],
            "responses": [one.response for one in answers],
            "scores": (scores := [total(one, config) for one in answers]),
            "ended": (finished := [one.ended for one in answers]),
            "chosen": choose(scores, finished, table.kind, config),
        }
        for i, (row, *answers) in enumerate(zip(sorted(ids), *draws, strict=True))
    ]
    for part in PARTS:
        own = [sample for sample in samples if sample["part"] == part]
        write_rows(own, job.export / f"{part}.arrow", table.kind, config, world.size)
    hidden = ("prompt_ids", "response_ids")
    with (job.export / "samples.jsonl").open("w", encoding="utf-8") as file:
        for sample in samples:
            shown = {name: value for name, value in sample.items() if name not in hidden}
            file.write(json.dumps(shown, ensure_ascii=False) + "\n")
    metrics = sample_metrics(samples)
    MetricsFile(job.metrics_file, 1).write(1, metrics)
    return metrics


def answer_all(
    policy: Any, config: SampleConfig, setup: Setup, first: int, place: str
) -> list[AnswerBatch]:
    """`n` answers of the policy to each prompt of this rank; `first` numbers their draws."""
    generator = load_generator(
        config.generator,
        policy,
        setup.contract,
        config.sampling,
        setup.world,
        gather=config.gather_for_generation,
        longest_prompt=lambda: max(map(len, setup.prompts["prompt_ids"])),
        place=f"{place}.generator",
    )
    batches = []
    for draw in range(config.n):
        heartbeat.at("rollout", draw + 1)
        sequences = answer(generator, setup, first + draw)
        unknown = torch.zeros(sequences.response_ids.shape)
        scores, ends = torch.zeros(len(sequences)), ended(sequences.response_ids, setup.contract)
        batches.append(as_text(Scored(sequences, unknown, unknown, None, scores, ends), setup))
    return batches


def score_all(
    batches: Sequence[AnswerBatch], job: LaunchedJob, config: SampleConfig, setup: Setup, place: str
) -> list[list[Answer]]:
    """The answers of all ranks with the score of each source of rewards, by draw."""
    scores: list[dict[str, Sequence[float | None]]] = [{} for _ in batches]
    tokens, world = config.micro_batch_tokens, setup.world

    def score(label: str, judge: Judge) -> None:
        for draw, batch in enumerate(batches):
            heartbeat.at("scoring", draw + 1)
            with heartbeat.scored_by(label):
                scores[draw][label] = judge(batch)

    def score_by_model(model: Any, label: str) -> None:
        own = partial(by_reward_model, model=model, micro_batch_tokens=tokens, world=world)
        score(label, own)

    for index, reward in enumerate(config.rewards):
        name = f"{INPUT_PREFIX}{index}"
        if isinstance(reward, TrainedReward):
            work = partial(score_by_model, label=reward.label)
            with_model(load_scores, job.inputs["reward_model"], setup, work)
            continue
        where = f"{place}.{name}"
        source = load_source(job, reward, name, where, setup.contract, world, tokens)
        score(reward.label, partial(by_source, source=source))
        del source
        free_memory()
    return [
        gather(judged(batch, given, draw, setup), world)
        for draw, (batch, given) in enumerate(zip(batches, scores, strict=True))
    ]


def token_ids(batches: Sequence[AnswerBatch], setup: Setup) -> dict[int, list[list[int]]]:
    """The tokens of all answers to each prompt, of all ranks, by the number of the prompt."""
    own = {}
    for i, row in enumerate(setup.rows.tolist()):
        answers = [batch.scored.sequences for batch in batches]
        own[row] = [one.response_ids[i][one.real_mask[i]].tolist() for one in answers]
    found = setup.world.gather(own)  # JSON makes the numbers text
    return {int(row): ids for part in found for row, ids in part.items()}


def total(answer: Answer, config: SampleConfig) -> float:
    """The score of an answer by all sources of rewards."""
    return sum(one.weight * (answer.scores[one.label] or 0.0) for one in config.rewards)


def choose(
    scores: Sequence[float], finished: Sequence[bool], kind: Kind, config: SampleConfig
) -> Chosen:
    """The answers to a prompt that make a row, from their scores and from which are not cut.

    Of equal scores the first one counts. None: no answer may be trained on, the best score is below
    `min_score`, or all scores are equal, which makes no comparison.
    """
    allowed = [i for i, is_whole in enumerate(finished) if is_whole or config.cut_answers == "keep"]
    if not allowed:
        return None
    best, worst = (find(allowed, key=scores.__getitem__) for find in (max, min))
    if config.min_score is not None and scores[best] < config.min_score:
        return None
    if kind == "demonstrations":
        return (best,)
    return (best, worst) if scores[best] > scores[worst] else None


def write_rows(
    samples: Sequence[Sample], path: Path, kind: Kind, config: SampleConfig, ranks: int
) -> None:
    """Write the chosen answers of a part.

    Raises StageError if there are fewer rows than ranks, which train on them.
    """
    rows = []
    for sample in [sample for sample in samples if sample["chosen"] is not None]:
        best, *worst = (sample["response_ids"][number] for number in sample["chosen"])
        pair = {"chosen_ids": best, "rejected_ids": worst[0]} if worst else {}
        rows.append(sample | {"response_ids": best, "loss_mask": [True] * len(best)} | pair)
    if len(rows) < ranks:
        cut = sum(not is_whole for sample in samples for is_whole in sample["ended"])
        raise StageError(
            f"{path.name}: found {len(rows)} rows of {len(samples)} prompts, expected at least "
            f"{ranks}, one for each rank; {cut} of {config.n * len(samples)} answers were cut. "
            "Fix: raise n or sampling.max_response_tokens, lower min_score, or set rewards that "
            "tell answers to a prompt apart"
        )
    writer = ArrowWriter(path, DEMONSTRATION if kind == "demonstrations" else COMPARISON)
    writer.write(rows)
    writer.close()


def sample_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Mean scores of all answers and of the best ones; shares of prompts without a row, and of
    answers that were cut."""
    best = [one["scores"][one["chosen"][0]] for one in samples if one["chosen"] is not None]
    return {
        "sample/score": mean(score for sample in samples for score in sample["scores"]),
        "sample/chosen_score": mean(best),
        "sample/without_row": 1 - len(best) / len(samples),
        "sample/cut": mean(not is_whole for sample in samples for is_whole in sample["ended"]),
    }


if __name__ == "__main__":
    run_program(main)
