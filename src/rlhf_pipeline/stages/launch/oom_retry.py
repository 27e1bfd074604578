"""After an out-of-memory failure: halve the micro batches, keep the global batches."""

from collections.abc import Mapping
from typing import Any

from rlhf_pipeline.config.block import Block, leaves
from rlhf_pipeline.runtime.job import as_json
from rlhf_pipeline.stages.launch.hints import CPU_MEMORY, GPU_MEMORY, MICRO_BATCHES

OUT_OF_MEMORY = (GPU_MEMORY, CPU_MEMORY)
"""Causes of a failure that smaller micro batches can avoid."""


def halved(config: Mapping[str, Block]) -> dict[str, Block] | None:
    """The blocks with every micro batch size halved, at least 1. None if all of them are 1."""
    smaller = {
        name: type(block).model_validate(_halved(block.model_dump(mode="json")))
        for name, block in config.items()
    }
    return None if smaller == dict(config) else smaller


def adjusted(
    configured: Mapping[str, Block], used: Mapping[str, Block]
) -> dict[str, dict[str, Any]]:
    """The parameters that differ between two versions of the same blocks.

    Each maps to a pair such as {"configured": 8, "used": 4}.
    """
    before, after = leaves(as_json(configured)), leaves(as_json(used))
    return {
        name: {"configured": old, "used": new}
        for (name, old), (_, new) in zip(before, after, strict=True)
        if old != new
    }


def _halved(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        name: max(1, item // 2) if name in MICRO_BATCHES else _halved(item)
        for name, item in value.items()
    }
