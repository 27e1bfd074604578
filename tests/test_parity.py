"""benchmarks/parity.py without its runs: the statistics, the recipe in both words, the score."""

import math

import pytest

from rlhf_pipeline.config.policies import DistillConfig, GRPOConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.preferences import DPOConfig, KTOConfig

CONFIGS = {
    "ppo": PPOConfig, "grpo": GRPOConfig, "rloo": GRPOConfig, "dpo": DPOConfig, "kto": KTOConfig,
    "dpo_lora": DPOConfig, "dpo_ranks": DPOConfig, "distill": DistillConfig,
}  # fmt: skip


def test_the_interval_is_that_of_paired_differences(benchmark):
    # Differences 1, 2, 3, 2, 2 hundredths: mean 2, standard deviation sqrt(2 / 4) = 0.70711; the
    # 95% quantile of Student's t with 4 degrees of freedom is 2.13185: 2.13185 * 0.70711 / sqrt(5)
    # = 0.67415.
    found = benchmark("parity").Comparison.of(
        [0.51, 0.62, 0.73, 0.82, 0.92], [0.5, 0.6, 0.7, 0.8, 0.9]
    )
    assert found.ours - found.trl == pytest.approx(0.02)
    assert found.difference == pytest.approx(0.02)
    assert (found.lower, found.upper) == pytest.approx((0.0132585, 0.0267415), rel=1e-5)


def test_one_seed_decides_nothing(benchmark):
    found = benchmark("parity").Comparison.of([0.5], [0.5])
    assert (found.lower, found.upper) == (-math.inf, math.inf)
    assert found.equivalent(0.05) == "undecided"


@pytest.mark.parametrize(
    ("lower", "upper", "expected"),
    [
        (-0.04, 0.04, "yes"),
        (0.01, 0.04, "yes"),  # different, but by less than the margin
        (-0.06, 0.04, "undecided"),
        (0.04, 0.06, "undecided"),
        (-0.06, 0.06, "undecided"),
        (0.06, 0.07, "no"),
        (-0.07, -0.06, "no"),
    ],
)
def test_equivalence_needs_the_whole_interval_within_the_margin(benchmark, lower, upper, expected):
    found = benchmark("parity").Comparison(0.5, 0.5, (lower + upper) / 2, lower, upper)
    assert found.equivalent(0.05) == expected


@pytest.mark.parametrize("method", CONFIGS)
def test_both_sides_have_the_same_optimizer(benchmark, method):
    recipe = benchmark("parity_recipe")
    config = CONFIGS[method].model_validate(recipe.ours(method, 1600))
    on_rows = isinstance(config, DPOConfig | KTOConfig)
    actor = config if on_rows else config.actor
    own = actor.optimizer
    theirs = recipe.trl(method, "folder", 1)
    assert theirs["lr_scheduler_type"] == own.schedule == "constant"
    assert own.warmup_fraction == 0  # TRL's default
    assert theirs["learning_rate"] == own.learning_rate
    assert (theirs["adam_beta1"], theirs["adam_beta2"]) == own.betas
    assert theirs["adam_epsilon"] == own.eps
    assert theirs["weight_decay"] == own.weight_decay
    assert theirs["max_grad_norm"] == own.max_grad_norm
    assert theirs["bf16"] == (actor.deepspeed.precision == "bf16") == (actor.lora is not None)
    if method == "ppo":
        assert config.critic == config.actor  # TRL's PPO has one optimizer for both models


@pytest.mark.parametrize("method", ["ppo", "grpo", "rloo"])
def test_both_sides_sample_and_clip_alike(benchmark, method):
    recipe = benchmark("parity_recipe")
    config = CONFIGS[method].model_validate(recipe.ours(method, 1600))
    theirs = recipe.trl(method, "folder", 1)
    assert theirs["temperature"] == config.sampling.temperature
    name = "response_length" if method == "ppo" else "max_completion_length"
    assert theirs[name] == config.sampling.max_response_tokens
    assert theirs["kl_coef" if method == "ppo" else "beta"] == config.kl.coef
    assert theirs["cliprange" if method == "ppo" else "epsilon"] == config.clip_range
    assert config.missing_eos_penalty == 0


def test_both_sides_take_the_same_steps(benchmark):
    recipe = benchmark("parity_recipe")
    ppo = PPOConfig.model_validate(recipe.ours("ppo", 1600))
    theirs = recipe.trl("ppo", "folder", 1)
    # TRL's PPO steps once for `gradient_accumulation_steps` minibatches.
    assert theirs["gradient_accumulation_steps"] == 1
    batch = theirs["per_device_train_batch_size"]
    assert batch == ppo.rollout_batch_size
    assert theirs["total_episodes"] == ppo.steps * ppo.rollout_batch_size
    assert theirs["num_ppo_epochs"] == ppo.ppo_epochs
    assert batch / theirs["num_mini_batches"] == ppo.minibatch_size
    for method in ("grpo", "rloo"):
        config = GRPOConfig.model_validate(recipe.ours(method, 1600))
        theirs = recipe.trl(method, "folder", 1)
        assert theirs["per_device_train_batch_size"] == config.rollout_batch_size
        assert config.minibatch_size == config.rollout_batch_size
        assert theirs["num_generations"] == config.responses_per_prompt
        assert theirs["num_iterations"] == config.ppo_epochs
        assert theirs["max_steps"] == config.steps * config.ppo_epochs


@pytest.mark.parametrize(("method", "rows"), [("dpo", 1600), ("kto", 4000)])
def test_methods_on_rows_take_the_same_steps_on_both_sides(benchmark, method, rows):
    from rlhf_pipeline.training.supervised import optimizer_steps

    recipe = benchmark("parity_recipe")
    config = CONFIGS[method].model_validate(recipe.ours(method, rows))
    theirs = recipe.trl(method, "folder", 1)
    assert optimizer_steps(config, rows) == theirs["max_steps"]
    assert config.batch_size == theirs["per_device_train_batch_size"]
    assert config.beta == theirs["beta"]


def test_two_ranks_share_the_batch(benchmark):
    recipe = benchmark("parity_recipe")
    ranks, whole = (recipe.trl(name, "folder", 1) for name in ("dpo_ranks", "dpo"))
    assert recipe.RECIPES["dpo_ranks"].ranks * ranks.pop("per_device_train_batch_size") == 32
    assert whole.pop("per_device_train_batch_size") == 32 and ranks == whole
    assert recipe.ours("dpo_ranks", 1600) == recipe.ours("dpo", 1600)


def test_distillation_is_the_same_on_both_sides(benchmark):
    recipe = benchmark("parity_recipe")
    config = DistillConfig.model_validate(recipe.ours("distill", 1600))
    theirs = recipe.trl("distill", "folder", 1)
    assert (theirs["beta"], theirs["max_steps"]) == (config.beta, config.steps)
    assert theirs["per_device_train_batch_size"] == config.minibatch_size
    assert config.minibatch_size == config.rollout_batch_size
    assert theirs["temperature"] == config.sampling.temperature
    assert theirs["max_completion_length"] == config.sampling.max_response_tokens
    assert (config.kl.coef, config.given_batch_size, config.top_k) == (1, 0, None)


def test_the_score_counts_every_token(benchmark):
    share = benchmark("parity_task").share
    assert share([0, 15, 16, 63]) == 0.5  # two of the first 16 letters, another one, EOS
    assert share([63]) == 0.0
