"""Policies that train on their own answers: what they sample, and how often."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from rlhf_pipeline.config.block import Block
from rlhf_pipeline.config.evaluate import AnsweringConfig, EvaluateConfig
from rlhf_pipeline.config.rewards import Rewards, TrainedReward, uses_trained
from rlhf_pipeline.config.training import (
    OptimizerConfig,
    SamplingConfig,
    SFTConfig,
    SupervisedConfig,
)

Kind = Literal["demonstrations", "comparisons"]
"""Rows of SFT: the best answer to a prompt. Rows of DPO: the best and the worst."""


class TableConfig(Block):
    """The rows that stage `sample` writes, and a policy trains on. The pipeline sets this block,
    not the user."""

    kind: Kind
    round: PositiveInt
    """Each round has prompts or random numbers of its own."""
    rewards: Rewards
    """Those that have chosen the answers."""


class SampleConfig(AnsweringConfig):
    """Answers of the present policy to the prompts of the phase `ppo`, and their scores."""

    n: int = Field(default=8, ge=2)
    """Answers to each prompt."""
    prompts: PositiveInt | None = None
    """Prompts of a round: the next ones in a random order, so that rounds have other prompts until
    all are used. None: all prompts in every round, with other random numbers."""
    validation_prompts: PositiveInt = 256
    """Largest number of held-out prompts, whose answers become the held-out rows."""
    rewards: Rewards = (TrainedReward(),)
    """Sources of an answer's score, which is the sum of weight * (score - mean), as in
    `ppo.rewards`. Reward models are in memory one after the other."""
    min_score: float | None = Field(default=None, allow_inf_nan=False)
    """A prompt whose best answer has a lower score leaves no row. With a true answer as the reward,
    1 keeps right answers alone. None: any best answer will do."""
    cut_answers: Literal["drop", "keep"] = "drop"
    """What to do with answers that were cut at `sampling.max_response_tokens`. drop: none is
    trained on, neither as the best nor as the worst answer, because a policy would learn not to
    end; keep: they are answers like the others."""
    sampling: SamplingConfig = SamplingConfig(max_response_tokens=256)
    """How answers are sampled."""

    def answering(self) -> EvaluateConfig:
        """How the answers are made, as the code of the evaluation reads it."""
        shared = {*AnsweringConfig.model_fields, "sampling"}
        return EvaluateConfig.model_validate(self.model_dump(include=shared))


class SampledConfig(Block):
    """Fields common to policies that train on their own answers."""

    stage: ClassVar[str]
    kind: ClassVar[Kind]
    trains: ClassVar[type[SupervisedConfig]]
    """The block that the program of its training reads."""

    rounds: PositiveInt
    """Times that the policy answers and trains. Round n is the same for any number of rounds, so
    more rounds continue those that are finished."""
    sample: SampleConfig = SampleConfig()
    """Prompts, answers and scores of each round."""

    @property
    def sampler(self) -> str:
        """The parameter with rewards and sampling."""
        return f"{self.stage}.sample"

    @property
    def rewards(self) -> Rewards:
        return self.sample.rewards

    @property
    def sampling(self) -> SamplingConfig:
        return self.sample.sampling

    @property
    def needs_reward_model(self) -> bool:
        """Whether the trained reward model is a reward."""
        return uses_trained(self.rewards)

    def training(self) -> SupervisedConfig:
        """The parameters of the training in each round."""
        return self.trains.model_validate(self.model_dump(include={*self.trains.model_fields}))

    def table(self, number: int) -> TableConfig:
        """The rows of a round."""
        return TableConfig(kind=self.kind, round=number, rewards=self.rewards)


class RejectionConfig(SampledConfig, SFTConfig):
    """Rejection sampling: SFT on the best of n own answers (RAFT, Dong et al. 2023; Llama 2).

    The learning values are those of `sft`. The best model has the lowest held-out perplexity.
    """

    stage = "rejection"
    kind = "demonstrations"
    trains = SFTConfig

    rounds: PositiveInt = 1
    """Times that the policy answers and trains. More than 1: RAFT, whose policy of a round answers
    in the next one. Finished rounds are reused when this is raised."""
    epochs: PositiveFloat = 1
    """Passes over the chosen answers of a round; fractions are allowed."""
    batch_size: PositiveInt = 32
    """Answers per optimizer step, over all ranks and micro batches."""
    micro_batch_tokens: PositiveInt = 2048
    """Largest number of tokens in a forward pass on each rank. A longer row is a forward pass of
    its own."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)


SAMPLED: Mapping[str, type[RejectionConfig]] = {kind.stage: kind for kind in (RejectionConfig,)}
"""The blocks of policies that train on their own answers."""
