"""Stage program: answers of a policy, scored, as rows for SFT or DPO.

    deepspeed --module rlhf_pipeline.evaluation.sample job.json

    train.arrow, validation.arrow   rows with the tokens of generation, in the columns of the split
    samples.jsonl                   prompts, answers and scores, and which answers are in the rows

Policy and judges work as in an evaluation, one model at a time. An interrupted stage begins again.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pyarrow as pa

from rlhf_pipeline.config.evaluate import REWARD_MODEL
from rlhf_pipeline.config.rewards import PairwiseJudge, Scorer, TrainedReward
from rlhf_pipeline.config.sample import Kind, SampleConfig, TableConfig
from rlhf_pipeline.data.phase_files import COMPARISON, DEMONSTRATION
from rlhf_pipeline.data.record_files import ArrowWriter
from rlhf_pipeline.data.token_contract import common_contract
from rlhf_pipeline.distributed.batches import Rows, even_share, load_rows, sampled_rows, step_rows
from rlhf_pipeline.distributed.world import join
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.evaluation.answering import Setup, answer_all, in_order, judge_all
from rlhf_pipeline.evaluation.judges import load_judges, outcomes_of
from rlhf_pipeline.models.loading import load_tokenizer
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.metrics_file import MetricsFile
from rlhf_pipeline.runtime.program import run_program
from rlhf_pipeline.scoring.chat_model import ChatModel, reply_folder
from rlhf_pipeline.verdict.answers import Answer

PARTS = ("train", "validation")
_MASK = pa.list_(pa.bool_())
COMPARED = pa.schema([*COMPARISON, ("chosen_mask", _MASK), ("rejected_mask", _MASK)])
"""Comparisons with the tokens that the policy chose, for an answer can have several turns."""
Sample = dict[str, Any]
"""A prompt with its answers: a line of `samples.jsonl`, and the tokens."""
Match = tuple[int, int]
"""The numbers of two answers that a judge compares."""


def main(job: LaunchedJob) -> dict[str, float]:
    """Answer, score, choose; write the rows and all answers."""
    table = job.block("table", TableConfig)
    (place,) = job.config.keys() - {"table"}  # such as rejection.sample
    config, trust = job.block(place, SampleConfig), job.trust_remote_code
    models = {name: job.inputs[name] for name in ("prompts", "policy")}  # judges may read text
    contract, world = common_contract(models), join(job.seed, timeout_s=job.collective_timeout_s)
    tokenizer = load_tokenizer(job.inputs["policy"], trust_remote_code=trust)
    files = [load_rows(job.inputs["prompts"] / f"{part}.arrow", world) for part in PARTS]
    count, others = (file.num_rows for file in files)
    drawn = step_rows(count, min(count, config.prompts or count), table.round - 1, job.seed)
    held_out = count + sampled_rows(others, config.validation_prompts, job.seed)
    own = np.concatenate([even_share(rows, world) for rows in (np.unique(drawn), held_out)])
    together = pa.Table.from_batches([batch for file in files for batch in file.batches])
    prompts, seed = Rows.of(together).columns(own), job.seed + table.round - 1
    judges = load_judges(job, config.rewards, f"{place}.rewards")
    setup = Setup(seed, config, contract, tokenizer, own, prompts, trust, world, place)
    scored = answer_all({"policy": job.inputs["policy"]}, {"policy": setup}, job, 0, config.n)
    draws = judge_all(scored, job, judges, {"policy": setup})
    shared = {}
    for i, row in enumerate(own.tolist()):
        sequences = [each.sequences for each in scored.values()]
        asked = [one.prompt_ids[i][one.prompt_mask[i]].tolist() for one in sequences]
        ids = [one.response_ids[i][one.real_mask[i]].tolist() for one in sequences]
        own_masks = [one.action_mask[i][one.real_mask[i]].tolist() for one in sequences]
        prompt = {name: prompts[name][i] for name in ("id", "messages")}
        tokens = {"prompt_ids": asked, "response_ids": ids, "action_masks": own_masks}
        shared[row] = {"part": PARTS[row >= count], **prompt, **tokens}
    gathered = world.gather(shared)
    if world.rank != 0:
        return {}
    answers = in_order("policy", draws, config.n)
    answers = judge_groups(answers, config, place, reply_folder(job))
    samples: dict[int, Sample] = {int(row): one for part in gathered for row, one in part.items()}
    for row, group in groupby(answers, lambda answer: answer.row):
        own_answers = list(group)
        scores, finished = totals(own_answers, config), [bool(one.ended) for one in own_answers]
        chosen = choose(scores, finished, table.kind, config)
        texts = [one.response for one in own_answers]
        if chosen is not None and len({texts[n] for n in chosen}) < len(chosen):
            chosen = None  # equal answers, which were scored apart
        asked = samples[row]["prompt_ids"]
        if chosen is not None and any(asked[n] != asked[chosen[0]] for n in chosen):
            chosen = None  # an environment has begun their episodes differently
        samples[row] |= {"responses": texts, "scores": scores, "ended": finished, "chosen": chosen}
    written = [samples[row] for row in sorted(samples)]
    metrics = write(written, job.export, table.kind, world.size, config.min_score)
    contract.write(job.export)
    MetricsFile(job.metrics_file, 1).write(1, metrics)
    return metrics


def judge_groups(
    drawn: Sequence[Answer], config: SampleConfig, place: str, cache: Path
) -> list[Answer]:
    """Let chat models compare the answers of a policy to the same prompt, on rank 0 alone.

    An answer gets 1 for each win and -1 for each loss, as in `judge_pairs`, which raises the same.
    Answers that were cut play only if they are kept.
    """
    playing = [i for i, one in enumerate(drawn) if one.ended or config.cut_answers == "keep"]
    fields = [list(own) for _, own in groupby(playing, key=lambda i: drawn[i].row)]
    texts, answers = [(one.prompt, one.response) for one in drawn], list(drawn)
    for index, judge in enumerate(config.rewards):
        if isinstance(judge, PairwiseJudge):
            model = ChatModel(judge.openai, cache, f"{place}.rewards.{index}")
            with heartbeat.scored_by(judge.label):
                points = knock_out(fields, partial(_decide, texts, model))
            answers = [a.scored(judge.label, points.get(i, 0.0)) for i, a in enumerate(answers)]
    return answers


def _decide(
    texts: Sequence[tuple[str, str]], model: ChatModel, matches: Sequence[Match]
) -> list[float]:
    return outcomes_of([(*texts[one], texts[two][1]) for one, two in matches], model)


def knock_out(
    fields: Sequence[Sequence[int]], decide: Callable[[Sequence[Match]], Sequence[float]]
) -> Mapping[int, float]:
    """Wins minus losses of all players; n of a field play about 3n/2 matches.

    `decide` gives 1 for a match that the first player wins, -1 for the second one, 0 for a draw.
    All fields play a round together. The winners of the first one play on for the best place, its
    losers for the worst one. After a draw, the player with more points counts as the winner. One of
    an odd number waits, and plays first in the next round.
    """
    points: dict[int, float] = defaultdict(float)
    # With the places in a pair, better and worse, from which players stay.
    brackets: list[tuple[Sequence[int], tuple[int, ...]]] = [(field, (0, 1)) for field in fields]
    while brackets := [each for each in brackets if len(each[0]) > 1]:
        pairs = [list(zip(field[::2], field[1::2], strict=False)) for field, _ in brackets]
        matches, ranked = [match for own in pairs for match in own], {}
        for (one, two), outcome in zip(matches, decide(matches), strict=True):
            points[one] += outcome
            points[two] -= outcome
            lead = outcome or points[one] - points[two]
            ranked[one, two] = (one, two) if lead >= 0 else (two, one)
        brackets = [
            ([*field[2 * len(own) :], *(ranked[match][place] for match in own)], (place,))
            for (field, places), own in zip(brackets, pairs, strict=True)
            for place in places
        ]
    return points


def totals(answers: Sequence[Answer], config: SampleConfig) -> list[float]:
    """The score of each answer to a prompt: the weighted sum of all sources of rewards."""

    def score(answer: Answer, reward: Scorer) -> float:
        name = REWARD_MODEL if isinstance(reward, TrainedReward) else reward.label
        return reward.weight * (answer.scores[name] or 0.0)

    return [sum(score(answer, reward) for reward in config.rewards) for answer in answers]


def choose(
    scores: Sequence[float], finished: Sequence[bool], kind: Kind, config: SampleConfig
) -> tuple[int, ...] | None:
    """The number of the best answer or, for comparisons, of the best and of the worst one.

    Of equal scores the first one counts. None: all answers are cut, the best score is below
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


