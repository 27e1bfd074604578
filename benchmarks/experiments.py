"""The default recipe with changed PPO parameters, on several seeds in parallel.

Finished stages are reused, so an interrupted benchmark resumes and a repeated one costs nothing.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rlhf_pipeline.config.base_model import BaseModelConfig
from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.config.training import RewardModelConfig, SFTConfig
from rlhf_pipeline.kedro_run.config_loader import LayeredConfigLoader
from rlhf_pipeline.pipelines.evaluate import evaluate
from rlhf_pipeline.pipelines.ppo import PPO, ppo
from rlhf_pipeline.pipelines.preparation import base_model, split
from rlhf_pipeline.pipelines.supervised import reward_model, sft
from rlhf_pipeline.settings import CONFIG_LOADER_ARGS
from rlhf_pipeline.stages.job import RunContext
from rlhf_pipeline.stages.run import StageRunner

PROJECT = Path(__file__).parents[1]
RESULTS = PROJECT / "benchmarks" / "results"
LAUNCH = LaunchConfig(processes=1)
"""One process per run, on its own core: parallel runs never wait for each other."""
Tree = dict[str, Any]


@dataclass(frozen=True)
class Start:
    """The inputs of PPO for one seed."""

    seed: int
    workspace: Path
    base_model: Path
    split: Path
    sft_model: Path
    reward_model: Path

    def stages(self) -> StageRunner:
        """What runs the stages."""
        return StageRunner(RunContext(self.workspace, LAUNCH))


def prepare(seed: int, workspace: Path) -> Start:
    """Run everything before PPO with the default parameters."""
    given, common = parameters(), (seed, StageRunner(RunContext(workspace, LAUNCH)))
    data = SplitConfig.model_validate(given["split"])
    base = base_model(BaseModelConfig.model_validate(given["base_model"]), data, *common)
    rows = split(base, data, None, *common)
    policy = sft(rows, base, SFTConfig.model_validate(given["sft"]), *common)
    config = RewardModelConfig.model_validate(given["reward_model"])
    scores = reward_model(base, rows, policy, data, config, *common)
    return Start(seed, workspace, base, rows, policy, scores)


def ppo_config(changes: Tree) -> PPOConfig:
    """The default parameters of PPO with some changes, nested like `ppo`."""
    merged = OmegaConf.merge(parameters()["ppo"], changes)
    return PPOConfig.model_validate(OmegaConf.to_container(merged))


def train_reward_model(start: Start, changes: Tree) -> Path:
    """Train a reward model with the default parameters and some changes."""
    given = parameters()
    config = RewardModelConfig.model_validate(given["reward_model"] | changes)
    data = SplitConfig.model_validate(given["split"])
    inputs = start.base_model, start.split, start.sft_model, data
    return reward_model(*inputs, config, start.seed, start.stages())


def train(start: Start, changes: Tree) -> Path:
    """Train a policy by PPO with the default parameters and some changes, nested like `ppo`."""
    models = start.sft_model, start.reward_model
    trained = RewardModelConfig.model_validate(parameters()["reward_model"])
    return ppo(start.split, *models, trained, ppo_config(changes), start.seed, start.stages())


def compare(start: Start, policy: Path) -> Path:
    """The export of stage evaluate for a policy, without the best of several answers of SFT."""
    config = EvaluateConfig.model_validate(parameters()["evaluate"] | {"best_of_n": 0})
    models = start.sft_model, policy, start.reward_model
    trained = RewardModelConfig.model_validate(parameters()["reward_model"]), ppo_config({})
    data = SplitConfig.model_validate(parameters()["split"])
    return evaluate(PPO)(start.split, *models, *trained, data, config, start.seed, start.stages())


def history(policy: Path) -> list[dict[str, float]]:
    """The metrics of PPO, one row per logged step, with its number as `step`."""
    lines = map(json.loads, (policy.parent / "metrics.jsonl").read_text().splitlines())
    return [{"step": line["step"]} | line["metrics"] for line in lines]


def side_by_side(function: Callable[..., Any], tasks: list[tuple[Any, ...]]) -> Iterator[Any]:
    """Yield `function(*task)` for each task as it ends; run one task per core at a time."""
    cores = multiprocessing.Queue()  # type: ignore[var-annotated]
    for core in os.sched_getaffinity(0):
        cores.put(core)
    with ProcessPoolExecutor(
        len(os.sched_getaffinity(0)), initializer=_take_core, initargs=(cores,)
    ) as pool:
        for done in as_completed([pool.submit(function, *task) for task in tasks]):
            yield done.result()


def commit() -> str:
    """The current commit, marked if the work tree differs from it."""
    describe = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=10"]
    return subprocess.run(
        describe, cwd=PROJECT, capture_output=True, text=True, check=True
    ).stdout.strip()


def _take_core(cores: multiprocessing.Queue[int]) -> None:
    os.sched_setaffinity(0, {cores.get()})


def parameters(environment: str = "base") -> Tree:
    """The parameters of an environment."""
    loader = LayeredConfigLoader(str(PROJECT / "conf"), env=environment, **CONFIG_LOADER_ARGS)
    return dict(loader["parameters"])
