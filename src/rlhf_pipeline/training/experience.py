"""PPO's experience: the advantage of every token of a scored rollout, and its minibatches.

Shapes: B responses of this rank, R response tokens (right-padded).
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from rlhf_pipeline.config.doors import ADVANTAGE, call_with
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.rewards import clip_of
from rlhf_pipeline.distributed.batches import micro_batches, minibatch_rows
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.generation.records import Experience, Scored
from rlhf_pipeline.models.forward import response_logprobs_and_entropy
from rlhf_pipeline.models.sequences import Sequences
from rlhf_pipeline.rl.advantages import gae, to_tokens
from rlhf_pipeline.rl.masking import masked_moments, mean_and_variance, whiten
from rlhf_pipeline.rl.rewards import per_token_rewards, sampler_weights, shaped_scores
from rlhf_pipeline.training.ppo_setup import PPOModels, Setup


def actor_pass(models: PPOModels, batch: Sequences, config: PPOConfig) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies (B, R) of responses under the actor, for its loss."""
    return response_logprobs_and_entropy(
        models.actor, batch, vocab_size=models.contract.vocab_size,
        temperature=config.sampling.temperature, entropy_trains=config.entropy_coef > 0,
    )  # fmt: skip


def make_experience(
    scored: Scored, config: PPOConfig, *, kl_coef: float, world: World
) -> Experience:
    """Compute rewards, advantages and returns of a scored rollout.

    `kl_coef` is that of this step, in the reward or in the loss (`kl_coefs`). Moments and means are
    over the rows of all ranks. Advantages of a critic are whitened over what trains; the others
    keep the unit of the score, or of its standard deviation. What does not train is left out of the
    action mask. Raises StageError if `ppo.advantage` returns something else.
    """
    mask = scored.sequences.action_mask
    trained = mask & trained_rows(scored, config)[:, None]
    experience = partial(
        Experience,
        replace(scored.sequences, action_mask=trained),
        None if config.logprobs_in_update else scored.logprobs,
        ref_logprobs=scored.ref_logprobs,
        sampler_logprobs=scored.sampler_logprobs,
        training_pass=scored.training_pass,
    )
    if config.has_teacher:
        return experience(advantages=torch.zeros_like(scored.logprobs))
    scores, in_update = training_scores(scored, config), config.logprobs_in_update
    weights = None
    if not in_update:
        weights = sampler_weights_of(scored.logprobs, scored.sampler_logprobs, mask, config)
    in_reward, _ = kl_coefs(kl_coef, config)
    penalties = torch.zeros_like(scores) if in_update else in_reward * scored.kl
    by_prompt = groups(scores, config)
    found = call_with(
        ADVANTAGE.load(config.advantage),
        config,
        scores=by_prompt,
        **separate(scored, config),
        penalties=groups(penalties, config),
        returns=groups(scores - penalties, config),
        moments=lambda x: mean_and_variance(
            _moments(x, torch.ones_like(x).bool(), world), correction=1
        ),
        rewards=token_rewards(scored, config, kl_coef=kl_coef, world=world),
        whitened=lambda x: whiten(x, trained, _moments(x, trained, world)),
        values=scored.values,
        mask=mask,
    )
    parts = found if isinstance(found, tuple) else (found,)
    shapes = [getattr(part, "shape", None) for part in parts]
    of_tokens, of_prompts = tuple(mask.shape), tuple(by_prompt.shape)
    allowed = [[of_tokens], [of_prompts]] if scored.values is None else [[of_tokens] * 2]
    if shapes not in allowed:
        raise StageError(
            f"{config.stage}.advantage: {config.advantage} returned {type(found).__name__} with "
            f"shapes {shapes}, expected tensors with {' or '.join(map(str, allowed))}. Fix: return "
            "advantages, or with a critic a tuple of advantages and returns"
        )
    if scored.values is None:
        is_of_tokens = found.shape == mask.shape
        advantages = found if is_of_tokens else to_tokens(found.flatten(), mask)
        return experience(advantages=advantages if weights is None else weights * advantages)
    advantages, returns = found
    white = whiten(advantages, trained, _moments(advantages, trained, world))
    white = white if weights is None else weights * white
    return experience(advantages=white, old_values=scored.values, returns=returns)


def trained_rows(scored: Scored, config: PPOConfig) -> Tensor:
    """Which responses (B,) train, as `truncated` and `equal_groups` say."""
    found = torch.ones(len(scored.sequences), dtype=torch.bool)
    if config.truncated == "mask":
        found &= scored.ended
    if config.equal_groups != "keep":
        found &= ~equal_groups(scored, config).repeat(config.responses_per_prompt)
    return found


def equal_groups(scored: Scored, config: PPOConfig) -> Tensor:
    """For which prompts (G,) all responses have equal scores; for gdpo, equal ones of every source
    that has a weight, and equal penalties.

    A small spread is not an equal group, and a mean of 0 or 1 says nothing if scores are not 0 or
    1 (https://github.com/OpenRLHF/OpenRLHF/issues/1270).
    """
    by_prompt = groups(training_scores(scored, config), config)[None]
    if config.advantage == "gdpo":
        found = separate(scored, config)
        by_prompt = torch.cat([found["parts"][found["weights"] != 0], found["shaping"][None]])
    return (by_prompt == by_prompt[:, :1]).all(1).all(0)


