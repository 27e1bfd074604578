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
    """The place in DeepSpeed of one model that trains."""

    zero_stage: Literal[0, 1, 2, 3] = 1
    """ZeRO stage: 0 replicates everything, 1 shards optimizer states over the ranks, 2 gradients as well, 3 weights too."""

    precision: Precision = "fp32"
    """Weights and activations; the optimizer keeps fp32 master weights in any case. fp16 needs a GPU."""

    offload_optimizer: bool = False
    """Keep optimizer states in main memory and step on the CPU; from stage 1 on. On a GPU this takes DeepSpeed's CPU
    Adam, which is compiled at its first use and needs a C++ compiler."""

    offload_parameters: bool = False
    """Keep weights in main memory and fetch each layer's for its turn; stage 3 only."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.zero_stage == 0 and self.precision != "fp32":
            raise ValueError(
                f"zero_stage 0 with precision {self.precision} takes a spurious first Adam step in DeepSpeed; use zero_stage 1"
            )
        if self.zero_stage == 0 and self.offload_optimizer:
            raise ValueError("offload_optimizer has no effect at zero_stage 0; use zero_stage 1 or higher")
        if self.zero_stage != 3 and self.offload_parameters:
            raise ValueError(f"offload_parameters has no effect at zero_stage {self.zero_stage}; use zero_stage 3")
        return self


class FrozenDeepSpeedConfig(Block):
    """The place in DeepSpeed of one model that only infers. It has weights alone, so there are two ways to hold them."""

    zero_stage: Literal[0, 3] | None = None
    """0: whole on every rank, without a DeepSpeed engine; 3: sharded over the ranks. None: 3 where the model that it
    accompanies is at 3, else 0. The reference accompanies the actor, the reward model the critic."""

    precision: Precision = "fp32"
    """Weights and activations. fp16 needs a GPU."""

    offload_parameters: bool = False
    """Keep weights in main memory and fetch each layer's for its turn; stage 3 only."""


class TrainedModelConfig(Block):
    """One model that trains: its optimizer and its place in DeepSpeed."""

    optimizer: OptimizerConfig
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()

    gradient_checkpointing: bool = False
    """Keep one activation a layer and compute the others again in the backward pass: less memory, about a third more time."""


class FrozenModelConfig(Block):
    """One model that only infers."""

    deepspeed: FrozenDeepSpeedConfig = FrozenDeepSpeedConfig()

    def zero_stage(self, accompanied: TrainedModelConfig | None) -> Literal[0, 3]:
        """The ZeRO stage as configured, or by the rule; `accompanied` is the model in training that it goes with."""
        if self.deepspeed.zero_stage is not None:
            return self.deepspeed.zero_stage
        return 3 if accompanied is not None and accompanied.deepspeed.zero_stage == 3 else 0

    def require_offload_possible(self, name: str, accompanied: TrainedModelConfig | None) -> None:
        """Raise `ValueError` if weights that are whole on every rank are to be offloaded; `name` is this model's block."""
        if self.deepspeed.offload_parameters and self.zero_stage(accompanied) != 3:
            raise ValueError(f"{name}.deepspeed.offload_parameters has no effect at zero_stage 0; set zero_stage to 3")


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

    checkpoint_every: PositiveInt | None = operational(None)
    """Optimizer steps between two checkpoints to go on from, at each evaluation in any case. None: only there."""


class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning: next-token loss on the demonstrations' responses. Best = lowest held-out perplexity."""


class RewardModelConfig(SupervisedConfig):
    """Reward modelling: Bradley-Terry loss on pairs of answers. Best = lowest held-out loss."""
