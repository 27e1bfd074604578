"""The hardware of the options, and the one at hand."""

import pytest

from rlhf_pipeline.sizing.hardware import GIB, at_hand, main_memory, named

LISTING = """#!/bin/sh
echo "81559, {}, NVIDIA H100 80GB HBM3"
echo "40960, {}, NVIDIA A100-SXM4-40GB"
"""


@pytest.mark.parametrize(
    ("gpu", "gpus", "nodes", "ranks", "gibibytes", "has_bf16"),
    [
        ("a100-40", None, 1, 1, 40, True),
        ("24", None, 1, 1, 24, True),
        ("v100-32", None, 1, 1, 32, False),  # before Ampere
        ("a10", None, 1, 1, 24, True),
        (None, "8x80", 1, 8, 80, True),
        (None, "2x4x80", 2, 4, 80, True),
        ("h200", "8x80", 1, 8, 141, True),  # the name says the memory
    ],
)
def test_options(gpu, gpus, nodes, ranks, gibibytes, has_bf16):
    found = named(gpu, gpus)
    assert (found.nodes, found.ranks, found.gpu_memory) == (nodes, ranks, gibibytes * GIB)
    assert (found.world, found.has_bf16) == (nodes * ranks, has_bf16)


@pytest.mark.parametrize(
    ("capabilities", "has_bf16"),
    [(("9.0", "8.0"), True), (("10.0", "8.6"), True), (("9.0", "7.5"), False),
     (("[N/A]", "8.0"), False)],
)  # fmt: skip
def test_the_least_gpu_at_hand_counts(tmp_path, monkeypatch, capabilities, has_bf16):
    program = tmp_path / "nvidia-smi"
    program.write_text(LISTING.format(*capabilities))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = at_hand([2], ["0", "1"])
    assert (found.gpu_memory, found.name) == (40960 * 2**20, "NVIDIA A100-SXM4-40GB")
    assert found.has_bf16 is has_bf16


def test_ranks_share_the_main_memory_of_their_node_and_zero_divides_by_all_ranks():
    found = at_hand([4, 2], [])
    assert (found.ranks, found.nodes, found.world, found.on_gpu) == (4, 2, 6, False)
    assert found.rank_memory == found.main_memory // 4 > 2**27


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/", {"memory.max": "max"}, 64 * GIB),
        ("0::/", {"memory.max": f"{8 * GIB}"}, 8 * GIB),  # a container
        # SLURM's --mem limits the job; the step and the task below it have no limit.
        ("0::/slurm/job_7/step_0/task_0", {"slurm/job_7/memory.max": f"{32 * GIB}",
                                           "slurm/job_7/step_0/memory.max": "max"}, 32 * GIB),
        ("3:cpu:/x\n4:memory:/slurm/job_7", {
            "memory/memory.limit_in_bytes": f"{2**63}",
            "memory/slurm/job_7/memory.limit_in_bytes": f"{16 * GIB}"}, 16 * GIB),
    ],
)  # fmt: skip
def test_a_control_group_limits_main_memory(tmp_path, groups, limits, expected):
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(groups + "\n")
    (tmp_path / "proc" / "meminfo").write_text(f"MemTotal: {64 * 2**20} kB\n")
    for name, text in limits.items():
        file = tmp_path / "sys" / "fs" / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    assert main_memory(tmp_path) == expected