def separate(scored: Scored, config: PPOConfig) -> dict[str, Tensor]:
    """The clipped score of each source (S, K, G), its weight (S,), and what cut and long responses
    add to the score (K, G), which is at most 0."""
    assert scored.clipped_scores is not None
    weights, parts = [1.0], [scored.clipped_scores]
    if scored.parts:
        weights = [one.weight for one in config.rewards]
        limits = (clip_of(one, config.score_clip) for one in config.rewards)
        found = zip(scored.parts.values(), limits, strict=True)
        parts = [part.clamp(-limit, limit) for part, limit in found]
    return {
        "parts": torch.stack([groups(part, config) for part in parts]),
        "weights": torch.tensor(weights),
        "shaping": groups(training_scores(scored, config) - scored.clipped_scores, config),
    }


def sampler_weights_of(
    logprobs: Tensor, sampled: Tensor | None, mask: Tensor, config: PPOConfig
) -> Tensor | None:
    """The weights (B, R) of `ppo.sampler_correction`; None without it."""
    if config.correction is None or sampled is None:
        return None
    return sampler_weights(logprobs, sampled, mask, **config.correction.model_dump())


def value_offset(scored: Scored, config: PPOConfig, *, kl_coef: float, world: World) -> float:
    """The number which, added to every value, makes their mean that of the discounted returns.

    The critic starts as the reward model, which was trained on whole responses only. If its scalars
    within a response had another mean, every end of a response would look like a gain or a loss.
    """
    assert scored.values is not None
    mask = scored.sequences.action_mask
    rewards = token_rewards(scored, config, kl_coef=kl_coef, world=world)
    none = torch.zeros_like(rewards)
    _, returns = gae(rewards, none, mask, gamma=config.gamma, lam=1.0)  # independent of values
    mean, _ = mean_and_variance(_moments(returns - scored.values, mask, world))
    return float(mean)


def token_rewards(scored: Scored, config: PPOConfig, *, kl_coef: float, world: World) -> Tensor:
    """The reward of each token, (B, R): its KL penalty, and the score at the end."""
    mask, scores = scored.sequences.action_mask, training_scores(scored, config)
    in_reward, _ = kl_coefs(kl_coef, config)
    logprobs = scored.ref_logprobs if config.logprobs_in_update else scored.logprobs
    rewards = per_token_rewards(scores, logprobs, scored.ref_logprobs, mask, kl_coef=in_reward)
    if not config.whiten_rewards:
        return rewards
    return whiten(rewards, mask, _moments(rewards, mask, world), shift_mean=False)


def kl_coefs(kl_coef: float, config: PPOConfig) -> tuple[float, float]:
    """The coefficient of the KL penalty in the reward, and that in the loss: one of them is 0."""
    in_loss = config.has_teacher or config.kl.place == "loss"
    return (0.0, kl_coef) if in_loss else (kl_coef, 0.0)


def training_scores(scored: Scored, config: PPOConfig) -> Tensor:
    """The scores that PPO maximizes, (B,): clipped, and lower for responses without EOS."""
    assert scored.clipped_scores is not None, "`RewardSum` has clipped them"
    shaped: Tensor = call_with(
        shaped_scores,
        config,
        scores=scored.clipped_scores,
        has_eos=scored.ended,
        lengths=scored.sequences.real_mask.sum(1),
        max_response_tokens=config.sampling.max_response_tokens,
    )
    return shaped


def groups(x: Tensor, config: PPOConfig) -> Tensor:
    """The responses to one prompt in each column: (B,) to (K, G).

    Rows are a first response to every prompt, then a second one to every prompt, and so on.
    """
    return x.view(config.responses_per_prompt, -1)


def in_micro_batches(setup: Setup, experience: Experience, step: int) -> Iterator[list[Experience]]:
    """The micro batches of each minibatch, epoch after epoch.

    A minibatch has all responses to its prompts if its size allows it, because they share the
    tokens of the prompt in a forward pass.
    """
    if experience.training_pass is not None:
        yield [experience]
        return
    config, world, key = setup.config, setup.world, (setup.seed, step)
    rows = torch.arange(len(experience.sequences))
    together = config.responses_per_prompt
    if config.minibatch_size % (together * world.size):
        together = 1
    units, size = rows.view(together, -1), config.minibatch_size // together
    drawn = [
        units[:, torch.from_numpy(chosen)].flatten()
        for epoch in range(1, config.ppo_epochs + 1)
        for chosen in minibatch_rows(units.shape[1] * world.size, size, world, (*key, epoch))
    ]
    if config.equal_groups != "keep" or config.truncated == "mask":
        drawn = only_trained(drawn, experience.sequences.action_mask.any(1), world)
    lengths = [experience.sequences.lengths[rows] for rows in drawn]
    groups = micro_batches(lengths, config.micro_batch_tokens, setup.models.actor, world)
    for rows, own in zip(drawn, groups, strict=True):
        yield [experience.rows(rows[index]) for index in own]


def only_trained(drawn: list[Tensor], trains: Tensor, world: World) -> list[Tensor]:
    """The rows of each minibatch that train, and others for ranks that have fewer of them.

    ZeRO needs all ranks in each forward pass.
    """
    first = [rows[trains[rows].argsort(descending=True, stable=True)] for rows in drawn]
    counts = world.most([max(1, int(trains[rows].sum())) for rows in drawn])
    return [rows[:count] for rows, count in zip(first, counts, strict=True)]


def _moments(x: Tensor, mask: Tensor, world: World) -> Tensor:
    return world.sum(masked_moments(x, mask)).cpu()
