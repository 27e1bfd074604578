"""Policies that train on their own answers: what they sample, and how often."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field, PositiveInt

from rlhf_pipeline.config.block import Block
from rlhf_pipeline.config.episodes import EpisodesConfig
from rlhf_pipeline.config.evaluate import AnsweringConfig, EvaluateConfig
from rlhf_pipeline.config.preferences import DPOConfig
from rlhf_pipeline.config.rewards import ModelReward, SampleRewards, TrainedReward, name_faults
from rlhf_pipeline.config.training import OptimizerConfig, SamplingConfig, SFTConfig

Kind = Literal["demonstrations", "comparisons"]


class TableConfig(Block):
    """The rows that a policy trains on. The pipeline sets this block, not the user."""

    kind: Kind
    """The best answer to a prompt, for SFT; or the best and the worst, for DPO."""
    round: PositiveInt
    rewards: SampleRewards


class SampleConfig(AnsweringConfig):
    """Answers of the present policy to the prompts of the phase `ppo`, and their scores."""

    n: int = Field(default=8, ge=2)
    """Answers to each prompt."""
    prompts: PositiveInt | None = None
    """Prompts of a round, the next ones in a random order. None: all prompts in every round."""
    validation_prompts: PositiveInt = 256
    """Largest number of held-out prompts, whose answers become the held-out rows."""
    rewards: SampleRewards = (TrainedReward(),)
    """Sources of the score, the sum of weight * (score - mean), as in `ppo.rewards`. A chat model
    alone (`openai`) finds the best and the worst answer by knock-out, with about 3n/2 comparisons:
    1 for each win, -1 for each loss."""
    min_score: float | None = Field(default=None, allow_inf_nan=False)
    """A prompt whose best answer has a lower score leaves no row. None: any best answer will do."""
    cut_answers: Literal["drop", "keep"] = "drop"
    """drop: an answer that was cut at `sampling.max_response_tokens` is neither best nor worst,
    because the policy would learn not to end; keep: it is an answer like the others."""
    sampling: SamplingConfig = SamplingConfig(max_response_tokens=256)

    @property
    def answering(self) -> EvaluateConfig:
        """How an evaluation would answer, whose memory is the same."""
        shared = {*AnsweringConfig.model_fields, "sampling"}
        return EvaluateConfig.model_validate(self.model_dump(include=shared))

    def _faults(self) -> Iterator[str]:
        yield from (f"rewards: {fault}" for fault in name_faults(self.rewards))
        for index, reward in enumerate(self.rewards):
            if isinstance(reward, ModelReward) and reward.mean is not None:
                yield (
                    f"rewards.{index}.mean: found {reward.mean}, expected null: stage sample "
                    "subtracts the mean that is stored with the model"
                )


class SampledConfig(Block):
    """Fields common to policies that train on their own answers."""

    stage: ClassVar[str]
    sampler: ClassVar[str]
    kind: ClassVar[Kind]

    rounds: PositiveInt = 1
    """Times that the policy answers and trains. A later round continues an earlier one."""
    sample: SampleConfig = SampleConfig()

    @property
    def rewards(self) -> SampleRewards:
        return self.sample.rewards

    @property
    def sampling(self) -> SamplingConfig:
        return self.sample.sampling

    @property
    def episodes(self) -> EpisodesConfig:
        return self.sample.episodes


class RejectionConfig(SampledConfig, SFTConfig):
    """Rejection sampling: SFT on the best of n own answers (Llama 2; RAFT, Dong et al. 2023)."""

    stage, sampler = "rejection", "rejection.sample"
    kind = "demonstrations"

    batch_size: PositiveInt = 32
    """Answers per optimizer step, over all ranks and micro batches."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)


class IterativeDPOConfig(SampledConfig, DPOConfig):
    """Iterative DPO: in each round, DPO on the best and the worst of n own answers (Xu et al.
    2023), with the values of RLHF Workflow (Dong et al. 2024)."""

    stage, sampler = "iterative_dpo", "iterative_dpo.sample"
    kind = "comparisons"

    rounds: PositiveInt = 3
    """As in `rejection.rounds`."""
    fixed_reference: bool = False
    """Reference of the later rounds. True: the SFT model, as in RLHF Workflow and TRL's online DPO;
    False: the policy at the start of the round (Yuan et al. 2024)."""
    batch_size: PositiveInt = 64
    """Comparisons per optimizer step, over all ranks and micro batches."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-7)

    @property
    def loads_reference(self) -> bool:
        return super().loads_reference or (self.has_reference and self.fixed_reference)
