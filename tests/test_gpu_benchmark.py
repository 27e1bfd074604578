"""benchmarks/gpu.py where there is no GPU: its rows are valid, and it says what it lacks."""

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

from rlhf_pipeline.run.checks import check
from rlhf_pipeline.sizing.fit import fits
from rlhf_pipeline.sizing.hardware import GIB, Hardware
from rlhf_pipeline.sizing.models import Shape
from rlhf_pipeline.sizing.stages import plan_stage

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def rows(benchmark):
    return benchmark("gpu_rows")


@pytest.fixture
def gpu(benchmark):
    return benchmark("gpu")


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


def test_memory_that_nvidia_smi_does_not_know_is_left_out(rows, monkeypatch):
    """As it is with MIG, and where GPU and CPU share their memory."""
    listing = "0, GPU-8932f937, [N/A]\n1, GPU-5a5d6, 512\n2, GPU-77, 9000\n"
    monkeypatch.setattr(rows, "visible_gpus", lambda: ["0", "1"])
    monkeypatch.setattr(
        rows.subprocess, "run", lambda *arguments, **options: SimpleNamespace(stdout=listing)
    )
    memory = rows.Memory()
    wait_until(lambda: memory._peak is not None or not memory.is_alive())
    assert memory.stop() == 512


@pytest.mark.parametrize(
    ("fields", "gpus", "toy", "expected"),
    [
        ({}, 1, False, ""),
        ({"cuda_only": "no vLLM"}, 0, True, "CUDA only: no vLLM"),
        ({"package": "no_such_package"}, 1, False, "needs the package no_such_package"),
        ({"at_least": 8}, 2, False, "needs 8 GPUs, found 2"),
        ({"at_least": 8}, 0, True, ""),
    ],
)
def test_a_row_that_cannot_run_says_why(gpu, rows, fields, gpus, toy, expected):
    assert gpu.obstacle(rows.Row("row", "sft", **fields), gpus, toy=toy) == expected


def result(row, verdict="pass", **values):
    return {"of": row, "row": row, "verdict": verdict, "seconds": 1.0, "values": values}


def test_losses_of_another_zero_stage_must_be_equal(gpu, rows):
    part = rows.Part(
        "losses",
        tuple(
            rows.Row(name, "sft", settings={"deepspeed": {"precision": "fp32"}}) for name in "abc"
        ),
        compared=True,
    )
    losses = [{"first loss": 2.0, "last loss": last} for last in (1.0, 1.00001, 1.1)]
    results = [result(name, **each) for name, each in zip("abc", losses, strict=True)]
    gpu.compare_losses(part, results)
    assert [each["verdict"] for each in results] == ["pass", "pass", "FAIL"]
    assert results[2]["reason"] == "found last loss 1.100000, expected 1.000000 as in the first"


def test_a_part_that_runs_again_keeps_rows_of_the_same_versions(gpu, rows, tmp_path):
    part = rows.Part("something", tuple(rows.Row(name, "sft") for name in "ab"))
    file, versions = tmp_path / "part.json", {"torch": "1", "GPUs": []}
    for found, name in ((versions, "b"), (versions, "a"), (versions | {"torch": "2"}, "a")):
        gpu.store(file, found, [result(name)], part, 1.0)
        measured = [row["of"] for row in json.loads(file.read_text())["rows"]]
        assert measured == {"b": ["b"]}.get(name, ["a", "b"] if found is versions else ["a"])


def test_the_page_merges_the_parts_that_have_run(benchmark, rows, tmp_path):
    for name, torch in (("trainer", "1"), ("generation", "2")):
        shown = [result("big", **{"MFU, %": 41.5}), result("no", "skip") | {"reason": "a | b"}]
        record = {"part": name, "measures": "what it does", "date": "2026-01-02", "seconds": 9.0}
        record |= {"versions": {"torch": torch, "GPUs": ["H100"] * 2}, "rows": shown}
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    page = benchmark("gpu_report").write(tmp_path).read_text()
    assert "generation: 2 x H100; torch 2." in page and "trainer: 2 x H100; torch 1." in page
    assert "| big | pass | 41.5 |  |" in page and "| no | skip |  | a / b |" in page
    assert "Parts that have not run: kernels" in page


def test_a_rank_that_does_not_end_is_ended(gpu):
    sleeper = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True
    )
    assert gpu.wait([sleeper], 0.5) is False and sleeper.poll() is not None


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
    monkeypatch.setattr("rlhf_pipeline.run.checks.find_spec", lambda name: object())
    for row in stages.ROWS.values():
        check(stages.row_parameters(row, rehearsal=False), gpus=8)
        check(stages.row_parameters(row, rehearsal=True), gpus=0)


