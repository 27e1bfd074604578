"""Files that are written as a stream are safetensors files."""

import json

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from rlhf_pipeline.distributed import engine_state
from rlhf_pipeline.distributed.engine_state import write_tensors
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.digests import FileEntry, file_digest
from rlhf_pipeline.runtime.heartbeat import Heartbeat


def test_safetensors_reads_what_was_written(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_state, "PIECE", 8)
    monkeypatch.setattr(heartbeat, "_here", Heartbeat(0, None))
    tensors = {
        "weight|a": torch.tensor([[1.0, -2.0, 3.0], [float("nan"), float("inf"), -0.0]]),
        "weight|none": torch.empty(0),
        "a transposed matrix": torch.arange(6.0).view(2, 3).t(),
    }
    entry = write_tensors(tmp_path / "file", tensors, {"a": "12"})
    assert entry == FileEntry((tmp_path / "file").stat().st_size, file_digest(tmp_path / "file"))
    found = load_file(tmp_path / "file")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == torch.float32 and found[name].shape == tensor.shape
        assert torch.equal(found[name].view(torch.int32), tensor.contiguous().view(torch.int32)), (
            name
        )
    with safe_open(tmp_path / "file", framework="pt") as file:
        assert file.metadata() == {"a": "12"}
    # The header, three pieces of each full tensor, and one piece that `file_digest` read.
    assert heartbeat._here.ticks == 1 + 3 + 3 + 1


def test_the_tensors_begin_at_a_multiple_of_eight_bytes(tmp_path):
    for length in range(8):
        write_tensors(tmp_path / "file", {"n" * (length + 1): torch.ones(1)}, {})
        content = (tmp_path / "file").read_bytes()
        header = int.from_bytes(content[:8], "little")
        assert header % 8 == 0
        assert json.loads(content[8 : 8 + header])["n" * (length + 1)]["data_offsets"] == [0, 4]


def test_a_rank_without_any_piece_writes_an_empty_file(tmp_path):
    write_tensors(tmp_path / "file", {}, {})
    with safe_open(tmp_path / "file", framework="pt") as file:
        assert list(file.keys()) == [] and file.metadata() == {}
