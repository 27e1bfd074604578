"""The largest published model whose PPO fits one GPU, as in DeepSpeed-Chat's table, computed."""

from collections.abc import Mapping
from typing import Any

from rlhf_pipeline.sizing.fit import fits
from rlhf_pipeline.sizing.hardware import GIB, GPUS, Hardware
from rlhf_pipeline.sizing.models import MODELS
from rlhf_pipeline.sizing.stages import plan_stage

MAIN_MEMORY = 512 * GIB
"""Main memory beside the GPU, for offload."""

_LORA = {"lora": {"rank": 16}}
METHODS: Mapping[str, dict[str, Any]] = {
    "all weights": {},
    "all weights, optimizer in main memory": {"deepspeed": {"offload_optimizer": True}},
    "LoRA": _LORA,
    "QLoRA": {"lora": {"rank": 16, "quantize": "nf4"}},
}
"""Changes of the blocks of actor and critic."""


def largest_models() -> dict[int, list[str | None]]:
    """For each size of GPU in gibibytes: the largest model by `METHODS`; None: not even one fits.

    All four models have the same size and are in bf16, prompts and responses have 256 tokens, and
    gradient checkpointing is on.
    """
    by_size = sorted(MODELS, key=lambda name: MODELS[name].shape.parameters, reverse=True)
    found: dict[int, list[str | None]] = {}
    for memory in sorted({gpu.memory for gpu in GPUS.values()}):
        hardware = Hardware(1, gpu_memory=memory, main_memory=MAIN_MEMORY)
        found[memory // GIB] = [
            next((name for name in by_size if _fits(name, method, hardware)), None)
            for method in METHODS.values()
        ]
    return found


def _fits(model: str, method: dict[str, Any], hardware: Hardware) -> bool:
    deepspeed = {"precision": "bf16"} | method.get("deepspeed", {})
    trained = method | {
        "deepspeed": deepspeed,
        "gradient_checkpointing": True,
        "optimizer": {"learning_rate": 1e-5},
    }
    parameters = {
        "ppo": {
            "steps": 1,
            "rollout_batch_size": 32,
            "minibatch_size": 32,
            "micro_batch_tokens": 2048,
            "sampling": {"max_response_tokens": 256, "batch_size_per_gpu": 32},
            "actor": trained,
            "critic": trained,
        },
        "split": {
            "sources": [{"name": "synthetic"}],
            "max_prompt_tokens": 256,
            "max_response_tokens": 256,
        },
    }
    return fits(plan_stage("ppo", parameters, MODELS[model].shape, hardware), hardware)
