"""Supervised fine-tuning and reward modelling, and the blocks that they share with PPO and DPO."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from rlhf_pipeline.config.block import Block, operational

Precision = Literal["fp32", "bf16", "fp16"]


class OptimizerConfig(Block):
    """AdamW and its learning-rate schedule."""

    learning_rate: PositiveFloat
    """Peak learning rate."""

    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up: cosine or linear to zero at the last step, or constant."""

    warmup_fraction: float = Field(default=0.03, ge=0, lt=1)
    """Share of all optimizer steps in which the learning rate rises linearly from zero."""

    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay; off in InstructGPT's and DeepSpeed-Chat's published settings."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Adam's moment decays; (0.9, 0.95) as in InstructGPT."""

    eps: PositiveFloat = 1e-8
    """Adam's denominator constant."""

    max_grad_norm: PositiveFloat = 1.0
    """Global gradient norm above which gradients are scaled down."""


class DeepSpeedConfig(Block):
    """One model's place in DeepSpeed."""

    zero_stage: Literal[0, 1, 2] = 1
    """ZeRO stage: 0 replicates everything, 1 shards optimizer states over the ranks, 2 gradients as well."""

    precision: Precision = "fp32"
    """Weights and activations; the optimizer keeps fp32 master weights in any case. fp16 needs a GPU."""


class TrainedModelConfig(Block):
    """One model that trains: its optimizer and its place in DeepSpeed."""

    optimizer: OptimizerConfig
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()

    @model_validator(mode="after")
    def _master_weights(self) -> Self:
        if self.deepspeed.zero_stage == 0 and self.deepspeed.precision != "fp32":
            raise ValueError(
                f"deepspeed.zero_stage 0 with precision {self.deepspeed.precision} takes a spurious first Adam step in "
                "DeepSpeed; use zero_stage 1"
            )
        return self


class FrozenModelConfig(Block):
    """One model that only infers. It takes no DeepSpeed engine: at stage 0 there is nothing to shard."""

    precision: Precision = "fp32"
    """Precision of the weights and activations."""


class SupervisedConfig(TrainedModelConfig):
    """What SFT, reward modelling and DPO have in common: passes over a fixed data set."""

    epochs: PositiveFloat
    """Passes over the training rows; fractions allowed."""

    batch_size: PositiveInt
    """Rows (SFT) or comparisons (reward model, DPO) in one optimizer step, over all ranks and accumulation steps."""

    micro_batch_size_per_gpu: PositiveInt
    """Rows or comparisons in one forward pass on one rank; gradient accumulation follows from it."""

    evaluations: PositiveInt = 4
    """Evaluations on the held-out rows, evenly spaced, the last one after the last step. The best checkpoint among them
    is exported."""

    log_every: PositiveInt = operational(1)
    """Optimizer steps between two lines of metrics."""


class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning: next-token loss on the demonstrations' responses. Best = lowest held-out perplexity."""


class RewardModelConfig(SupervisedConfig):
    """Reward modelling: Bradley-Terry loss on pairs of answers. Best = lowest held-out loss."""
