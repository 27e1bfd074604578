"""PPO's options: conflicting ones are refused with the fix."""

import pytest
from pydantic import ValidationError

from rlhf_pipeline.config.doors import ADVANTAGE
from rlhf_pipeline.config.policies import GRPOConfig
from rlhf_pipeline.config.ppo import PPOConfig

MODEL = {"optimizer": {"learning_rate": 1e-3}}
GAE = {
    "steps": 4, "rollout_batch_size": 8, "minibatch_size": 8, "micro_batch_tokens": 4,
    "actor": MODEL, "critic": MODEL,
}  # fmt: skip
RLOO = GAE | {"advantage": "rloo", "responses_per_prompt": 2, "critic": None}


def test_only_gae_needs_a_critic():
    for advantage in ADVANTAGE.builtin.keys() - {"gae"}:
        config = PPOConfig.model_validate(RLOO | {"advantage": advantage})
        assert config.critic is None
        # The round trip through job.json.
        assert PPOConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (GAE | {"critic": None},
         "critic: found none, expected a block for advantage gae. Fix: add the block, or set "
         "advantage to rloo, grpo or reinforce"),
        (RLOO | {"critic": MODEL},
         "critic: found a block, expected none for advantage rloo. Fix: set critic to null"),
        (RLOO | {"responses_per_prompt": 1},
         "responses_per_prompt: found 1, expected 2 or more for advantage rloo"),
        (GAE | {"rollout_batches": 3, "minibatch_size": 16},
         "minibatch_size: found 16, expected a divisor of 3 * rollout_batch_size 8"),
        (RLOO | {"lam": 0.9},
         "lam: found 0.9, expected the default 0.95: only advantage gae reads it. Fix: remove lam"),
        (GAE | {"importance": "sequence"},
         "importance: found sequence, expected token for advantage gae, whose advantages differ"),
        (RLOO | {"overlong_penalty": 1.0, "sampling": {"max_response_tokens": 100}},
         "overlong_buffer: found 128, expected at most sampling.max_response_tokens 100"),
        (RLOO | {"advantage": "my_rlhf:own", "responses_per_prompt": 1, "equal_groups": "drop"},
         "responses_per_prompt: found 1, expected 2 or more for equal_groups, which compares"),
        (RLOO | {"curriculum": {"minimum": 0.5, "maximum": 0.5}},
         "minimum: found 0.5, expected less than maximum 0.5"),
        (RLOO | {"old_logprobs": "rollout", "sampler_correction": {}},
         "sampler_correction: found a block, expected null for old_logprobs rollout"),
        (RLOO | {"importance": "sequence", "sampler_correction": {}},
         "sampler_correction.level: found token, expected sequence for importance sequence, which "
         "weighs whole responses. Fix: set it to sequence"),
        (GAE | {"critic_warmup_steps": 4},
         "critic_warmup_steps: found 4, expected less than steps 4"),
        (GAE | {"rollout_batches": 5, "kl": {"target": 6.0, "horizon": 8}},
         "kl.horizon: found 8, expected more than a fifth of the 40 responses of a step"),
    ],
)  # fmt: skip
def test_conflicting_options_are_refused(fields, message):
    with pytest.raises(ValidationError) as refusal:
        PPOConfig.model_validate(fields)
    assert message in str(refusal.value)


def test_a_limit_that_is_off_restricts_nothing():
    for limits in ({"maximum": 150.0, "explosion": None}, {"explosion": 0.5}, {"maximum": 3.0}):
        PPOConfig.model_validate(GAE | {"kl": limits})


@pytest.mark.parametrize(
    ("fields", "level"),
    [
        ({}, None),
        ({"generator": "vllm"}, "token"),
        ({"generator": "vllm", "old_logprobs": "rollout"}, None),
        ({"generator": "vllm", "sampler_correction": None}, None),
        ({"actor": MODEL | {"deepspeed": {"precision": "bf16"}}}, "token"),
        ({"sampler_correction": {"level": "sequence"}}, "sequence"),
        ({"generator": "vllm", "importance": "sequence"}, "sequence"),
    ],
)
def test_a_sampler_is_corrected_where_it_is_not_the_policy(fields, level):
    found = PPOConfig.model_validate(RLOO | fields).correction
    assert level == (found and found.level)


def test_a_minibatch_is_the_whole_step_unless_it_is_set():
    without = {name: value for name, value in RLOO.items() if name != "minibatch_size"}
    config = PPOConfig.model_validate(without | {"rollout_batches": 3})
    assert (config.minibatch_size, config.updates_per_epoch) == (24, 1)
    assert (config.responses_per_step, config.prompts_per_step) == (24, 12)
    # A recipe contains the number, so that null and the same number are one result.
    same = PPOConfig.model_validate(without | {"rollout_batches": 3, "minibatch_size": 24})
    assert config.recipe() == same.recipe()
    assert GRPOConfig.model_validate({"rollout_batch_size": 32}).minibatch_size == 32
