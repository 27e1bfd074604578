"""Stage program: answers of a policy, scored, as rows for SFT or DPO.

    deepspeed --module rlhf_pipeline.evaluation.sample job.json

    train.arrow, validation.arrow   rows with the tokens of generation, in the columns of the split
    samples.jsonl                   prompts, answers and scores, and which answers are in the rows

The policy answers and its answers are judged as in an evaluation, one model at a time in memory.
Nothing is saved on the way: an interrupted stage begins again.
"""

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from rlhf_pipeline.config.evaluate import JUDGE_PREFIX, REWARD_MODEL
from rlhf_pipeline.config.rewards import PairwiseJudge, SampleReward, TrainedReward
from rlhf_pipeline.config.sample import Kind, SampleConfig, TableConfig
from rlhf_pipeline.data.phase_files import COMPARISON, DEMONSTRATION
from rlhf_pipeline.data.record_files import ArrowWriter
from rlhf_pipeline.data.token_contract import common_contract
from rlhf_pipeline.distributed.batches import Rows, even_share, load_rows, sampled_rows, step_rows
from rlhf_pipeline.distributed.world import join
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.evaluation.comparison import Answer
from rlhf_pipeline.evaluation.evaluate import CACHE, answer_all, in_order, judge_all
from rlhf_pipeline.evaluation.judges import load_judges
from rlhf_pipeline.evaluation.pairwise import judge_pairs
from rlhf_pipeline.evaluation.setup import Setup
from rlhf_pipeline.models.loading import load_tokenizer
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.metrics_file import MetricsFile
from rlhf_pipeline.runtime.program import run_program

PARTS = ("train", "validation")
Sample = dict[str, Any]
"""A prompt with its answers: a line of `samples.jsonl`, with the tokens as well."""


def main(job: LaunchedJob) -> dict[str, float]:
    """Answer, score, choose; write the rows and all answers."""
    table = job.block("table", TableConfig)
    (place,) = job.config.keys() - {"table"}  # such as rejection.sample
    config, trust = job.block(place, SampleConfig), job.trust_remote_code
    contract = common_contract(
        {name: path for name, path in job.inputs.items() if not name.startswith(JUDGE_PREFIX)}
    )
    world = join(job.seed, timeout_s=job.collective_timeout_s)
    tokenizer = load_tokenizer(job.inputs["policy"], trust_remote_code=trust)
    files = [load_rows(job.inputs["prompts"] / f"{part}.arrow", world) for part in PARTS]
    prompts, (count, others) = Rows.joined(files), (file.num_rows for file in files)
    drawn = step_rows(count, min(count, config.prompts or count), table.round - 1, job.seed)
    held_out = count + sampled_rows(others, config.validation_prompts, job.seed)
    own = np.concatenate([even_share(rows, world) for rows in (np.unique(drawn), held_out)])
    seed, judging = job.seed + table.round - 1, config.judging()
    columns = prompts.columns(own)
    setup = Setup(seed, judging, contract, tokenizer, own, columns, trust, world, place)
    scored, _ = answer_all({"policy": job.inputs["policy"]}, None, setup, None, config.n)
    draws = judge_all(scored, job, load_judges(job, judging), setup)
    own_samples = {}
    for i, row in enumerate(own.tolist()):
        given = [each.sequences for each in scored.values()]
        ids = [one.response_ids[i][one.real_mask[i]].tolist() for one in given]
        prompt = {name: columns[name][i] for name in ("id", "prompt_ids", "messages")}
        own_samples[row] = {"part": PARTS[row >= count], **prompt, "response_ids": ids}
    gathered = world.gather(own_samples)
    if world.rank != 0:
        return {}
    pairs = {"": [], "policy": in_order("policy", draws, config.n)}
    pairs, *_ = judge_pairs(pairs, pairs["policy"], judging, job.directory.parents[1] / CACHE)
    samples: dict[int, Sample] = {int(row): one for part in gathered for row, one in part.items()}
    for row, group in groupby(pairs["policy"], lambda answer: answer.row):
        answers = list(group)
        samples[row] |= {
            "responses": [one.response for one in answers],
            "scores": totals(answers, config),
            "ended": [one.ended for one in answers],
        }
    metrics = write([*samples.values()], job.export, config, table.kind, world.size)
    contract.write(job.export)
    MetricsFile(job.metrics_file, 1).write(1, metrics)
    return metrics


