"""The default recipe with changed PPO parameters, several seeds side by side.

What ran before is found finished by its fingerprint, so an interrupted benchmark goes on where it was and a rerun is free.
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

from kedro.config import OmegaConfigLoader
from omegaconf import OmegaConf

from rlhf_pipeline.config.base_model import BaseModelConfig
from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.config.training import RewardModelConfig, SFTConfig
from rlhf_pipeline.pipelines.data_preparation.nodes import base_model, split
from rlhf_pipeline.pipelines.evaluation.nodes import evaluate
from rlhf_pipeline.pipelines.ppo.nodes import ppo
from rlhf_pipeline.pipelines.reward_model.nodes import reward_model
from rlhf_pipeline.pipelines.sft.nodes import sft
from rlhf_pipeline.settings import CONFIG_LOADER_ARGS

PROJECT = Path(__file__).parents[1]
RESULTS = PROJECT / "benchmarks" / "results"
LAUNCH = LaunchConfig(processes=1)
"""One process a run, with a core to itself: runs side by side never wait for each other."""
Tree = dict[str, Any]


@dataclass(frozen=True)
class Start:
    """What PPO starts from, on one seed."""

    seed: int
    workspace: Path
    data: Path
    sft_model: Path
    reward_model: Path


def prepare(seed: int, workspace: Path) -> Start:
    """Everything before PPO, with the default parameters."""
    given, common = _parameters(), (LAUNCH, seed, workspace)
    split_config = SplitConfig.model_validate(given["split"])
    base = base_model(BaseModelConfig.model_validate(given["base_model"]), split_config, *common)
    data = split(base, split_config, *common)
    policy = sft(data, base, SFTConfig.model_validate(given["sft"]), *common)
    judge = reward_model(
        data, policy, RewardModelConfig.model_validate(given["reward_model"]), *common
    )
    return Start(seed, workspace, data, policy, judge)


def train_reward_model(start: Start, changes: Tree) -> Path:
    """Another reward model: the default parameters but for `changes`."""
    config = RewardModelConfig.model_validate(_parameters()["reward_model"] | changes)
    return reward_model(start.data, start.sft_model, config, LAUNCH, start.seed, start.workspace)


def train(start: Start, changes: Tree) -> Path:
    """The policy that PPO makes with the default parameters but for `changes`, a tree like that of the block `ppo`."""
    config = PPOConfig.model_validate(
        OmegaConf.to_container(OmegaConf.merge(_parameters()["ppo"], changes))
    )
    return ppo(
        start.data, start.sft_model, start.reward_model, config, LAUNCH, start.seed, start.workspace
    )


def compare(start: Start, policy: Path) -> Tree:
    """The evaluation stage's result for a policy, with the default parameters."""
    config = EvaluateConfig.model_validate(_parameters()["evaluate"])
    models = start.sft_model, policy, start.reward_model
    export = evaluate("evaluate", "ppo")(
        start.data, *models, config, LAUNCH, start.seed, start.workspace
    )
    return dict(json.loads((export / "evaluation.json").read_text()))


def history(policy: Path) -> list[dict[str, float]]:
    """PPO's metrics, a row a step, with the step's number as `step`."""
    lines = map(json.loads, (policy.parent / "metrics.jsonl").read_text().splitlines())
    return [{"step": line["step"]} | line["metrics"] for line in lines]


def side_by_side(function: Callable[..., Any], tasks: list[tuple[Any, ...]]) -> Iterator[Any]:
    """`function(*task)` for each task, as many at a time as there are cores, in the order in which they end."""
    cores = multiprocessing.Queue()  # type: ignore[var-annotated]
    for core in os.sched_getaffinity(0):
        cores.put(core)
    with ProcessPoolExecutor(
        len(os.sched_getaffinity(0)), initializer=_take_core, initargs=(cores,)
    ) as pool:
        for done in as_completed([pool.submit(function, *task) for task in tasks]):
            yield done.result()


def commit() -> str:
    """The commit in the work tree, marked where the tree differs from it."""
    describe = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=10"]
    return subprocess.run(
        describe, cwd=PROJECT, capture_output=True, text=True, check=True
    ).stdout.strip()


def _take_core(cores: multiprocessing.Queue[int]) -> None:
    os.sched_setaffinity(0, {cores.get()})


def _parameters() -> Tree:
    return dict(
        OmegaConfigLoader(str(PROJECT / "conf"), env="base", **CONFIG_LOADER_ARGS)["parameters"]
    )
