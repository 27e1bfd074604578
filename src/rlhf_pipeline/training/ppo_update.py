"""The update of PPO: minibatches, and the losses of actor and critic in each optimizer step."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_pipeline.config.doors import POLICY_LOSS, call_with
from rlhf_pipeline.config.policies import DistillConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.distributed.batches import micro_batches
from rlhf_pipeline.distributed.optimizer_step import Loss, Sums, grad_norm, optimizer_step
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.distributed.zero import DeepSpeedEngine
from rlhf_pipeline.generation.records import Experience
from rlhf_pipeline.models.forward import response_divergences, response_logprobs, response_values
from rlhf_pipeline.models.sequences import Sequences
from rlhf_pipeline.rl.diagnostics import explained_variance, policy_diagnostics, value_sums
from rlhf_pipeline.rl.losses import (
    LossSum,
    Reduce,
    entropy_loss,
    kl_loss,
    reduced,
    sft_loss,
    value_loss,
)
from rlhf_pipeline.rl.masking import masked_sum
from rlhf_pipeline.rl.rewards import kl_estimate
from rlhf_pipeline.training.experience import (
    actor_pass,
    in_micro_batches,
    kl_coefs,
    sampler_weights_of,
)
from rlhf_pipeline.training.ppo_setup import Setup


class Terms(NamedTuple):
    """What divides the sums of the losses: numbers of a whole optimizer step, on all ranks."""

    tokens: Tensor  # that the policy chose; divides the value loss
    policy: Tensor  # divides `ppo.policy_loss`
    others: Tensor  # divides KL and entropy


def update_models(
    setup: Setup, experience: Experience, step: int, kl_coef: float
) -> dict[str, float]:
    """Take all optimizer steps of one rollout; return means over the tokens of all epochs.

    `experience` are the rows of this rank. `kl_coef` is that of the step, in the reward or in the
    loss (`experience.kl_coefs`). While the critic warms up, the actor does not train.
    """
    models, config, world = setup.models, setup.config, setup.world
    train_actor = step > config.critic_warmup_steps
    texts = None if setup.text is None else setup.text.of_step(step)
    given = None if setup.given is None else setup.given.of_step(step)
    engines = {"actor": models.actor} if train_actor else {}
    engines |= {} if models.critic is None else {"critic": models.critic}
    minibatches = in_micro_batches(setup, experience, step)
    metrics = {f"optim/{name}_lr": engine.get_lr()[0] for name, engine in engines.items()}
    sums: Sums = {}
    for epoch in range(1, config.ppo_epochs + 1):
        before = sums
        for number, pieces in enumerate(islice(minibatches, config.updates_per_epoch)):
            text = next(texts) if texts is not None and train_actor else None
            if given is not None:
                pieces = pieces + demonstrations(next(given), setup)
            sums = update_minibatch(
                setup, pieces, sums, kl_coef=kl_coef, train_actor=train_actor, text=text,
                is_sampler=epoch == 1 and number == 0,
            )  # fmt: skip
        if train_actor and config.kl.stop_update is not None:
            metrics["policy/epochs"] = epoch
            names = ("policy/approx_kl", "policy/count")
            own = world.sums({name: sums[name] - before.get(name, 0) for name in names})
            if own["policy/approx_kl"] / max(1.0, own["policy/count"]) > config.kl.stop_update:
                # The schedules still end with the last step.
                skipped = (config.ppo_epochs - epoch) * config.updates_per_epoch
                for _ in range(skipped):
                    for engine in engines.values():
                        engine.lr_scheduler.step()
                break
    equal: dict[str, Tensor] = {}
    if experience.old_values is not None and experience.returns is not None:
        mask = experience.sequences.action_mask
        moments = world.sum(value_sums(experience.old_values, experience.returns, mask))
        equal["value/explained_variance"] = explained_variance(moments)
    for name, engine in engines.items():
        if (norm := grad_norm(engine)) is not None:
            equal[f"optim/{name}_grad_norm"] = norm
    totals = world.sums(sums, equal=equal)
    metrics |= _means({name: totals[name] for name in sums})
    metrics |= {name: totals[name] for name in equal}
    # Equal returns, for example if all responses are cut, have no variance to explain.
    if math.isnan(metrics.get("value/explained_variance", 0.0)):
        del metrics["value/explained_variance"]
    return metrics


def chunks_of(rows: Sequences, setup: Setup) -> list[Sequences]:
    """Rows that train beside the responses, as micro batches."""
    tokens, actor = setup.config.micro_batch_tokens, setup.models.actor
    (groups,) = micro_batches([rows.lengths], tokens, actor, setup.world)
    return [rows.rows(index) for index in groups]


def demonstrations(rows: Sequences, setup: Setup) -> list[Experience]:
    """Demonstrations as micro batches of the minibatch that they are added to."""
    chunks = chunks_of(rows, setup)
    pairs = [(chunk, torch.zeros(chunk.response_ids.shape)) for chunk in chunks]
    return [Experience(chunk, zeros, zeros, given=True) for chunk, zeros in pairs]


def update_minibatch(
    setup: Setup,
    pieces: Sequence[Experience],
    sums: Sums,
    *,
    kl_coef: float,
    train_actor: bool,
    text: Sequences | None = None,
    is_sampler: bool = False,
) -> Sums:
    """Take one optimizer step of each model in training; return the sums with those of this step.

    `pieces` are the micro batches of one minibatch. With `text`, `ptx.coef` times its loss is added
    to the actor's, each a mean over its own tokens. `is_sampler`: the actor still is the policy
    that sampled.
    """
    models, config, world = setup.models, setup.config, setup.world
    terms = terms_of([piece.sequences.action_mask for piece in pieces], config, world)
    if train_actor:
        losses: list[Loss] = [
            partial(actor_loss, setup, piece, terms, kl_coef=kl_coef, is_sampler=is_sampler)
            for piece in pieces
        ]
        if text is not None:
            length = text.response_ids.numel() * world.size  # every rank has equally many blocks
            chunks = chunks_of(text, setup)
            losses += [partial(text_loss, setup, blocks, length) for blocks in chunks]
        sums = optimizer_step(models.actor, world, losses, sums)
        if models.ema is not None:
            models.ema.update()
    if (critic := models.critic) is not None:
        losses = [partial(critic_loss, critic, piece, config, terms.tokens) for piece in pieces]
        sums = optimizer_step(critic, world, losses, sums)
    return sums


@torch.no_grad()
def terms_of(masks: Sequence[Tensor], config: PPOConfig, world: World) -> Terms:
    """What divides the losses of the micro batches with these masks, on which alone it depends."""
    counts = []
    for mask in masks:
        none = torch.zeros(mask.shape)
        tensors = {"logprobs": none, "old_logprobs": none, "advantages": none, "mask": mask}
        _, policy = policy_loss(config, **tensors)
        _, others = reduction(config)(none, mask)
        counts.append(torch.stack([mask.sum(), torch.as_tensor(policy), others]))
    count = torch.stack(counts).sum(0).double().to(world.device, non_blocking=True)
    return Terms(*world.sum(count).clamp(min=1))  # all responses may be left out


def actor_loss(
    setup: Setup, piece: Experience, terms: Terms, *, kl_coef: float, is_sampler: bool = False
) -> tuple[Tensor, Sums]:
    """The policy loss of a micro batch, plus KL penalty and entropy loss if they are on."""
    models, config = setup.models, setup.config
    piece = piece.to(models.actor.device)
    mask, (_, in_loss) = piece.sequences.action_mask, kl_coefs(kl_coef, config)
    old, reduce, sums = piece.old_logprobs, reduction(config), Sums()
    if isinstance(config, DistillConfig):
        assert old is not None
        logprobs, entropy, away, of_teacher = response_divergences(
            models.actor, models.reference, piece.sequences, beta=config.beta, top_k=config.top_k,
            entropy_trains=config.entropy_coef > 0, vocab_size=models.contract.vocab_size,
            temperature=config.sampling.temperature,
        )  # fmt: skip
        total, _ = reduce(in_loss * away, mask)
        sums = kl_sums(old, of_teacher, mask)
    else:
        if (done := piece.training_pass) is not None:
            logprobs, entropy = done.logprobs, done.entropy
        else:
            logprobs, entropy = actor_pass(models, piece.sequences, config)
        advantages = piece.advantages
        if old is None:
            assert piece.ref_logprobs is not None
            old = logprobs.detach()
            sums = kl_sums(old, piece.ref_logprobs, mask)
            weights = sampler_weights_of(old, piece.sampler_logprobs, mask, config)
            if weights is not None:
                advantages, squares = weights * advantages, weights.double().square()
                sums |= {"weights/mean": weights.double().sum(), "weights/square": squares.sum()}
                sums |= {"weights/count": mask.sum()}
        total, _ = policy_loss(
            config, logprobs=logprobs, old_logprobs=old, advantages=advantages, mask=mask
        )
    loss, count = total / terms.policy, mask.sum()
    if piece.given:
        return loss, {"given/loss": loss * terms.tokens, "given/count": count}
    diagnostics = call_with(
        policy_diagnostics, config, logprobs=logprobs.detach(), old_logprobs=old, mask=mask
    )
    if config.has_teacher:  # nothing is clipped
        del diagnostics["clip_fraction"]
    sums |= {f"policy/{name}": value for name, value in diagnostics.items()}
    entropies = masked_sum(entropy, mask)
    sums |= {"policy/loss": loss * terms.tokens, "policy/entropy": entropies, "policy/count": count}
    if is_sampler and piece.sampler_logprobs is not None:
        gap = (logprobs.detach() - piece.sampler_logprobs).abs()
        sums |= {"rollout/logprob_gap": masked_sum(gap, mask), "rollout/count": count}
    if in_loss and not config.has_teacher:
        assert piece.ref_logprobs is not None
        total, _ = kl_loss(logprobs, old, piece.ref_logprobs, mask, reduce=reduce)
        loss = loss + in_loss * (total / terms.others)
    if config.entropy_coef > 0:
        total, _ = entropy_loss(entropy, mask, reduce=reduce)
        loss = loss + config.entropy_coef * (total / terms.others)
    return loss, sums


def kl_sums(logprobs: Tensor, of_reference: Tensor, mask: Tensor) -> Sums:
    """The KL of responses from the reference or the teacher, in nats, by both estimators."""
    kl, k3 = (masked_sum(kl_estimate(logprobs, of_reference, kind), mask) for kind in ("k1", "k3"))
    return {"objective/kl": kl, "objective/kl_k3": k3, "objective/count": mask.any(1).sum()}


def policy_loss(config: PPOConfig, **tensors: Tensor) -> LossSum:
    """The loss that `ppo.policy_loss` names."""
    function = POLICY_LOSS.load(config.policy_loss)
    loss: LossSum = call_with(function, config, **tensors, reduce=reduction(config))
    return loss


def reduction(config: PPOConfig) -> Reduce:
    """How the losses of the actor are summed over tokens."""
    longest = config.sampling.max_response_tokens
    return partial(reduced, denominator=config.denominator, max_response_tokens=longest)


def critic_loss(
    critic: DeepSpeedEngine, piece: Experience, config: PPOConfig, tokens: Tensor
) -> tuple[Tensor, Sums]:
    """The clipped value loss of a micro batch; `tokens` as in `Terms`."""
    piece = piece.to(critic.device)
    assert piece.old_values is not None and piece.returns is not None
    if (done := piece.training_pass) is None or done.values is None:
        values = response_values(critic, piece.sequences)
    else:
        values = done.values
    mask, clip_range = piece.sequences.action_mask, config.value_clip_range
    total, count = value_loss(values, piece.old_values, piece.returns, mask, clip_range=clip_range)
    loss = total / tokens
    return loss, {"value/loss": loss * tokens, "value/count": count}


def text_loss(setup: Setup, blocks: Sequences, tokens: int) -> tuple[Tensor, Sums]:
    """The language-model loss (ptx) of plain text; `tokens` are those of the whole step."""
    models, ptx = setup.models, setup.config.ptx
    assert ptx is not None
    blocks = blocks.to(models.actor.device)
    logprobs = response_logprobs(models.actor, blocks, vocab_size=models.contract.vocab_size)
    total, count = sft_loss(logprobs, blocks.action_mask)
    loss = total / tokens
    return ptx.coef * loss, {"ptx/loss": loss * tokens, "ptx/count": count}


def _means(sums: dict[str, float]) -> dict[str, float]:
    """Each sum `group/name` divided by `group/count`."""
    metrics = {
        name: value / max(1.0, sums[f"{name.partition('/')[0]}/count"])
        for name, value in sums.items()
        if not name.endswith("/count")
    }
    if "weights/square" in metrics:  # Kish's effective sample size
        mean, square = metrics.pop("weights/mean"), metrics.pop("weights/square")
        metrics["rollout/effective_sample_size"] = mean**2 / square if square else 0.0
    if "ptx/loss" in metrics:
        metrics["ptx/perplexity"] = math.exp(min(metrics["ptx/loss"], 700.0))
    return metrics
