"""Stage program: compare a candidate policy with the SFT baseline on held-out prompts.

    deepspeed --module rlhf_pipeline.evaluation.evaluate job.json

The policies answer the same prompts with equal decoding and equal randomness. Every judge scores
every answer. One model at a time is in memory: what could be trained can be evaluated.
"""

import gc
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_pipeline.config.evaluate import (
    CHAMPION,
    JUDGE_PREFIX,
    REWARD_MODEL,
    CandidateConfig,
    EvaluateConfig,
)
from rlhf_pipeline.config.rewards import INPUT_PREFIX as REWARD_PREFIX
from rlhf_pipeline.config.training import FrozenDeepSpeedConfig
from rlhf_pipeline.data.token_contract import TokenContract, common_contract
from rlhf_pipeline.distributed.batches import even_share, load_rows, sampled_rows
from rlhf_pipeline.distributed.frozen_model import frozen_model
from rlhf_pipeline.distributed.lean_deepspeed import DeepSpeedEngine, get_accelerator
from rlhf_pipeline.distributed.world import World, join
from rlhf_pipeline.evaluation.comparison import (
    BASELINE,
    Answer,
    compare,
    headline,
    summary,
    write_answers,
)
from rlhf_pipeline.evaluation.judges import AnswerBatch, Judge, RewardModelJudge, load_judges
from rlhf_pipeline.evaluation.report import FIGURE, plot_comparison, render_markdown
from rlhf_pipeline.models.forward import response_logprobs
from rlhf_pipeline.models.loading import load_policy, load_tokenizer, saved_precision
from rlhf_pipeline.models.scalar_head import TokenScores, load_scores
from rlhf_pipeline.models.sequences import Sequences
from rlhf_pipeline.rl.kl import kl_estimate
from rlhf_pipeline.rollout.function_reward import Answered
from rlhf_pipeline.rollout.generation import row_seeds
from rlhf_pipeline.rollout.scoring import Scored, by_micro_batches, ended
from rlhf_pipeline.rollout.transformers_generator import TransformersGenerator
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.digests import file_digest
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.manifest import NAME, Manifest
from rlhf_pipeline.runtime.metrics_file import MetricsFile
from rlhf_pipeline.runtime.program import run_program

M = TypeVar("M", bound=nn.Module)
R = TypeVar("R")


@dataclass(frozen=True)
class Setup:
    """What all policies share."""

    seed: int
    config: EvaluateConfig
    contract: TokenContract
    tokenizer: PreTrainedTokenizerBase
    rows: np.ndarray
    """Numbers of this rank's prompts in the table; the last one may repeat the first of all."""
    prompts: dict[str, list[Any]]
    """Columns of these rows."""
    judges: list[Judge]
    """The judges without the reward model."""
    trust: bool
    """Whether code that ships with a model may run."""
    world: World


def main(job: LaunchedJob) -> dict[str, float]:
    """Answer, judge, compare; write the evaluation, the report and all answers."""
    candidate = job.block("candidate", CandidateConfig)
    config = job.block("evaluate", EvaluateConfig)
    contract = common_contract(
        {name: path for name, path in job.inputs.items() if not name.startswith(JUDGE_PREFIX)}
    )
    world = join(job.seed, timeout_s=job.collective_timeout_s)
    folders = policy_folders(job, candidate.name)
    writer = MetricsFile(job.metrics_file, len(folders), rank=world.rank)
    setup = load(job, config, contract, world)
    scored = answer_all(folders, setup)
    answers = judge_all(scored, job.inputs["reward_model"], setup, writer)
    evaluation = compare(answers, config, optimized_judges(job, candidate.name, config))
    trained = Manifest.read(job.inputs["reward_model"]).metrics
    evaluation["reward_model_accuracy_lower"] = trained.get("validation/accuracy_lower")
    if world.rank == 0:
        write(evaluation, answers, candidate.caveats, job.export)
    return headline(evaluation)


