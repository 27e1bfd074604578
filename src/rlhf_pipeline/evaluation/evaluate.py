"""Stage program: compare a candidate policy with the SFT baseline on held-out prompts.

    deepspeed --module rlhf_pipeline.evaluation.evaluate job.json

The policies answer the same prompts with equal decoding and equal randomness. Every judge scores
every answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_pipeline.config.evaluate import JUDGE_PREFIX, CandidateConfig, EvaluateConfig
from rlhf_pipeline.data.token_contract import TokenContract, common_contract
from rlhf_pipeline.distributed.batches import load_rows, own_share, sampled_rows
from rlhf_pipeline.distributed.world import World, join
from rlhf_pipeline.evaluation.comparison import BASELINE, Answer, compare, headline, summary
from rlhf_pipeline.evaluation.figures import FIGURE, plot_comparison
from rlhf_pipeline.evaluation.judges import AnswerBatch, Judge, load_judges
from rlhf_pipeline.evaluation.report import render_markdown
from rlhf_pipeline.models.loading import freeze, load_policy, load_tokenizer
from rlhf_pipeline.rl.kl import kl_estimate
from rlhf_pipeline.rollout.function_reward import Answered
from rlhf_pipeline.rollout.generation import row_seeds
from rlhf_pipeline.rollout.scoring import Scored, ScoringModels, score_sequences
from rlhf_pipeline.rollout.transformers_generator import TransformersGenerator
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.metrics_file import MetricsFile
from rlhf_pipeline.runtime.program import run_program


@dataclass(frozen=True)
class Setup:
    """What all policies share."""

    seed: int
    config: EvaluateConfig
    contract: TokenContract
    tokenizer: PreTrainedTokenizerBase
    rows: np.ndarray
    """Numbers of this rank's prompts in the table."""
    prompts: dict[str, list[Any]]
    """Columns of these rows."""
    reference: PreTrainedModel
    """The baseline, from which the KL is measured."""
    judges: list[Judge]
    device: torch.device


def main(job: LaunchedJob) -> dict[str, float]:
    """Load, answer, judge, compare; write the evaluation, the report and all answers."""
    candidate = job.block("candidate", CandidateConfig)
    config = job.block("evaluate", EvaluateConfig)
    contract = common_contract(
        {name: path for name, path in job.inputs.items() if not name.startswith(JUDGE_PREFIX)}
    )
    world = join(job.seed, timeout_s=job.collective_timeout_s)
    policies = load_policies(job, candidate.name, config, world)
    setup = load(job, config, contract, policies[BASELINE], world)
    writer = MetricsFile(job.metrics_file, len(policies), rank=world.rank)
    answers: dict[str, list[Answer]] = {}
    for step, (name, policy) in enumerate(policies.items(), start=1):
        heartbeat.at("evaluation", step)
        answers[name] = gather(judge_answers(answer(policy, setup), setup), world)
        metrics = summary(answers[name])
        writer.write(step, {f"{name}/{metric}": value for metric, value in metrics.items()})
    evaluation = compare(answers, config)
    if world.rank == 0:
        write(evaluation, answers, candidate.caveats, job.export)
    return headline(evaluation)


def load_policies(
    job: LaunchedJob, candidate: str, config: EvaluateConfig, world: World
) -> dict[str, PreTrainedModel]:
    """Load the baseline, the candidate, and as "ppo_ema" the average of its weights, if any."""
    model = job.inputs[f"{candidate}_model"]
    folders = {BASELINE: job.inputs[f"{BASELINE}_model"], candidate: model}
    if (model / "ema").is_dir():
        folders[f"{candidate}_ema"] = model / "ema"
    trust = job.trust_remote_code
    return {
        name: freeze(load_policy(folder, config.precision, trust_remote_code=trust)).to(
            world.device
        )
        for name, folder in folders.items()
    }


def load(
    job: LaunchedJob,
    config: EvaluateConfig,
    contract: TokenContract,
    baseline: PreTrainedModel,
    world: World,
) -> Setup:
    """Load the prompts of this rank, the tokenizer and the judges."""
    table = load_rows(job.inputs["prompts"] / "test.arrow", world)
    rows = own_share(sampled_rows(table.num_rows, config.prompts, job.seed), world)
    trust = job.trust_remote_code
    return Setup(
        seed=job.seed,
        config=config,
        contract=contract,
        tokenizer=load_tokenizer(job.inputs["sft_model"], trust_remote_code=trust),
        rows=rows,
        prompts=table.columns(rows),
        reference=baseline,
        judges=load_judges(job, config, world.device),
        device=world.device,
    )


def answer(policy: PreTrainedModel, setup: Setup) -> Scored:
    """Answer the prompts of this rank, and compute the log-probabilities of the answers."""
    sampling = setup.config.sampling
    generator = TransformersGenerator(policy, setup.contract)
    seeds = row_seeds(setup.seed, 0, setup.rows)
    sequences = generator.generate(setup.prompts["prompt_ids"], sampling, seeds).sequences
    models = ScoringModels(
        policy=policy,
        reference=setup.reference,
        critic=None,
        reward_model=None,
        contract=setup.contract,
        device=setup.device,
        temperature=sampling.temperature,
        micro_batch_size=setup.config.micro_batch_size_per_gpu,
    )
    return score_sequences(sequences, models)


def judge_answers(scored: Scored, setup: Setup) -> list[Answer]:
    """Let every judge score the answers."""
    sequences, prompts = scored.sequences, setup.prompts
    texts = setup.tokenizer.batch_decode(sequences.response_ids, skip_special_tokens=True)
    responses = [text.strip() for text in texts]
    text = Answered(prompts["messages"], prompts["reference"], responses)
    batch = AnswerBatch(scored, text, prompts["source"])
    scores = {judge.name: judge.score(batch) for judge in setup.judges}
    log_ratios = torch.where(
        sequences.response_mask, kl_estimate(scored.logprobs, scored.ref_logprobs, "k1"), 0.0
    )
    return [
        Answer(
            row=int(row),
            prompt="\n\n".join(
                f"{message['role'].title()}: {message['content']}" for message in text.prompts[i]
            ),
            response=text.responses[i],
            scores={name: given[i] for name, given in scores.items()},
            kl=float(log_ratios[i].sum()),
            response_tokens=int(sequences.response_mask[i].sum()),
            ended=bool(scored.ended[i]),
        )
        for i, row in enumerate(setup.rows)
    ]


def gather(own: list[Answer], world: World) -> list[Answer]:
    """The answers of all ranks, in the order of the prompts."""
    parts: list[list[Answer]] = [[] for _ in range(world.size)]
    torch.distributed.all_gather_object(parts, own)
    return sorted((answer for part in parts for answer in part), key=lambda answer: answer.row)


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
    lines = [
        json.dumps({"policy": name} | a.record()) for name, given in answers.items() for a in given
    ]
    (export / "answers.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    run_program(main)
