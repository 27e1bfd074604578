"""The kinds of PPO without a critic: GRPO, and distillation from a teacher."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import BeforeValidator, NonNegativeFloat, PositiveFloat, PositiveInt

from rlhf_pipeline.config.base_model import BaseModelConfig
from rlhf_pipeline.config.doors import ADVANTAGE
from rlhf_pipeline.config.ppo import ADVANTAGE_OF, PPOConfig
from rlhf_pipeline.config.ppo_blocks import KLConfig
from rlhf_pipeline.config.rewards import Reward
from rlhf_pipeline.config.training import (
    FrozenModelConfig,
    MicroBatchTokens,
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
    minibatch_size: PositiveInt = 64
    """Responses per optimizer step, over all ranks; must divide the responses of a step."""
    micro_batch_tokens: MicroBatchTokens = 2048
    """As in `sft.micro_batch_tokens`."""
    advantage: Annotated[str, ADVANTAGE] = "grpo"
    """Advantage estimator, as in `ppo.advantage`: any without a critic, or a function of yours."""
    sampling: SamplingConfig = SamplingConfig(max_response_tokens=256)
    """How responses are sampled."""
    kl: KLConfig = KLConfig(coef=0.04, place="loss")
    """KL constraint to the reference."""
    missing_eos_penalty: NonNegativeFloat = 0.0
    """Subtracted from the score of a response that was cut."""
    actor: TrainedModelConfig = TrainedModelConfig(optimizer=OptimizerConfig(learning_rate=1e-6))
    """The policy in training. It starts from the SFT model, or without SFT from the base model."""


UNUSED = (
    *("advantage", "rewards", "reward_model", "curriculum"),
    *("score_clip", "missing_eos_penalty", "overlong_penalty"),
)
"""Fields of PPO that shape scores, of which a distillation has none."""


class TeacherConfig(BaseModelConfig):
    """The model to learn from, its `path` alone or fields of `base_model`. It needs the tokenizer,
    the chat template and the end tokens of the student."""

    path: str
    """A Hugging Face id or a local folder."""
    architecture: None = None
    """A teacher has weights."""
    vocab_size: None = None
    """A teacher has a tokenizer."""


class TeacherKLConfig(KLConfig):
    """The reverse KL to the teacher, which a distillation minimizes; see `ppo.kl`."""

    unused = ("place", "target", "horizon", "maximum")

    coef: PositiveFloat = 1.0
    """Factor of the advantages; it weighs the KL against `ptx` and `entropy_coef`."""
    explosion: PositiveFloat | None = None
    """KL above which training has diverged. None: no limit, since the student starts far away."""

    def _faults(self) -> Iterator[str]:
        for name in self.unused:
            if getattr(self, name) != type(self).model_fields[name].default:
                why = "a distillation minimizes the KL to the teacher, and holds it nowhere"
                yield self._fault(name, f"none: {why}", f"remove {name}")


class DistillConfig(PPOConfig):
    """On-policy distillation: the program of PPO with a teacher in place of rewards and critic.

        A_t = kl.coef * (log p_teacher(y_t | x, y_<t) - log p_student(y_t | x, y_<t))

    The student samples the response y to the prompt x. Each token answers for its own reverse KL
    alone, a discount of 0; advantages are not whitened.

    Source: Thinking Machines Lab 2025, https://thinkingmachines.ai/blog/on-policy-distillation,
    whose recipe has these numbers of steps and this learning rate. The reverse KL on own samples is
    also that of GKD (Agarwal et al. 2023) and MiniLLM (Gu et al. 2023), without their mixtures.
    """

    stage = sampler = "distill"
    has_teacher = True
    unused = ("critic", *ADVANTAGE_OF, *UNUSED)

    teacher: Annotated[
        TeacherConfig, BeforeValidator(lambda x: {"path": x} if isinstance(x, str) else x)
    ]
    """The model to learn from, which may be larger than the student."""
    steps: PositiveInt = 100
    """Number of steps, each on `rollout_batches` * `rollout_batch_size` responses."""
    rollout_batch_size: PositiveInt = 64
    """Responses per generated batch, over all ranks."""
    minibatch_size: PositiveInt = 64
    """Responses per optimizer step, over all ranks; must divide the responses of a step."""
    micro_batch_tokens: MicroBatchTokens = 2048
    """As in `sft.micro_batch_tokens`."""
    advantage: Annotated[str, ADVANTAGE] = "immediate"
    """immediate: the advantage of a token is its own reverse KL. Another value is refused."""
    rewards: tuple[Reward, ...] = ()
    """None: the teacher alone says what is good."""
    missing_eos_penalty: NonNegativeFloat = 0.0
    """None: the teacher's probability of EOS counts."""
    sampling: SamplingConfig = SamplingConfig(max_response_tokens=256)
    """How responses are sampled; the temperature is also that of the teacher."""
    kl: TeacherKLConfig = TeacherKLConfig()
    """The reverse KL to the teacher."""
    actor: TrainedModelConfig = TrainedModelConfig(optimizer=OptimizerConfig(learning_rate=5e-5))
    """The student. It starts from the SFT model, or without SFT from the base model."""
    reference: FrozenModelConfig = FrozenModelConfig()
    """How the frozen teacher is loaded, also beside LoRA."""

    def _faults(self) -> Iterator[str]:
        for name in UNUSED:
            if getattr(self, name) != type(self).model_fields[name].default:
                yield (
                    f"{name}: found a value, expected none: the teacher alone says what is good. "
                    f"Fix: remove {name}"
                )
        yield from super()._faults()
