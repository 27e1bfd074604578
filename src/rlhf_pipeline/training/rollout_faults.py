"""Faults that leave nothing to learn from a rollout, and the advice for PPO's parameters."""

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.training.divergence import stability_advice


def rollout_fault(
    metrics: dict[str, float], config: PPOConfig, where: str, *, trained: bool
) -> str | None:
    """Why a rollout contains nothing to learn from, or None.

    `metrics` come from `rollout_metrics`, and `where` names the rollout in the message. `trained`:
    the actor has taken an optimizer step; otherwise it is the SFT model.
    """
    kl, bound = metrics["objective/kl"], config.kl.explosion
    if bound is not None and not kl <= bound:  # `kl > bound` would miss NaN
        return (
            f"objective/kl: found {kl:.4g} nats per response {where}, expected at most "
            f"ppo.kl.explosion ({bound:g}). The actor is too far from the reference. "
            f"Fix: {ppo_advice('objective/kl', config)}"
        )
    # An EOS ends a response and counts as one of its tokens.
    if metrics["rollout/response_tokens"] != metrics["rollout/eos_fraction"]:
        return None
    cause = (
        "the actor has learned to end at once because ppo.rewards prefers that. Fix: raise "
        f"ppo.kl.coef ({config.kl.coef:g}), or check the scores of short answers"
        if trained
        else "the SFT model ends at once. Fix: check its demonstrations, and whether the chat "
        "template ends a prompt with EOS"
    )
    return f"every response is empty {where}: {cause}"


def sampler_fault(metrics: dict[str, float], config: PPOConfig, step: int) -> str | None:
    """Why the responses of a step are not the actor's, or None. `metrics` are of the update."""
    gap, bound = metrics.get("rollout/logprob_gap"), config.maximum_logprob_gap
    if gap is None or bound is None or not gap > bound:
        return None
    return (
        f"rollout/logprob_gap: found {gap:.4g} nats per token at step {step}, expected at most "
        f"ppo.maximum_logprob_gap ({bound:g}). The responses do not come from the actor. Fix: set "
        f"ppo.generator to transformers, or ppo.actor.deepspeed.precision "
        f"({config.actor.deepspeed.precision}) to fp32"
    )


def ppo_advice(metric: str, config: PPOConfig) -> str:
    """The fix for a metric of PPO that is not finite."""
    if metric.endswith("/score"):  # the reward model does not train: it was damaged from the start
        companion = config.reward_model_companion.deepspeed
        precision = config.reward_model.beside(companion).precision
        return f"check the reward model and ppo.reward_model.deepspeed.precision ({precision})"
    if config.critic is not None and ("value" in metric or "critic" in metric):
        return stability_advice("ppo.critic.", config.critic)
    actor = stability_advice("ppo.actor.", config.actor)
    return f"{actor}, or raise ppo.kl.coef ({config.kl.coef:g})"
