"""The state an engine resumes from: fp32 weights, Adam's moments, an average, and its counters.

Each rank writes the pieces of each parameter that its optimizer holds, by name and position, as
safetensors. Any number of ranks at any ZeRO stage can assemble its own pieces from these files, bit
for bit. Nothing is unpickled.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rlhf_pipeline.distributed.lean_deepspeed import DeepSpeedEngine
from rlhf_pipeline.distributed.zero import Piece, fp32_shards, pieces, spread_fp32_shards
from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.digests import PIECE, FileEntry, write_pieces

_ALIGNMENT = 8
"""The tensors begin at a multiple of this number of bytes."""
MOMENTS = ("exp_avg", "exp_avg_sq")
_Written = tuple[Any, frozenset[str], Mapping[str, str]]
"""A rank's file, opened; the keys of its tensors; where the piece of each parameter begins."""
SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Attributes of DeepSpeed's dynamic loss scaler."""


def save_engine(
    engine: DeepSpeedEngine, directory: Path, *, average: list[Tensor] | None = None
) -> dict[str, FileEntry]:
    """Write this rank's part of an engine into a folder that all ranks share.

    Returns the size and digest of each file that this rank wrote, by name.

    Args:
        directory: an existing, empty folder.
        average: the average of its weights, with the shapes of `fp32_shards(engine)`.
    """
    rank = torch.distributed.get_rank()
    written: dict[str, FileEntry] = {}
    # At stage 0 all ranks hold the same state.
    if engine.zero_optimization_stage() > 0 or rank == 0:
        tensors = {
            f"{kind}|{part.name}": shard.detach().view(-1)[part.shard_slice]
            for kind, shards in _tensors(engine, average).items()
            for piece, shard in zip(pieces(engine), shards, strict=True)
            for part in piece
        }
        starts = {part.name: str(part.start) for piece in pieces(engine) for part in piece}
        name = f"rank{rank}.safetensors"
        written[name] = write_tensors(directory / name, tensors, starts)
    if rank == 0:
        path = directory / "engine.json"
        path.write_text(json.dumps(_counters(engine), indent=2))
        written[path.name] = FileEntry.of(path)
    return written


def load_engine(
    engine: DeepSpeedEngine, directory: Path, *, average: list[Tensor] | None = None
) -> None:
    """Load what `save_engine` wrote into a new engine; the arguments are the same.

    Raises ArtifactError if a piece of a parameter is missing.
    """
    counters = json.loads((directory / "engine.json").read_text())
    if counters["step"] > 0:
        _start_optimizer(engine, counters["step"])
    files = [
        safe_open(path, framework="pt") for path in sorted(directory.glob("rank*.safetensors"))
    ]
    written = [(file, frozenset(file.keys()), file.metadata()) for file in files]
    with torch.no_grad():
        for kind, shards in _tensors(engine, average).items():
            for piece, shard in zip(pieces(engine), shards, strict=True):
                for part in piece:
                    _read(written, kind, part, shard.view(-1)[part.shard_slice], directory)
    spread_fp32_shards(engine)
    _set_counters(engine, counters)


def bytes_needed(engine: DeepSpeedEngine, average: list[Tensor] | None = None) -> int:
    """Bytes that `save_engine` writes on this rank, with the moments that Adam has not made yet."""
    shards = sum(shard.numel() * 4 for shard in fp32_shards(engine))
    return shards * (1 + len(MOMENTS) + (average is not None))


def _tensors(engine: DeepSpeedEngine, average: list[Tensor] | None) -> dict[str, list[Tensor]]:
    """The tensors to save, by kind; each list is parallel to `fp32_shards(engine)`."""
    shards = fp32_shards(engine)
    state = _adam(engine).state
    found = {"weight": shards}
    if all(shard in state for shard in shards):
        found |= {moment: [state[shard][moment] for shard in shards] for moment in MOMENTS}
    return found | ({} if average is None else {"average": average})


def _adam(engine: DeepSpeedEngine) -> torch.optim.Optimizer:
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def _start_optimizer(engine: DeepSpeedEngine, step: int) -> None:
    """Create the state that Adam otherwise creates at its first step."""
    adam = _adam(engine)
    for shard in fp32_shards(engine):
        moments = {moment: torch.zeros_like(shard) for moment in MOMENTS}
        # Fused AdamW counts on the device of the parameter, DeepSpeed's AdamW on the host.
        is_fused = isinstance(adam, torch.optim.AdamW)
        counted = torch.tensor(float(step), device=shard.device) if is_fused else step
        adam.state[shard] = {"step": counted, **moments}


def _counters(engine: DeepSpeedEngine) -> dict[str, Any]:
    shards, state = fp32_shards(engine), _adam(engine).state
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return {
        "step": int(state[shards[0]]["step"]) if shards[0] in state else 0,
        "schedule": engine.lr_scheduler.state_dict(),
        "global_steps": engine.global_steps,
        "skipped_steps": engine.skipped_steps,
        "scaler": {name: getattr(scaler, name) for name in SCALER if hasattr(scaler, name)},
    }


def _set_counters(engine: DeepSpeedEngine, counters: dict[str, Any]) -> None:
    engine.lr_scheduler.load_state_dict(counters["schedule"])
    for group, rate in zip(
        engine.optimizer.param_groups, engine.lr_scheduler.get_last_lr(), strict=True
    ):
        group["lr"] = rate
    engine.global_steps, engine.skipped_steps = counters["global_steps"], counters["skipped_steps"]
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    for name, value in counters["scaler"].items():
        if hasattr(scaler, name):  # stage 0 in fp32 has no scaler
            setattr(scaler, name, value)


def _read(written: list[_Written], kind: str, part: Piece, target: Tensor, directory: Path) -> None:
    """Fill a part from the files of all ranks, whose pieces begin and end elsewhere."""
    key, found = f"{kind}|{part.name}", 0
    for file, keys, starts in written:
        if key not in keys:
            continue
        tensor, start = file.get_slice(key), int(starts[part.name])
        first = max(part.start, start)
        last = min(part.start + part.size, start + tensor.get_shape()[0])
        if first < last:
            values = tensor[first - start : last - start]
            target[first - part.start : last - part.start].copy_(values)
            found += len(values)
            heartbeat.tick()
    if found != part.size:
        raise ArtifactError(
            f"{directory}: found {found} of {part.size} numbers of {kind} {part.name}. "
            "The file of a rank is missing"
        )


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> FileEntry:
    """Write fp32 tensors from any device as a safetensors file; return its size and digest.

    `safetensors.torch.save_file` needs all tensors in main memory together. Here one at a time is
    copied there, its bytes are digested on their way to the file, and every piece is a heartbeat.

        8 bytes: length of the header | header as JSON | the tensors, one after the other
    """
    fields: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.float32, f"{name}: {tensor.dtype}"
        begin, end = end, end + tensor.nbytes
        fields[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps(fields).encode()
    header += b" " * (-len(header) % _ALIGNMENT)

    def pieces() -> Iterator[bytes | memoryview]:
        yield len(header).to_bytes(8, "little") + header
        for tensor in tensors.values():
            data = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), PIECE):
                yield data[start : start + PIECE]

    return write_pieces(path, pieces())