def write(
    samples: Sequence[Sample], folder: Path, kind: Kind, ranks: int, min_score: float | None = None
) -> dict[str, float]:
    """Write all answers, and the rows of both parts; return the metrics. Raises StageError if a
    part has fewer rows than the ranks that are to train on it."""
    folder.mkdir(exist_ok=True)
    with (folder / "samples.jsonl").open("w", encoding="utf-8") as file:
        for one in samples:
            ids = "_ids", "_masks"
            shown = {name: value for name, value in one.items() if not name.endswith(ids)}
            file.write(json.dumps(shown, ensure_ascii=False) + "\n")
    cut = mean(not finished for one in samples for finished in one["ended"])
    used = [one for one in samples if one["chosen"] is not None]
    for part in PARTS:
        rows = [row_of(one) for one in used if one["part"] == part]
        if len(rows) < ranks:
            own = (score for one in samples if one["part"] == part for score in one["scores"])
            best = max(own, default=-math.inf)
            why, fix = f"{cut:.0%} of the answers were cut", "use rewards that tell answers apart"
            if min_score is not None and best < min_score:
                why += f", and no answer reached min_score {min_score:g}: the best one has {best:g}"
                fix = "lower min_score"
            raise StageError(
                f"sample: found {len(rows)} rows for {part}, expected at least {ranks}, one for "
                f"each rank; {why}. Fix: raise prompts, n or sampling.max_response_tokens, or {fix}"
            )
        schema = DEMONSTRATION if kind == "demonstrations" else COMPARED
        writer = ArrowWriter(folder / f"{part}.arrow", schema)
        writer.write(rows)
        writer.close()
    return {
        "sample/score": mean(score for one in samples for score in one["scores"]),
        "sample/chosen_score": mean(one["scores"][one["chosen"][0]] for one in used),
        "sample/without_row": 1 - len(used) / len(samples),
        "sample/cut": cut,
    }


def row_of(sample: Sample) -> Sample:
    """The columns of SFT and of DPO."""
    best, worst = (sample["chosen"][end] for end in (0, -1))
    ids, actions = sample["response_ids"], sample["action_masks"]
    own = {"prompt_ids": sample["prompt_ids"][best]}
    own |= {"response_ids": ids[best], "loss_mask": actions[best]}
    pair = {"chosen_ids": ids[best], "chosen_mask": actions[best]}
    return sample | own | pair | {"rejected_ids": ids[worst], "rejected_mask": actions[worst]}


if __name__ == "__main__":
    run_program(main)
