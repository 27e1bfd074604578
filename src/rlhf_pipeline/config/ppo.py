"""PPO with four models (actor, reference, critic, reward model), or without a critic and its advantages."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from rlhf_pipeline.config.block import Block
from rlhf_pipeline.config.rewards import Rewards, TrainedReward
from rlhf_pipeline.config.training import FrozenModelConfig, SavingConfig, TrainedModelConfig


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
    """Weight of the per-token penalty -coef * KL in the reward; the first value where `target` is set."""

    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimate of a token's KL in that penalty: k1 = log pi - log pi_ref is unbiased, summed over a response and as a
    reward; k2 and k3 are never negative (Schulman, "Approximating KL Divergence"). Metrics show k1 in any case."""

    target: PositiveFloat | None = None
    """KL that the coefficient is adapted to hold (Ziegler et al. 2019). None: the coefficient stays fixed."""

    horizon: PositiveInt = 1000
    """Responses over which the adaptive coefficient moves by a factor of about e^0.2 = 1.22, at the error's clip of 0.2."""

    maximum: PositiveFloat | None = None
    """KL above which training stops and the stage ends well, with the best checkpoint, which is never one above it. Past
    a point, the reward model's score keeps rising while true quality falls (Gao et al. 2022). None: no bound."""

    explosion: PositiveFloat | None = 100.0
    """KL above which, or not finite, training is broken: the stage fails at once and exports nothing, where `maximum`,
    which must be lower, ends it well. 100: policies of use stay within some tens of nats. Very long responses under a weak
    leash may need more. None: no bound."""

    stop_update: PositiveFloat | None = None
    """Mean KL a token, of the policy that sampled to the one in training (`policy/approx_kl`), over an epoch, above which
    the step's other epochs are left out. The learning rates move on as if they had been taken. None: no bound."""

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if (
            self.explosion is not None
            and self.maximum is not None
            and self.explosion <= self.maximum
        ):
            raise ValueError(
                f"explosion {self.explosion:g} must exceed maximum {self.maximum:g}: raise it, or set it to null for no bound"
            )
        return self


class EMAConfig(Block):
    """An exponential moving average of the actor's weights, in fp32: a checkpoint of its own beside the actor's."""

    decay: float = Field(default=0.992, gt=0, lt=1)
    """Weight of the average so far at each optimizer step; it remembers about 1 / (1 - decay) of them. DeepSpeed-Chat's."""


class PtxConfig(Block):
    """A language-model loss on the text of `split.pretraining`, added to the actor's in every optimizer step (PPO-ptx,
    Ouyang et al. 2022, equation 2): against forgetting what the reward does not ask for."""

    coef: PositiveFloat = 27.8
    """Weight of the text's mean negative log-likelihood a token, beside PPO's mean loss a token; 27.8 as in InstructGPT
    and DeepSpeed-Chat."""

    batch_size: PositiveInt
    """Blocks in one optimizer step, over all ranks; InstructGPT has 8 for each response. `micro_batch_size_per_gpu` of
    them are in one forward pass."""


