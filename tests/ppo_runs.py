"""Short PPO runs in this process, on one rank with real DeepSpeed engines."""

import copy
import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.generation.generator import Generator, row_seeds
from rlhf_pipeline.generation.records import Scored
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.training import ppo
from rlhf_pipeline.training.ppo_setup import PPOModels, Setup, set_up
from rlhf_pipeline.training.rollouts import score_sequences


def ppo_config(**changes) -> PPOConfig:
    # With the usual eps of 1e-8, Adam would turn rounding noise in tiny gradients into full steps.
    model = {"optimizer": {"learning_rate": 1e-3, "warmup_fraction": 0.0, "eps": 1e-4}}
    fields = {
        "steps": 2, "rollout_batch_size": 8, "minibatch_size": 8, "micro_batch_tokens": 48,
        "evaluations": 2, "sampling": {"max_response_tokens": 6}, "actor": model, "critic": model,
    }  # fmt: skip
    return PPOConfig.model_validate(fields | changes)


@dataclass(frozen=True)
class Run:
    """A finished run."""

    setup: Setup
    start: dict[str, dict[str, Any]]
    """The weights of each model before the first step."""
    lines: list[dict[str, float]]
    """The metrics of each line of `metrics.jsonl`."""

    def weights(self, name: str) -> dict[str, Any]:
        return _module(self.setup, name).state_dict()


def run_ppo(
    config: PPOConfig,
    inputs: dict[str, Path],
    world: World,
    folder: Path,
    *,
    generator: Generator | None = None,
    answers: int = 0,
) -> Run:
    """Train with seed 1."""
    folder.mkdir(exist_ok=True)
    job = LaunchedJob("ppo", "f", 1, {}, inputs, {}, folder, 60.0, answers=answers)
    setup = set_up(job, config, TokenContract.read(inputs["sft_model"]), world)
    if generator is not None:
        setup = replace(setup, models=replace(setup.models, generator=generator))
    start = {
        name: copy.deepcopy(_module(setup, name).state_dict()) for name in setup.models.engines()
    }
    ppo.train(setup)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return Run(setup, start, [json.loads(line)["metrics"] for line in lines])


def ppo_setup_of(models: Any, config: PPOConfig, world: World, **more: Any) -> Any:
    """What the steps of PPO read of their setup, with seed 1."""
    further = {"seed": 1, "text": None, "given": None} | more
    return SimpleNamespace(models=models, config=config, world=world, **further)


def scored_rollout(
    models: PPOModels, prompts: list[list[int]], config: PPOConfig, step: int
) -> Scored:
    """Sample a response to each prompt and score it, as in one step of a run with seed 1."""
    seeds = row_seeds(1, step, np.arange(len(prompts)))
    rollout = models.generator.generate(prompts, config.sampling, seeds)
    setup = ppo_setup_of(models, config, World(0, 1, models.actor.device))
    return models.rewards(score_sequences(setup, rollout.sequences), {})


def _module(setup: Setup, name: str) -> Any:
    model = getattr(setup.models, name)
    return getattr(model, "module", model)
