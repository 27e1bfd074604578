"""PPO with actor, reference, reward model and critic, or with advantages without a critic."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
)

from rlhf_pipeline.config.base_model import BaseModelConfig
from rlhf_pipeline.config.block import Block, nearest, operational
from rlhf_pipeline.config.doors import ADVANTAGE, POLICY_LOSS, PPO_GENERATOR, parameters
from rlhf_pipeline.config.episodes import EpisodesConfig
from rlhf_pipeline.config.rewards import Rewards, TrainedReward, reads_scored, uses_trained
from rlhf_pipeline.config.training import (
    FrozenModel,
    FrozenModelConfig,
    HybridConfig,
    MicroBatchTokens,
    MinibatchSize,
    SamplingConfig,
    SavingConfig,
    StageModel,
    TrainedModel,
    TrainedModelConfig,
    own_base_faults,
)


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
    """Exponential moving average of the actor's fp32 weights, evaluated and exported beside it."""

    decay: float = Field(default=0.992, gt=0, lt=1)
    """Weight of the previous average at each optimizer step; 0.992 as in DeepSpeed-Chat."""


class PtxConfig(Block):
    """Language-model loss on `split.pretraining` in every optimizer step of the actor, which
    prevents forgetting (PPO-ptx, Ouyang et al. 2022, equation 2)."""

    coef: PositiveFloat = 0.1
    """Weight of the text's mean loss per token relative to PPO's. With InstructGPT's 27.8, policies
    learned nothing from their rewards (docs/ppo.md)."""
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


class CriticConfig(TrainedModelConfig):
    """The value model of gae, which reads the policy's tokens."""

    start: Literal["reward_model", "policy", "own"] = "reward_model"
    """The model that it starts from: the reward model, or without one the policy; the policy, the
    SFT model with a new head; or `base_model` below with a new head."""
    base_model: BaseModelConfig | None = operational(None)  # its files are an input
    """With `start: own`: a model with the policy's tokenizer, as in `reward_model.base_model`."""

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        yield from own_base_faults(self.start, self.base_model)
        if self.base_model is not None and self.base_model.path is None:
            yield "base_model.path: found none, expected a folder or a name. Fix: set it"


