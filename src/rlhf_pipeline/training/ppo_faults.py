"""When nothing can be learned from a rollout, and what a user can do about it, in the user's own parameters."""

from __future__ import annotations

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.training.divergence import steadier


def rollout_fault(
    metrics: dict[str, float], config: PPOConfig, where: str, *, trained: bool
) -> str | None:
    """Why nothing can be learned from a rollout with these metrics, in words; None where something can.

    Args:
        metrics: `rollout_metrics`.
        config: the bound on KL, and the values that the remedies are about.
        where: which rollout it is.
        trained: whether the actor has taken an optimizer step: if not, it is the SFT model.
    """
    kl, bound = metrics["objective/kl"], config.kl.explosion
    if bound is not None and not kl <= bound:
        return (
            f"objective/kl is {kl:.4g} nats a response {where}, not within ppo.kl.explosion ({bound:g}): the actor has left "
            f"the reference for good; {remedy('objective/kl', config)}"
        )
    # An EOS ends a response and counts as one of its tokens.
    if metrics["rollout/response_tokens"] == metrics["rollout/eos_fraction"]:
        cause = (
            f"the actor has learned to end at once, because the reward model likes it; raise ppo.kl.coef ({config.kl.coef:g}) "
            "or look at the scores of short answers"
            if trained
            else "the SFT model ends at once; look at its demonstrations, and whether the chat template ends a prompt with EOS"
        )
        return f"every response is empty, EOS or nothing, {where}: {cause}"
    return None


def remedy(metric: str, config: PPOConfig) -> str:
    """What to do about a metric that is not finite. The reward model does not train: it was damaged from the start."""
    if metric.endswith("/score"):
        precision = config.reward_model.deepspeed.precision
        return (
            f"look at the reward model, and at ppo.reward_model.deepspeed.precision ({precision})"
        )
    if config.critic is not None and ("value" in metric or "critic" in metric):
        return steadier("ppo.critic.", config.critic)
    return f"{steadier('ppo.actor.', config.actor)}, or raise ppo.kl.coef ({config.kl.coef:g})"
