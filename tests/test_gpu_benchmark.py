"""benchmarks/gpu.py where there is no GPU: its rows are valid, and it says what it lacks."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_pipeline.preflight import preflight

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch):
    """The module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu")


def run(*options: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, BENCHMARKS / "gpu.py", *options],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_row_is_valid_on_eight_gpus_and_in_a_rehearsal(gpu, monkeypatch):
    monkeypatch.setattr("rlhf_pipeline.parameter_faults.find_spec", lambda name: object())
    for row in gpu.ROWS.values():
        preflight(gpu.row_parameters(row, rehearsal=False), gpus=8)
        preflight(gpu.row_parameters(row, rehearsal=True), gpus=0)


def test_a_dry_run_lists_every_row(gpu):
    listed = run("--dry-run")
    assert listed.returncode == 0, listed.stderr
    for name in (*gpu.ROWS, *gpu.OTHERS):
        assert f"\n{name}: " in f"\n{listed.stdout}"
    assert "sft.lora.quantize=nf4" in listed.stdout


def test_without_gpus_the_message_says_what_to_do():
    refused = run()
    assert refused.returncode == 2, refused.stderr
    assert refused.stdout.startswith("gpu: found 0 GPUs, expected at least one. Fix: check")
