"""What benchmarks compute and compare; each shows the rest when it is run."""

import ast
import gzip
import json
import sys
from importlib.util import find_spec
from math import nextafter
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import completed

from rlhf_pipeline.commands.plan import make_plan
from rlhf_pipeline.config.policies import DistillConfig, GRPOConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.preferences import DPOConfig, KTOConfig
from rlhf_pipeline.kedro_run.checks import check
from rlhf_pipeline.kedro_run.config_loader import LayeredConfigLoader
from rlhf_pipeline.settings import CONFIG_LOADER_ARGS
from rlhf_pipeline.sizing.fit import changed, fits
from rlhf_pipeline.sizing.hardware import GIB, Hardware, named
from rlhf_pipeline.sizing.models import Shape
from rlhf_pipeline.sizing.stages import plan_stage

PROJECT = Path(__file__).parents[1]
BENCHMARKS = PROJECT / "benchmarks"


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_what_a_benchmark_imports_exists(name, monkeypatch):
    """Also within its functions, which no test calls."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for node in ast.walk(ast.parse((BENCHMARKS / f"{name}.py").read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom) and is_installed(node):
            exec(ast.unparse(node), {})


def is_installed(node: ast.Import | ast.ImportFrom) -> bool:
    """Whether the package is there. PPO is in an older TRL, which the benchmarks install."""
    name = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
    return name != "trl.experimental.ppo" and (name != "trl" or find_spec("trl") is not None)


@pytest.mark.parametrize("name", ["ppo", "grpo", "speed", "dpo"])
def test_a_run_of_acceptance_fits_eight_gpus_and_each_limit_refuses(benchmark, name):
    acceptance = benchmark("acceptance")
    test = acceptance.TESTS[name]
    loader = LayeredConfigLoader(str(PROJECT / "conf"), env=test.env, **CONFIG_LOADER_ARGS)
    given = changed(loader["parameters"], {"base_model.path": test.model} | test.params)
    stages = [test.policy, *(["evaluate"] if "evaluate" in test.last else [])]
    plan = make_plan(given, stages, hardware=named(None, "8x80"))
    assert {stage: fit.fits for stage, fit in plan.fits.items()} == dict.fromkeys(stages, True)
    good = {what: nextafter(low, high) for what, (low, high) in test.expected.items()}
    assert acceptance.faults(good, test.expected) == []
    for what, limits in test.expected.items():
        for limit in limits:
            (fault,) = acceptance.faults(good | {what: limit}, test.expected)
            assert fault.startswith(f"{what}: found {limit}, expected above {limits[0]}")


def test_the_frontier_is_linear_in_the_root_of_kl_and_ends_at_its_last_point(benchmark):
    above = benchmark("baselines").above_frontier
    points = {
        "sft": (1.0, 0.0), "ppo": (2.0, 0.25), "dpo": (2.0, 9.0),
        "best_of_2": (1.5, 0.25), "best_of_4": (2.0, 1.0), "best_of_16": (2.5, 4.0),
    }  # fmt: skip
    one = {name: {"gold_score": gold, "kl": kl} for name, (gold, kl) in points.items()}
    assert (above(one, "ppo"), above(one, "dpo")) == (0.5, -0.5)
    one["ppo"]["kl"] = 0.5625  # the square root is halfway between those of best of 2 and of 4
    assert above(one, "ppo") == pytest.approx(0.25)


@pytest.mark.parametrize("world", ["good", "hasty"])
def test_no_source_of_a_world_without_gold_has_a_gold_score(benchmark, world, tmp_path):
    assert {each["name"] for each in benchmark("without_gold").sources(world, tmp_path)} == {
        "files"
    }


def test_dialogues_with_one_first_turn_are_in_one_half(benchmark, tmp_path):
    """The judge of human_preferences.py has seen no dialogue of the reward model."""
    dialogues = [
        f"\n\nHuman: Question {number}?\n\nAssistant: Answer {answer}."
        for number in range(40)
        for answer in ("a", "b")
    ]
    file = tmp_path / "rows.jsonl.gz"
    with gzip.open(file, "wt") as opened:
        opened.writelines(json.dumps({"chosen": each}) + "\n" for each in dialogues)
    benchmark("human_preferences").write_halves(file, tmp_path)
    judge, proxy = (
        {json.loads(line)["chosen"].split("\n\nAssistant:")[0] for line in half.open()}
        for half in (tmp_path / "judge.jsonl", tmp_path / "proxy.jsonl")
    )
    assert judge and proxy and not judge & proxy and len(judge | proxy) == 40


CONFIGS = {
    "ppo": PPOConfig, "grpo": GRPOConfig, "rloo": GRPOConfig, "dpo": DPOConfig, "kto": KTOConfig,
    "dpo_lora": DPOConfig, "dpo_ranks": DPOConfig, "distill": DistillConfig,
}  # fmt: skip


@pytest.mark.parametrize("method", CONFIGS)
def test_both_sides_of_parity_have_the_same_recipe(benchmark, method):
    from rlhf_pipeline.training.supervised import optimizer_steps

    recipe = benchmark("parity_recipe")
    rows = 4000 if method == "kto" else 1600
    config = CONFIGS[method].model_validate(recipe.ours(method, rows))
    theirs = recipe.trl(method, "folder", 1)
    on_rows = isinstance(config, DPOConfig | KTOConfig)
    actor = config if on_rows else config.actor
    own, batch = actor.optimizer, theirs["per_device_train_batch_size"]
    assert own.warmup_fraction == 0  # TRL's default
    assert (actor.deepspeed.precision == "bf16") == (actor.lora is not None)
    expected = {
        "lr_scheduler_type": own.schedule, "learning_rate": own.learning_rate,
        "adam_beta1": own.betas[0], "adam_beta2": own.betas[1], "adam_epsilon": own.eps,
        "weight_decay": own.weight_decay, "max_grad_norm": own.max_grad_norm,
        "bf16": actor.lora is not None,
    }  # fmt: skip
    if on_rows:
        assert batch * recipe.RECIPES[method].ranks == config.batch_size
        expected |= {"beta": config.beta, "max_steps": optimizer_steps(config, rows)}
    else:
        assert batch == config.rollout_batch_size
        assert method == "distill" or config.missing_eos_penalty == 0
        length = "response_length" if method == "ppo" else "max_completion_length"
        expected |= {
            "temperature": config.sampling.temperature,
            length: config.sampling.max_response_tokens,
        }
    if method == "ppo":
        same = config.critic.model_dump(exclude={"start", "base_model"})
        assert same == config.actor.model_dump()  # TRL's PPO has one optimizer for both models
        assert batch / theirs["num_mini_batches"] == config.minibatch_size
        expected |= {
            # TRL's PPO steps once for so many minibatches.
            "gradient_accumulation_steps": 1,
            "total_episodes": config.steps * config.rollout_batch_size,
            "num_ppo_epochs": config.ppo_epochs,
            "kl_coef": config.kl.coef,
            "cliprange": config.clip_range,
        }
    elif method == "distill":
        assert config.minibatch_size == batch
        assert (config.kl.coef, config.given_batch_size, config.top_k) == (1, 0, None)
        expected |= {"beta": config.beta, "max_steps": config.steps}
    elif not on_rows:
        assert config.minibatch_size == batch
        expected |= {
            "num_generations": config.responses_per_prompt,
            "num_iterations": config.ppo_epochs,
            "max_steps": config.steps * config.ppo_epochs,
            "beta": config.kl.coef,
            "epsilon": config.clip_range,
        }
    assert {name: theirs[name] for name in expected} == expected


def test_the_interval_of_parity_is_that_of_paired_differences(benchmark):
    # Differences 1, 2, 3, 2, 2 hundredths: mean 2, standard deviation sqrt(2 / 4) = 0.70711; the
    # 95% quantile of Student's t with 4 degrees of freedom is 2.13185: 2.13185 * 0.70711 / sqrt(5)
    # = 0.67415.
    comparison = benchmark("parity").Comparison
    found = comparison.of([0.51, 0.62, 0.73, 0.82, 0.92], [0.5, 0.6, 0.7, 0.8, 0.9])
    assert found.difference == pytest.approx(0.02)
    assert (found.lower, found.upper) == pytest.approx((0.0132585, 0.0267415), rel=1e-5)
    assert comparison.of([0.5], [0.5]).equivalent(0.05) == "undecided"  # one seed
    for lower, upper, expected in (
        (0.01, 0.04, "yes"),  # different, but by less than the margin
        (-0.06, 0.04, "undecided"),
        (0.04, 0.06, "undecided"),
        (0.06, 0.07, "no"),
        (-0.07, -0.06, "no"),
    ):
        given = comparison(0.5, 0.5, (lower + upper) / 2, lower, upper)
        assert given.equivalent(0.05) == expected


def gpu(*options: str):
    """Run gpu.py as on a machine without GPUs."""
    program = [sys.executable, BENCHMARKS / "gpu.py", *options]
    return completed(*program, CUDA_VISIBLE_DEVICES="", COLUMNS="200")


def test_without_gpus_the_message_says_what_to_do():
    refused = gpu()
    assert refused.returncode == 2, refused.stderr
    assert refused.stdout.startswith("gpu: found 0 GPUs, expected at least one. Fix: check")


@pytest.mark.long
def test_the_rehearsal_of_a_part_ends_in_a_page(tmp_path):
    done = gpu("--cpu-rehearsal", "--part", "generation", "--results", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0.5B: pass" in done.stdout and "0.5B, vLLM: skip" in done.stdout
    page = (tmp_path / "report.md").read_text()
    assert "ms a token" in page and "no GPU: a rehearsal" in page


def test_bytes_and_operations_of_a_token_by_hand(benchmark):
    """Two layers of 1,000 weights, 10 in norms, a head of 50 x 4; keys and queries of 8 numbers.

    A step reads every weight once, and keys and values of 20 + 5 tokens in each of 3 rows. Training
    takes three forward passes, and two with adapters; causal attention reads half of a row of 50.
    """
    rows = benchmark("gpu_rows")
    shape = SimpleNamespace(
        matrices=2000, vectors=10, vocab=50, embedding=4, layers=2, keys=8, queries=8
    )
    weights, cache = 2000 + 10 + 200, 3 * (20 + 5) * 2 * 2 * 8
    assert rows.bytes_of_token(shape, rows=3, prompt=20, response=10) == 2 * (weights + cache)
    forward = 10 * (2 * (2000 + 200) + 2 * 2 * 8 * 50)
    assert rows.training_flops(shape, 10, 50) == 3 * forward
    assert rows.training_flops(shape, 10, 50, adapters=True) == 2 * forward
    assert rows.share_of_bandwidth(3e9, 0.002, 3e12) == pytest.approx(0.5)
    assert rows.mfu(flops=8e14, seconds=2.0, peak=1e15, gpus=2) == pytest.approx(0.2)
    assert rows.limits_of("NVIDIA H100 PCIe") == (756e12, 2000e9)


def test_what_one_h100_measures_fits_it_in_nine_minutes(benchmark):
    """By the plan; a row that does not fit would be skipped."""
    rows, worker, models = map(benchmark, ("gpu_rows", "gpu_worker", "gpu_models"))
    config_of = {"sft": worker.sft_config, "ppo": worker.ppo_config}
    assert all(part.minutes <= 500 / 60 for part in rows.PARTS.values())
    for row in (row for part in rows.PARTS.values() for row in part.rows if row.kind in config_of):
        ranks = row.at_least if row.gpus == 0 else 1
        config, lengths = config_of[row.kind](row.settings, ranks)
        fields = rows.architecture(row.settings["model"], toy=False, positions=1)
        given = models.blocks_of(row.kind, config, lengths), Shape.of(fields)
        hardware = Hardware(ranks, gpu_memory=79 * GIB)
        assert fits(plan_stage(row.kind, *given, hardware), hardware), row.name


def test_the_stages_of_every_row_are_valid_on_eight_gpus_and_in_a_rehearsal(
    benchmark, monkeypatch, tmp_path
):
    stages = benchmark("gpu_stages")
    monkeypatch.setattr(stages, "FOLDER", tmp_path)
    monkeypatch.setattr("rlhf_pipeline.kedro_run.faults.find_spec", lambda name: object())
    for row in stages.ROWS.values():
        check(stages.row_parameters(row, rehearsal=False), gpus=8)
        check(stages.row_parameters(row, rehearsal=True), gpus=0)
