"""Registration of the policies, and the gate that a candidate must pass to become the champion."""

from pydantic import Field

from rlhf_pipeline.config.block import Block


class RegisterConfig(Block):
    """Name of the registered model, and the promotion gate."""

    model: str = Field(default="rlhf-policy", min_length=1, pattern=r"^[^/:]+$")
    """Name of the registered model. The SFT baseline and the candidates (PPO, DPO) are versions of
    this one model, so MLflow can compare them. MLflow allows neither slash nor colon."""
    min_win_rate_lower: float = Field(default=0.5, ge=0, lt=1)
    """The lower end of the 95% interval on the win rate against SFT must be above this value. 0.5
    requires a policy that is better beyond chance; a mean above 0.5 is not enough."""
    max_kl: float = Field(default=10.0, gt=0)
    """Largest KL from SFT, nats per response. Far from SFT the reward model's score still rises
    while the true quality falls: the policy exploits the reward model."""