class PPOConfig(EpisodesConfig, SavingConfig):
    """Proximal policy optimization (Schulman et al. 2017) on the score of `rewards`."""

    stage: ClassVar[str] = "ppo"
    """Name of the stage and of its parameter block."""
    sampler: ClassVar[str] = "ppo"
    """The parameter with rewards and sampling."""
    has_teacher: ClassVar[bool] = False
    """Whether the reference is another model than the start of the actor."""

    steps: PositiveInt
    """Number of steps, each on `rollout_batches` * `rollout_batch_size` responses."""
    rollout_batch_size: PositiveInt
    """Responses per generated batch, over all ranks."""
    rollout_batches: PositiveInt = 1
    """Batches generated before each step trains on all of them (DeepSpeed-Chat's
    `generation_batches`). n batches of m responses equal one batch of n * m exactly."""
    responses_per_prompt: PositiveInt = 1
    """Independent responses to each prompt; must divide `rollout_batch_size`."""
    minibatch_size: MinibatchSize = Field(default=None, validate_default=True)
    """Responses per optimizer step, over all ranks; must divide the responses of a step. None: all
    of them."""
    micro_batch_tokens: MicroBatchTokens = 2048
    """As in `sft.micro_batch_tokens`."""
    ppo_epochs: PositiveInt = 1
    """Passes over the responses of each step. Each draws its minibatches anew."""
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    """Log-probabilities of the policy that sampled, for ratios and KL. recompute: by the forward
    pass that trains, so that the first ratio is exactly 1; rollout: those of the sampler, which
    differ by rounding but need no pass."""
    maximum_logprob_gap: PositiveFloat | None = 0.5
    """Training fails if the log-probabilities of sampler and training differ by more on average, in
    nats per token, because another policy has answered. None: no limit."""
    sampler_correction: SamplerCorrectionConfig | Literal["auto"] | None = "auto"
    """Weights for responses whose sampler is not the policy that trains. auto: the default values,
    with the level of `importance`, if generator is vllm or a class of yours, or the actor's
    precision is not fp32. None: none."""
    advantage: Annotated[str, ADVANTAGE] = "gae"
    """Advantage estimator (docs/ppo.md has formulas and sources): gae with a critic; rloo, grpo,
    gdpo, reinforce, reinforce++ or reinforce++-baseline without one; or a function of yours
    (docs/extending.md), which has a critic if it reads `values`."""
    equal_groups: Literal["keep", "drop", "resample"] = "keep"
    """What happens to a prompt whose responses all have equal scores, for an advantage that
    compares them. drop: no loss counts them, not even their KL penalty; resample: others replace
    them (dynamic sampling, Yu et al. 2025)."""
    maximum_resamples: PositiveInt = 10
    """With `equal_groups: resample`: further rounds, before what is equal counts as with drop."""
    curriculum: CurriculumConfig | None = None
    """Prompts to leave out because they were always or never solved. None: all come again."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """grpo only: the standard deviation that divides scores. group: that of the prompt's responses;
    batch: that of all responses of the step; none: 1, as in Dr. GRPO."""
    reinforce_baseline: Literal["batch_mean", "none"] = "batch_mean"
    """reinforce only: baseline subtracted from a response's return."""
    sampling: SamplingConfig = SamplingConfig()
    kl: KLConfig = KLConfig()
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount factor; 1 as in InstructGPT."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """GAE's lambda: 0 relies on the critic, 1 on the observed rewards."""
    value_lam: float | None = Field(default=None, ge=0, le=1)
    """Lambda of the critic's returns; 1 suits long responses (Yue et al. 2025). None: `lam`."""
    policy_loss: Annotated[str, POLICY_LOSS] = "clip"
    """Loss of the actor: clip, PPO's clipped surrogate objective; cispo, which clips importance
    weights from above only (MiniMax 2025); or a function of yours (docs/extending.md)."""
    importance: Literal["token", "sequence"] = "token"
    """Ratio of new to old policy. token: that of each token; sequence: the geometric mean over the
    response (GSPO, Zheng et al. 2025), for `clip_range: 3e-4` and `denominator: sequences`."""
    clip_range: PositiveFloat = 0.2
    """Clip range of policy ratios around 1."""
    clip_range_high: PositiveFloat | None = None
    """Clip range upwards; 0.28 keeps rare tokens alive (Yu et al. 2025). None: `clip_range`."""
    denominator: Literal["tokens", "sequences", "constant"] = "tokens"
    """What divides the sum of the actor's losses. tokens: all tokens, as in DAPO; sequences: the
    tokens of each response, then the responses, as in GRPO's paper; constant: responses times
    `sampling.max_response_tokens` (Dr. GRPO, Liu et al. 2025)."""
    truncated: Literal["score", "mask"] = "score"
    """Whether a response that was cut trains: score, with its score; mask, no loss counts it."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus: the policy's mean entropy per token. Usually 0 in RLHF."""
    ptx: PtxConfig | None = None
    value_clip_range: PositiveFloat | None = 0.2
    """Clip range of new values around the old ones. None: no clipping."""
    score_clip: PositiveFloat | None = 5.0
    """Clip range of a reward model's centred scores around 0, as in DeepSpeed-Chat. The scores of
    functions are not clipped. None: no clipping."""
    missing_eos_penalty: NonNegativeFloat = 1.0
    """Subtracted from the score of a response that was cut (TRL's name). 0: no penalty."""
    overlong_penalty: NonNegativeFloat = 0.0
    """Subtracted from the score of a response of `sampling.max_response_tokens`; it grows from 0
    over the last `overlong_buffer` tokens (DAPO)."""
    overlong_buffer: PositiveInt = 128
    """Tokens over which `overlong_penalty` grows."""
    whiten_rewards: bool = False
    """gae only: scale the per-token rewards of a step to variance 1 (Huang et al. 2024)."""
    actor: TrainedModelConfig
    """The policy in training. It starts from the SFT model."""
    critic: CriticConfig | None = None
    hybrid: HybridConfig = HybridConfig()
    generator: Annotated[str, PPO_GENERATOR] = Field(default="auto", validate_default=True)
    """Program that samples responses. transformers: the actor itself; hybrid: a copy, sharded over
    `hybrid.inference_tp_size` ranks; vllm: a copy in vLLM, split likewise; auto: hybrid if that
    size is above 1, else vllm where it is installed and there is a GPU, else transformers
    (docs/scaling.md); or a class of yours (docs/extending.md)."""
    gather_for_generation: bool = True
    """At ZeRO stage 3: gather all weights of the actor for each batch, which every GPU needs memory
    for. False: gather each layer at every token, which is much slower."""
    offload_during_rollout: bool = operational(False)
    """While a GPU samples, keep in main memory: optimizer states, fp32 weights and `ema` of the
    actor, all of critic, reference and trained reward model."""
    critic_warmup_steps: int = Field(default=0, ge=0)
    """gae only: number of first steps that train only the critic."""
    ema: EMAConfig | None = None
    reference: FrozenModelConfig = FrozenModelConfig()
    """The frozen SFT model that the KL refers to; with LoRA without `train_rest`, the actor
    itself."""
    reward_model: FrozenModelConfig = FrozenModelConfig()
    """The frozen reward model."""
    rewards: Rewards = (TrainedReward(),)
    """Sources of a response's score, which is the sum of weight * (score - mean)."""
    evaluations: PositiveInt = 5
    """Number of evenly spaced evaluations on held-out prompts, the last one after the last step.
    The exported model has the highest score minus `kl.coef` times KL within `kl.maximum`."""
    evaluation_prompts: PositiveInt = 256
    """Maximum number of held-out prompts per evaluation; every rank gets equally many."""

    @property
    def reward_model_companion(self) -> TrainedModelConfig:
        """The model in training whose ZeRO stage and precision the reward model follows."""
        return self.critic or self.actor

    def models(self) -> list[StageModel]:
        """The models that the stage loads; the first one is exported."""
        averaged = self.ema is not None
        actor = TrainedModel(f"{self.stage}.actor", self.actor, averaged=averaged)
        found: list[StageModel] = [actor]
        if self.has_teacher or not self.actor.is_own_reference:
            frozen = self.reference.beside(self.actor.deepspeed)
            found.append(FrozenModel(f"{self.stage}.reference", frozen))
        if self.critic is not None:
            found.append(TrainedModel(f"{self.stage}.critic", self.critic, scalar=True))
        if uses_trained(self.rewards):
            frozen = self.reward_model.beside(self.reward_model_companion.deepspeed)
            found.append(FrozenModel(f"{self.stage}.reward_model", frozen, scalar=True))
        return found

    @property
    def responses_per_step(self) -> int:
        return self.rollout_batches * self.rollout_batch_size

    @property
    def prompts_per_step(self) -> int:
        return self.responses_per_step // self.responses_per_prompt

    @property
    def updates_per_epoch(self) -> int:
        return self.responses_per_step // self.minibatch_size

    @property
    def logprobs_in_update(self) -> bool:
        """Whether nothing reads the log-probabilities of the policy that sampled before its only
        update on the rollout. The update's own forward pass computes them then."""
        return (
            self.ppo_epochs * self.updates_per_epoch == 1
            and (self.kl.place, self.old_logprobs) == ("loss", "recompute")
            and (self.equal_groups, self.truncated) == ("keep", "score")  # all rows are in it
            and not (self.critic or self.has_teacher or self.critic_warmup_steps)
            and not any(reads_scored(reward) for reward in self.rewards)
        )

    @field_validator("minibatch_size")
    @classmethod
    def _whole_step(cls, size: int | None, info: ValidationInfo) -> int | None:
        if size is not None or "rollout_batch_size" not in info.data:  # another fault
            return size
        return int(info.data["rollout_batch_size"] * info.data.get("rollout_batches", 1))

    @field_validator("generator")
    @classmethod
    def _chosen(cls, generator: str, info: ValidationInfo) -> str:
        hybrid = info.data.get("hybrid")
        shares = generator == "auto" and hybrid and hybrid.inference_tp_size > 1
        return "hybrid" if shares else generator

    @property
    def correction(self) -> SamplerCorrectionConfig | None:
        """The weights that `sampler_correction` stands for."""
        if self.sampler_correction != "auto":
            return self.sampler_correction
        exact = self.generator in _BY_ACTOR and self.actor.deepspeed.precision == "fp32"
        if exact or self.old_logprobs == "rollout":
            return None
        return SamplerCorrectionConfig(level=self.importance)

    def _faults(self) -> Iterator[str]:
        if self.responses_per_step % self.minibatch_size:
            batches = f"{self.rollout_batches} * " if self.rollout_batches > 1 else ""
            whole = f"{batches}rollout_batch_size {self.rollout_batch_size}"
            fix = "set it to null, which is all responses of a step"
            yield self._fault("minibatch_size", f"a divisor of {whole}", fix)
        size, group = self.rollout_batch_size, self.responses_per_prompt
        if size % group and "responses_per_prompt" not in self.model_fields_set:
            fix = f"use {nearest(size, range(group, size + 2 * group, group))}"
            expected = f"a multiple of responses_per_prompt {group}"
            yield self._fault("rollout_batch_size", expected, fix)
        elif size % group:
            fix = f"use {nearest(group, (n for n in range(1, size + 1) if size % n == 0))}"
            expected = f"a divisor of rollout_batch_size {size}"
            yield self._fault("responses_per_prompt", expected, fix)
        # None are known of a distillation, and where the source does not tell.
        asked = () if self.has_teacher else parameters(ADVANTAGE.place(self.advantage))
        if "values" in asked and self.critic is None:
            yield (
                f"critic: found none, expected a block for advantage {self.advantage}. "
                "Fix: add the block, or set advantage to rloo, grpo or reinforce"
            )
        if asked and "values" not in asked and self.critic is not None:
            expected = f"none for advantage {self.advantage}"
            yield self._fault("critic", expected, "set critic to null")
        if self.advantage in _OF_GROUPS and self.responses_per_prompt < 2:
            compares = f"advantage {self.advantage}, which compares the responses to one prompt"
            yield self._fault("responses_per_prompt", f"2 or more for {compares}")
        for name, advantages in ADVANTAGE_OF.items() if self.advantage in ADVANTAGE.builtin else ():
            default = type(self).model_fields[name].default
            if self.advantage not in advantages and getattr(self, name) != default:
                why = f"only advantage {' or '.join(advantages)} reads it"
                yield self._fault(name, f"the default {default}: {why}", f"remove {name}")
        for name, off in {"equal_groups": "keep", "curriculum": None}.items():
            if getattr(self, name) != off and self.responses_per_prompt < 2:
                expected = f"2 or more for {name}, which compares the responses to one prompt"
                yield self._fault("responses_per_prompt", expected, f"raise it, or remove {name}")
        yield from self._score_and_loss_faults()
        if self.generator == "vllm":
            yield from self.refused_by_vllm()
        if not self.has_teacher:
            yield from self.reference.faults_as_reference(self.actor)
        if self.critic_warmup_steps >= self.steps:
            expected = f"less than steps {self.steps}, so that the actor trains"
            yield self._fault("critic_warmup_steps", expected)
        if self.kl.target is not None and self.kl.horizon <= 0.2 * self.responses_per_step:
            expected = f"more than a fifth of the {self.responses_per_step} responses of a step"
            yield self._fault("kl.horizon", expected)

    def _score_and_loss_faults(self) -> Iterator[str]:
        if self.importance == "sequence" and self.advantage in _OF_TOKENS:
            differ = "whose advantages differ within a response"
            expected = f"token for advantage {self.advantage}, {differ}"
            yield self._fault("importance", expected, "remove importance")
        if self.overlong_buffer > self.sampling.max_response_tokens and self.overlong_penalty:
            most = f"at most sampling.max_response_tokens {self.sampling.max_response_tokens}"
            yield self._fault("overlong_buffer", most, "lower it")
        if isinstance(self.sampler_correction, Block) and self.old_logprobs == "rollout":
            expected = "null for old_logprobs rollout, whose ratios contain the correction"
            yield self._fault("sampler_correction", expected, "remove sampler_correction")
        of_tokens = self.correction is not None and self.correction.level == "token"
        if of_tokens and self.importance == "sequence":
            expected = "sequence for importance sequence, which weighs whole responses"
            yield self._fault("sampler_correction.level", expected, "set it to sequence")

    def refused_by_vllm(self) -> Iterator[str]:
        """Why vLLM cannot sample with these parameters."""
        if not self.gather_for_generation:
            yield (
                "gather_for_generation: found false, expected true for generator vllm, whose "
                "batches differ between ranks"
            )
        lora = self.actor.lora
        if lora is not None and lora.quantize is not None:
            expected = "null for generator vllm, which adds the adapters to the matrices"
            yield self._fault("actor.lora.quantize", expected)


_BY_ACTOR = ("auto", "transformers", "hybrid")
"""Generators that compute as training does. See `pipelines.ppo.with_generator` for `auto`."""
_OF_GROUPS = ("rloo", "grpo", "gdpo", "reinforce++-baseline")
_OF_TOKENS = ("gae", "reinforce++")
_GAE_ONLY = ("lam", "value_lam", "value_clip_range", "whiten_rewards", "critic_warmup_steps")
ADVANTAGE_OF = {
    "gamma": ("gae", "reinforce++"),
    **dict.fromkeys(_GAE_ONLY, ("gae",)),
    "scale_rewards": ("grpo",),
    "reinforce_baseline": ("reinforce",),
    "equal_groups": _OF_GROUPS,
}
"""Fields that only some advantage estimators read."""
