"""Stage program: compare a candidate policy with the SFT baseline, or any models, on prompts.

    deepspeed --module rlhf_pipeline.evaluation.evaluate job.json

The policies answer the same prompts with equal decoding and equal randomness; the baseline answers
again with other randomness, because a win rate is about independent answers. Every judge scores
every answer. One model at a time is in memory: what could be trained can be evaluated.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf_pipeline.config.evaluate import (
    CHAMPION,
    JUDGE_PREFIX,
    REWARD_MODEL,
    SFT_MODEL,
    SFT_ROWS,
    TASK_PREFIX,
    CandidateConfig,
    EvaluateConfig,
)
from rlhf_pipeline.data.token_contract import common_contract
from rlhf_pipeline.distributed.batches import even_share, load_rows, sampled_rows
from rlhf_pipeline.distributed.engine import free_memory
from rlhf_pipeline.distributed.lean_deepspeed import DeepSpeedEngine
from rlhf_pipeline.distributed.world import World, join
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.evaluation.comparison import (
    BASE_MODEL,
    BASELINE,
    INSTRUCT,
    Answer,
    best_of_n,
    compare,
    headline,
    write_answers,
)
from rlhf_pipeline.evaluation.judges import by_reward_model, model_judges, optimized_judges
from rlhf_pipeline.evaluation.pairwise import judge_pairs
from rlhf_pipeline.evaluation.setup import (
    HeldOut,
    Setup,
    held_out_answers,
    logprobs,
    perplexity,
    with_model,
)
from rlhf_pipeline.evaluation.texts import AnswerBatch, Judge, load_judges
from rlhf_pipeline.models.lean_transformers import PreTrainedModel
from rlhf_pipeline.models.loading import load_policy, load_tokenizer
from rlhf_pipeline.models.scalar_head import load_scores
from rlhf_pipeline.models.sequences import Sequences
from rlhf_pipeline.rl.rewards import kl_estimate
from rlhf_pipeline.rollout.chat_model import REPLIES, dialogue, reply_folder
from rlhf_pipeline.rollout.generation import Generator, load_generator, row_seeds
from rlhf_pipeline.rollout.records import Answered, Scored, ended
from rlhf_pipeline.rollout.true_answers import accuracy
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.manifest import Manifest
from rlhf_pipeline.runtime.metrics_file import MetricsFile
from rlhf_pipeline.runtime.program import run_program

if TYPE_CHECKING:
    from rlhf_pipeline.evaluation.tasks import Tasks

Draw = tuple[str, int]  # a policy, and the number of its answer to each prompt


def main(job: LaunchedJob) -> dict[str, float]:
    """Answer, judge, compare; write the evaluation and all answers."""
    candidate = job.block("candidate", CandidateConfig)
    config = job.block("evaluate", EvaluateConfig)
    world = join(job.seed, timeout_s=job.collective_timeout_s)
    folders = policy_folders(job, candidate)
    baseline = next(iter(folders))
    setups = load(job, config, candidate, folders, world)
    setup = setups[baseline]
    counts: dict[str, Counter[str]] = {}
    judges = load_judges(job, config, counts=counts)
    rows = job.inputs.get(SFT_ROWS)
    held_out = None if rows is None else held_out_answers(rows, setup)
    tasks = None
    if config.tasks is not None:
        from rlhf_pipeline.evaluation.tasks import Tasks

        tasks = Tasks(config.tasks, setup)
    # Beside the champion none: the evaluation of the candidate has the same curve.
    best = 0 if CHAMPION in folders else config.best_of_n
    drawn_by_sft = max(config.baseline_draws, best)
    scored, perplexities = answer_all(folders, held_out, setups, tasks, drawn_by_sft)
    draws = judge_all(scored, job, judges, setups)
    counted = world.gather(counts)
    if world.rank != 0:
        return {}
    curve = best_of_n([draws[baseline, draw] for draw in range(best)]) if best else None
    answers = {name: in_order(name, draws, config.answers_per_prompt) for name in folders}
    drawn = in_order(baseline, draws, config.baseline_draws)
    answers, drawn, replies = judge_pairs(answers, drawn, config, reply_folder(job))
    for name in counts:
        replies[name] = {one: sum(own[name].get(one, 0) for own in counted) for one in REPLIES}
    more = {"best_of_n": curve, "perplexity": perplexities, "pairwise_judges": replies}
    optimized, rewards = optimized_judges(job, candidate.name, config)
    evaluation = compare(answers, config, optimized, drawn, rewards)
    writer = MetricsFile(job.metrics_file, len(answers))
    for step, (name, given) in enumerate(evaluation["policies"].items(), start=1):
        writer.write(step, {f"{name}/{key}": value for key, value in given.items()})
    evaluation |= {name: value for name, value in more.items() if value}
    if tasks is not None:
        tasks.add_to(evaluation)
    if candidate.models:
        evaluation["titles"] = {name: name for name in candidate.models}
    elif Manifest.read(folders[baseline]).metrics.get("base_model/has_chat_template"):
        evaluation["titles"] = {baseline: INSTRUCT}
    model = job.inputs.get("reward_model")
    trained = {} if model is None else Manifest.read(model).metrics
    evaluation["reward_model_accuracy_lower"] = trained.get("validation/accuracy_lower")
    job.export.mkdir(exist_ok=True)
    (job.export / "evaluation.json").write_text(json.dumps(evaluation, indent=2))
    further = [answer for answer in drawn if answer.draw >= config.answers_per_prompt]
    write_answers(answers | {f"{baseline}_again": further}, job.export)
    return headline(evaluation)


def policy_folders(job: LaunchedJob, compared: CandidateConfig) -> dict[str, Path]:
    """The baseline, the candidate, and as "ppo_ema" the average of its weights, if any.

    Without SFT, the baseline is the base model. The champion competes without its average. Models
    that are compared apart from a pipeline are in their order.
    """
    if compared.models:
        return {name: job.inputs[f"{name}_model"] for name in compared.models}
    candidate = compared.name
    model, baseline = job.inputs[f"{candidate}_model"], job.inputs[SFT_MODEL]
    name = BASE_MODEL if Manifest.read(baseline).stage == BASE_MODEL else BASELINE
    folders = {name: baseline, candidate: model}
    if candidate != CHAMPION and (model / "ema").is_dir():
        folders[f"{candidate}_ema"] = model / "ema"
    return folders


def load(
    job: LaunchedJob,
    config: EvaluateConfig,
    compared: CandidateConfig,
    folders: Mapping[str, Path],
    world: World,
) -> dict[str, Setup]:
    """Load the prompts of this rank and the tokenizer, by policy.

    The policies of a pipeline share both. Raises ArtifactError if the token contracts of what is
    read together differ, and StageError if models would answer different prompts.
    """
    trust = job.trust_remote_code

    def setup(models: dict[str, Path], tokenizer: Path, prompts: Path) -> Setup:
        contract, table = common_contract(models), load_rows(prompts / "test.arrow", world)
        rows = even_share(sampled_rows(table.num_rows, config.prompts, job.seed), world)
        loaded = load_tokenizer(tokenizer, trust_remote_code=trust)
        return Setup(job.seed, config, contract, loaded, rows, table.columns(rows), trust, world)

    if not compared.models:
        others = JUDGE_PREFIX, TASK_PREFIX
        models = {name: path for name, path in job.inputs.items() if not name.startswith(others)}
        return dict.fromkeys(folders, setup(models, job.inputs[SFT_MODEL], job.inputs["prompts"]))
    setups = {}
    for name, folder in folders.items():
        prompts = job.inputs[f"{name}_prompts"]
        setups[name] = setup({f"{name}_prompts": prompts, f"{name}_model": folder}, folder, prompts)
    first, *rest = (each.prompts["messages"] for each in setups.values())
    if any(messages != first for messages in rest):
        raise StageError(
            "prompts: found other prompts for one model than for another, expected the same ones. "
            "Fix: raise split.max_prompt_tokens, because a prompt has more tokens for one of them"
        )
    return setups


def answer_all(
    folders: dict[str, Path],
    held_out: HeldOut | None,
    setups: Mapping[str, Setup],
    tasks: "Tasks | None",
    baseline_draws: int,
) -> tuple[dict[Draw, Scored], dict[str, float]]:
    """Let every policy answer the prompts of this rank; log-probabilities by it and the baseline.

    The baseline comes last: it also reads the answers of the others, if they have its tokens.
    Returns the answers by draw, and the perplexity of held-out answers by policy.
    """
    baseline = next(iter(folders))
    found: dict[Draw, tuple[Sequences, Tensor]] = {}
    scored: dict[Draw, Scored] = {}
    perplexities: dict[str, float] = {}

    def answer_and_read(policy: PreTrainedModel | DeepSpeedEngine, name: str) -> None:
        setup = setups[name]
        read = partial(logprobs, setup=setup, temperature=setup.config.sampling.temperature or 1.0)
        generator = load_generator(
            setup.config.generator,
            policy,
            setup.contract,
            setup.config.sampling,
            setup.world,
            gather=setup.config.gather_for_generation,
            longest_prompt=lambda: max(map(len, setup.prompts["prompt_ids"])),
            place=f"{setup.place}.generator",
        )
        for draw in range(baseline_draws if name == baseline else setup.config.answers_per_prompt):
            sequences = answer(generator, setup, draw)
            found[name, draw] = sequences, read(policy, sequences)
        if held_out is not None:
            perplexities[name] = perplexity(policy, held_out, setup)
        if tasks is not None:
            tasks.do(policy, name)
        if name == baseline:
            for given, (sequences, own) in found.items():
                contract = setups[given[0]].contract
                reference = own
                if given[0] != name:
                    has_its_tokens = contract == setup.contract
                    reference = read(policy, sequences) if has_its_tokens else own * math.nan
                scored[given] = Scored(
                    sequences,
                    logprobs=own,
                    ref_logprobs=reference,
                    values=None,
                    scores=torch.zeros(len(sequences)),  # the judges come later
                    ended=ended(sequences.response_ids, contract),
                )

    for step, (name, folder) in enumerate(reversed(folders.items()), start=1):
        heartbeat.at("rollout", step)
        with_model(load_policy, folder, setups[name], partial(answer_and_read, name=name))
    return scored, {name: perplexities[name] for name in folders if held_out is not None}


def answer(generator: Generator, setup: Setup, draw: int = 0) -> Sequences:
    """Answer the prompts of this rank. Answers of one draw have equal randomness."""
    prompts, rows = setup.prompts["prompt_ids"], setup.rows
    seeds = row_seeds(setup.seed, draw, rows)
    return generator.generate(prompts, setup.config.sampling, seeds, rows.tolist()).sequences


def judge_all(
    scored: Mapping[Draw, Scored],
    job: LaunchedJob,
    judges: Mapping[str, Judge],
    setups: Mapping[str, Setup],
) -> dict[Draw, list[Answer]]:
    """The judged answers of all ranks, by draw. One model at a time is in memory."""
    batches = {draw: as_text(given, setups[draw[0]]) for draw, given in scored.items()}
    setup = next(iter(setups.values()))
    scores: dict[Draw, dict[str, Sequence[float | None]]] = {draw: {} for draw in batches}

    def judge_by(name: str, judge: Judge) -> None:
        for step, (draw, batch) in enumerate(batches.items(), start=1):
            heartbeat.at("scoring", step)
            with heartbeat.scored_by(name):
                scores[draw][name] = judge(batch)

    tokens, world = setup.config.micro_batch_tokens, setup.world
    own = partial(by_reward_model, micro_batch_tokens=tokens, world=world)
    if "reward_model" in job.inputs:
        with_model(
            load_scores,
            job.inputs["reward_model"],
            setup,
            lambda model: judge_by(REWARD_MODEL, partial(own, model=model)),
        )
    for name, judge in chain(judges.items(), model_judges(job, [*setups.values()])):
        judge_by(name, judge)
        del judge
        free_memory()
    return {
        draw: gather(judged(batch, scores[draw], draw[1], setup), world)
        for draw, batch in batches.items()
    }


def as_text(scored: Scored, setup: Setup) -> AnswerBatch:
    """The answers as the judges read them."""
    prompts, ids = setup.prompts, scored.sequences.response_ids
    texts = setup.tokenizer.batch_decode(ids, skip_special_tokens=True)
    responses = [text.strip() for text in texts]
    return AnswerBatch(scored, Answered.of(prompts, responses), prompts["source"])


def judged(
    batch: AnswerBatch, scores: Mapping[str, Sequence[float | None]], draw: int, setup: Setup
) -> list[Answer]:
    """The answers of this rank with their scores by judge."""
    scored, text = batch.scored, batch.text
    mask = scored.sequences.action_mask
    log_ratios = kl_estimate(scored.logprobs, scored.ref_logprobs, "k1").where(mask, 0.0)
    sft_logprobs = scored.ref_logprobs.where(mask, 0.0)

    def known(value: Tensor) -> float | None:
        """None where the baseline has other tokens than the policy."""
        return None if value.isnan() else float(value)

    return [
        Answer(
            row=int(row),
            response=text.responses[i],
            draw=draw,
            prompt=dialogue(text.prompts[i]),
            scores={name: given[i] for name, given in scores.items()},
            kl=known(log_ratios[i].sum()),
            sft_logprob=known(sft_logprobs[i].sum()),
            response_tokens=int(mask[i].sum()),
            ended=bool(scored.ended[i]),
            source=batch.sources[i],
            messages=text.prompts[i],
            right=accuracy(text.references[i], text.responses[i]),
        )
        for i, row in enumerate(setup.rows)
    ]


def gather(own: list[Answer], world: World) -> list[Answer]:
    """The answers of all ranks, in the order of the prompts; repeated rows once."""
    parts = world.gather([asdict(answer) for answer in own])
    by_row = {fields["row"]: Answer(**fields) for part in parts for fields in part}
    return [by_row[row] for row in sorted(by_row)]


def in_order(policy: str, draws: Mapping[Draw, list[Answer]], count: int) -> list[Answer]:
    """The first draws of a policy together: the answers to one prompt follow each other."""
    drawn = (draws[policy, draw] for draw in range(count))
    return [*chain.from_iterable(zip(*drawn, strict=True))]


if __name__ == "__main__":
    run_program(main)
