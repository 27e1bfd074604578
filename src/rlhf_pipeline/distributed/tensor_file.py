"""Safetensors files, written one tensor at a time and digested meanwhile.

`safetensors.torch.save_file` needs all tensors in main memory together, and its file would have to
be read again for the digest.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_pipeline.runtime.manifest import PIECE, FileEntry, write_pieces

NAMES = {
    torch.uint64: "U64", torch.int64: "I64", torch.float64: "F64", torch.complex64: "C64",
    torch.float32: "F32", torch.uint32: "U32", torch.int32: "I32", torch.bfloat16: "BF16",
    torch.float16: "F16", torch.uint16: "U16", torch.int16: "I16", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""What safetensors calls the types of numbers, in the order of its files: wide ones come first, so
that each tensor begins at a multiple of its width."""


def write_tensors(
    tensors: Mapping[str, Tensor], path: Path | str, metadata: Mapping[str, str]
) -> FileEntry:
    """Write tensors from any device as `safetensors.torch.save_file` does, up to the order of the
    metadata; return size and digest of the file. Every piece is a heartbeat."""
    order = sorted(tensors, key=lambda name: ([*NAMES].index(tensors[name].dtype), name))
    fields, end = {"__metadata__": dict[str, Any](metadata)}, 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        fields[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    header = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)  # the tensors begin at a multiple of 8 bytes

    def content() -> Iterator[bytes | memoryview]:
        yield len(header).to_bytes(8, "little") + header
        for name in order:
            data = tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), PIECE):
                yield data[start : start + PIECE]

    return write_pieces(Path(path), content())
