"""Tokens per second of every generator, beside the most that the memory's bandwidth allows.

    python benchmarks/generators.py MODEL                              # a folder; fp32 on one CPU
    python benchmarks/generators.py MODEL --precision=bf16 --rows 1 16 64 256

Each generator answers the same random prompts with the same seeds, once to warm up and then
`--repeats` times. One that fails is a row with its fault. To produce one token for each row, a
generator reads all weights and the keys and values of all rows at least once:

    limit = rows x bandwidth / (bytes of weights + rows x tokens x bytes of keys and values)

with the bandwidth of copying a large tensor on this device. Results: a table, and
benchmarks/results/generators/generators.json.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from rlhf_pipeline.config.ppo import HybridConfig
from rlhf_pipeline.config.training import SamplingConfig, TrainedModelConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.engine import train_engine
from rlhf_pipeline.distributed.lean_deepspeed import DeepSpeedEngine, get_accelerator
from rlhf_pipeline.distributed.world import World, join
from rlhf_pipeline.models.loading import load_policy
from rlhf_pipeline.rollout.generation import Generator, row_seeds
from rlhf_pipeline.rollout.hybrid_generator import HybridGenerator
from rlhf_pipeline.rollout.transformers_generator import TransformersGenerator
from rlhf_pipeline.rollout.vllm_generator import VLLMGenerator

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "generators"
COPIED = 2**29
"""Bytes of the tensor whose copy measures the bandwidth; no cache contains it."""


@dataclass(frozen=True)
class Speed:
    """What one generator does with one number of rows."""

    generator: str
    rows: int
    tokens: int
    """Tokens of all responses together."""
    seconds: float
    """Median of a rollout, with what the generator does before and after it."""
    limit: float
    """Tokens per second that the bandwidth allows."""
    fault: str = ""
    """Why the generator has not run."""

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


def main() -> None:
    """Measure, show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--response-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    world = alone()
    contract = TokenContract.read(options.model)
    # bf16 requires ZeRO: its optimizer keeps the float32 weights.
    engine = {"precision": options.precision, "zero_stage": int(options.precision == "bf16")}
    config = TrainedModelConfig.model_validate(
        {"optimizer": {"learning_rate": 1e-6}, "deepspeed": engine}
    )
    actor = train_engine(partial(load_policy, options.model), config, 1)
    longest = options.prompt_tokens + options.response_tokens
    copied = bandwidth(actor.device)
    kept = weight_bytes(actor.module), longest * key_value_bytes(actor.module)
    limits = {rows: rows * copied / (kept[0] + rows * kept[1]) for rows in options.rows}
    speeds = []
    for name, make in generators(actor, contract, world, max(options.rows), longest).items():
        generator = None  # one for all numbers of rows: vLLM allows one in a process
        for rows, limit in limits.items():
            prompts = np.random.default_rng(1).integers(
                contract.vocab_size, size=(rows, options.prompt_tokens)
            )
            sampling = SamplingConfig(
                max_response_tokens=options.response_tokens, batch_size_per_gpu=rows
            )
            try:
                generator = generator or make()
                measured = measure(generator, prompts.tolist(), sampling, options.repeats)
                speeds.append(Speed(name, rows, *measured, limit))
            except Exception as error:  # the others can still run
                fault = f"{type(error).__name__}: {error}".partition("\n")[0]
                speeds.append(Speed(name, rows, 0, 0.0, limit, fault))
    show(speeds, copied)
    RESULTS.mkdir(parents=True, exist_ok=True)
    record = {"options": vars(options) | {"model": str(options.model)}, "bandwidth": copied}
    record["speeds"] = [asdict(speed) | {"rate": speed.rate} for speed in speeds]
    (RESULTS / "generators.json").write_text(json.dumps(record, indent=2))


def alone() -> World:
    """A world of one rank."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return join(1, timeout_s=600.0)


def generators(
    actor: DeepSpeedEngine, contract: TokenContract, world: World, rows: int, longest: int
) -> dict[str, Callable[[], Generator]]:
    """Every generator, for at most that many rows of that many tokens."""
    found: dict[str, Callable[[], Generator]] = {
        "transformers": lambda: TransformersGenerator(actor, contract),
        "hybrid": lambda: HybridGenerator(actor, contract, HybridConfig(), world),
        "vllm": lambda: VLLMGenerator(actor, contract, rows=rows, longest=longest),
    }
    return found


def measure(
    generator: Generator, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, repeats: int
) -> tuple[int, float]:
    """Tokens of the responses, and the median of a rollout's seconds."""
    seconds = []
    for _ in range(1 + repeats):
        get_accelerator().synchronize()
        began = time.perf_counter()
        rollout = generator.generate(prompts, sampling, row_seeds(1, 1, np.arange(len(prompts))))
        get_accelerator().synchronize()
        seconds.append(time.perf_counter() - began)
    return int(rollout.sequences.response_mask.sum()), statistics.median(seconds[1:])


def bandwidth(device: torch.device, repetitions: int = 10) -> float:
    """Bytes per second that the fastest of some copies of a large tensor reads and writes."""
    source = torch.zeros(COPIED, dtype=torch.uint8, device=device)
    target, seconds = torch.empty_like(source), []
    for _ in range(repetitions):
        get_accelerator().synchronize()
        began = time.perf_counter()
        target.copy_(source)
        get_accelerator().synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * COPIED / min(seconds)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the weights that a token passes: all but a table of embeddings of its own."""
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    weights = sum(weight.nbytes for weight in model.parameters())
    return weights - (0 if tied else model.get_input_embeddings().weight.nbytes)


def key_value_bytes(model: nn.Module) -> int:
    """Bytes of the keys and values of one token."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head * next(model.parameters()).element_size()


def show(speeds: list[Speed], copied: float) -> None:
    """Print the table."""
    table = Table(title=f"Generation; copies of large tensors move {copied / 1e9:,.1f} GB/s")
    for column in ("generator", "rows", "tokens", "seconds", "tokens/s", "limit", "share"):
        table.add_column(column, justify="right")
    table.add_column("fault")
    for s in speeds:
        table.add_row(
            s.generator, str(s.rows), f"{s.tokens:,}", f"{s.seconds:.2f}", f"{s.rate:,.0f}",
            f"{s.limit:,.0f}", f"{s.rate / s.limit:.0%}", s.fault,
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