def totals(answers: Sequence[Answer], config: SampleConfig) -> list[float]:
    """The score of each answer to a prompt: the weighted sum of all sources of rewards.

    A chat model has compared every answer with the next one, the last one with the first.
    """

    def score(number: int, reward: SampleReward) -> float:
        name = REWARD_MODEL if isinstance(reward, TrainedReward) else reward.label
        before, own = (answers[i].scores[name] or 0.0 for i in (number - 1, number))
        return reward.weight * (own - before if isinstance(reward, PairwiseJudge) else own)

    return [sum(score(i, reward) for reward in config.rewards) for i in range(len(answers))]


def choose(sample: Sample, kind: Kind, config: SampleConfig) -> tuple[int, ...] | None:
    """The number of the best answer or, for comparisons, of the best and of the worst one.

    Of equal scores the first one counts. None: no answer may be trained on, the best score is below
    `min_score`, or all scores are equal, which makes no comparison.
    """
    scores, keeps = sample["scores"], config.cut_answers == "keep"
    allowed = [i for i, is_whole in enumerate(sample["ended"]) if is_whole or keeps]
    if not allowed:
        return None
    best, worst = (find(allowed, key=scores.__getitem__) for find in (max, min))
    if config.min_score is not None and scores[best] < config.min_score:
        return None
    if kind == "demonstrations":
        return (best,)
    return (best, worst) if scores[best] > scores[worst] else None


def write(
    samples: Sequence[Sample], folder: Path, config: SampleConfig, kind: Kind, ranks: int
) -> dict[str, float]:
    """Write the rows of both parts and all answers; return the metrics.

    Raises StageError if a part has fewer rows than the ranks that are to train on it.
    """
    folder.mkdir(exist_ok=True)
    rows: dict[str, list[Sample]] = {part: [] for part in PARTS}
    best = []
    with (folder / "samples.jsonl").open("w", encoding="utf-8") as file:
        for sample in samples:
            chosen = choose(sample, kind, config)
            shown = {name: value for name, value in sample.items() if not name.endswith("_ids")}
            file.write(json.dumps(shown | {"chosen": chosen}, ensure_ascii=False) + "\n")
            if chosen is not None:
                first, last = (sample["response_ids"][chosen[end]] for end in (0, -1))
                row = {"response_ids": first, "loss_mask": [True] * len(first)}
                pair = {"chosen_ids": first, "rejected_ids": last}
                rows[sample["part"]].append(sample | row | pair)
                best.append(sample["scores"][chosen[0]])
    cut = mean(not is_whole for sample in samples for is_whole in sample["ended"])
    for part in PARTS:
        if len(rows[part]) < ranks:
            raise StageError(
                f"sample: found {len(rows[part])} rows for {part}, expected at least {ranks}, one "
                f"for each rank: {cut:.0%} of all answers were cut. Fix: use more prompts, raise "
                "n or sampling.max_response_tokens, lower min_score, or use rewards that tell "
                "the answers to a prompt apart"
            )
        schema = DEMONSTRATION if kind == "demonstrations" else COMPARISON
        writer = ArrowWriter(folder / f"{part}.arrow", schema)
        writer.write(rows[part])
        writer.close()
    return {
        "sample/score": mean(score for sample in samples for score in sample["scores"]),
        "sample/chosen_score": mean(best),
        "sample/without_row": 1 - len(best) / len(samples),
        "sample/cut": cut,
    }


if __name__ == "__main__":
    run_program(main)
