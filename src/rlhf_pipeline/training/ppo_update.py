import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from rlhf_pipeline.config.doors import POLICY_LOSS, call_with
from rlhf_pipeline.config.policies import DistillConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.distributed.batches import micro_batches, minibatch_rows
from rlhf_pipeline.distributed.lean_deepspeed import DeepSpeedEngine
from rlhf_pipeline.distributed.optimizer_step import (
    Loss,
    Sums,
    accumulate,
    fp16_metrics,
    grad_norm,
    optimizer_step,
    skip_optimizer_steps,
    step_together,
)
from rlhf_pipeline.distributed.world import World
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
from rlhf_pipeline.training.experience import actor_pass
from rlhf_pipeline.training.ppo_setup import PPOModels


def update_models(
    models: PPOModels,
    experience: Experience,
    config: PPOConfig,
    world: World,
    *,
    key: tuple[int, int],
    kl_coef: float,
    train_actor: bool,
    texts: Iterator[Sequences] | None = None,
    given: Iterator[Sequences] | None = None,
) -> dict[str, float]:
    """Take all optimizer steps of one rollout; return means over the tokens of all epochs.

    Args:
        experience: the rows of this rank.
        key: seed and step, which draw the minibatches.
        kl_coef: weight of the KL penalty, if the loss contains it.
        train_actor: False while the critic warms up.
        texts: this rank's plain text for each update of the actor; None: no language-model loss.
        given: the same for demonstrations of a distillation.
    """
    engines = {"actor": models.actor} if train_actor else {}
    engines |= {} if models.critic is None else {"critic": models.critic}
    minibatches = in_micro_batches(models, experience, config, world, key)
    metrics = {f"optim/{name}_lr": engine.get_lr()[0] for name, engine in engines.items()}
    sums: Sums = {}
    for epoch in range(1, config.ppo_epochs + 1):
        before = sums
        for number, pieces in enumerate(islice(minibatches, config.updates_per_epoch)):
            text = next(texts) if texts is not None and train_actor else None
            if given is not None:
                pieces = pieces + demonstrations(next(given), models, config, world)
            sums = update_minibatch(
                models, pieces, config, world, sums, kl_coef=kl_coef, train_actor=train_actor,
                text=text, is_sampler=epoch == 1 and number == 0,
            )  # fmt: skip
        if train_actor and config.kl.stop_update is not None:
            metrics["policy/epochs"] = epoch
            names = ("policy/approx_kl", "policy/count")
            own = world.sums({name: sums[name] - before.get(name, 0) for name in names})
            if own["policy/approx_kl"] / max(1.0, own["policy/count"]) > config.kl.stop_update:
                for engine in engines.values():
                    remaining = config.ppo_epochs - epoch
                    skip_optimizer_steps(engine, remaining * config.updates_per_epoch)
                break
    explained: dict[str, Tensor] = {}
    if experience.old_values is not None and experience.returns is not None:
        mask = experience.sequences.action_mask
        moments = world.sum(value_sums(experience.old_values, experience.returns, mask))
        explained["value/explained_variance"] = explained_variance(moments)
    norms = {f"optim/{name}_grad_norm": grad_norm(engine) for name, engine in engines.items()}
    known = {name: norm for name, norm in norms.items() if norm is not None}
    totals = world.sums(sums, equal=explained | known)
    return (
        metrics
        | _means({name: totals[name] for name in sums})
        # Equal returns, for example if all responses are cut, have no variance to explain.
        | {name: totals[name] for name in explained if not math.isnan(totals[name])}
        | {name: totals[name] for name in known}
        | {
            f"optim/{name}_{key}": value
            for name, engine in engines.items()
            for key, value in fp16_metrics(engine).items()
        }
    )


def in_micro_batches(
    models: PPOModels, experience: Experience, config: PPOConfig, world: World, key: tuple[int, int]
) -> Iterator[list[Experience]]:
    """The micro batches of each minibatch, epoch after epoch.

    A minibatch has all responses to its prompts if its size allows it, because they share the
    tokens of the prompt in a forward pass.
    """
    if experience.training_pass is not None:
        yield [experience]
        return
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
        drawn = _only_trained(drawn, experience.sequences.action_mask.any(1), world)
    lengths = [experience.sequences.lengths[rows] for rows in drawn]
    groups = micro_batches(lengths, config.micro_batch_tokens, models.actor, world)
    for rows, own in zip(drawn, groups, strict=True):
        yield [experience.rows(rows[index]) for index in own]


