"""Stage program: a candidate policy and the SFT baseline side by side on held-out prompts.

    deepspeed --module rlhf_pipeline.evaluation.evaluate job.json

The policies answer the same prompts by the same decoding and with the same random draws. Each answer is scored by the
reward model and, where the prompt's source has a judge, by the gold score that no model was trained on directly.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_pipeline.config.evaluate import CandidateConfig, EvaluateConfig
from rlhf_pipeline.data.gold import judged
from rlhf_pipeline.data.token_contract import TokenContract, common_contract
from rlhf_pipeline.distributed.batches import columns, load_rows, own_share
from rlhf_pipeline.distributed.metrics_writer import MetricsWriter
from rlhf_pipeline.distributed.world import World, join
from rlhf_pipeline.evaluation.report import render_markdown
from rlhf_pipeline.evaluation.statistics import distinct_n, mean_with_interval, win_rate
from rlhf_pipeline.models.loading import freeze, load_policy, load_scores, load_tokenizer
from rlhf_pipeline.models.scalar_head import TokenScores
from rlhf_pipeline.rl.kl import kl_estimate
from rlhf_pipeline.rollout.generation import generate, uniform_draws
from rlhf_pipeline.rollout.scoring import score
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.program import run_program

BASELINE = "sft"


@dataclass(frozen=True)
class Answer:
    """One policy's answer to one prompt."""

    row: int
    prompt: str
    response: str
    score: float
    """The reward model's score, relative to the mean of demonstrations."""
    gold_score: float | None
    kl: float
    """log pi(response) - log pi_sft(response), nats."""
    response_tokens: int
    ended: bool


def main(job: LaunchedJob) -> dict[str, float]:
    """Answer, score, compare; write `evaluation.json` and `report.md`."""
    config = job.block("evaluate", EvaluateConfig)
    candidate = job.block("candidate", CandidateConfig)
    contract = common_contract(job.inputs)
    world = join(job.seed, timeout_s=job.collective_timeout_s)
    table = load_rows(job.inputs["prompts"] / "test.arrow", world)
    rows = own_share(np.arange(min(config.prompts, table.num_rows)), world)
    tokenizer = load_tokenizer(job.inputs["sft_model"], trust_remote_code=job.trust_remote_code)
    policies = {
        name: freeze(
            load_policy(checkpoint, config.precision, trust_remote_code=job.trust_remote_code)
        ).to(world.device)
        for name, checkpoint in policy_folders(job, candidate.name).items()
    }
    reward_model = freeze(
        load_scores(
            job.inputs["reward_model"], config.precision, trust_remote_code=job.trust_remote_code
        )
    ).to(world.device)
    writer = MetricsWriter(job.metrics_file, world, len(policies))
    answers: dict[str, list[Answer]] = {}
    for step, (name, policy) in enumerate(policies.items(), start=1):
        heartbeat.at("evaluation", step)
        own = answer(
            policy, policies[BASELINE], reward_model, columns(table, rows), rows,
            config=config, contract=contract, tokenizer=tokenizer, seed=job.seed,
        )  # fmt: skip
        answers[name] = gather(own, world)
        writer.write(
            step, {f"{name}/{key}": value for key, value in summary(answers[name]).items()}
        )
    evaluation = compare(answers, config)
    if world.rank == 0:
        write(evaluation, answers, job.export)
    return headline(evaluation)


def policy_folders(job: LaunchedJob, candidate: str) -> dict[str, Path]:
    """The policies by name: the baseline, the candidate, and as "ppo_ema" the average of the candidate's weights, if any."""
    model = job.inputs[f"{candidate}_model"]
    found = {BASELINE: job.inputs[f"{BASELINE}_model"], candidate: model}
    average = model / "ema"
    return found | ({f"{candidate}_ema": average} if average.is_dir() else {})


def answer(
    policy: PreTrainedModel,
    reference: PreTrainedModel,
    reward_model: TokenScores,
    prompts: dict[str, list[Any]],
    rows: np.ndarray,
    *,
    config: EvaluateConfig,
    contract: TokenContract,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
) -> list[Answer]:
    """A policy's answers to this rank's prompts, judged."""
    draws = uniform_draws(seed, 0, rows, config.sampling.max_response_tokens).to(policy.device)
    rollout = generate(policy, prompts["prompt_ids"], draws, config.sampling, contract)
    scored = score(
        rollout, policy, reference, None, reward_model,
        contract=contract, device=policy.device, temperature=config.sampling.temperature,
        micro_batch_size=config.micro_batch_size_per_gpu,
    )  # fmt: skip
    log_ratios = torch.where(
        rollout.response_mask, kl_estimate(scored.logprobs, scored.ref_logprobs, "k1"), 0.0
    )
    texts = tokenizer.batch_decode(rollout.response_ids, skip_special_tokens=True)
    return [
        Answer(
            row=int(row),
            prompt="\n\n".join(
                f"{message['role'].title()}: {message['content']}" for message in messages
            ),
            response=text.strip(),
            score=float(scored.scores[i]) - reward_model.score_mean,
            gold_score=judged(source, messages, text),
            kl=float(log_ratios[i].sum()),
            response_tokens=int(rollout.response_mask[i].sum()),
            ended=bool(scored.ended[i]),
        )
        for i, (row, source, messages, text) in enumerate(
            zip(rows, prompts["source"], prompts["messages"], texts, strict=True)
        )
    ]