def policy_folders(job: LaunchedJob, candidate: str) -> dict[str, Path]:
    """The baseline, the candidate, and as "ppo_ema" the average of its weights, if any.

    The champion competes without its average.
    """
    model = job.inputs[f"{candidate}_model"]
    folders = {BASELINE: job.inputs[f"{BASELINE}_model"], candidate: model}
    if candidate != CHAMPION and (model / "ema").is_dir():
        folders[f"{candidate}_ema"] = model / "ema"
    return folders


def optimized_judges(job: LaunchedJob, candidate: str, config: EvaluateConfig) -> set[str]:
    """The judges that the candidate's training has optimized; functions by file and name.

    The reward model counts unless PPO ran without it: DPO learns from the same comparisons.
    """
    trained = Manifest.read(job.inputs[f"{candidate}_model"])
    if "ppo" not in trained.config:
        return {REWARD_MODEL}
    found, functions = set(), set()
    for index, reward in enumerate(trained.config["ppo"]["rewards"]):
        if reward["weight"] and "model" in reward:
            found.add(REWARD_MODEL)
        if reward["weight"] and "callable" in reward:
            function = reward["callable"].rpartition(":")[2]
            functions.add((trained.inputs.get(f"{REWARD_PREFIX}{index}"), function))
    for index, judge in enumerate(config.judges):
        if (file_digest(job.inputs[f"{JUDGE_PREFIX}{index}"]), judge.function) in functions:
            found.add(judge.label)
    return found


def load(job: LaunchedJob, config: EvaluateConfig, contract: TokenContract, world: World) -> Setup:
    """Load the prompts of this rank, the tokenizer and the judges that are no models."""
    table = load_rows(job.inputs["prompts"] / "test.arrow", world)
    rows = even_share(sampled_rows(table.num_rows, config.prompts, job.seed), world)
    return Setup(
        seed=job.seed,
        config=config,
        contract=contract,
        tokenizer=load_tokenizer(
            job.inputs[f"{BASELINE}_model"], trust_remote_code=job.trust_remote_code
        ),
        rows=rows,
        prompts=table.columns(rows),
        judges=load_judges(job, config),
        trust=job.trust_remote_code,
        world=world,
    )


def answer_all(folders: dict[str, Path], setup: Setup) -> dict[str, Scored]:
    """Let every policy answer the prompts of this rank; log-probabilities by it and the baseline.

    The baseline comes last: it also reads the answers of the others.
    """
    found: dict[str, tuple[Sequences, Tensor]] = {}
    references: dict[str, Tensor] = {}

    def answer_and_read(policy: PreTrainedModel | DeepSpeedEngine, name: str) -> None:
        sequences = answer(policy, setup)
        own = logprobs(policy, sequences, setup)
        found[name] = sequences, own
        if name == BASELINE:
            for other, (answers, _) in found.items():
                references[other] = own if other == name else logprobs(policy, answers, setup)

    for step, (name, folder) in enumerate(reversed(folders.items()), start=1):
        heartbeat.at("rollout", step)
        with_model(load_policy, folder, setup, partial(answer_and_read, name=name))
    return {
        name: Scored(
            sequences=sequences,
            logprobs=own,
            ref_logprobs=references[name],
            values=None,
            scores=torch.zeros(len(sequences)),
            ended=ended(sequences.response_ids, setup.contract),
        )
        for name in folders
        for sequences, own in [found[name]]
    }


def judge_all(
    scored: Mapping[str, Scored], reward_model: Path, setup: Setup, writer: MetricsFile
) -> dict[str, list[Answer]]:
    """The judged answers of all ranks, by policy; writes the metrics of each policy."""

    def judge_by(model: TokenScores | DeepSpeedEngine) -> dict[str, list[Answer]]:
        judge = RewardModelJudge(model, setup.config.micro_batch_tokens, setup.world)
        judges = [judge, *setup.judges]
        answers = {}
        for step, (name, given) in enumerate(scored.items(), start=1):
            heartbeat.at("scoring", step)
            answers[name] = gather(judge_answers(given, setup, judges), setup.world)
            metrics = summary(answers[name])
            writer.write(step, {f"{name}/{metric}": value for metric, value in metrics.items()})
        return answers

    return with_model(load_scores, reward_model, setup, judge_by)


