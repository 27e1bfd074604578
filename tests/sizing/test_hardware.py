"""The hardware of the options, and the one at hand."""

import pytest

from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.sizing.hardware import GIB, at_hand, named

LISTING = """#!/bin/sh
echo "81559, NVIDIA H100 80GB HBM3"
echo "40960, NVIDIA A100-SXM4-40GB"
"""


@pytest.mark.parametrize(
    ("gpu", "gpus", "nodes", "ranks", "gibibytes"),
    [
        ("a100-40", None, 1, 1, 40),
        ("24", None, 1, 1, 24),
        (None, "8x80", 1, 8, 80),
        (None, "2x4x80", 2, 4, 80),
        ("h200", "8x80", 1, 8, 141),  # the name says the memory
    ],
)
def test_options(gpu, gpus, nodes, ranks, gibibytes):
    found = named(gpu, gpus)
    assert (found.nodes, found.ranks, found.gpu_memory) == (nodes, ranks, gibibytes * GIB)
    assert found.world == nodes * ranks


@pytest.mark.parametrize(
    ("gpu", "gpus", "message"),
    [
        ("a100", None, r"--gpu: found 'a100' \(did you mean a10\?\)|--gpu: found 'a100'"),
        (None, "8", "--gpus: found '8', expected GPUS x GB such as 8x80"),
        (None, "0x80", "--gpus: found '0x80'"),
    ],
)
def test_other_forms_are_refused(gpu, gpus, message):
    with pytest.raises(ConfigError, match=message):
        named(gpu, gpus)


def test_the_smallest_gpu_at_hand_counts(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(LISTING)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = at_hand(2, 1, ["0", "1"])
    assert (found.gpu_memory, found.name) == (40960 * 2**20, "NVIDIA A100-SXM4-40GB")


def test_without_gpus_ranks_share_main_memory():
    found = at_hand(2, 1, [])
    assert not found.on_gpu
    assert found.rank_memory == found.main_memory // 2 > 2**28