def gather(own: list[Answer], world: World) -> list[Answer]:
    """All ranks' answers, in the order of the prompts."""
    parts: list[list[Answer]] = [[] for _ in range(world.size)]
    torch.distributed.all_gather_object(parts, own)
    return sorted((answer for part in parts for answer in part), key=lambda answer: answer.row)


def compare(answers: dict[str, list[Answer]], config: EvaluateConfig) -> dict[str, Any]:
    """Both policies' metrics, the win rates of the candidate over the baseline, and pairs of answers to read.

    Args:
        answers: the baseline's by its name, then the candidate's, then those of its variants.
        config: the decoding, and how many pairs to show.
    """
    baseline, candidate, *variants = answers
    has_gold = all(answer.gold_score is not None for answer in answers[baseline])
    measures = ["score", "gold_score"] if has_gold else ["score"]

    def win_rates(name: str) -> dict[str, dict[str, float]]:
        return {
            m.removesuffix("_score"): asdict(
                win_rate(
                    [getattr(a, m) for a in answers[name]],
                    [getattr(a, m) for a in answers[baseline]],
                )
            )
            for m in measures
        }

    return {
        "candidate": candidate,
        "prompts": len(answers[baseline]),
        "decoding": {
            "temperature": config.sampling.temperature,
            "max_response_tokens": config.sampling.max_response_tokens,
        },
        "judge": "gold" if has_gold else None,
        "policies": {name: summary(given) for name, given in answers.items()},
        "win_rates": win_rates(candidate),
        "variants": {name: win_rates(name) for name in variants},
        "samples": [
            {
                "prompt": a.prompt,
                baseline: a.response,
                candidate: b.response,
                f"{baseline}_score": a.score,
                f"{candidate}_score": b.score,
                f"{baseline}_gold": a.gold_score,
                f"{candidate}_gold": b.gold_score,
            }
            for a, b in list(zip(answers[baseline], answers[candidate], strict=True))[
                : config.samples
            ]
        ],
    }


def summary(answers: list[Answer]) -> dict[str, float]:
    """Means over prompts, scores and KL with their 95% intervals."""
    columns = {"score": [a.score for a in answers], "kl": [a.kl for a in answers]}
    gold = [a.gold_score for a in answers if a.gold_score is not None]
    if len(gold) == len(answers):
        columns["gold_score"] = gold
    metrics: dict[str, float] = {}
    for name, values in columns.items():
        metrics[name], metrics[f"{name}_lower"], metrics[f"{name}_upper"] = mean_with_interval(
            values
        )
    texts = [a.response for a in answers]
    return metrics | {
        "response_tokens": float(np.mean([a.response_tokens for a in answers])),
        "eos_fraction": float(np.mean([a.ended for a in answers])),
        "distinct_1": distinct_n(texts, 1),
        "distinct_2": distinct_n(texts, 2),
    }


def headline(evaluation: dict[str, Any]) -> dict[str, float]:
    """The evaluation as flat metrics: `sft/...`, `ppo/...` (or another candidate's name), `win_rate/...`, and for a variant
    of the candidate `ppo_ema/...`, its win rates among them."""
    policies = {
        f"{name}/{key}": value
        for name, metrics in evaluation["policies"].items()
        for key, value in metrics.items()
    }
    rates = {"win_rate/": evaluation["win_rates"]}
    rates |= {
        f"{name}/win_rate_": by_measure for name, by_measure in evaluation["variants"].items()
    }
    return policies | {
        f"{prefix}{measure}{suffix}": rate[key]
        for prefix, by_measure in rates.items()
        for measure, rate in by_measure.items()
        for key, suffix in (("rate", ""), ("lower", "_lower"), ("upper", "_upper"))
    }


def write(evaluation: dict[str, Any], answers: dict[str, list[Answer]], export: Path) -> None:
    """The evaluation for machines and for people, and every answer of both policies."""
    export.mkdir(exist_ok=True)
    (export / "evaluation.json").write_text(json.dumps(evaluation, indent=2))
    (export / "report.md").write_text(render_markdown(evaluation))
    lines = [
        json.dumps({"policy": name} | asdict(a)) for name, given in answers.items() for a in given
    ]
    (export / "answers.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    run_program(main)
