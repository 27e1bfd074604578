"""PPO's update: the optimizer steps that one rollout pays for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from torch import Tensor

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.distributed.optimizer_step import (
    accumulate,
    fp16_metrics,
    grad_norm,
    optimizer_step,
    skip_optimizer_steps,
    step_together,
)
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.models.forward import (
    response_logprobs,
    response_logprobs_and_entropy,
    response_values,
)
from rlhf_pipeline.models.sequences import Sequences, micro_batches
from rlhf_pipeline.rl.diagnostics import explained_variance, policy_diagnostics, value_sums
from rlhf_pipeline.rl.masking import masked_sum
from rlhf_pipeline.rl.ppo_losses import entropy_loss, policy_loss, value_loss
from rlhf_pipeline.rl.sft_loss import sft_loss
from rlhf_pipeline.training.experience import Experience
from rlhf_pipeline.training.ppo_models import PPOModels


def learn(
    models: PPOModels,
    experience: Experience,
    config: PPOConfig,
    world: World,
    *,
    train_actor: bool,
    texts: Iterator[Sequences] | None = None,
) -> dict[str, float]:
    """All optimizer steps of one rollout; return their metrics, each a mean over the tokens of all epochs.

    `texts` gives this rank's blocks of plain text for each update of the actor; None: no language-model loss.
    """
    engines = {"actor": models.actor if train_actor else None, "critic": models.critic}
    trained = {name: engine for name, engine in engines.items() if engine is not None}
    totals: dict[str, Tensor] = {}
    metrics: dict[str, float] = {}
    for epoch in range(1, config.ppo_epochs + 1):
        before = dict(totals)
        for minibatch in experience.minibatches(config.minibatch_size // world.size):
            text = next(texts) if texts is not None and train_actor else None
            update(models, minibatch, config, world, totals, train_actor=train_actor, text=text)
        if train_actor and config.kl.stop_update is not None:
            metrics["policy/epochs"] = epoch
            if _approx_kl(totals, before, world) > config.kl.stop_update:
                for engine in trained.values():
                    skip_optimizer_steps(
                        engine, (config.ppo_epochs - epoch) * config.updates_per_epoch
                    )
                break
    sums = world.sums(totals)
    tokens, text_tokens = sums.pop("tokens"), sums.pop("text_tokens", 0.0)
    metrics |= {
        name: value / (text_tokens if name == "ptx/loss" else tokens)
        for name, value in sums.items()
    }
    if "ptx/loss" in metrics:
        metrics["ptx/perplexity"] = math.exp(min(metrics["ptx/loss"], 700.0))
    if experience.old_values is not None and experience.returns is not None:
        moments = value_sums(
            experience.old_values, experience.returns, experience.rollout.response_mask
        )
        explained = float(explained_variance(world.sum(moments.to(world.device))))
        if not math.isnan(
            explained
        ):  # equal returns, as when all responses are cut, leave nothing to explain
            metrics["value/explained_variance"] = explained
    for name, engine in trained.items():
        metrics[f"optim/{name}_lr"] = engine.get_lr()[0]
        norm = grad_norm(engine)
        if norm is not None:
            metrics[f"optim/{name}_grad_norm"] = float(norm)
        metrics |= {f"optim/{name}_{key}": value for key, value in fp16_metrics(engine).items()}
    return metrics


def _approx_kl(totals: dict[str, Tensor], before: dict[str, Tensor], world: World) -> float:
    """Mean `policy/approx_kl` of what was added to `totals` since `before`: one number on all ranks, so that they agree."""
    sums = world.sums(
        {name: totals[name] - before.get(name, 0) for name in ("policy/approx_kl", "tokens")}
    )
    return sums["policy/approx_kl"] / sums["tokens"]


def update(
    models: PPOModels,
    minibatch: Experience,
    config: PPOConfig,
    world: World,
    totals: dict[str, Tensor],
    *,
    train_actor: bool,
    text: Sequences | None = None,
) -> None:
    """One optimizer step of each model that trains; adds the sums of their metrics to `totals`.

    With `text`, the actor's loss is the sum of PPO's and `ptx.coef` times the text's, each a mean over its own tokens.
    """
    tokens = minibatch.rollout.response_mask.sum().double().to(world.device)
    normalizer = world.sum(tokens)
    pieces = [
        minibatch.rows(i) for i in micro_batches(minibatch.lengths, config.micro_batch_size_per_gpu)
    ]

    def add(sums: dict[str, Tensor]) -> None:
        for name, value in sums.items():
            totals[name] = totals.get(name, 0) + value.detach().double()

    def actor_loss(piece: Experience) -> Tensor:
        piece = piece.to(world.device)
        mask = piece.rollout.response_mask
        logprobs, entropy = response_logprobs_and_entropy(
            models.actor,
            piece.rollout,
            vocab_size=models.contract.vocab_size,
            temperature=config.sampling.temperature,
        )
        loss = policy_loss(
            logprobs,
            piece.old_logprobs,
            piece.advantages,
            mask,
            clip_range=config.clip_range,
            normalizer=normalizer,
            dual_clip=config.dual_clip,
        )
        diagnostics = policy_diagnostics(
            logprobs.detach(), piece.old_logprobs, mask, clip_range=config.clip_range
        )
        add({f"policy/{name}": value for name, value in diagnostics.items() if name != "tokens"})
        add({"policy/loss": loss * normalizer, "policy/entropy": masked_sum(entropy, mask)})
        if config.entropy_coef > 0:
            loss = loss + config.entropy_coef * entropy_loss(entropy, mask, normalizer=normalizer)
        return loss

    def critic_loss(piece: Experience) -> Tensor:
        piece = piece.to(world.device)
        assert (
            models.critic is not None and piece.old_values is not None and piece.returns is not None
        )
        loss = value_loss(
            response_values(models.critic, piece.rollout),
            piece.old_values,
            piece.returns,
            piece.rollout.response_mask,
            clip_range=config.value_clip_range,
            normalizer=normalizer,
        )
        add({"value/loss": loss * normalizer})
        return loss

    def text_loss(blocks: Sequences) -> Tensor:
        assert config.ptx is not None and text is not None
        blocks = blocks.to(world.device)
        mask = blocks.response_mask
        normalizer = (
            text.response_ids.numel() * world.size
        )  # ranks have equal shares of blocks of one length
        logprobs = response_logprobs(models.actor, blocks, vocab_size=models.contract.vocab_size)
        loss = sft_loss(logprobs, mask, normalizer=normalizer)
        add({"ptx/loss": loss * normalizer, "text_tokens": mask.sum()})
        return config.ptx.coef * loss

    add({"tokens": tokens})
    steps = []
    if train_actor:
        losses = [partial(actor_loss, piece) for piece in pieces]
        if text is not None:
            chunks = micro_batches(text.lengths, config.micro_batch_size_per_gpu)
            losses += [partial(text_loss, text.rows(i)) for i in chunks]
        steps.append((models.actor, losses))
    if models.critic is not None:
        steps.append((models.critic, [partial(critic_loss, piece) for piece in pieces]))
    if config.actor.deepspeed.precision == "fp16":  # the critic's as well, by PPOConfig
        for engine, losses in steps:
            accumulate(engine, world, losses)
        step_together([engine for engine, _ in steps])
    else:
        for engine, losses in steps:
            optimizer_step(engine, world, losses)
    if (
        train_actor and models.ema is not None and models.actor.was_step_applied()
    ):  # fp16 may have left it out
        models.ema.update()
