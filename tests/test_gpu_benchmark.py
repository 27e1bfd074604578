"""benchmarks/gpu.py where there is no GPU: its rows are valid, and it says what it lacks."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from omegaconf import OmegaConf
from waiting import wait_until

from rlhf_pipeline.checks import check

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """The module; it writes to a folder of the test."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("gpu")
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


def test_every_row_is_valid_on_eight_gpus_and_in_a_rehearsal(gpu, monkeypatch):
    monkeypatch.setattr("rlhf_pipeline.checks.find_spec", lambda name: object())
    for row in gpu.ROWS.values():
        check(gpu.row_parameters(row, rehearsal=False), gpus=8)
        check(gpu.row_parameters(row, rehearsal=True), gpus=0)


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


def test_memory_that_nvidia_smi_does_not_know_is_left_out(gpu, monkeypatch):
    """As it is with MIG, and where GPU and CPU share their memory."""
    listing = "0, GPU-8932f937, [N/A]\n1, GPU-5a5d6, 512\n2, GPU-77, 9000\n"
    monkeypatch.setattr(gpu, "visible_gpus", lambda: ["0", "1"])
    monkeypatch.setattr(
        gpu.subprocess, "run", lambda *arguments, **options: SimpleNamespace(stdout=listing)
    )
    memory = gpu.Memory()
    wait_until(lambda: memory._peak is not None or not memory.is_alive())
    assert memory.stop() == 512


def test_an_error_of_any_kind_is_a_line_of_the_table(gpu, monkeypatch):
    def fails(*_, **__):
        raise ValueError("nothing fits")

    monkeypatch.setattr(gpu, "check", fails)
    (found,) = gpu.run_row("lora", rehearsal=True)
    assert (found.verdict, found.reason) == ("FAIL", "ValueError: nothing fits")


def test_a_row_whose_package_is_missing_says_so(gpu, monkeypatch):
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    (found,) = gpu.run_row("4-bit", rehearsal=False)
    assert (found.verdict, found.reason) == ("skip", "needs the package bitsandbytes")


@pytest.mark.parametrize(
    ("skipped", "verdict"),
    [
        ("[1] tests/a.py:407: the extra `quantization` is not installed", "pass"),
        ("[3] tests/b.py:30: needs vllm: make vllm", "pass"),
        ("[1] tests/c.py:44: needs a GPU", "FAIL"),
    ],
)
def test_a_test_may_be_skipped_for_a_missing_package_alone(gpu, monkeypatch, skipped, verdict):
    output = f"SKIPPED {skipped}\n5 passed, 1 skipped in 3.0s\n"
    done = SimpleNamespace(stdout=output, stderr="", returncode=0)
    monkeypatch.setattr(gpu.subprocess, "run", lambda *arguments, **options: done)
    (found,) = gpu.run_tests(rehearsal=False)
    assert found.verdict == verdict
    assert found.reason == f"5 passed, 1 skipped in 3.0s; SKIPPED {skipped}"


def test_sampled_tokens_are_those_of_all_responses_over_the_time_of_sampling(gpu, tmp_path):
    """16 prompts with 4 responses each are 64 responses: 64 * 100 tokens in 2 s."""
    step = {"time/step_s": 9.0, "time/rollout_s": 5.0, "time/generation_s": 2.0}
    lines = [{"step": n, "metrics": step | {"rollout/response_tokens": 100.0}} for n in (1, 2)]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = {"rollout_batches": 1, "rollout_batch_size": 64, "responses_per_prompt": 4}
    run = SimpleNamespace(stage="ppo", metrics_file=file, config={"ppo": config})
    assert gpu.rate(run) == "3,200 sampled tokens/s"


def test_options_of_long_contexts_are_the_parameters(gpu, tmp_path):
    """As Kedro reads them: items end at commas, and a value is YAML."""
    option = gpu.as_option(gpu.long_contexts(rows=2, vocabulary=512))
    found = OmegaConf.to_container(OmegaConf.from_dotlist(option.split(",")))
    assert found["split"]["sources"] == [{"name": "files", "path": str(tmp_path / "texts-2.jsonl")}]
    assert found["ppo"]["sampling"] == {"max_response_tokens": 512}
    assert found["base_model"] == {
        "architecture": {"max_position_embeddings": 1024},
        "vocab_size": 512,
    }


@pytest.mark.long
def test_prompts_and_responses_of_long_contexts_are_whole(gpu, monkeypatch):
    """Every row is 512 + 512 tokens."""
    monkeypatch.setattr(gpu, "WORDS", 200)
    values = gpu.merged(gpu.parameters("tiny"), gpu.long_contexts(rows=40, vocabulary=512))
    stages = gpu.StageRunner(gpu.RunContext(gpu.FOLDER / "workspace", gpu.LaunchConfig()))
    blocks = {
        name: gpu.parameter_blocks()[name].model_validate(values[name])
        for name in ("base_model", "split")
    }
    model = gpu.base_model(blocks["base_model"], blocks["split"], 1, stages)
    rows = gpu.split(model, blocks["split"], 1, stages)
    with pa.OSFile(str(rows / "ppo" / "train.arrow")) as file:
        prompts = pa.ipc.open_stream(file).read_all()["prompt_ids"].to_pylist()
    assert len(prompts) > 5 and {len(prompt) for prompt in prompts} == {512}