class PPOConfig(SavingConfig):
    """Proximal policy optimization (Schulman et al. 2017) on the reward model's score."""

    steps: PositiveInt
    """Rollouts: each generates, scores and trains on `rollout_batches` times `rollout_batch_size` responses."""

    rollout_batch_size: PositiveInt
    """Responses in one generated batch, over all ranks."""

    rollout_batches: PositiveInt = 1
    """Batches generated and pooled before a step trains on them; DeepSpeed-Chat's `generation_batches`. Advantages belong
    to the pool, so n batches of m responses are exactly one of n * m. GPU memory does not grow with either: generation,
    scoring and training go by micro batches, the pool lies in main memory."""

    responses_per_prompt: PositiveInt = 1
    """Responses to each prompt, each drawn on its own; divides `rollout_batch_size`. At least 2 for rloo and grpo."""

    minibatch_size: PositiveInt
    """Responses in one optimizer step, over all ranks; divides the responses of a step."""

    micro_batch_size_per_gpu: PositiveInt
    """Responses in one forward pass on one rank."""

    ppo_epochs: PositiveInt = 1
    """Passes over each rollout."""

    advantage: Literal["gae", "rloo", "grpo", "reinforce"] = "gae"
    """What an action was worth. gae: token by token against a critic (Schulman et al. 2016). The others take the response
    as one action, need no critic and refuse one: rloo compares it with the mean of the prompt's other responses (Ahmadian
    et al. 2024), grpo with the mean of all of them in units of their standard deviation (Shao et al. 2024), reinforce
    with the mean of the step's responses (Williams 1992)."""

    scale_by_group_std: bool = True
    """grpo only: divide by the standard deviation of the prompt's responses. False: not, as in Liu et al. 2025."""

    reinforce_baseline: Literal["batch_mean", "none"] = "batch_mean"
    """reinforce only: what a response is compared with."""

    sampling: SamplingConfig = SamplingConfig()
    kl: KLConfig = KLConfig()

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount; 1 in InstructGPT: a response's end counts as much as its start."""

    lam: float = Field(default=0.95, ge=0, le=1)
    """GAE's lambda: 0 trusts the critic alone, 1 the observed rewards alone."""

    clip_range: PositiveFloat = 0.2
    """Policy ratios are clipped to 1 +- this."""

    dual_clip: float | None = Field(default=None, gt=1)
    """Ratio beyond which a token with a negative advantage is pulled back no further (Ye et al. 2020; 3 there).
    None: not clipped."""

    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the policy's mean entropy a token, a bonus in the actor's objective. 0: none, as is usual in RLHF."""

    ptx: PtxConfig | None = None
    """Language-model loss on plain text beside PPO's. None: none."""

    value_clip_range: PositiveFloat | None = 0.2
    """New values are clipped to the old ones +- this. None: not clipped."""

    score_clip: PositiveFloat | None = 5.0
    """Centred scores are clipped to +- this, as in DeepSpeed-Chat. None: not clipped."""

    missing_eos_score: float | None = -1.0
    """Score of a response that was cut before it ended by itself, in place of the reward model's (Huang et al. 2024).
    None: the reward model's score stands."""

    whiten_rewards: bool = False
    """gae only: scale the per-token rewards of a step to variance 1, their mean kept (Huang et al. 2024)."""

    actor: TrainedModelConfig
    """The policy in training; starts from the SFT model."""

    critic: TrainedModelConfig | None = None
    """The value model; starts from the reward model. Required by gae, refused otherwise."""

    gather_for_generation: bool = True
    """Where the actor is at ZeRO stage 3: gather its weights once for each generated batch, which takes the whole model
    on every GPU. False: gather each layer at every token, far slower."""

    critic_warmup_steps: NonNegativeInt = 0
    """gae only: first steps in which the critic alone trains, so that the actor never follows an untrained one."""

    ema: EMAConfig | None = None
    """An average of the actor's weights over its optimizer steps, evaluated and exported beside it. None: none is kept."""

    reference: FrozenModelConfig = FrozenModelConfig()
    """The frozen SFT model that the KL is measured to. An actor with LoRA (without `train_rest`) is its own reference."""

    reward_model: FrozenModelConfig = FrozenModelConfig()
    """The frozen judge."""

    rewards: Rewards = (TrainedReward(),)
    """What the score of a response is made of: the sum of weight * (score - mean) over these sources. `score_clip` and
    `missing_eos_score` apply to the sum."""

    evaluations: PositiveInt = 5
    """Evaluations on held-out prompts, evenly spaced, the last one after the last step. The checkpoint with the highest
    score within `kl.maximum` is exported."""

    evaluation_prompts: PositiveInt = 256
    """Held-out prompts in each evaluation, at most, and as many on each rank."""

    @property
    def responses_per_step(self) -> int:
        """Responses that a step generates and trains on, over all ranks."""
        return self.rollout_batches * self.rollout_batch_size

    @property
    def prompts_per_step(self) -> int:
        """Prompts that they answer."""
        return self.responses_per_step // self.responses_per_prompt

    @property
    def updates_per_epoch(self) -> int:
        """Optimizer steps in one pass over a step's responses."""
        return self.responses_per_step // self.minibatch_size

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        if self.responses_per_step % self.minibatch_size:
            batches = f"{self.rollout_batches} * " if self.rollout_batches > 1 else ""
            raise ValueError(
                f"minibatch_size {self.minibatch_size} does not divide {batches}rollout_batch_size {self.rollout_batch_size}"
            )
        if self.rollout_batch_size % self.responses_per_prompt:
            raise ValueError(
                f"responses_per_prompt {self.responses_per_prompt} does not divide rollout_batch_size "
                f"{self.rollout_batch_size}"
            )
        return self

    @model_validator(mode="after")
    def _advantage(self) -> Self:
        if self.advantage == "gae" and self.critic is None:
            raise ValueError(
                "advantage gae needs a critic; give its block, or choose rloo, grpo or reinforce"
            )
        if self.advantage != "gae" and self.critic is not None:
            raise ValueError(
                f"advantage {self.advantage} has no critic; leave its block out, or set critic to null"
            )
        if self.advantage in ("rloo", "grpo") and self.responses_per_prompt < 2:
            raise ValueError(
                f"advantage {self.advantage} compares the responses to one prompt; set responses_per_prompt to 2 or more"
            )
        for name, advantage in ADVANTAGE_OF.items():
            value, default = getattr(self, name), type(self).model_fields[name].default
            if self.advantage != advantage and value != default:
                raise ValueError(
                    f"{name} {value} has no effect with advantage {self.advantage}; it belongs to {advantage}: leave it out"
                )
        return self

    @model_validator(mode="after")
    def _frozen_models(self) -> Self:
        self.reference.require_effect("reference", self.actor)
        self.reference.require_offload_possible("reference", self.actor)
        self.reward_model.require_offload_possible("reward_model", self.critic)
        return self

    @model_validator(mode="after")
    def _fp16_in_both_or_neither(self) -> Self:
        if self.critic is None:
            return self
        actor, critic = self.actor.deepspeed.precision, self.critic.deepspeed.precision
        if (actor == "fp16") != (critic == "fp16"):
            raise ValueError(
                f"actor.deepspeed.precision {actor} with critic.deepspeed.precision {critic}: where the gradients of one "
                "overflow, neither takes its step, which takes fp16 in both; set both to fp16, or neither"
            )
        return self

    @model_validator(mode="after")
    def _schedules(self) -> Self:
        if self.critic_warmup_steps >= self.steps:
            raise ValueError(
                f"critic_warmup_steps {self.critic_warmup_steps} leaves none of {self.steps} steps to the actor"
            )
        if self.kl.target is not None and self.kl.horizon <= 0.2 * self.responses_per_step:
            raise ValueError(
                f"kl.horizon {self.kl.horizon} must exceed a fifth of the {self.responses_per_step} responses of a step"
            )
        return self


ADVANTAGE_OF = {
    "gamma": "gae",
    "lam": "gae",
    "value_clip_range": "gae",
    "whiten_rewards": "gae",
    "critic_warmup_steps": "gae",
    "scale_by_group_std": "grpo",
    "reinforce_baseline": "reinforce",
}
"""Fields that one advantage estimator alone reads."""
