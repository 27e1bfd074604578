"""Advantages by every estimator, on one rank and on two ranks that are threads."""

from dataclasses import replace

import pytest
import torch
from ppo_runs import ppo_config
from tiny_jobs import trained

from rlhf_pipeline.config.doors import Door
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.generation.records import Experience, Scored
from rlhf_pipeline.models.sequences import Sequences
from rlhf_pipeline.training.experience import equal_groups, make_experience, value_offset
from rlhf_pipeline.training.ppo_update import policy_loss

NAN = float("nan")
# Two responses each to the prompts a and b, in the order a, b, a, b.
MASK = torch.tensor([[True, True], [True, False], [True, False], [True, True]])
LOGPROBS = torch.tensor([[1.0, 2.0], [0.0, NAN], [2.0, NAN], [1.0, -1.0]])  # the reference's are 0
SCORES = torch.tensor([3.3, 1.5, 1.2, 2.0])
# The KL by k1 is 3, 0, 2 and 0 nats; each costs 0.1. So the returns are 3, 1.5, 1 and 2.


def config_of(**changes) -> PPOConfig:
    fields = {
        "rollout_batch_size": 4, "minibatch_size": 4, "responses_per_prompt": 2,
        "score_clip": None, "missing_eos_penalty": 0.0,
    }  # fmt: skip
    return ppo_config(**fields | changes)


@pytest.fixture
def experience_of(on_threads):
    """Makes the experience of each rank, or what `function` makes of the same arguments.

    A rank has every `ranks`-th row.
    """

    def make(ranks: int, values: bool, function=make_experience, **options) -> list[Experience]:
        config = config_of(**options) if values else config_of(critic=None, **options)

        def one(world: World) -> Experience:
            own = slice(world.rank, None, ranks)
            mask = MASK[own]
            ids, zeros = torch.zeros_like(mask).long(), torch.zeros_like(LOGPROBS[own])
            scored = Scored(
                Sequences(ids, torch.ones_like(mask), ids, mask, mask), LOGPROBS[own], zeros,
                values=zeros if values else None, scores=SCORES[own], clipped_scores=SCORES[own],
                ended=torch.ones(len(mask), dtype=torch.bool),
            )  # fmt: skip
            return function(scored, config, kl_coef=0.1, world=world)

        return on_threads(ranks, one)

    return make


UNCHANGED = {"advantage": "reinforce", "reinforce_baseline": "none"}
IN_LOSS = {"kl": {"place": "loss"}}
OVERLONG = {
    "overlong_penalty": 1.0, "overlong_buffer": 1, "sampling": {"max_response_tokens": 2}
}  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # a: 3 - 1, 1 - 3; b: 1.5 - 2, 2 - 1.5.
        ({"advantage": "rloo"}, [2.0, -0.5, -2.0, 0.5]),
        # Means 2 and 1.75.
        ({"advantage": "grpo", "scale_rewards": "none"}, [1.0, -0.25, -1.0, 0.25]),
        # Over the deviation of all scores, 0.9273618 + 1e-4; the penalties as below.
        ({"advantage": "grpo", "scale_rewards": "batch"},
         [1.0821221, -0.2695529, -1.0821221, 0.2695529]),
        # Scores 3.3, 1.2 and 1.5, 2: deviations 1.4849242 and 0.3535534, so 1.05 / 1.4850242 and
        # 0.25 / 0.3536534. The penalties 0.3, 0.2 and 0, 0 cost a's responses 0.05 and -0.05.
        ({"advantage": "grpo"}, [0.6570592, -0.7069069, -0.6570592, 0.7069069]),
        ({"advantage": "grpo"} | IN_LOSS, [0.7070592, -0.7069069, -0.7070592, 0.7069069]),
        # Mean 7.5 / 4.
        ({"advantage": "reinforce"}, [1.125, -0.375, -0.875, 0.125]),
        (UNCHANGED, [3.0, 1.5, 1.0, 2.0]),
        # The scores alone.
        (UNCHANGED | IN_LOSS, [3.3, 1.5, 1.2, 2.0]),
        # The responses of two tokens, the limit, lose 1.
        (UNCHANGED | IN_LOSS | OVERLONG, [2.3, 1.5, 1.2, 1.0]),
        # White over the tokens of all ranks.
        # Returns 3, 3.1; 1.5; 1; 2, 2.1: mean 12.7 / 6, variance 30.27 / 6 - 4.4802778 = 0.5647222.
        # 0.8833333, 0.9833333; -0.6166667; -1.1166667; -0.1166667, -0.0166667 over 0.7514800.
        ({"advantage": "reinforce++"},
         [[1.1754583, 1.3085289], [-0.8206029, 0], [-1.4859566, 0], [-0.1552492, -0.0221784]]),
        # Tokens 1, 1; -0.25; -1; 0.25, 0.25: mean 1.25 / 6, variance 3.1875 / 6 - 0.0434028.
        # 0.7916667 twice; -0.4583333; -1.2083333; 0.0416667 twice, over 0.6984606.
        ({"advantage": "reinforce++-baseline"}, [1.1334450, -0.6562050, -1.7299950, 0.0596550]),
    ],
)  # fmt: skip
def test_advantages_without_a_critic(experience_of, ranks, options, expected):
    whole = torch.where(MASK, torch.tensor(expected).view(4, -1), 0.0)
    for rank, experience in enumerate(experience_of(ranks, values=False, **options)):
        torch.testing.assert_close(experience.advantages, whole[rank::ranks], rtol=1e-5, atol=1e-6)
        assert experience.old_values is None and experience.returns is None


