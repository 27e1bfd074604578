"""The state an engine resumes from: fp32 weights, Adam's moments, an average, and its counters.

Each rank writes the pieces of each parameter that its optimizer holds as safetensors. Any number of
ranks at any ZeRO stage can assemble its own pieces from these files, bit for bit.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rlhf_pipeline.distributed.tensor_file import write_tensors
from rlhf_pipeline.distributed.zero import DeepSpeedEngine, fp32_shards, pieces, spread_fp32_shards
from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.manifest import FileEntry

MOMENTS = ("exp_avg", "exp_avg_sq")


def save_engine(
    engine: DeepSpeedEngine, directory: Path, *, average: list[Tensor] | None = None
) -> dict[str, FileEntry]:
    """Write this rank's part of an engine into an empty folder that all ranks share.

    `average` has the shapes of `fp32_shards(engine)`. Returns the size and digest of each file that
    this rank wrote, by name.
    """
    rank, written = torch.distributed.get_rank(), dict[str, FileEntry]()
    # At stage 0 all ranks hold the same state.
    if engine.zero_optimization_stage() > 0 or rank == 0:
        tensors = {
            f"{kind}|{name}": piece.detach()
            for kind, shards in saved_tensors(engine, average).items()
            for name, _, piece in pieces(engine, shards)
        }
        assert all(piece.dtype == torch.float32 for piece in tensors.values())
        starts = {name: str(start) for name, start, _ in pieces(engine, fp32_shards(engine))}
        path = directory / f"rank{rank}.safetensors"
        written[path.name] = write_tensors(tensors, path, starts)
    if rank == 0:
        shards, state = fp32_shards(engine), _adam(engine).state
        counters = {
            "step": int(state[shards[0]]["step"]) if shards[0] in state else 0,
            "schedule": engine.lr_scheduler.state_dict(),
            "global_steps": engine.global_steps,
        }
        path = directory / "engine.json"
        path.write_text(json.dumps(counters, indent=2))
        written[path.name] = FileEntry.of(path)
    return written


def load_engine(
    engine: DeepSpeedEngine, directory: Path, *, average: list[Tensor] | None = None
) -> None:
    """Load what `save_engine` wrote into a new engine; ArtifactError if a part is missing."""
    counters = json.loads((directory / "engine.json").read_text())
    if counters["step"] > 0:
        start_optimizer(engine, counters["step"])
    paths = sorted(directory.glob("rank*.safetensors"))
    files = [safe_open(path, framework="pt") for path in paths]
    written = [(file, frozenset(file.keys()), file.metadata()) for file in files]
    with torch.no_grad():
        for kind, shards in saved_tensors(engine, average).items():
            for name, start, piece in pieces(engine, shards):
                found = _read(written, f"{kind}|{name}", start, piece)
                if found != len(piece):
                    raise ArtifactError(
                        f"{directory}: found {found} of {len(piece)} numbers of {kind} {name}. "
                        "The file of a rank is missing"
                    )
    spread_fp32_shards(engine)
    engine.lr_scheduler.load_state_dict(counters["schedule"])
    rates = engine.lr_scheduler.get_last_lr()
    for group, rate in zip(engine.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    engine.global_steps = counters["global_steps"]


def bytes_needed(engine: DeepSpeedEngine, average: list[Tensor] | None = None) -> int:
    """Bytes that `save_engine` writes on this rank, with the moments that Adam has not made yet."""
    shards = sum(shard.numel() * 4 for shard in fp32_shards(engine))
    return shards * (1 + len(MOMENTS) + (average is not None))


def saved_tensors(engine: DeepSpeedEngine, average: list[Tensor] | None) -> dict[str, list[Tensor]]:
    """The tensors to save, by kind; each list is parallel to `fp32_shards(engine)`."""
    shards, state = fp32_shards(engine), _adam(engine).state
    found = {"weight": shards}
    if all(shard in state for shard in shards):
        found |= {moment: [state[shard][moment] for shard in shards] for moment in MOMENTS}
    return found | ({} if average is None else {"average": average})


def _adam(engine: DeepSpeedEngine) -> torch.optim.Optimizer:
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def start_optimizer(engine: DeepSpeedEngine, step: int) -> None:
    """Create the state that Adam otherwise creates at its first step."""
    adam = _adam(engine)
    for shard in fp32_shards(engine):
        # Fused AdamW counts on the device of the parameter, DeepSpeed's AdamW on the host.
        is_fused = isinstance(adam, torch.optim.AdamW)
        counted = torch.tensor(float(step), device=shard.device) if is_fused else step
        moments = {moment: torch.zeros_like(shard) for moment in MOMENTS}
        adam.state[shard] = {"step": counted, **moments}


def _read(written: Iterable[tuple[Any, Any, Any]], key: str, begin: int, piece: Tensor) -> int:
    """Fill a piece from the files of all ranks, which end elsewhere; return how much was found."""
    found, end = 0, begin + len(piece)
    for file, keys, starts in written:
        if key not in keys:
            continue
        tensor, start = file.get_slice(key), int(starts[key.partition("|")[2]])
        first, last = max(begin, start), min(end, start + tensor.get_shape()[0])
        if first < last:
            values = tensor[first - start : last - start]
            piece[first - begin : last - begin].copy_(values)
            found += len(values)
            heartbeat.report_progress()
    return found