def with_model(
    load: Callable[..., M], folder: Path, setup: Setup, work: Callable[[M | DeepSpeedEngine], R]
) -> R:
    """Load a frozen model, let `work` use it, and free its memory: one model at a time.

    The model has the precision that it was saved in and is sharded as it was trained, unless the
    configuration says otherwise.
    """
    stage = setup.config.zero_stage
    if stage is None:
        stage = 3 if 3 in zero_stages(folder) else 0
    precision = setup.config.precision or saved_precision(folder)
    settings = FrozenDeepSpeedConfig(zero_stage=stage, precision=precision)
    model = frozen_model(
        partial(load, folder, trust_remote_code=setup.trust), settings, setup.world
    )
    try:
        return work(model)
    finally:
        if isinstance(model, DeepSpeedEngine):
            model.destroy()
        del model
        gc.collect()
        get_accelerator().empty_cache()


def zero_stages(folder: Path) -> set[int]:
    """The ZeRO stages of the engines of the stage that made an artifact."""
    artifact = folder if (folder / NAME).is_file() else folder.parent  # the average is inside
    engines = Manifest.read(artifact).deepspeed.values()
    return {settings["zero_optimization"]["stage"] for settings in engines}


def answer(policy: PreTrainedModel | DeepSpeedEngine, setup: Setup) -> Sequences:
    """Answer the prompts of this rank."""
    generator = TransformersGenerator(policy, setup.contract)
    seeds = row_seeds(setup.seed, 0, setup.rows)
    return generator.generate(setup.prompts["prompt_ids"], setup.config.sampling, seeds).sequences


@torch.no_grad()
def logprobs(policy: nn.Module, sequences: Sequences, setup: Setup) -> Tensor:
    """Log-probability of each token of the answers, (B, R)."""
    function = partial(
        response_logprobs,
        vocab_size=setup.contract.vocab_size,
        temperature=setup.config.sampling.temperature,
    )
    tokens = setup.config.micro_batch_tokens
    return by_micro_batches(function, policy, sequences, tokens, setup.world)


def judge_answers(scored: Scored, setup: Setup, judges: list[Judge]) -> list[Answer]:
    """Let every judge score the answers."""
    sequences, prompts = scored.sequences, setup.prompts
    texts = setup.tokenizer.batch_decode(sequences.response_ids, skip_special_tokens=True)
    responses = [text.strip() for text in texts]
    text = Answered(prompts["messages"], prompts["reference"], responses)
    batch = AnswerBatch(scored, text, prompts["source"])
    scores = {judge.name: judge.score(batch) for judge in judges}
    mask = sequences.response_mask
    log_ratios = kl_estimate(scored.logprobs, scored.ref_logprobs, "k1").where(mask, 0.0)
    sft_logprobs = scored.ref_logprobs.where(mask, 0.0)
    return [
        Answer(
            row=int(row),
            prompt="\n\n".join(
                f"{message['role'].title()}: {message['content']}" for message in text.prompts[i]
            ),
            response=text.responses[i],
            scores={name: given[i] for name, given in scores.items()},
            kl=float(log_ratios[i].sum()),
            sft_logprob=float(sft_logprobs[i].sum()),
            response_tokens=int(mask[i].sum()),
            ended=bool(scored.ended[i]),
            source=prompts["source"][i],
        )
        for i, row in enumerate(setup.rows)
    ]


def gather(own: list[Answer], world: World) -> list[Answer]:
    """The answers of all ranks, in the order of the prompts; repeated rows once."""
    by_row = {answer.row: answer for part in world.gather(own) for answer in part}
    return [by_row[row] for row in sorted(by_row)]


def write(
    evaluation: dict[str, Any],
    answers: dict[str, list[Answer]],
    caveats: Mapping[str, str],
    export: Path,
) -> None:
    """Write the evaluation as JSON, the report as Markdown, and every answer of every policy."""
    export.mkdir(exist_ok=True)
    (export / "evaluation.json").write_text(json.dumps(evaluation, indent=2))
    (export / "report.md").write_text(render_markdown(evaluation, caveats))
    plot_comparison(evaluation, answers, export / FIGURE)
    write_answers(answers, export)


if __name__ == "__main__":
    run_program(main)
