"""Registering the policies, and what a candidate must show before it becomes the champion."""

from __future__ import annotations

from pydantic import Field

from rlhf_pipeline.config.block import Block


class RegisterConfig(Block):
    """The model registry's part of the parameters: a name, and the promotion gate."""

    model: str = Field(default="rlhf-policy", min_length=1, pattern=r"^[^/:]+$")
    """Name of the registered model. SFT baseline and candidates (PPO, DPO) are versions of this one model, so that they
    compare side by side. MLflow allows neither slash nor colon."""

    min_win_rate_lower: float = Field(default=0.5, ge=0, lt=1)
    """The lower end of the 95% interval on the win rate against SFT must be above this. 0.5 asks for a policy that is
    better beyond chance; an average above 0.5 alone is not enough."""

    max_kl: float = Field(default=10.0, gt=0)
    """Nats per response that the policy may have moved from SFT, at most. Beyond some distance the reward model's score
    goes on rising while the quality that it stands for falls: the policy has learnt to please the reward model."""