CUT = torch.tensor([True, True, False, True])
"""The third response was cut."""


def of_prompts(scored, config, kl_coef, world):
    """The experience of responses of which b's have equal scores."""
    scores = torch.tensor([3.0, 2.0, 1.0, 2.0])
    scored = replace(scored, ended=CUT, scores=scores, clipped_scores=scores)
    return make_experience(scored, config, kl_coef=0.0, world=world)


@pytest.mark.parametrize(
    ("options", "trained"),
    [
        ({}, [True, True, True, True]),
        ({"truncated": "mask"}, [True, True, False, True]),
        ({"equal_groups": "drop"}, [True, False, True, False]),
        ({"equal_groups": "resample", "truncated": "mask"}, [True, False, False, False]),
    ],
)
def test_what_does_not_train_leaves_the_action_mask_alone(experience_of, options, trained):
    """The advantages stay those of whole groups: +-1 / sqrt(2) and nothing."""
    (found,) = experience_of(1, False, of_prompts, advantage="grpo", **options)
    assert torch.equal(found.sequences.action_mask, MASK & torch.tensor(trained)[:, None])
    assert torch.equal(found.sequences.real_mask, MASK)
    rows = [[0.7070568] * 2, [0.0] * 2, [-0.7070568, 0.0], [0.0] * 2]
    torch.testing.assert_close(found.advantages, torch.tensor(rows), rtol=1e-5, atol=1e-6)


def sampled_elsewhere(scored, config, kl_coef, world):
    sampler = scored.logprobs - torch.tensor(0.5).log()  # twice as likely there
    scored = replace(scored, sampler_logprobs=sampler)
    return make_experience(scored, config, kl_coef=kl_coef, world=world)


@pytest.mark.parametrize(("level", "share"), [("token", 0.5), ("sequence", 0.25)])
def test_advantages_have_the_weight_of_the_sampler(experience_of, level, share):
    """The first response has two tokens: 1/2 each, or 1/4 together."""
    correction = {"sampler_correction": {"level": level}, "advantage": "rloo"}
    (found,) = experience_of(1, False, sampled_elsewhere, **correction)
    (plain,) = experience_of(1, False, advantage="rloo")
    torch.testing.assert_close(found.advantages[0], share * plain.advantages[0])
    torch.testing.assert_close(found.advantages[1], 0.5 * plain.advantages[1])


def test_the_gradient_of_gspo_stays_that_of_gspo_where_a_sampler_is_corrected(experience_of):
    """Each response has w * s / |y| * A times the gradient of its log-probability: w is the weight
    of its sampler, 1/4 or 1/2, s, the ratio of the response, is 1. `auto` alone gives a weight to
    each response.
    """
    gspo = {"importance": "sequence", "denominator": "sequences", "clip_range": 3e-4}
    options = gspo | {"advantage": "rloo", "actor": trained(1, "bf16")}

    def uneven(scored, config, kl_coef, world):
        halves = torch.tensor([[0.5, 0.8], [0.5, 1.0], [0.5, 1.0], [0.8, 0.5]])
        scored = replace(scored, sampler_logprobs=scored.logprobs - halves.log())
        return make_experience(scored, config, kl_coef=kl_coef, world=world)

    (found,) = experience_of(1, False, uneven, **options)
    logprobs = torch.where(MASK, LOGPROBS, 0.0).requires_grad_()
    total, rows = policy_loss(
        config_of(critic=None, **options), logprobs=logprobs, old_logprobs=LOGPROBS,
        advantages=found.advantages, mask=MASK,
    )  # fmt: skip
    total.backward()
    weights, advantages = torch.tensor([0.4, 0.5, 0.5, 0.4]), torch.tensor([2.0, -0.5, -2.0, 0.5])
    expected = -(weights * advantages / MASK.sum(1))[:, None] * MASK
    torch.testing.assert_close(logprobs.grad, expected, rtol=1e-5, atol=1e-6)
    assert rows == 4


def test_the_weight_of_the_sampler_follows_whitening_and_spares_the_critic(experience_of):
    (found,) = experience_of(1, True, sampled_elsewhere, sampler_correction={})
    (plain,) = experience_of(1, True)
    torch.testing.assert_close(found.advantages, 0.5 * plain.advantages)
    assert torch.equal(found.returns, plain.returns)


