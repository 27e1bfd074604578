"""What benchmarks compute and compare; each shows the rest when it is run."""

import ast
import gzip
import json
from importlib.util import find_spec
from math import nextafter
from pathlib import Path

import pytest

from rlhf_pipeline.commands.plan import make_plan
from rlhf_pipeline.config.policies import DistillConfig, GRPOConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.preferences import DPOConfig, KTOConfig
from rlhf_pipeline.data.sources.synthetic import asked, measured
from rlhf_pipeline.kedro_run.checks import check
from rlhf_pipeline.kedro_run.config_loader import LayeredConfigLoader
from rlhf_pipeline.settings import CONFIG_LOADER_ARGS
from rlhf_pipeline.sizing.fit import changed
from rlhf_pipeline.sizing.hardware import named

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


# acceptance.py: eight GPUs, and figures that others publish.


@pytest.mark.parametrize("name", ["ppo", "grpo", "speed", "dpo"])
def test_a_run_of_acceptance_fits_eight_gpus_and_each_limit_refuses(benchmark, name):
    acceptance = benchmark("acceptance")
    test = acceptance.TESTS[name]
    loader = LayeredConfigLoader(str(PROJECT / "conf"), env=test.env, **CONFIG_LOADER_ARGS)
    given = changed(loader["parameters"], {"base_model.path": test.model} | test.params)
    stages = [test.policy, *(["evaluate"] if "evaluate" in test.last else [])]
    plan = make_plan(given, stages, hardware=named(None, "8x80"))
    assert {stage: fit.fits for stage, fit in plan.fits.items()} == dict.fromkeys(stages, True)
    blocks = check(given, gpus=8, elsewhere=True)
    assert blocks["sft"] is blocks["reward_model"] is None

    good = {what: nextafter(low, high) for what, (low, high) in test.expected.items()}
    assert acceptance.faults(good, test.expected) == []
    for what, limits in test.expected.items():
        for limit in limits:
            (fault,) = acceptance.faults(good | {what: limit}, test.expected)
            assert fault.startswith(f"{what}: found {limit}, expected above {limits[0]}")
    assert len(acceptance.faults({}, test.expected)) == len(test.expected)


# baselines.py: gold scores above the frontier of best of n.


def policy(gold, kl):
    return {"gold_score": gold, "score": gold / 2, "kl": kl, "response_tokens": 9.0}


def test_the_candidate_alone_has_a_win_rate(benchmark):
    gold = {"rate": 0.7, "lower": 0.6, "upper": 0.8, "length_controlled": {"rate": 0.65}}
    rows = benchmark("baselines").rows_of({
        "candidate": "ppo",
        "policies": {"sft": policy(1.0, 0.0), "ppo": policy(2.0, 1.5)},
        "win_rates": {"gold": gold, "score": {"rate": 0.9, "lower": 0.8, "upper": 0.95}},
        "best_of_n": [policy(1.0, 0.0) | {"n": 1}, policy(1.5, 0.2) | {"n": 2}],
    })  # fmt: skip
    assert rows.keys() == {"sft", "ppo", "best_of_2"}
    ends = {"rate": 0.7, "lower": 0.6, "upper": 0.8, "length_controlled": 0.65}
    assert rows["ppo"] == policy(2.0, 1.5) | ends
    assert rows["best_of_2"]["gold_score"] == 1.5 and "rate" not in rows["sft"]


def test_the_frontier_is_linear_in_the_root_of_kl_and_ends_at_its_last_point(benchmark):
    above = benchmark("baselines").above_frontier
    one = {"sft": policy(1.0, 0.0), "ppo": policy(2.0, 0.25), "dpo": policy(2.0, 9.0)}
    for n, (gold, kl) in {2: (1.5, 0.25), 4: (2.0, 1.0), 8: (2.2, 2.25), 16: (2.5, 4.0)}.items():
        one[f"best_of_{n}"] = policy(gold, kl)
    assert (above(one, "ppo"), above(one, "dpo")) == (0.5, -0.5)
    one["ppo"]["kl"] = 0.5625  # the square root is halfway between those of best of 2 and of 4
    assert above(one, "ppo") == pytest.approx(0.25)


def test_a_mean_has_the_interval_of_students_t_and_no_test_request_is_in_the_table(benchmark):
    baselines = benchmark("baselines")
    assert baselines.shown([1.0, 2.0, 3.0]) == "2.00±2.48"  # 4.303 / sqrt(3)
    assert (baselines.shown([1.0]), baselines.shown([])) == ("1.00", "-")
    found = baselines.lookup(1)
    assert found["hits"] == 0 < found["requests"]
    assert found["gold_score"] < -2  # the answers to other requests


# without_gold.py and human_preferences.py: what the runs may see.


def test_careful_comparisons_prefer_the_better_answer_most_often(benchmark):
    rows = list(benchmark("without_gold").careful(seed=3))
    gains = [
        measured(asked(row["prompt"]), row["chosen"]).gold
        - measured(asked(row["prompt"]), row["rejected"]).gold
        for row in rows
    ]
    assert len(rows) == 300 and sum(gain > 0 for gain in gains) > 220


@pytest.mark.parametrize("world", ["good", "hasty"])
def test_no_source_of_a_world_has_a_gold_score(benchmark, world, tmp_path, monkeypatch):
    module = benchmark("without_gold")
    row = {"prompt": "p", "chosen": "c", "rejected": "r"}
    monkeypatch.setattr(module, "generated", lambda source, seed: [row])
    module.write_files(world, 1, tmp_path / "world")
    assert {each["name"] for each in module.sources(world, tmp_path / "world")} == {"files"}
    assert json.loads((tmp_path / "world/test.jsonl").read_text()) == row


