import re
from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from rlhf_pipeline.config.block import Block, operational
from rlhf_pipeline.config.judges import Judge
from rlhf_pipeline.config.precision import Precision
from rlhf_pipeline.config.rewards import CallableReward
from rlhf_pipeline.config.sampling import EvaluationSamplingConfig
from rlhf_pipeline.config.training import (
    DeepSpeedConfig,
    FrozenDeepSpeedConfig,
    FrozenModel,
    FrozenModelConfig,
)

REWARD_MODEL = "score"
"""Name of the judge that is the reward model; its scores are called `score`."""

GOLD = "gold"
"""Name of the judge that knows the true quality; its scores are called `gold_score`."""

CHAMPION = "champion"
"""Name of the registry's champion where it answers beside a candidate, and of its alias."""

JUDGE_PREFIX = "judges."
"""Inputs of the evaluation job: the source file of `evaluate.judges.0` is the input `judges.0`."""

TASK_PREFIX = "tasks."
"""Inputs of the evaluation job: the files of own tasks (`evaluate.tasks`)."""

SFT_ROWS = "sft_rows"
"""Input of the evaluation job: the rows of SFT, whose validation rows are held-out answers."""

_NAME = re.compile(r"[\w.-]+(?<!_lower)(?<!_upper)")


class TasksConfig(Block):
    """Tasks of the lm-evaluation-harness (the extra `tasks`) in the chat template of the policy."""

    names: tuple[str, ...] = Field(min_length=1)
    """Tasks, groups and tags of the harness, or files of your own tasks (FILE.yaml)."""
    limit: PositiveInt | None = None
    """Largest number of documents of each task, the first ones. None: all."""
    few_shot: NonNegativeInt | None = None
    """Solved examples before each question. None: as the task says. A task that
    has no examples gets none."""
    batch_size_per_gpu: PositiveInt = 8
    """Documents per forward pass on each rank."""

    @property
    def files(self) -> tuple[str, ...]:
        """The files among the names."""
        return tuple(name for name in self.names if name.endswith((".yaml", ".yml")))


class EvaluateConfig(Block):
    """Both policies answer the same held-out prompts with equal decoding."""

    prompts: PositiveInt = 512
    """Largest number of held-out prompts. The half width of the win rate's interval falls with the
    square root of this number: 512 prompts give 0.04."""
    answers_per_prompt: PositiveInt = 1
    """Answers of each policy to each prompt. Several narrow the intervals less than as many further
    prompts, because answers to one prompt resemble each other; intervals take this into account."""
    micro_batch_tokens: PositiveInt = 16384
    """Largest number of tokens in a forward pass on each rank when scoring."""
    sampling: EvaluationSamplingConfig = EvaluationSamplingConfig()
    """Decoding of both policies."""
    precision: Precision | None = None
    """Precision of all models. None: each model has the precision that it was saved in."""
    zero_stage: Literal[0, 3] | None = None
    """0: a whole copy of the model on every rank; 3: sharded over the ranks. None: 3 for a model
    that was trained at stage 3, else 0. One model at a time is in memory."""
    gather_for_generation: bool = operational(True)
    """With a policy at ZeRO stage 3: gather all its weights to answer, which needs memory for the
    whole model on every GPU. False: gather each layer at every token, which is much slower."""
    judges: tuple[Judge, ...] = ()
    """Further judges, see `config.judges`: Python functions (FILE.py:FUNCTION, or a block with
    `callable` and `name`; see `rlhf_pipeline.rollout.function_reward`), reward models, true answers
    and chat models. The first one that training has not optimized decides about a promotion. The
    reward model always judges; the gold score judges, and decides, if the source of every prompt
    has one."""
    best_of_n: int = Field(default=0, ge=0)
    """A power of two: for n = 1, 2, 4, ... up to this number, also report the best of n answers of
    SFT by the reward model, a bound for PPO. Costs that many answers of SFT to every prompt; those
    of `answers_per_prompt` are among them. 0: off."""
    tasks: TasksConfig | None = None
    """Benchmark tasks that each policy also solves. None: no tasks."""

    def models(self, trained: Sequence[DeepSpeedConfig]) -> list[FrozenModel]:
        """The models that the stage loads one after the other, as they were `trained`."""
        own = FrozenModelConfig(
            deepspeed=FrozenDeepSpeedConfig(zero_stage=self.zero_stage, precision=self.precision)
        )
        return [FrozenModel("evaluate", own.beside(companion)) for companion in trained]

    @property
    def baseline_draws(self) -> int:
        """Answers of the baseline to each prompt: the second is independent of the candidate's."""
        return 1 if self.sampling.temperature == 0 else max(2, self.answers_per_prompt)

    def _faults(self) -> Iterator[str]:
        if self.sampling.temperature == 0 and (self.answers_per_prompt > 1 or self.best_of_n):
            yield (
                f"found answers_per_prompt {self.answers_per_prompt} and best_of_n "
                f"{self.best_of_n}, expected 1 and 0 with sampling.temperature 0, which gives the "
                "same answer every time. Fix: set them so, or raise the temperature"
            )

    @field_validator("best_of_n")
    @classmethod
    def _check_power(cls, value: int) -> int:
        if value and (value == 1 or value & (value - 1)):
            raise ValueError(f"found {value}, expected 0, 2, 4, 8 or another power of two")
        return value

    @field_validator("judges")
    @classmethod
    def _check_judges(cls, judges: tuple[Judge, ...]) -> tuple[Judge, ...]:
        labels = [judge.label for judge in judges]
        for judge in judges:
            if isinstance(judge, CallableReward) and judge.weight != 1.0:
                raise ValueError(
                    f"found weight {judge.weight} of judge {judge.label}, expected none, because "
                    "judges are not summed. Fix: remove weight"
                )
            if not _NAME.fullmatch(judge.label):
                raise ValueError(
                    f"found judge {judge.label!r}, expected letters, digits, '.', '_' and '-', and "
                    "neither _lower nor _upper at the end. Fix: set name"
                )
            if judge.label in (REWARD_MODEL, GOLD) or labels.count(judge.label) > 1:
                raise ValueError(
                    f"found two judges called {judge.label!r}, expected unique names. Fix: set name"
                )
        return judges


class CandidateConfig(Block):
    """The policy compared with the SFT baseline. The pipeline sets this block, not the user."""

    name: str
    """Stage that trained the policy: "ppo" or "dpo"."""
