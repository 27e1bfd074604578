"""Writing a safetensors file as a stream.

`safetensors.torch.save_file` needs all tensors in main memory together. Here one at a time is
copied there, its bytes are digested on their way to the file, and every piece is a heartbeat.

    8 bytes: length of the header | header as JSON | the tensors, one after the other
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from rlhf_pipeline.runtime.digests import PIECE, FileEntry, write_pieces

_ALIGNMENT = 8
"""The tensors begin at a multiple of this number of bytes."""


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> FileEntry:
    """Write fp32 tensors from any device; return the size and digest of the file."""
    return write_pieces(path, _pieces(tensors, metadata))


def _pieces(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    yield _header(tensors, metadata)
    for tensor in tensors.values():
        data = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        for start in range(0, len(data), PIECE):
            yield data[start : start + PIECE]


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    fields: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.float32, f"{name}: {tensor.dtype}"
        begin, end = end, end + tensor.nbytes
        fields[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps(fields).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    return len(header).to_bytes(8, "little") + header
