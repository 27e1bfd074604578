"""Safetensors files that are digested while they are written."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rlhf_pipeline.distributed import tensor_file
from rlhf_pipeline.distributed.tensor_file import NAMES, write_tensors
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.heartbeat import Heartbeat
from rlhf_pipeline.runtime.manifest import FileEntry, file_digest


@pytest.mark.parametrize("metadata", [{}, {"a weight: \u00fc": '"12"'}])
def test_the_bytes_are_those_of_safetensors(tmp_path, monkeypatch, metadata):
    monkeypatch.setattr(tensor_file, "PIECE", 8)
    monkeypatch.setattr(heartbeat, "_here", Heartbeat(0, None))
    tensors = {
        "weight|\u00e4": torch.tensor([[1.0, -2.0, 3.0], [float("nan"), float("inf"), -0.0]]),
        "weight|none": torch.empty(0),
        "a transposed matrix": torch.arange(6.0).view(2, 3).t(),
        "part of a tensor": torch.arange(6.0)[2:5],
        "a number": torch.tensor(2.5),
        **{str(dtype): torch.tensor([[0, 1, 3]]).to(dtype) for dtype in NAMES},
    }
    entry = write_tensors(tensors, tmp_path / "file", metadata)
    pieces = sum(-(-tensor.nbytes // 8) for tensor in tensors.values())
    assert heartbeat._here.pieces == 1 + pieces  # of them one for the header
    save_file({n: x.contiguous() for n, x in tensors.items()}, tmp_path / "other", metadata)
    assert (tmp_path / "file").read_bytes() == (tmp_path / "other").read_bytes()
    assert entry == FileEntry((tmp_path / "file").stat().st_size, file_digest(tmp_path / "file"))


def test_the_numbers_begin_where_safetensors_lets_them_begin(tmp_path):
    for length in range(1, 9):  # of the header, which is filled up to a multiple of eight
        tensors = {"n" * length: torch.ones(1)}
        write_tensors(tensors, tmp_path / "file", {"a": "b"})
        save_file(tensors, tmp_path / "other", {"a": "b"})
        assert (tmp_path / "file").read_bytes() == (tmp_path / "other").read_bytes()


def test_a_rank_without_any_piece_writes_an_empty_file(tmp_path):
    write_tensors({}, tmp_path / "file", {})
    with safe_open(tmp_path / "file", framework="pt") as file:
        assert list(file.keys()) == [] and file.metadata() == {}
