"""One rank of `communication.py`: an engine of this project, which obeys a line at a time.

Each line is a JSON object: the name of a method of `Rank`, and its arguments. Each answer is one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_pipeline.config.training import TrainedModelConfig
from rlhf_pipeline.distributed import deepspeed_config, engine
from rlhf_pipeline.distributed.optimizer_step import Loss, optimizer_step
from rlhf_pipeline.distributed.world import join
from rlhf_pipeline.distributed.zero import for_generation, whole_shape

COLLECTIVES = ("allreduce_", "_allgather_base_", "allgather_", "_reduce_scatter_base_", "reduce_",
               "broadcast_")  # fmt: skip
"""Operators of torch (namespace c10d) that send numbers of a model."""


class Rank:
    """The methods that lines can ask for."""

    def __init__(self) -> None:
        self.world = join(0, timeout_s=240.0)

    def build(self, stage: int, checkpointing: bool, bucket: int, **zero: Any) -> dict[str, Any]:
        """Load a model into an engine; `bucket` and `zero` replace settings."""
        config = TrainedModelConfig.model_validate(
            {
                "optimizer": {"learning_rate": 1e-4},
                "deepspeed": {"zero_stage": stage},
                "gradient_checkpointing": checkpointing,
            }
        )

        def settings(*arguments: Any, **options: Any) -> dict[str, Any]:
            made = deepspeed_config.training_settings(*arguments, **options)
            made["zero_optimization"] |= zero
            return made

        torch.manual_seed(0)
        with (
            mock.patch.object(deepspeed_config, "BUCKET", bucket),
            mock.patch.object(engine, "BUCKET", bucket),
            mock.patch.object(engine, "training_settings", settings),
        ):
            self.engine = engine.train_engine(_model, config, total_steps=10**6)
        sizes = [whole_shape(parameter).numel() for parameter in self.engine.module.parameters()]
        return {"parameters": sum(sizes), "weights": len(sizes)}

    def step(self, micro_batches: int, count: int, *, first: bool = False) -> dict[str, Any]:
        """Take optimizer steps, each with some micro batches; `first`: warm up and count calls."""

        def loss() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return self.engine(torch.tensor([[5, 6, 7, 8]])).logits.square().mean(), {}

        losses: list[Loss] = [loss] * micro_batches
        return self._measured(lambda: optimizer_step(self.engine, self.world, losses), count, first)

    def generate(self, count: int, *, first: bool = False) -> dict[str, Any]:
        """Gather the weights for a rollout, and release them."""

        def gather() -> None:
            with for_generation(self.engine):
                pass

        return self._measured(gather, count, first)

    def collective(self, name: str, elements: int, count: int) -> dict[str, Any]:
        """One collective of fp32 numbers."""
        whole, part = torch.zeros(elements), torch.zeros(elements // self.world.size)
        dist = torch.distributed
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: dist.all_reduce(whole),
            "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
            "reduce": lambda: dist.reduce(whole, 0),
        }
        return self._measured(calls[name], count, first=False)

    def _measured(self, work: Callable[[], Any], count: int, first: bool) -> dict[str, Any]:
        calls: Counter[str] = Counter()
        if first:
            for _ in range(2):  # ZeRO-3 records the order of the layers in the first step
                with torch.profiler.profile() as profile:
                    work()
            calls.update(event.name for event in profile.events() or ())
        seconds = []
        self.world.barrier()
        before = _counters()
        for _ in range(count):
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
            self.world.barrier()
        sent, received = (
            (after - first) / count for after, first in zip(_counters(), before, strict=True)
        )
        return {
            "seconds": seconds,
            "sent": sent,
            "received": received,
            "collectives": {n: c for n in COLLECTIVES if (c := calls[f"c10d::{n}"])},
        }


def _model(precision: str, **_: Any) -> nn.Module:
    """A Llama of 2.6 million weights, whose computation takes little time."""
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        vocab_size=256, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _counters() -> tuple[int, int]:
    """Bytes that this node's interface has sent and received."""
    (device,) = (path for path in Path("/sys/class/net").iterdir() if path.name != "lo")
    read = (device / "statistics" / f"{way}_bytes" for way in ("tx", "rx"))
    sent, received = (int(file.read_text()) for file in read)
    return sent, received


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print, too
    torch.set_num_threads(1)
    rank = Rank()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        answers.write(json.dumps(getattr(rank, name)(**arguments)) + "\n")
