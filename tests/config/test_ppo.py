"""PPO's options: what does not fit together is refused, by name and with the fix."""

import pytest
from pydantic import ValidationError

from rlhf_pipeline.config.ppo import PPOConfig

MODEL = {"optimizer": {"learning_rate": 1e-3}}
GAE = {"steps": 4, "rollout_batch_size": 8, "minibatch_size": 8, "micro_batch_size_per_gpu": 4, "actor": MODEL,
       "critic": MODEL}  # fmt: skip
RLOO = GAE | {"advantage": "rloo", "responses_per_prompt": 2, "critic": None}


def test_sizes_of_a_step():
    config = PPOConfig.model_validate(RLOO | {"rollout_batches": 3, "minibatch_size": 12})
    assert (config.responses_per_step, config.prompts_per_step, config.updates_per_epoch) == (
        24,
        12,
        2,
    )


def test_the_language_model_loss_is_off_unless_asked_for():
    assert PPOConfig.model_validate(GAE).ptx is None
    assert PPOConfig.model_validate(GAE | {"ptx": {"batch_size": 4}}).ptx.coef == 27.8


@pytest.mark.parametrize("advantage", ["rloo", "grpo", "reinforce"])
def test_no_critic_is_needed(advantage):
    config = PPOConfig.model_validate(RLOO | {"advantage": advantage})
    assert config.critic is None
    assert (
        PPOConfig.model_validate(config.model_dump(mode="json")) == config
    )  # as it goes through job.json


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            GAE | {"actor": MODEL | {"deepspeed": {"precision": "fp16"}}},
            "where the gradients of one overflow, neither takes its step",
        ),
        (
            GAE | {"critic": None},
            "advantage gae needs a critic; give its block, or choose rloo, grpo or reinforce",
        ),
        (
            RLOO | {"critic": MODEL},
            "advantage rloo has no critic; leave its block out, or set critic to null",
        ),
        (
            RLOO | {"responses_per_prompt": 1},
            "advantage rloo compares the responses to one prompt; set responses_per_",
        ),
        (
            RLOO | {"advantage": "grpo", "responses_per_prompt": 1},
            "advantage grpo compares the responses to one prompt",
        ),
        (
            GAE | {"responses_per_prompt": 3},
            "responses_per_prompt 3 does not divide rollout_batch_size 8",
        ),
        (
            GAE | {"rollout_batches": 3, "minibatch_size": 16},
            "minibatch_size 16 does not divide 3 * rollout_batch_size 8",
        ),
        (
            RLOO | {"lam": 0.9},
            "lam 0.9 has no effect with advantage rloo; it belongs to gae: leave it out",
        ),
        (RLOO | {"whiten_rewards": True}, "whiten_rewards True has no effect with advantage rloo"),
        (
            RLOO | {"critic_warmup_steps": 1},
            "critic_warmup_steps 1 has no effect with advantage rloo",
        ),
        (
            GAE | {"scale_by_group_std": False},
            "scale_by_group_std False has no effect with advantage gae",
        ),
        (
            RLOO | {"reinforce_baseline": "none"},
            "reinforce_baseline none has no effect with advantage rloo",
        ),
        (
            GAE | {"critic_warmup_steps": 4},
            "critic_warmup_steps 4 leaves none of 4 steps to the actor",
        ),
        (GAE | {"dual_clip": 1.0}, "greater than 1"),
        (GAE | {"entropy_coef": -0.1}, "greater than or equal to 0"),
        (GAE | {"kl": {"stop_update": 0.0}}, "greater than 0"),
        (GAE | {"kl": {"estimator": "k4"}}, "'k1', 'k2' or 'k3'"),
        (GAE | {"kl": {"explosion": 0.0}}, "greater than 0"),
        (
            GAE | {"kl": {"maximum": 5.0, "explosion": 5.0}},
            "explosion 5 must exceed maximum 5: raise it, or set it to",
        ),
        (GAE | {"kl": {"maximum": 150.0}}, "explosion 100 must exceed maximum 150"),
        (
            GAE | {"rollout_batches": 5, "kl": {"target": 6.0, "horizon": 8}},
            "kl.horizon 8 must exceed a fifth of the 40 responses of a step",
        ),
    ],
)
def test_what_does_not_fit_is_refused(fields, message):
    with pytest.raises(ValidationError) as refusal:
        PPOConfig.model_validate(fields)
    assert message in str(refusal.value)


def test_a_bound_that_is_off_bounds_nothing():
    for bounds in ({"maximum": 150.0, "explosion": None}, {"explosion": 0.5}, {"maximum": 3.0}):
        PPOConfig.model_validate(GAE | {"kl": bounds})
