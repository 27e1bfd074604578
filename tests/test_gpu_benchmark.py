"""benchmarks/gpu.py where there is no GPU: its rows are valid, and it says what it lacks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf_pipeline.kedro_run.checks import check
from rlhf_pipeline.sizing.fit import fits
from rlhf_pipeline.sizing.hardware import GIB, Hardware
from rlhf_pipeline.sizing.models import Shape
from rlhf_pipeline.sizing.stages import plan_stage

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def rows(benchmark):
    return benchmark("gpu_rows")


@pytest.fixture
def stages(benchmark, monkeypatch, tmp_path):
    module = benchmark("gpu_stages")
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    return module


def run(*options: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, BENCHMARKS / "gpu.py", *options],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_part_and_row_is_listed_and_fits_nine_minutes(rows):
    listed = run("--list")
    assert listed.returncode == 0, listed.stderr
    for name, part in rows.PARTS.items():
        assert f"\n{name}: " in f"\n{listed.stdout}"
        assert part.minutes <= 500 / 60, name
        assert all(row.name in listed.stdout for row in part.rows)


def test_without_gpus_the_message_says_what_to_do():
    refused = run()
    assert refused.returncode == 2, refused.stderr
    assert refused.stdout.startswith("gpu: found 0 GPUs, expected at least one. Fix: check")


def test_a_token_reads_every_weight_once_and_the_keys_and_values_before_it(rows):
    """Two layers of 1,000 weights, 10 in norms, a head of 50 x 4; keys of 8 numbers."""
    shape = SimpleNamespace(matrices=2000, vectors=10, vocab=50, embedding=4, layers=2, keys=8)
    weights, cache = 2000 + 10 + 200, 3 * (20 + 5) * 2 * 2 * 8
    assert rows.bytes_of_token(shape, rows=3, prompt=20, response=10) == 2 * (weights + cache)


def test_training_has_three_forward_passes_and_adapters_two(rows):
    """10 tokens in rows of 50: causal attention reads half of the row, keys and values, twice."""
    shape = SimpleNamespace(matrices=2000, vocab=50, embedding=4, layers=2, queries=8)
    forward = 10 * (2 * (2000 + 200) + 2 * 2 * 8 * 50)
    assert rows.training_flops(shape, 10, 50) == 3 * forward
    assert rows.training_flops(shape, 10, 50, adapters=True) == 2 * forward


def test_shares_of_what_a_gpu_can_do(rows):
    assert rows.share_of_bandwidth(3e9, 0.002, 3e12) == pytest.approx(0.5)
    assert rows.mfu(flops=8e14, seconds=2.0, peak=1e15, gpus=2) == pytest.approx(0.2)
    assert rows.limits_of("NVIDIA H100 80GB HBM3") == (989e12, 3350e9)
    assert rows.limits_of("NVIDIA H100 PCIe") == (756e12, 2000e9)
    assert rows.limits_of("unknown") is None


def test_what_one_h100_measures_fits_it(benchmark, rows):
    """By the plan; a row that does not fit would be skipped."""
    worker, models = benchmark("gpu_worker"), benchmark("gpu_models")
    config_of = {"sft": worker.sft_config, "ppo": worker.ppo_config}
    for row in (row for part in rows.PARTS.values() for row in part.rows if row.kind in config_of):
        ranks = row.at_least if row.gpus == 0 else 1
        config, lengths = config_of[row.kind](row.settings, ranks)
        fields = rows.architecture(row.settings["model"], toy=False, positions=1)
        given = models.blocks_of(row.kind, config, lengths), Shape.of(fields)
        hardware = Hardware(ranks, gpu_memory=79 * GIB)
        planned = plan_stage(row.kind, *given, hardware)
        assert fits(planned, hardware), row.name


@pytest.mark.slow
def test_the_rehearsal_of_a_part_ends_in_a_page(tmp_path):
    done = run("--cpu-rehearsal", "--part", "generation", "--results", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0.5B: pass" in done.stdout and "0.5B, vLLM: skip" in done.stdout
    page = (tmp_path / "report.md").read_text()
    assert "ms a token" in page and "no GPU: a rehearsal" in page


def test_the_stages_of_every_row_are_valid_on_eight_gpus_and_in_a_rehearsal(stages, monkeypatch):
    monkeypatch.setattr("rlhf_pipeline.kedro_run.faults.find_spec", lambda name: object())
    for row in stages.ROWS.values():
        check(stages.row_parameters(row, rehearsal=False), gpus=8)
        check(stages.row_parameters(row, rehearsal=True), gpus=0)


def test_sampled_tokens_are_those_of_all_responses_over_the_time_of_sampling(stages, tmp_path):
    """16 prompts with 4 responses each are 64 responses: 64 * 100 tokens in 2 s."""
    step = {"time/step_s": 9.0, "time/rollout_s": 5.0, "time/generation_s": 2.0}
    lines = [{"step": n, "metrics": step | {"rollout/response_tokens": 100.0}} for n in (1, 2)]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = {"rollout_batches": 1, "rollout_batch_size": 64, "responses_per_prompt": 4}
    run = SimpleNamespace(stage="ppo", metrics_file=file, config={"ppo": config})
    assert stages.rate(run) == "3,200 sampled tokens/s"
