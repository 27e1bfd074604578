"""Supervised fine-tuning and reward modelling, and the blocks that they share with PPO and DPO."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from rlhf_pipeline.config.block import Block, operational

Precision = Literal["fp32", "bf16", "fp16"]
Quantization = Literal["nf4"]


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
            raise ValueError(
                "offload_optimizer has no effect at zero_stage 0; use zero_stage 1 or higher"
            )
        if self.zero_stage != 3 and self.offload_parameters:
            raise ValueError(
                f"offload_parameters has no effect at zero_stage {self.zero_stage}; use zero_stage 3"
            )
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


class LoRAConfig(Block):
    """Low-rank adapters (Hu et al. 2021) beside linear layers whose own weights are frozen: W x + (alpha / rank) B A x.

    There is no dropout: no forward pass is random. Adapters want a learning rate some ten times that of whole models.
    """

    rank: PositiveInt = 16
    """Width of the adapters: an (out, in) matrix gets rank * (in + out) weights."""

    alpha: PositiveFloat = 32.0
    """Scale: what an adapter adds is multiplied by alpha / rank."""

    target_modules: Literal["all-linear"] | list[str] = Field(default="all-linear", min_length=1)
    """Layers with an adapter, by the last parts of their names (q_proj, v_proj); all-linear: every one but the language
    model's or the reward model's head."""

    train_rest: bool = False
    """Train what has no adapter, too: embeddings, norms, biases, as DeepSpeed-Chat without `only_optimize_lora`. The scalar
    head of a reward model or critic trains in any case."""

    quantize: Quantization | None = None
    """nf4: keep the frozen matrices in 4 bits (Dettmers et al. 2023). Needs a GPU and the extra `quantization`. The export
    adds the adapters to the weights as they were before. None: in `deepspeed.precision`."""

    @model_validator(mode="after")
    def _frozen_if_quantized(self) -> Self:
        if self.quantize is not None and self.train_rest:
            raise ValueError(
                f"quantize {self.quantize} freezes what train_rest would train; choose one of them"
            )
        return self


class TrainedModelConfig(Block):
    """One model that trains: its optimizer and its place in DeepSpeed."""

    optimizer: OptimizerConfig
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()

    lora: LoRAConfig | None = None
    """Train low-rank adapters in place of the weights. None: the weights."""

    gradient_checkpointing: bool = False
    """Keep one activation a layer and compute the others again in the backward pass: less memory, about a third more time."""

    @property
    def keeps_its_start(self) -> bool:
        """Whether the model with its adapters off is what it was at the start: it then is its own reference."""
        return self.lora is not None and not self.lora.train_rest

    @model_validator(mode="after")
    def _quantized_whole(self) -> Self:
        if (
            self.lora is not None
            and self.lora.quantize is not None
            and self.deepspeed.zero_stage == 3
        ):
            raise ValueError(
                f"lora.quantize {self.lora.quantize} cannot be sharded; use deepspeed.zero_stage 2 or lower"
            )
        return self


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
            raise ValueError(
                f"{name}.deepspeed.offload_parameters has no effect at zero_stage 0; set zero_stage to 3"
            )

    def require_effect(self, name: str, trained: TrainedModelConfig) -> None:
        """Raise `ValueError` if this block says something and `trained` is its own reference; `name` is this block."""
        if trained.keeps_its_start and self != FrozenModelConfig():
            raise ValueError(
                f"{name} has no effect beside LoRA: the reference is the trained model with its adapters off, in its precision "
                f"and sharded as it is; leave {name} out, or set lora.train_rest to true for a reference of its own"
            )


class SavingConfig(Block):
    """How often a training stage writes, and what it keeps in its work directory; no part of its recipe."""

    log_every: PositiveInt = operational(1)
    """Steps between two lines of metrics."""

    checkpoint_every: PositiveInt | None = operational(None)
    """Steps between two checkpoints to go on from, at each evaluation in any case. None: only there."""

    keep_last: PositiveInt = operational(2)
    """Checkpoints to go on from that are kept until the stage is finished: the newest, and some to fall back on."""

    keep_best: PositiveInt = operational(1)
    """Evaluated models that are kept. The best of them is exported."""

    def checkpoint_due(self, step: int) -> bool:
        """Whether `checkpoint_every` asks for a checkpoint after this step."""
        return self.checkpoint_every is not None and step % self.checkpoint_every == 0


class SupervisedConfig(SavingConfig, TrainedModelConfig):
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


class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning: next-token loss on the demonstrations' responses. Best = lowest held-out perplexity."""


class RewardModelConfig(SupervisedConfig):
    """Reward modelling: Bradley-Terry loss on pairs of answers. Best = lowest held-out loss."""