def _only_trained(drawn: list[Tensor], trains: Tensor, world: World) -> list[Tensor]:
    """The rows of each minibatch that train, and others for ranks that have fewer of them.

    ZeRO needs all ranks in each forward pass.
    """
    first = [rows[trains[rows].argsort(descending=True, stable=True)] for rows in drawn]
    counts = world.most([max(1, int(trains[rows].sum())) for rows in drawn])
    return [rows[:count] for rows, count in zip(first, counts, strict=True)]


def demonstrations(
    rows: Sequences, models: PPOModels, config: PPOConfig, world: World
) -> list[Experience]:
    """Demonstrations as micro batches of the minibatch that they are added to."""
    (groups,) = micro_batches([rows.lengths], config.micro_batch_tokens, models.actor, world)
    chunks = [rows.rows(index) for index in groups]
    none = [torch.zeros(chunk.response_ids.shape) for chunk in chunks]
    pairs = zip(chunks, none, strict=True)
    return [Experience(chunk, zeros, zeros, given=True) for chunk, zeros in pairs]


def update_minibatch(
    models: PPOModels,
    pieces: Sequence[Experience],
    config: PPOConfig,
    world: World,
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
    masks = [piece.sequences.action_mask for piece in pieces]
    counts = [
        torch.stack([mask.sum(), number_of_terms(config, mask), reduction(config)(mask, mask)[1]])
        for mask in masks
    ]
    count = torch.stack(counts).sum(0).double()
    # All responses may be left out.
    totals = world.sum(count.to(world.device, non_blocking=True)).clamp(min=1)
    tokens, policy_terms, other_terms = totals
    steps: list[tuple[DeepSpeedEngine, Sequence[Loss]]] = []
    if train_actor:
        loss_of = partial(
            actor_loss, config=config, tokens=tokens, kl_coef=kl_coef,
            policy_terms=policy_terms, other_terms=other_terms, is_sampler=is_sampler,
        )  # fmt: skip
        losses: list[Loss] = [partial(loss_of, models, piece) for piece in pieces]
        if text is not None:
            length = text.response_ids.numel() * world.size  # every rank has equally many blocks
            limit = config.micro_batch_tokens
            (groups,) = micro_batches([text.lengths], limit, models.actor, world)
            chunks = [text.rows(index) for index in groups]
            losses += [partial(text_loss, models, blocks, config, length) for blocks in chunks]
        steps.append((models.actor, losses))
    if (critic := models.critic) is not None:
        losses = [partial(critic_loss, critic, piece, config, tokens) for piece in pieces]
        steps.append((critic, losses))
    if config.actor.deepspeed.precision == "fp16":  # then the critic's is fp16 too, see PPOConfig
        for engine, own in steps:
            sums = accumulate(engine, world, own, sums)
        step_together([engine for engine, _ in steps])
    else:
        for engine, own in steps:
            sums = optimizer_step(engine, world, own, sums)
    # An overflow in fp16 skips the step.
    if train_actor and models.ema is not None and models.actor.was_step_applied():
        models.ema.update()
    return sums


def actor_loss(
    models: PPOModels,
    piece: Experience,
    config: PPOConfig,
    tokens: Tensor,
    kl_coef: float,
    *,
    policy_terms: Tensor,
    other_terms: Tensor,
    is_sampler: bool = False,
) -> tuple[Tensor, Sums]:
    """The policy loss of a micro batch, plus KL penalty and entropy loss if they are on.

    Three numbers are those of the whole optimizer step: `tokens`, those that the policy chose;
    `policy_terms`, what divides `ppo.policy_loss`; `other_terms`, what divides KL and entropy.
    """
    piece = piece.to(models.actor.device)
    mask = piece.sequences.action_mask
    old, reduce, sums = piece.old_logprobs, reduction(config), Sums()
    if isinstance(config, DistillConfig):
        logprobs, entropy, away, of_teacher = response_divergences(
            models.actor, models.reference, piece.sequences, beta=config.beta, top_k=config.top_k,
            entropy_trains=config.entropy_coef > 0, vocab_size=models.contract.vocab_size,
            temperature=config.sampling.temperature,
        )  # fmt: skip
        total, _ = reduce(kl_coef * away, mask)
        kl, k3 = (masked_sum(kl_estimate(old, of_teacher, kind), mask) for kind in ("k1", "k3"))
        sums = {"objective/kl": kl, "objective/kl_k3": k3, "objective/count": mask.any(1).sum()}
    else:
        if (done := piece.training_pass) is not None:
            logprobs, entropy = done.logprobs, done.entropy
        else:
            logprobs, entropy = actor_pass(models, piece.sequences, config)
        total, _ = policy_loss(
            config, logprobs=logprobs, old_logprobs=old, advantages=piece.advantages, mask=mask
        )
    loss, count = total / policy_terms, mask.sum()
    if piece.given:
        return loss, {"given/loss": loss * tokens, "given/count": count}
    diagnostics = call_with(
        policy_diagnostics, config, logprobs=logprobs.detach(), old_logprobs=old, mask=mask
    )
    if config.has_teacher:  # nothing is clipped
        del diagnostics["clip_fraction"]
    sums |= {f"policy/{name}": value for name, value in diagnostics.items()}
    entropies = masked_sum(entropy, mask)
    sums |= {"policy/loss": loss * tokens, "policy/entropy": entropies, "policy/count": count}
    if is_sampler and piece.sampler_logprobs is not None:
        gap = (logprobs.detach() - piece.sampler_logprobs).abs()
        sums |= {"rollout/logprob_gap": masked_sum(gap, mask), "rollout/count": count}
    if config.kl.place == "loss":
        assert piece.ref_logprobs is not None
        total, _ = kl_loss(logprobs, old, piece.ref_logprobs, mask, reduce=reduce)
        loss = loss + kl_coef * (total / other_terms)
    if config.entropy_coef > 0:
        total, _ = entropy_loss(entropy, mask, reduce=reduce)
        loss = loss + config.entropy_coef * (total / other_terms)
    return loss, sums


def policy_loss(config: PPOConfig, **tensors: Tensor) -> LossSum:
    """The loss that `ppo.policy_loss` names."""
    function = POLICY_LOSS.load(config.policy_loss)
    loss: LossSum = call_with(function, config, **tensors, reduce=reduction(config))
    return loss


def reduction(config: PPOConfig) -> Reduce:
    """How the losses of the actor are summed over tokens."""
    longest = config.sampling.max_response_tokens
    return partial(reduced, denominator=config.denominator, max_response_tokens=longest)


@torch.no_grad()
def number_of_terms(config: PPOConfig, mask: Tensor) -> Tensor:
    """The terms of the policy loss under a mask, on which alone their number depends."""
    none = torch.zeros(mask.shape, device=mask.device)
    _, terms = policy_loss(config, logprobs=none, old_logprobs=none, advantages=none, mask=mask)
    return torch.as_tensor(terms)


def critic_loss(
    critic: DeepSpeedEngine, piece: Experience, config: PPOConfig, tokens: Tensor
) -> tuple[Tensor, Sums]:
    """The clipped value loss of a micro batch; `tokens` as in `actor_loss`."""
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


def text_loss(
    models: PPOModels, blocks: Sequences, config: PPOConfig, tokens: int
) -> tuple[Tensor, Sums]:
    """The language-model loss (ptx) of plain text; `tokens` are those of the whole step."""
    assert config.ptx is not None
    blocks = blocks.to(models.actor.device)
    logprobs = response_logprobs(models.actor, blocks, vocab_size=models.contract.vocab_size)
    total, count = sft_loss(logprobs, blocks.action_mask)
    loss = total / tokens
    return config.ptx.coef * loss, {"ptx/loss": loss * tokens, "ptx/count": count}


def _means(sums: dict[str, float]) -> dict[str, float]:
    """Each sum `group/name` divided by `group/count`."""
    metrics = {
        name: value / max(1.0, sums[f"{name.partition('/')[0]}/count"])
        for name, value in sums.items()
        if not name.endswith("/count")
    }
    if "ptx/loss" in metrics:
        metrics["ptx/perplexity"] = math.exp(min(metrics["ptx/loss"], 700.0))
    return metrics