@pytest.mark.parametrize("options", [{}, {"advantage": "reinforce++"}])
def test_whitening_counts_what_trains(experience_of, options):
    """The responses that were not cut have mean 0 and variance 1."""

    def made(scored, config, *, kl_coef, world):
        return make_experience(replace(scored, ended=CUT), config, kl_coef=kl_coef, world=world)

    (found,) = experience_of(1, not options, made, truncated="mask", **options)
    mask = found.sequences.action_mask
    assert torch.equal(mask.any(1), CUT)
    advantages = found.advantages[mask]
    torch.testing.assert_close(advantages.mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(advantages.var(correction=0), torch.tensor(1.0))


THREE = {
    "advantage": "gdpo", "score_clip": 5.0, "missing_eos_penalty": 1.0,
    "rewards": ["trained", {"regex": ".", "weight": 3.0}, {"reference": "exact", "weight": 0.0}],
}  # fmt: skip


def of_three_sources(trained, regex, exact, ended, function=make_experience):
    """What a function makes of the scores of three sources, of which the last one has no weight."""

    def make(scored, config, kl_coef, world):
        parts = {"trained": trained, "regex": regex, "exact": exact}
        parts = {name: torch.tensor(part) for name, part in parts.items()}
        scores = parts["trained"].clamp(-5, 5) + 3 * parts["regex"]
        own = replace(scored, parts=parts, clipped_scores=scores, ended=torch.tensor(ended).bool())
        return function(own, config, kl_coef=0.0, world=world)

    return make


def test_gdpo_gets_clipped_scores_weights_and_penalties(experience_of):
    """The third response was cut. A pair that differs has +-0.5 / 0.7072068 = +-0.7070068.

    a: the model's scores are equal once clipped; the pattern counts three times, 2.1210204. b: the
    model's scores alone. All over the deviation sqrt(9.9971722 / 3) = 1.8254837 plus 1e-4; the
    penalty of 1 then takes +-0.5 of a, unscaled.
    """
    made = of_three_sources([9.0, 2.0, 5.0, 1.0], [1.0] * 2 + [0.0, 1.0], [0.0] * 4, [1, 1, 0, 1])
    (found,) = experience_of(1, False, made, **THREE)
    first, second = 1.6618314, 0.3872771
    expected = torch.tensor([[first, first], [second, 0.0], [-first, 0.0], [-second, -second]])
    torch.testing.assert_close(found.advantages, expected, rtol=1e-5, atol=1e-6)


def test_a_group_is_equal_to_gdpo_if_every_source_with_a_weight_gives_equal_scores(experience_of):
    """a: 5 + 0 and 2 + 3 are equal sums of other scores. b: the source without weight differs."""

    def equal(scored, config, *, kl_coef, world):
        return equal_groups(scored, config)

    made = of_three_sources(
        [5.0, 1.0, 2.0, 1.0], [0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0], [1, 1, 1, 1], equal
    )
    (found,) = experience_of(1, False, made, **THREE)
    assert found.tolist() == [False, True]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [[3.0, 3.1], [1.5, 0], [1.0, 0], [2.0, 2.1]]),
        # The KL is in the loss alone.
        ({"kl": {"place": "loss"}}, [[3.3, 3.3], [1.5, 0], [1.2, 0], [2.0, 2.0]]),
        # The critic's lambda is 0, so a return is the reward of its token.
        ({"value_lam": 0.0}, [[-0.1, 3.1], [1.5, 0], [1.0, 0], [-0.1, 2.1]]),
        # Rewards -0.1, 3.1; 1.5; 1; -0.1, 2.1: mean 1.25, variance 17.29/6 - 1.5625 = 1.3191667,
        # deviation 1.1485498. Divided by it about their mean, which they keep: 0.0746047,
        # 2.8607268; 1.4676658; 1.0323342; 0.0746047, 1.9900637.
        (
            {"whiten_rewards": True},
            [[2.9353316, 2.8607268], [1.4676658, 0], [1.0323342, 0], [2.0646684, 1.9900637]],
        ),
    ],
)
def test_a_return_is_the_sum_of_the_rewards_to_come(experience_of, ranks, options, expected):
    """Values are 0, and lambda is 1."""
    for rank, experience in enumerate(experience_of(ranks, values=True, lam=1.0, **options)):
        own = torch.tensor(expected)[rank::ranks]
        torch.testing.assert_close(experience.returns, own, rtol=1e-5, atol=1e-6)
        assert torch.equal(experience.ref_logprobs, torch.zeros_like(LOGPROBS)[rank::ranks])


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
        # 3.3, 3.3 | 1.5 | 1.2 | 2, 2
        ({"kl": {"place": "loss"}}, 13.3 / 6),
    ],
)
def test_the_offset_is_from_the_mean_value_to_the_mean_return(experience_of, ranks, options, mean):
    for offset in experience_of(ranks, True, value_offset, **options):
        assert offset == pytest.approx(mean, abs=1e-6)


@pytest.mark.parametrize("shape", [(2,), (4, 1), None])
def test_an_advantage_of_another_shape_is_named(experience_of, monkeypatch, shape):
    """Two prompts with two responses each, of at most three tokens."""
    made = None if shape is None else torch.zeros(shape)
    monkeypatch.setattr(Door, "load", lambda door, name: lambda returns: made)
    with pytest.raises(StageError, match=r"ppo\.advantage: rloo returned .* shapes .* Fix: return"):
        experience_of(1, values=False, advantage="rloo")
