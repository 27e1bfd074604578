"""Program: let DeepSpeed validate the settings of every engine of some jobs.

    python -m rlhf_pipeline.distributed.dry_run request.json answer.json

It is one process and loads no model. The request has the paths of `jobs`, the number of `ranks`,
and the `machine` of `training_settings`; the answer has the refusals by stage and engine.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pydantic import ValidationError

from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.config.stages import BLOCKS
from rlhf_pipeline.config.training import SFTConfig, StageModel, TrainedModel, TrainedModelConfig
from rlhf_pipeline.distributed.deepspeed_config import inference_settings, training_settings
from rlhf_pipeline.distributed.lean_deepspeed import deepspeed
from rlhf_pipeline.runtime.job import LaunchedJob


def engine_settings(
    job: LaunchedJob, companion: TrainedModelConfig, *, hidden_size: int, on_gpu: bool
) -> dict[str, dict[str, Any]]:
    """The settings of each DeepSpeed engine of a job, by model, as its program makes them.

    `companion` is the SFT model, as whose evaluation shards its models.
    """
    machine: dict[str, Any] = {"hidden_size": hidden_size, "on_gpu": on_gpu}
    stage = "evaluate" if "evaluate" in job.config else job.stage  # also evaluate_dpo
    if stage not in BLOCKS:
        return {}
    config = job.block(stage, BLOCKS[stage])
    if isinstance(config, EvaluateConfig):
        models: Sequence[StageModel] = config.models([companion.deepspeed])
    else:
        models = config.models()
    return {
        model.name: training_settings(model.config, **machine)
        if isinstance(model, TrainedModel)
        else inference_settings(model.config, **machine)
        for model in models
        if isinstance(model, TrainedModel) or model.config.zero_stage == 3
    }


def refusal(settings: dict[str, Any], ranks: int) -> str | None:
    """Why DeepSpeed refuses settings on a number of ranks; None: it accepts them."""
    with (
        patch.object(deepspeed.comm, "get_rank", lambda: 0),
        patch.object(deepspeed.comm, "get_world_size", lambda: ranks),
    ):
        try:
            config = deepspeed.DeepSpeedConfig(settings)
        except ValidationError as error:
            detail = error.errors()[0]
            return f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}"
        except (AssertionError, ValueError) as error:
            return str(error)
    assert config.train_batch_size == ranks, "the patches no longer reach DeepSpeed"
    return None


def main(request: dict[str, Any]) -> dict[str, dict[str, str | None]]:
    """Validate the settings of all jobs; return refusals by engine and stage."""
    jobs = {job.stage: job for job in map(LaunchedJob.read, map(Path, request["jobs"]))}
    companion = jobs["sft"].block("sft", SFTConfig)
    return {
        stage: {
            name: refusal(settings, request["ranks"])
            for name, settings in engine_settings(job, companion, **request["machine"]).items()
        }
        for stage, job in jobs.items()
    }


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    target.write_text(json.dumps(main(json.loads(source.read_text()))))
