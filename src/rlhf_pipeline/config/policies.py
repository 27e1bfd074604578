"""The kinds of PPO without a critic: GRPO, and distillation from a teacher; and all kinds."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from rlhf_pipeline.config.base_model import BaseModelConfig
from rlhf_pipeline.config.doors import ADVANTAGE
from rlhf_pipeline.config.ppo import ADVANTAGE_OF, KLConfig, PPOConfig
from rlhf_pipeline.config.rewards import Reward
from rlhf_pipeline.config.training import (
    FrozenModelConfig,
    OptimizerConfig,
    SamplingConfig,
    TrainedModelConfig,
)


class GRPOConfig(PPOConfig):
    """Group relative policy optimization (Shao et al. 2024): the program of PPO without a critic,
    with the learning rate, KL and single update of DeepSeekMath (section 4.2), and TRL's 8
    responses."""

    stage = sampler = "grpo"
    unused = ("critic", *(name for name, readers in ADVANTAGE_OF.items() if readers == ("gae",)))

    steps: PositiveInt = 500
    """Number of steps, each on `rollout_batches` * `rollout_batch_size` responses."""
    rollout_batch_size: PositiveInt = 64
    """Responses per generated batch, over all ranks: those to 8 prompts."""
    responses_per_prompt: PositiveInt = 8
    """Independent responses to each prompt; must divide `rollout_batch_size`."""
    advantage: Annotated[str, ADVANTAGE] = "grpo"
    """Advantage estimator, as in `ppo.advantage`: any without a critic, or a function of yours."""
    sampling: SamplingConfig = SamplingConfig(max_response_tokens=256)
    kl: KLConfig = KLConfig(coef=0.04, place="loss")
    missing_eos_penalty: NonNegativeFloat = 0.0
    """Subtracted from the score of a response that was cut."""
    actor: TrainedModelConfig = TrainedModelConfig(optimizer=OptimizerConfig(learning_rate=1e-6))
    """The policy in training. It starts from the SFT model, or without SFT from the base model."""


class TeacherConfig(BaseModelConfig):
    """The model to learn from, its `path` alone or fields of `base_model`. It needs the tokenizer,
    the chat template and the end tokens of the student."""

    path: str
    """A Hugging Face id or a local folder."""
    architecture: None = None  # a teacher has weights
    vocab_size: None = None  # and a tokenizer


class TeacherKLConfig(KLConfig):
    """The divergence from the teacher, which a distillation minimizes; see `ppo.kl`."""

    unused = ("place", "target", "horizon", "maximum")

    coef: PositiveFloat = 1.0
    """Factor of the divergence, which weighs it against `ptx` and `entropy_coef`."""
    explosion: PositiveFloat | None = None
    """KL above which training has diverged. None: no limit, since the student starts far away."""

    def _faults(self) -> Iterator[str]:
        yield from self._given_but_unused("a distillation minimizes the KL to the teacher alone")


class DistillConfig(PPOConfig):
    """On-policy distillation: the program of PPO with a teacher in place of rewards and critic.

    The student samples responses, and at each of their tokens its next-token distribution moves to
    the teacher's: the loss is the mean of `rl.logprobs.divergence`, over whole vocabularies.

    Source: GKD, Agarwal et al. 2024, https://arxiv.org/abs/2306.13649. The numbers of steps and the
    learning rate are those of Thinking Machines Lab 2025,
    https://thinkingmachines.ai/blog/on-policy-distillation.
    """

    stage = sampler = "distill"
    has_teacher = True
    unused = (  # what shapes scores, advantages and ratios, of which a distillation has none
        *("advantage", *ADVANTAGE_OF, "critic", "rewards", "reward_model", "curriculum"),
        *("score_clip", "missing_eos_penalty", "overlong_penalty", "old_logprobs"),
        *("policy_loss", "importance", "clip_range", "clip_range_high", "sampler_correction"),
    )

    teacher: Annotated[
        TeacherConfig, BeforeValidator(lambda x: {"path": x} if isinstance(x, str) else x)
    ]
    """The model to learn from, which may be larger than the student."""
    beta: float = Field(default=1.0, ge=0, le=1)
    """The divergence. 1: reverse KL, which selects among what the student says; 0: forward KL,
    which covers what the teacher says; between them: generalized Jensen-Shannon divergence."""
    top_k: PositiveInt | None = None
    """The teacher's likeliest tokens that are compared one by one, and all others as one, which
    ignores differences in the tail of a large vocabulary. None: all tokens one by one."""
    given_batch_size: NonNegativeInt = 0
    """Demonstrations of the phase `sft` in each optimizer step beside `minibatch_size` own
    responses, over all ranks. GKD's lambda is the share of own responses."""
    steps: PositiveInt = 100
    """Number of steps, each on `rollout_batches` * `rollout_batch_size` responses."""
    rollout_batch_size: PositiveInt = 64
    """Responses per generated batch, over all ranks."""
    advantage: str = "none"  # the loss is a divergence
    old_logprobs: Literal["recompute", "rollout"] = "rollout"  # only metrics read them
    rewards: tuple[Reward, ...] = ()  # the teacher alone says what is good
    missing_eos_penalty: NonNegativeFloat = 0.0  # the teacher's probability of EOS counts
    sampling: SamplingConfig = SamplingConfig(max_response_tokens=256)
    """How responses are sampled; the temperature is also that of the teacher."""
    kl: TeacherKLConfig = TeacherKLConfig()
    actor: TrainedModelConfig = TrainedModelConfig(optimizer=OptimizerConfig(learning_rate=5e-5))
    """The student. It starts from the SFT model, or without SFT from the base model."""
    reference: FrozenModelConfig = FrozenModelConfig()
    """How the frozen teacher is loaded, also beside LoRA."""

    def _faults(self) -> Iterator[str]:
        yield from self._given_but_unused("a distillation has neither scores nor advantages")
        yield from super()._faults()


POLICIES: Mapping[str, type[PPOConfig]] = {
    "ppo": PPOConfig,
    "grpo": GRPOConfig,
    "distill": DistillConfig,
}
"""The blocks of the stages that run the program of PPO."""