def test_dialogues_with_one_first_turn_are_in_one_half(benchmark, tmp_path):
    dialogues = [
        f"\n\nHuman: Question {number}?\n\nAssistant: Answer {answer}."
        for number in range(40)
        for answer in ("a", "b")
    ]
    file = tmp_path / "rows.jsonl.gz"
    with gzip.open(file, "wt") as opened:
        opened.writelines(json.dumps({"chosen": each}) + "\n" for each in dialogues)
    benchmark("human_preferences").write_halves(file, tmp_path)
    first = []
    for name in ("judge", "proxy"):
        lines = (tmp_path / f"{name}.jsonl").read_text().splitlines()
        first.append({json.loads(line)["chosen"].split("\n\nAssistant:")[0] for line in lines})
        assert len(lines) == 2 * len(first[-1]) > 0
    assert not first[0] & first[1] and sum(map(len, first)) == 40


# parity.py: one recipe in the words of both sides.

CONFIGS = {
    "ppo": PPOConfig, "grpo": GRPOConfig, "rloo": GRPOConfig, "dpo": DPOConfig, "kto": KTOConfig,
    "dpo_lora": DPOConfig, "dpo_ranks": DPOConfig, "distill": DistillConfig,
}  # fmt: skip


@pytest.mark.parametrize("method", CONFIGS)
def test_both_sides_have_the_same_recipe(benchmark, method):
    from rlhf_pipeline.training.supervised import optimizer_steps

    recipe = benchmark("parity_recipe")
    rows = 4000 if method == "kto" else 1600
    config = CONFIGS[method].model_validate(recipe.ours(method, rows))
    theirs = recipe.trl(method, "folder", 1)
    on_rows = isinstance(config, DPOConfig | KTOConfig)
    actor = config if on_rows else config.actor
    own, batch = actor.optimizer, theirs["per_device_train_batch_size"]
    assert theirs["lr_scheduler_type"] == own.schedule == "constant"
    assert own.warmup_fraction == 0  # TRL's default
    assert theirs["learning_rate"] == own.learning_rate
    assert (theirs["adam_beta1"], theirs["adam_beta2"]) == own.betas
    assert theirs["adam_epsilon"] == own.eps
    assert theirs["weight_decay"] == own.weight_decay
    assert theirs["max_grad_norm"] == own.max_grad_norm
    assert theirs["bf16"] == (actor.deepspeed.precision == "bf16") == (actor.lora is not None)
    if on_rows:
        assert batch * recipe.RECIPES[method].ranks == config.batch_size
        assert theirs["beta"] == config.beta
        assert theirs["max_steps"] == optimizer_steps(config, rows)
        return
    assert batch == config.rollout_batch_size
    assert method == "distill" or config.missing_eos_penalty == 0
    assert theirs["temperature"] == config.sampling.temperature
    name = "response_length" if method == "ppo" else "max_completion_length"
    assert theirs[name] == config.sampling.max_response_tokens
    if method == "ppo":
        same = config.critic.model_dump(exclude={"start", "base_model"})
        assert same == config.actor.model_dump()  # TRL's PPO has one optimizer for both models
        # TRL's PPO steps once for `gradient_accumulation_steps` minibatches.
        assert theirs["gradient_accumulation_steps"] == 1
        assert theirs["total_episodes"] == config.steps * config.rollout_batch_size
        assert theirs["num_ppo_epochs"] == config.ppo_epochs
        assert batch / theirs["num_mini_batches"] == config.minibatch_size
        assert (theirs["kl_coef"], theirs["cliprange"]) == (config.kl.coef, config.clip_range)
    elif method == "distill":
        assert config.minibatch_size == batch
        assert (theirs["beta"], theirs["max_steps"]) == (config.beta, config.steps)
        assert (config.kl.coef, config.given_batch_size, config.top_k) == (1, 0, None)
    else:
        assert config.minibatch_size == batch
        assert theirs["num_generations"] == config.responses_per_prompt
        assert theirs["num_iterations"] == config.ppo_epochs
        assert theirs["max_steps"] == config.steps * config.ppo_epochs
        assert (theirs["beta"], theirs["epsilon"]) == (config.kl.coef, config.clip_range)


def test_the_interval_is_that_of_paired_differences(benchmark):
    # Differences 1, 2, 3, 2, 2 hundredths: mean 2, standard deviation sqrt(2 / 4) = 0.70711; the
    # 95% quantile of Student's t with 4 degrees of freedom is 2.13185: 2.13185 * 0.70711 / sqrt(5)
    # = 0.67415.
    comparison = benchmark("parity").Comparison
    found = comparison.of([0.51, 0.62, 0.73, 0.82, 0.92], [0.5, 0.6, 0.7, 0.8, 0.9])
    assert found.difference == pytest.approx(0.02)
    assert (found.lower, found.upper) == pytest.approx((0.0132585, 0.0267415), rel=1e-5)
    assert comparison.of([0.5], [0.5]).equivalent(0.05) == "undecided"  # one seed


@pytest.mark.parametrize(
    ("lower", "upper", "expected"),
    [
        (0.01, 0.04, "yes"),  # different, but by less than the margin
        (-0.06, 0.04, "undecided"),
        (0.04, 0.06, "undecided"),
        (0.06, 0.07, "no"),
        (-0.07, -0.06, "no"),
    ],
)
def test_equivalence_needs_the_whole_interval_within_the_margin(benchmark, lower, upper, expected):
    found = benchmark("parity").Comparison(0.5, 0.5, (lower + upper) / 2, lower, upper)
    assert found.equivalent(0.05) == expected


def test_the_score_of_parity_counts_every_token(benchmark):
    share = benchmark("parity_task").share
    assert share([0, 15, 16, 63]) == 0.5  # two of the first 16 letters, another one, EOS
    assert share([63]) == 0.0
