"""DeepSpeed's configuration, built from the parameter blocks.

Options that change numbers, act on the whole process, or had other defaults in earlier releases are
set explicitly: a new release cannot change them, and what is stored with an artifact is complete.
"""

import json
import os
import tomllib
from pathlib import Path
from typing import Any

from rlhf_pipeline.config.training import (
    BUCKET,
    LIVE,
    DeepSpeedConfig,
    FrozenDeepSpeedConfig,
    TrainedModelConfig,
)
from rlhf_pipeline.runtime.job import LaunchedJob

FIXED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
"""The settings that every engine has."""


def training_settings(
    config: TrainedModelConfig, *, hidden_size: int, on_gpu: bool
) -> dict[str, Any]:
    """DeepSpeed settings for a trainable model.

    Its batch sizes stay at 1, because `optimizer_step` decides how many micro batches a step has.
    """
    deepspeed = config.deepspeed
    settings = inference_settings(deepspeed, hidden_size=hidden_size, on_gpu=on_gpu)
    settings["gradient_clipping"] = config.optimizer.max_grad_norm
    if deepspeed.precision == "bf16":
        settings["data_types"]["grad_accum_dtype"] = deepspeed.accumulate
    if deepspeed.offload_optimizer:
        memory = {"device": "cpu", "pin_memory": on_gpu}
        settings["zero_optimization"]["offload_optimizer"] = memory
        # Without a GPU, torch's AdamW is already on the CPU.
        settings["zero_force_ds_cpu_optimizer"] = on_gpu
    return settings


def inference_settings(
    config: FrozenDeepSpeedConfig | DeepSpeedConfig, *, hidden_size: int, on_gpu: bool
) -> dict[str, Any]:
    """DeepSpeed settings for a model that is not trained; see `training_settings`."""
    precision, memory = config.precision, {"device": "cpu", "pin_memory": on_gpu}
    return FIXED | {
        "data_types": {"grad_accum_dtype": None, **FIXED["data_types"]},  # that of the weights
        "bf16": {"enabled": precision == "bf16", **FIXED["bf16"]},
        "fp16": {"enabled": precision == "fp16", **FIXED["fp16"]},
        "zero_optimization": {
            "stage": config.zero_stage,
            # Below stage 3 it lost gradients until 2026: DeepSpeed's 5606, 7371, 7805, 7965, 8061.
            "overlap_comm": config.zero_stage == 3,
            **FIXED["zero_optimization"],
            "reduce_bucket_size": BUCKET,
            "allgather_bucket_size": BUCKET,
            "stage3_prefetch_bucket_size": BUCKET,
            # Biases and norms stay whole, matrices are sharded.
            "stage3_param_persistence_threshold": 10 * hidden_size,
            "stage3_max_live_parameters": LIVE,
            "stage3_max_reuse_distance": LIVE,
            **({"offload_param": memory} if config.offload_parameters else {}),
        },
    }


def store_settings(settings: dict[str, Any], job: LaunchedJob) -> None:
    """Write the settings of each engine, by model, for the manifest of the artifact."""
    if os.environ["RANK"] == "0":
        job.deepspeed_file.write_text(json.dumps(settings, indent=2))
