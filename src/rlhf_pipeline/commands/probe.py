"""Some steps of each stage in a temporary folder, to estimate the hours of the whole run."""

import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from kedro.framework.session import KedroSession

from rlhf_pipeline.config.split import PHASES, SplitConfig
from rlhf_pipeline.runtime.metrics_file import read_json_lines
from rlhf_pipeline.sizing.work import Work

STEPS = 4
"""Of each stage. The first one is slower than the others, and the last one is evaluated."""


def measured_hours(
    project: Path,
    conf: Path,
    env: str | None,
    parameters: Mapping[str, Any],
    pipeline: str,
    works: Mapping[str, Work],
) -> dict[str, float]:
    """Hours of each trained stage: its steps, each as long as one of the probe.

    The stages run with the same models, batches and ranks on the hardware at hand. Evaluations and
    checkpoints are not in the estimate. The probe prints to stderr, and its MLflow run is in the
    temporary folder.
    """
    trained = [stage for stage, work in works.items() if work.steps is not None or work.updates]
    with tempfile.TemporaryDirectory(prefix="rlhf-plan-") as folder:
        uri = {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"}
        params = {**short(parameters, trained), "root": folder}
        with (
            patch.dict(os.environ, uri),
            redirect_stdout(sys.stderr),
            KedroSession.create(
                project, env=env, conf_source=str(conf), runtime_params=params
            ) as session,
        ):
            session.run(pipeline_names=[pipeline], to_nodes=trained)
            workspace = Path(session.load_context().catalog.load("workspace"))
        seconds = {stage: _step_seconds(workspace / stage) for stage in trained}
    return {
        stage: seconds[stage] * (works[stage].steps or 0) / 3600
        for stage in trained
        if works[stage].steps is not None
    }


def short(parameters: Mapping[str, Any], trained: list[str]) -> dict[str, Any]:
    """The parameters of the probe: few rows, few steps, one evaluation."""
    blocks = {
        name: dict(value) if isinstance(value, dict) else value
        for name, value in parameters.items()
    }
    split = SplitConfig.model_validate(blocks["split"])
    shares = zip(PHASES, split.weights, strict=True)
    share: dict[str, float] = {phase: weight / sum(split.weights) for phase, weight in shares}
    share["dpo"] = share["reward_model"]
    train = 1 - split.validation_fraction - split.test_fraction
    batches = {
        stage: blocks[stage].get("batch_size") or blocks[stage]["rollout_batch_size"]
        for stage in trained
    }
    rows = int(max(STEPS * size / share[stage] for stage, size in batches.items()) / train) + 1
    sources = [
        source | {"samples": min(rows, source.get("samples") or rows)}
        for source in blocks["split"]["sources"]
    ]
    blocks["split"] |= {"sources": sources}
    for stage, size in batches.items():
        blocks[stage] |= {"evaluations": 1}
        if stage == "ppo":
            blocks[stage] |= {"steps": STEPS, "evaluation_prompts": size, "critic_warmup_steps": 0}
        else:
            blocks[stage] |= {"epochs": STEPS * size / (rows * share[stage] * train)}
    blocks["reward_model"] |= {"gate": None}
    return blocks


def _step_seconds(stage: Path) -> float:
    """Seconds of a step: the median without the first step and the evaluated last one."""
    (file,) = stage.glob("*/metrics.jsonl")
    times = [line["metrics"]["time/step_s"] for line in read_json_lines(file) if line["step"]]
    return median(times[1:-1] or times)
