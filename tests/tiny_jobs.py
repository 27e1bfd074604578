"""Short runs of the training programs and of the evaluation, with tiny models."""

import json
from pathlib import Path
from typing import Any

from ppo_runs import ppo_config

from rlhf_pipeline.config.evaluate import CandidateConfig, EvaluateConfig
from rlhf_pipeline.config.policies import DistillConfig
from rlhf_pipeline.config.preferences import DPOConfig, KTOConfig
from rlhf_pipeline.config.training import RewardModelConfig, SFTConfig
from rlhf_pipeline.evaluation import evaluate
from rlhf_pipeline.runtime.job import LaunchedJob, as_json
from rlhf_pipeline.training import dpo, kto, ppo, reward_model, sft

MAIN = {
    "sft": sft.main,
    "reward_model": reward_model.main,
    "dpo": dpo.main,
    "kto": kto.main,
    "ppo": ppo.main,
    "distill": ppo.main,
    "evaluate": evaluate.main,
}
"""The work of each program."""
INPUTS = {
    "sft": ("base_model", "demonstrations"),
    "reward_model": ("sft_model", "comparisons"),
    "dpo": ("sft_model", "comparisons"),
    "kto": ("sft_model", "comparisons", "labelled"),
    "ppo": ("prompts", "sft_model", "reward_model"),
    "distill": ("prompts", "sft_model", "demonstrations", "teacher"),
    "evaluate": ("prompts", "demonstrations", "sft_model", "ppo_model", "reward_model"),
}
STEPS = 2


def trained(zero_stage: int, precision: str = "fp32", **deepspeed: Any) -> dict[str, Any]:
    """The block of a model in training."""
    return {
        "optimizer": {"learning_rate": 1e-3, "warmup_fraction": 0.0, "eps": 1e-4},
        "deepspeed": {"zero_stage": zero_stage, "precision": precision, **deepspeed},
    }


def tiny_job(
    program: str, inputs: dict[str, Path], folder: Path, changes: dict[str, Any]
) -> LaunchedJob:
    """A job with changed parameters. Training takes two steps and saves a checkpoint in each."""
    folder.mkdir(exist_ok=True)
    start = {"sft_model": "base_model"} if changes.get("start") == "base" else {}
    own = {start.get(name, name): inputs[start.get(name, name)] for name in INPUTS[program]}
    return LaunchedJob(program, "f", 1, as_json(_blocks(program, changes)), own, {}, folder, 60.0)


def logged(folder: Path) -> list[dict[str, float]]:
    """The metrics of each step, without times."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line)["metrics"].items() if "time/" not in name}
        for line in lines
    ]


def _blocks(program: str, changes: dict[str, Any]) -> dict[str, Any]:
    supervised = {
        "epochs": STEPS, "batch_size": 8, "micro_batch_tokens": 32, "evaluations": STEPS
    }  # fmt: skip
    generated = {"sampling": {"max_response_tokens": 4}, "micro_batch_tokens": 32}
    match program:
        case "sft":
            return {program: SFTConfig.model_validate(supervised | changes)}
        case "reward_model":
            return {program: RewardModelConfig.model_validate(supervised | changes)}
        case "dpo":
            return {program: DPOConfig.model_validate(supervised | changes)}
        case "kto":  # both answers of eight comparisons, and eight labelled ones
            return {program: KTOConfig.model_validate(supervised | {"batch_size": 24} | changes)}
        case "ppo":
            config = generated | {"steps": STEPS, "evaluations": STEPS, "evaluation_prompts": 4}
            return {program: ppo_config(**(config | changes))}
        case "distill":
            return {program: DistillConfig.model_validate(changes)}
        case _:
            config = generated | {"prompts": 8} | changes
            return {
                "evaluate": EvaluateConfig.model_validate(config),
                "candidate": CandidateConfig(name="ppo"),
            }