def test_a_whole_row_asks_for_every_stage(stages, monkeypatch, tmp_path):
    asked = []

    class Runner:
        def __init__(self, context):
            pass

        def run(self, job):
            asked.append(job.spec.name)
            return tmp_path

    monkeypatch.setattr(stages, "StageRunner", Runner)
    monkeypatch.setattr(stages, "split", lambda base, config, seed, runner: tmp_path)
    monkeypatch.setattr(stages, "base_model", lambda config, split, seed, runner: tmp_path)
    assert stages.run_stages(stages.REHEARSES, rehearsal=True) == []
    assert asked == ["sft", "reward_model", "ppo", "evaluate", "dpo", "evaluate_dpo"]


def test_an_error_of_any_kind_is_a_line_of_the_table(stages, monkeypatch):
    def fails(*_, **__):
        raise ValueError("nothing fits")

    monkeypatch.setattr(stages, "check", fails)
    (found,) = stages.run_stages("lora", rehearsal=True)
    assert (found.verdict, found.reason) == ("FAIL", "ValueError: nothing fits")


def test_stages_whose_package_is_missing_say_so(stages, monkeypatch):
    monkeypatch.setattr(stages, "find_spec", lambda name: None)
    (found,) = stages.run_stages("4-bit", rehearsal=False)
    assert (found.verdict, found.reason) == ("skip", "needs the package bitsandbytes")


@pytest.mark.parametrize(
    ("skipped", "verdict"),
    [
        ("[1] tests/a.py:407: the extra `quantization` is not installed", "pass"),
        ("[3] tests/b.py:30: needs vllm: make vllm", "pass"),
        ("[1] tests/c.py:44: needs a GPU", "FAIL"),
    ],
)
def test_a_test_may_be_skipped_for_a_missing_package_alone(stages, monkeypatch, skipped, verdict):
    output = f"SKIPPED {skipped}\n5 passed, 1 skipped in 3.0s\n"
    done = SimpleNamespace(stdout=output, stderr="", returncode=0)
    monkeypatch.setattr(stages.subprocess, "run", lambda *arguments, **options: done)
    (found,) = stages.run_tests(rehearsal=False)
    assert found.verdict == verdict
    assert found.reason == f"5 passed, 1 skipped in 3.0s; SKIPPED {skipped}"


def test_sampled_tokens_are_those_of_all_responses_over_the_time_of_sampling(stages, tmp_path):
    """16 prompts with 4 responses each are 64 responses: 64 * 100 tokens in 2 s."""
    step = {"time/step_s": 9.0, "time/rollout_s": 5.0, "time/generation_s": 2.0}
    lines = [{"step": n, "metrics": step | {"rollout/response_tokens": 100.0}} for n in (1, 2)]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = {"rollout_batches": 1, "rollout_batch_size": 64, "responses_per_prompt": 4}
    run = SimpleNamespace(stage="ppo", metrics_file=file, config={"ppo": config})
    assert stages.rate(run) == "3,200 sampled tokens/s"


def test_options_of_long_contexts_are_the_parameters(stages, tmp_path):
    """As Kedro reads them: items end at commas, and a value is YAML."""
    option = stages.as_option(stages.long_contexts(rows=2, vocabulary=512))
    found = OmegaConf.to_container(OmegaConf.from_dotlist(option.split(",")))
    assert found["split"]["sources"] == [{"name": "files", "path": str(tmp_path / "texts-2.jsonl")}]
    assert found["ppo"]["sampling"] == {"max_response_tokens": 512}
    assert found["base_model"] == {
        "architecture": {"max_position_embeddings": 1024},
        "vocab_size": 512,
    }


@pytest.mark.long
def test_prompts_and_responses_of_long_contexts_are_whole(stages, monkeypatch):
    """Every row is 512 + 512 tokens."""
    monkeypatch.setattr(stages, "WORDS", 200)
    values = stages.merged(stages.parameters("tiny"), stages.long_contexts(rows=40, vocabulary=512))
    runner = stages.StageRunner(
        stages.RunContext(stages.FOLDER / "workspace", stages.LaunchConfig())
    )
    blocks = {
        name: stages.parameter_blocks()[name].model_validate(values[name])
        for name in ("base_model", "split")
    }
    model = stages.base_model(blocks["base_model"], blocks["split"], 1, runner)
    rows = stages.split(model, blocks["split"], 1, runner)
    with pa.OSFile(str(rows / "ppo" / "train.arrow")) as file:
        prompts = pa.ipc.open_stream(file).read_all()["prompt_ids"].to_pylist()
    assert len(prompts) > 5 and {len(prompt) for prompt in prompts} == {512}
