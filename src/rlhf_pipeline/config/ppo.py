"""PPO with four models: actor, reference, critic, reward model."""

from __future__ import annotations

from typing import Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from rlhf_pipeline.config.block import Block, operational
from rlhf_pipeline.config.training import FrozenModelConfig, TrainedModelConfig


class SamplingConfig(Block):
    """How responses are drawn. There is no top-k and no top-p: log-probabilities must be those of the sampled distribution."""

    temperature: PositiveFloat = 1.0
    """Softmax temperature, applied in sampling and in every log-probability alike."""

    max_response_tokens: PositiveInt = 64
    """Tokens after which a response is cut if it has not ended by itself."""

    batch_size_per_gpu: PositiveInt = 64
    """Prompts answered at a time on one rank; bounds the memory of the key-value cache."""


class KLConfig(Block):
    """The leash to the reference. KL is measured in nats per response: the sum over its tokens, averaged over responses."""

    coef: NonNegativeFloat = 0.1
    """Weight of the per-token penalty -coef * (log pi - log pi_ref) in the reward; the first value where `target` is set."""

    target: PositiveFloat | None = None
    """KL that the coefficient is adapted to hold (Ziegler et al. 2019). None: the coefficient stays fixed."""

    horizon: PositiveInt = 1000
    """Responses over which the adaptive coefficient moves by a factor of about e at full error."""

    maximum: PositiveFloat | None = None
    """KL above which training stops; a checkpoint above it is never the best. Past a point, the reward model's score
    keeps rising while true quality falls (Gao et al. 2022). None: no bound."""


class PPOConfig(Block):
    """Proximal policy optimization (Schulman et al. 2017) on the reward model's score."""

    steps: PositiveInt
    """Rollouts: each generates, scores and trains on `rollout_batch_size` responses."""

    rollout_batch_size: PositiveInt
    """Responses generated in one step, over all ranks."""

    minibatch_size: PositiveInt
    """Responses in one optimizer step, over all ranks; divides `rollout_batch_size`."""

    micro_batch_size_per_gpu: PositiveInt
    """Responses in one forward pass on one rank."""

    ppo_epochs: PositiveInt = 1
    """Passes over each rollout."""

    sampling: SamplingConfig = SamplingConfig()
    kl: KLConfig = KLConfig()

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount; 1 in InstructGPT: a response's end counts as much as its start."""

    lam: float = Field(default=0.95, ge=0, le=1)
    """GAE's lambda: 0 trusts the critic alone, 1 the observed rewards alone."""

    clip_range: PositiveFloat = 0.2
    """Policy ratios are clipped to 1 +- this."""

    value_clip_range: PositiveFloat | None = 0.2
    """New values are clipped to the old ones +- this. None: not clipped."""

    score_clip: PositiveFloat | None = 5.0
    """Centred scores are clipped to +- this, as in DeepSpeed-Chat. None: not clipped."""

    missing_eos_score: float | None = -1.0
    """Score of a response that was cut before it ended by itself, in place of the reward model's (Huang et al. 2024).
    None: the reward model's score stands."""

    actor: TrainedModelConfig
    """The policy in training; starts from the SFT model."""

    critic: TrainedModelConfig
    """The value model; starts from the reward model."""

    reference: FrozenModelConfig = FrozenModelConfig()
    """The frozen SFT model that the KL is measured to."""

    reward_model: FrozenModelConfig = FrozenModelConfig()
    """The frozen judge."""

    evaluations: PositiveInt = 5
    """Evaluations on held-out prompts, evenly spaced, the last one after the last step. The checkpoint with the highest
    score within `kl.maximum` is exported."""

    evaluation_prompts: PositiveInt = 256
    """Held-out prompts in each evaluation, at most."""

    log_every: PositiveInt = operational(1)
    """Steps between two lines of metrics."""

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        if self.rollout_batch_size % self.minibatch_size:
            raise ValueError(
                f"minibatch_size {self.minibatch_size} does not divide rollout_batch_size {self.rollout_batch_size}"
            )
        return self
