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

import click
from kedro.framework.project import pipelines
from kedro.framework.session import KedroSession
from kedro.io import CatalogProtocol

from rlhf_pipeline.config.split import PHASES, SplitConfig
from rlhf_pipeline.datasets.artifact import PathDataset
from rlhf_pipeline.errors import ConfigError
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
    """Hours of the trained stages whose number of steps is known, at the speed of the probe.

    The stages run with the same models, batches and ranks on the hardware at hand. Evaluations and
    checkpoints are not in the estimate. The probe prints to stderr. Its results and its MLflow run
    are in the temporary folder, and the store for stages is not used. Raises ConfigError if the
    catalog would publish them elsewhere.
    """
    trained = [stage for stage in works if stage != "evaluate"]
    steps = {stage: works[stage].steps for stage in trained}
    if unknown := [stage for stage, count in steps.items() if count is None]:
        click.echo(
            f"{', '.join(unknown)}: found no number of rows, without which the hours are not known."
            " Fix: set `samples` of each source",
            err=True,
        )
    if unknown == trained:
        return {}
    with tempfile.TemporaryDirectory(prefix="rlhf-plan-") as folder:
        uri = {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"}
        params = {**short(parameters, trained), "root": folder, "store": None}
        with (
            patch.dict(os.environ, uri),
            redirect_stdout(sys.stderr),
            KedroSession.create(
                project, env=env, conf_source=str(conf), runtime_params=params
            ) as session,
        ):
            catalog = session.load_context().catalog
            outputs = pipelines[pipeline].to_nodes(*trained).all_outputs()
            _refuse_other_places(catalog, outputs, Path(folder))
            session.run(pipeline_names=[pipeline], to_nodes=trained)
            workspace = Path(catalog.load("workspace"))
        seconds = {stage: _step_seconds(workspace / stage) for stage in trained}
    return {stage: seconds[stage] * n / 3600 for stage, n in steps.items() if n is not None}


def _refuse_other_places(catalog: CatalogProtocol, outputs: set[str], folder: Path) -> None:
    """Raise ConfigError if the probe would write anywhere but to its folder."""
    store = catalog.load("store") if "store" in catalog else None
    if store is not None:
        raise ConfigError(
            f"store: found {store.name} in the catalog, expected null for a probe, as its steps "
            f"are no results. Fix: write its url as ${{runtime_params:store, {store.name}}}"
        )
    places = {"workspace": str(catalog.load("workspace"))}
    for name in sorted(outputs):
        if isinstance(entry := catalog.get(name), PathDataset):
            places[name] = entry.store.name if entry.store else str(entry.folder)
    for name, place in places.items():
        if "://" in place or not Path(place).is_relative_to(folder):
            raise ConfigError(
                f"{name}: found {place} in the catalog, expected a path below ${{_root}} for a "
                "probe, as its steps are no results. Fix: remove the entry from the catalog, and "
                "put it back after the probe"
            )


def short(parameters: Mapping[str, Any], trained: list[str]) -> dict[str, Any]:
    """The parameters of the probe: few rows, few steps, one evaluation."""
    blocks = {
        name: dict(value) if isinstance(value, dict) else value
        for name, value in parameters.items()
    }
    split = SplitConfig.model_validate(blocks["split"])
    weights: dict[str, float] = dict(zip(PHASES, split.weights, strict=True))
    share = dict.fromkeys(weights, 0.0)  # training rows of a phase, for a row of each source
    for source in split.sources:
        phases = [phase for phase in PHASES if source.may_serve(phase)]
        total = sum(weights[phase] for phase in phases) or 1
        for phase in phases:
            share[phase] += source.fraction * weights[phase] / total
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
