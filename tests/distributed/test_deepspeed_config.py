"""The complete configuration of DeepSpeed: any changed default fails here."""

import pytest
from deepspeed.runtime.config import DeepSpeedConfig

from rlhf_pipeline.config.training import FrozenDeepSpeedConfig, SFTConfig
from rlhf_pipeline.distributed.engine import inference_settings, training_settings


def trained(**deepspeed) -> SFTConfig:
    return SFTConfig.model_validate(
        {
            "epochs": 1, "batch_size": 8, "micro_batch_tokens": 128, "deepspeed": deepspeed,
            "optimizer": {"learning_rate": 1e-3, "max_grad_norm": 0.7},
        }
    )  # fmt: skip


DEFAULTS = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "managed_gradient_accumulation": True,
    "gradient_clipping": 0.7,
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "gradient_allreduce_op": "mean",
    "steps_per_print": 1_000_000_000,
    "wall_clock_breakdown": False,
    "data_types": {"grad_accum_dtype": None, "keep_in_fp32_modules": "auto"},
    "bf16": {"enabled": False, "check_grad_overflow": True},
    "zero_optimization": {
        "stage": 0,
        "overlap_comm": False,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 50_000_000,
        "allgather_bucket_size": 50_000_000,
        "memory_efficient_linear": False,
        "stage3_prefetch_bucket_size": 50_000_000,
        "stage3_param_persistence_threshold": 640,
        "stage3_max_live_parameters": 1_000_000_000,
        "stage3_max_reuse_distance": 1_000_000_000,
    },
}  # fmt: skip
IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32", "keep_in_fp32_modules": "auto"}}
CPU = {"device": "cpu", "pin_memory": False}
PINNED = {"device": "cpu", "pin_memory": True}
OFFLOADED = {"zero_stage": 3, "offload_optimizer": True, "offload_parameters": True}


def settings_with(stage=0, precision="fp32", **zero):
    changed = {
        "zero_optimization": DEFAULTS["zero_optimization"]
        | {"stage": stage, "overlap_comm": stage == 3}
        | zero
    }
    if precision != "fp32":
        changed[precision] = DEFAULTS[precision] | {"enabled": True}
    return DEFAULTS | changed


@pytest.mark.parametrize(
    ("deepspeed", "on_gpu", "expected"),
    [
        ({"zero_stage": 0}, False, settings_with()),
        ({"zero_stage": 1}, False, settings_with(1)),
        ({"zero_stage": 2, "precision": "bf16"}, False, settings_with(2, "bf16") | IN_FP32),
        (
            {"zero_stage": 2, "precision": "bf16", "accumulate": "bf16"},
            False,
            settings_with(2, "bf16")
            | {"data_types": IN_FP32["data_types"] | {"grad_accum_dtype": "bf16"}},
        ),
        ({"zero_stage": 3, "precision": "bf16"}, False, settings_with(3, "bf16") | IN_FP32),
        (
            OFFLOADED,
            False,
            settings_with(3, offload_param=CPU, offload_optimizer=CPU)
            | {"zero_force_ds_cpu_optimizer": False},
        ),
        (
            OFFLOADED,
            True,
            settings_with(3, offload_param=PINNED, offload_optimizer=PINNED)
            | {"zero_force_ds_cpu_optimizer": True},
        ),
    ],
)
def test_settings_of_a_trainable_model(deepspeed, on_gpu, expected):
    settings = training_settings(trained(**deepspeed), hidden_size=64, on_gpu=on_gpu)
    assert settings == expected
    require_accepted(settings)


def test_settings_of_a_frozen_model():
    """It has no gradients to clip; the default of DeepSpeed would be 1."""
    config = FrozenDeepSpeedConfig(zero_stage=3, precision="bf16", offload_parameters=True)
    settings = inference_settings(config, hidden_size=64, on_gpu=False)
    assert settings == settings_with(3, "bf16", offload_param=CPU) | {"gradient_clipping": 0.0}
    require_accepted(settings)


def require_accepted(settings):
    """DeepSpeed accepts every value."""
    read = DeepSpeedConfig(settings)
    assert read.gradient_clipping == settings["gradient_clipping"]
    assert read.zero_optimization_stage == settings["zero_optimization"]["stage"]
    assert read.bfloat16_config.check_grad_overflow is True and not read.float16_config.enabled
    assert read.gradient_allreduce_op == "mean" and read.managed_gradient_accumulation is True
    zero = read.zero_config.model_dump(by_alias=True)
    for key, value in settings["zero_optimization"].items():
        if not isinstance(value, dict):
            assert zero[key] == value, key
