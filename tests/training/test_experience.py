"""Advantages by every estimator, on one rank and on two ranks that are threads."""

import pytest
import torch

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.models.sequences import Sequences
from rlhf_pipeline.rollout.scoring import Scored
from rlhf_pipeline.training.experience import Experience, make_experience, value_offset

NAN = float("nan")
# Two responses each to the prompts a and b, in the order a, b, a, b.
MASK = torch.tensor([[True, True], [True, False], [True, False], [True, True]])
LOGPROBS = torch.tensor([[1.0, 2.0], [0.0, NAN], [2.0, NAN], [1.0, -1.0]])  # the reference's are 0
SCORES = torch.tensor([3.3, 1.5, 1.2, 2.0])
# The KL by k1 is 3, 0, 2 and 0 nats; each costs 0.1. So the returns are 3, 1.5, 1 and 2.


@pytest.fixture
def experience_of(on_threads):
    """Makes the experience of each rank, or what `function` makes of the same arguments.

    A rank has every `ranks`-th row.
    """

    def make(ranks: int, values: bool, function=make_experience, **options) -> list[Experience]:
        model = {"optimizer": {"learning_rate": 1e-3}}
        fields = {
            "steps": 1, "rollout_batch_size": 4, "minibatch_size": 4, "micro_batch_tokens": 64,
            "responses_per_prompt": 2, "score_clip": None, "missing_eos_score": None,
            "actor": model, "critic": model if values else None,
        }  # fmt: skip
        config = PPOConfig.model_validate(fields | options)

        def one(world: World) -> Experience:
            own = slice(world.rank, None, ranks)
            mask = MASK[own]
            sequences = Sequences(
                torch.zeros_like(mask).long(),
                torch.ones_like(mask),
                torch.zeros_like(mask).long(),
                mask,
            )
            scored = Scored(
                sequences=sequences,
                logprobs=LOGPROBS[own],
                ref_logprobs=torch.zeros_like(LOGPROBS[own]),
                values=torch.zeros_like(LOGPROBS[own]) if values else None,
                scores=SCORES[own],
                ended=torch.ones(len(mask), dtype=torch.bool),
            )
            return function(scored, config, kl_coef=0.1, world=world)

        return on_threads(ranks, one)

    return make


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # a: 3 - 1, 1 - 3; b: 1.5 - 2, 2 - 1.5.
        ({"advantage": "rloo"}, [2.0, -0.5, -2.0, 0.5]),
        # Means 2 and 1.75.
        ({"advantage": "grpo", "scale_by_group_std": False}, [1.0, -0.25, -1.0, 0.25]),
        # Standard deviations 1.4142136 and 0.3535534: 1 / 1.4143136, 0.25 / 0.3536534.
        ({"advantage": "grpo"}, [0.7070568, -0.7069069, -0.7070568, 0.7069069]),
        # Mean 7.5 / 4.
        ({"advantage": "reinforce"}, [1.125, -0.375, -0.875, 0.125]),
        ({"advantage": "reinforce", "reinforce_baseline": "none"}, [3.0, 1.5, 1.0, 2.0]),
        # k2: 1/2 + 4/2, 0, 4/2, 1/2 + 1/2 nats.
        (
            {"advantage": "reinforce", "reinforce_baseline": "none", "kl": {"estimator": "k2"}},
            [3.05, 1.5, 1.0, 1.9],
        ),
    ],
)
def test_advantages_without_a_critic(experience_of, ranks, options, expected):
    whole = torch.where(MASK, torch.tensor(expected).unsqueeze(1), 0.0)
    for rank, experience in enumerate(experience_of(ranks, values=False, **options)):
        torch.testing.assert_close(experience.advantages, whole[rank::ranks], rtol=1e-5, atol=1e-6)
        assert experience.old_values is None and experience.returns is None


@pytest.mark.parametrize("ranks", [1, 2])
def test_whitened_rewards_keep_their_mean(experience_of, ranks):
    """Rewards divided by their standard deviation about their mean; a return sums those to come.

    Rewards -0.1, 3.1; 1.5; 1; -0.1, 2.1: mean 1.25, variance 17.29/6 - 1.5625 = 1.3191667,
    deviation 1.1485498. Whitened: 0.0746047, 2.8607268; 1.4676658; 1.0323342; 0.0746047, 1.9900637.
    Values are 0 and lambda is 1, so the returns of the first tokens are 0.0746047 + 2.8607268,
    1.4676658, 1.0323342 and 0.0746047 + 1.9900637.
    """
    expected = torch.tensor(
        [[2.9353316, 2.8607268], [1.4676658, 0.0], [1.0323342, 0.0], [2.0646684, 1.9900637]]
    )
    for rank, experience in enumerate(
        experience_of(ranks, values=True, whiten_rewards=True, lam=1.0)
    ):
        torch.testing.assert_close(experience.returns, expected[rank::ranks], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_rewards_are_not_whitened_by_default(experience_of, ranks):
    expected = torch.tensor([[3.0, 3.1], [1.5, 0.0], [1.0, 0.0], [2.0, 2.1]])
    for rank, experience in enumerate(experience_of(ranks, values=True, lam=1.0)):
        torch.testing.assert_close(experience.returns, expected[rank::ranks], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("options", "mean"),
    [
        # Returns to go: 3, 3.1 | 1.5 | 1 | 2, 2.1. The values are 0.
        ({}, 12.7 / 6),
        # -0.1 + 3.1 / 2, 3.1 | 1.5 | 1 | -0.1 + 2.1 / 2, 2.1
        ({"gamma": 0.5}, 10.1 / 6),
        # The result of lambda 0 would depend on the values.
        ({"lam": 0.0}, 12.7 / 6),
    ],
)
def test_the_offset_is_from_the_mean_value_to_the_mean_return(experience_of, ranks, options, mean):
    for offset in experience_of(ranks, True, value_offset, **options):
        assert offset == pytest.approx(mean, abs=1e-6)
