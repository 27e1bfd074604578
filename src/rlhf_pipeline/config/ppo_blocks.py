"""The blocks inside `ppo`, `grpo` and `distill`: KL, average, ptx, curriculum, correction."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from rlhf_pipeline.config.block import Block


class KLConfig(Block):
    """KL constraint to the reference, in nats per response: the sum over its tokens."""

    coef: NonNegativeFloat = 0.1
    """Coefficient of the KL penalty per token. With `target`: its initial value."""
    place: Literal["reward", "loss"] = "reward"
    """Where the penalty acts. reward: each token's reward contains -coef * k1, so that a token also
    answers for the KL of later tokens; loss: the policy's loss contains coef * k2. Only these
    estimators have the gradient of the KL there (Tang and Munos 2025)."""
    target: PositiveFloat | None = None
    """KL that an adaptive coefficient maintains (Ziegler et al. 2019). None: fixed coefficient."""
    horizon: PositiveInt = 1000
    """Responses over which the adaptive coefficient changes by a factor of at most 1.22 (e^0.2)."""
    maximum: PositiveFloat | None = None
    """KL above which training stops early and exports the best model within the limit, because true
    quality falls at a large KL (Gao et al. 2022). None: no limit."""
    explosion: PositiveFloat | None = 100.0
    """KL above which training has diverged: the stage fails and exports nothing. None: no limit."""
    stop_update: PositiveFloat | None = None
    """Skip the remaining epochs of a step once the mean KL per token from the sampling policy
    (`policy/approx_kl`) exceeds this over an epoch. None: no limit."""

    def _faults(self) -> Iterator[str]:
        explosion, maximum = self.explosion, self.maximum
        if explosion is not None and maximum is not None and explosion <= maximum:
            yield (
                f"explosion: found {explosion:g}, expected more than maximum {maximum:g}. Fix: "
                "raise it, or set it to null for no limit"
            )


class EMAConfig(Block):
    """Exponential moving average of the actor's weights in fp32, exported beside the actor."""

    decay: float = Field(default=0.992, gt=0, lt=1)
    """Weight of the previous average at each optimizer step; 0.992 as in DeepSpeed-Chat."""


class PtxConfig(Block):
    """Language-model loss on `split.pretraining` in every optimizer step of the actor, which
    prevents forgetting (PPO-ptx, Ouyang et al. 2022, equation 2)."""

    coef: PositiveFloat = 27.8
    """Weight of the text's mean loss per token relative to PPO's; 27.8 as in InstructGPT."""
    batch_size: PositiveInt
    """Blocks of text per optimizer step, over all ranks; InstructGPT uses 8 per response."""


class CurriculumConfig(Block):
    """Which prompts come again, by the share of right responses at their last visit."""

    solved: float = Field(default=1.0, allow_inf_nan=False)
    """Score from which a response is right, with the penalties for cut and long ones."""
    minimum: float = Field(default=0.0, ge=0, le=1)
    """A prompt with at most this share of right responses is left out."""
    maximum: float = Field(default=1.0, ge=0, le=1)
    """A prompt with at least this share of right responses is left out."""
    passes: PositiveInt = 2
    """Passes over the data that such a prompt sits out before it is tried again."""

    def _faults(self) -> Iterator[str]:
        if self.minimum >= self.maximum:
            yield f"minimum: found {self.minimum}, expected less than maximum {self.maximum}"


class SamplerCorrectionConfig(Block):
    """Importance weights for responses whose sampler (vLLM, another kernel, bf16) differs from the
    policy that trains; see `rollout/logprob_gap` and `rollout/effective_sample_size`."""

    level: Literal["token", "sequence"] = "token"
    """token: a weight for each token, biased for long responses, with little variance; sequence:
    one for each response, without this bias, with more variance."""
    beyond: Literal["truncate", "mask"] = "truncate"
    """What happens to a weight above `maximum`: it becomes `maximum`, or 0."""
    maximum: float = Field(default=2.0, gt=1)
    """Largest weight; 2 as in Yao et al. 2025."""
