"""Supervised fine-tuning, reward modelling, and the blocks shared with DPO, KTO and PPO."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from rlhf_pipeline.config.base_model import BaseModelConfig
from rlhf_pipeline.config.block import Block, Kernels, Precision, Quantization, operational
from rlhf_pipeline.config.doors import REWARD_LOSS

BUCKET = 50_000_000
"""Elements in one collective: of gradients to reduce, or of weights to gather."""
LIVE = 1_000_000_000
"""Weights that a rank keeps whole at ZeRO-3, because the next pass uses them again."""
VLLM_PAGE, VLLM_BATCH = 128, 8192
"""Tokens of a page of keys and values, and at most in a forward pass, of the generator `vllm`."""

if TYPE_CHECKING:
    MicroBatchTokens = int  # programs get a number, see `checks.sized`
    MinibatchSize = int
else:
    MicroBatchTokens = PositiveInt | Literal["auto"]
    MinibatchSize = PositiveInt | None


class SamplingConfig(Block):
    """How responses are sampled. There is no top-k and no top-p: the log-probabilities of training
    could not follow them."""

    temperature: PositiveFloat = 1.0
    """Softmax temperature in sampling and in every log-probability."""
    max_response_tokens: PositiveInt = 64
    """Maximum length of a response; longer ones are cut."""
    batch_size_per_gpu: PositiveInt = 64
    """Prompts answered at once on each rank; limits the memory of the key-value cache."""


class HybridConfig(Block):
    """The copy of the actor that the generators `hybrid` and `vllm` sample from, split over ranks,
    as in DeepSpeed's Hybrid Engine."""

    inference_tp_size: PositiveInt = 1
    """Number of ranks that share a copy and answer together; must divide that of all ranks."""
    tp_gather_partition_size: PositiveInt = operational(8)
    """Number of layers whose weights are gathered at once."""
    pin_parameters: bool = operational(True)
    """Keep the memory of the copy between rollouts, else free it while the actor trains. vllm: the
    copy is freed on a GPU, and stays on a CPU."""


class OptimizerConfig(Block):
    """AdamW and its learning-rate schedule."""

    learning_rate: PositiveFloat
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Learning rate after the warm-up: decay to zero at the last step, or constant."""
    warmup_fraction: float = Field(default=0.03, ge=0, lt=1)
    """Fraction of all optimizer steps in which the learning rate rises linearly from zero."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of matrices and embeddings; norms and biases have none."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of Adam's moments; (0.9, 0.95) as in InstructGPT."""
    eps: PositiveFloat = 1e-8
    """Constant in Adam's denominator."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this global norm."""


class DeepSpeedConfig(Block):
    """DeepSpeed settings for one trainable model."""

    zero_stage: Literal[0, 1, 2, 3] = 1
    """ZeRO stage: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also weights."""
    precision: Precision = "fp32"
    """Precision of weights and activations beside fp32 master weights. Where nobody sets it, a run
    that is started beside GPUs of Ampere or newer takes bf16, unless zero_stage is 0."""
    accumulate: Literal["fp32", "bf16"] = "fp32"
    """Precision in which bf16 gradients of micro batches add up: fp32 takes 2 more bytes for each,
    bf16 loses what is below 2^-9 of the sum."""
    offload_optimizer: bool = False
    """Keep optimizer states in main memory and step on the CPU, for which DeepSpeed needs a C++
    compiler; requires stage 1 or higher."""
    offload_parameters: bool = False
    """Keep weights in main memory and fetch each layer when needed; requires stage 3."""
    kernels: Kernels | None = None
    """Fused kernels for norms, rotary embeddings and gated MLPs, which round in other places.
    liger: those of the extra `liger`, for a GPU; compile: those of torch.compile, below stage 3,
    for which torch needs a C++ compiler. None: torch's operators."""

    def _faults(self) -> Iterator[str]:
        if self.kernels == "compile" and self.zero_stage == 3:
            yield self._fault("kernels", "liger or null at zero_stage 3", "set zero_stage to 2")
        if self.accumulate == "bf16" and self.precision == "fp32":
            yield self._fault("accumulate", "fp32 with precision fp32", "leave it out")
        if self.zero_stage == 0 and self.precision == "bf16":
            yield (
                "precision: found bf16 at zero_stage 0, expected fp32: DeepSpeed takes a spurious "
                "first Adam step. Fix: set zero_stage to 1"
            )
        needs = ("offload_optimizer", 1, "1 or higher"), ("offload_parameters", 3, "3")
        for name, least, stages in needs:
            if getattr(self, name) and self.zero_stage < least:
                yield (
                    f"{name}: found true at zero_stage {self.zero_stage}, expected false: it has "
                    f"no effect. Fix: set zero_stage to {stages}"
                )


class FrozenDeepSpeedConfig(Block):
    """DeepSpeed settings for one frozen model."""

    zero_stage: Literal[0, 3] | None = None
    """0: a whole copy on every rank; 3: sharded over the ranks. None: 3 with `offload_parameters`,
    or if the companion in training (the actor, or for the reward model the critic) is at stage 3,
    else 0."""
    precision: Precision | None = None
    """Precision of weights and activations. None: that of the companion, so that the first KL to
    the reference is 0."""
    offload_parameters: bool = False
    """Keep weights in main memory and fetch each layer when needed, also on one GPU."""
    kernels: Kernels | None = None
    """Fused kernels. None: those of the companion. A sharded model is not compiled."""

    def _faults(self) -> Iterator[str]:
        if self.offload_parameters and self.zero_stage == 0:
            yield self._fault("zero_stage", "3 with offload_parameters", "set zero_stage to 3")


class LoRAConfig(Block):
    """Low-rank adapters (Hu et al. 2021) beside frozen linear layers: W x + (alpha / rank) B A x.
    They need about ten times the learning rate of whole models."""

    rank: PositiveInt = 16
    """Width of the adapters: an (out, in) matrix gets rank * (in + out) trainable weights."""
    alpha: PositiveFloat = 32.0
    """Scale: the output of an adapter is multiplied by alpha / rank."""
    target_modules: Literal["all-linear"] | list[str] = Field(default="all-linear", min_length=1)
    """Linear layers to adapt, by the last parts of their names (q_proj, v_proj). all-linear: all
    but the head of the language model or reward model."""
    train_rest: bool = False
    """Also train all parameters without an adapter (embeddings, norms, biases), like DeepSpeed-Chat
    without `only_optimize_lora`. The scalar head of a reward model or critic always trains."""
    quantize: Quantization | None = None
    """nf4: keep the frozen matrices in 4 bits (Dettmers et al. 2023), which requires a GPU and the
    extra `quantization`. The export merges the adapters into the original weights."""

    def _faults(self) -> Iterator[str]:
        if self.quantize is not None and self.train_rest:
            yield (
                f"train_rest: found true with quantize {self.quantize}, expected false: quantized "
                "models train only adapters. Fix: set one of them to its default"
            )


class TrainedModelConfig(Block):
    """One trainable model: its optimizer and its DeepSpeed settings."""

    optimizer: OptimizerConfig
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    lora: LoRAConfig | None = None
    """Train low-rank adapters instead of the weights. None: train the weights."""
    gradient_checkpointing: bool = False
    """Keep one activation per layer and recompute the others: less memory, a third more time."""

    @property
    def is_own_reference(self) -> bool:
        """Whether the model with disabled adapters equals its start, and so serves as reference."""
        return self.lora is not None and not self.lora.train_rest

    def _faults(self) -> Iterator[str]:
        quantize = None if self.lora is None else self.lora.quantize
        if quantize is not None and self.deepspeed.zero_stage == 3:
            yield (
                f"deepspeed.zero_stage: found 3 with lora.quantize {quantize}, expected 0 to 2: "
                "4-bit weights cannot be sharded. Fix: set zero_stage to 2"
            )


class FrozenModelConfig(Block):
    """One frozen model."""

    deepspeed: FrozenDeepSpeedConfig = FrozenDeepSpeedConfig()

    def beside(self, companion: DeepSpeedConfig) -> FrozenDeepSpeedConfig:
        """The DeepSpeed settings; what is None follows those of the companion model."""
        own, stage = self.deepspeed, self.deepspeed.zero_stage
        if stage is None:
            stage = 3 if own.offload_parameters or companion.zero_stage == 3 else 0
        kernels = own.kernels or companion.kernels
        kernels = None if (stage, kernels) == (3, "compile") else kernels
        precision = own.precision or companion.precision
        changes = {"zero_stage": stage, "precision": precision, "kernels": kernels}
        return own.model_copy(update=changes)

    def faults_as_reference(self, trained: TrainedModelConfig) -> Iterator[str]:
        """Faults of the block `reference`, which is unused if `trained` is its own reference."""
        if trained.is_own_reference and self != FrozenModelConfig():
            yield (
                "reference: found a block, expected none with LoRA: the reference is the trained "
                "model with its adapters disabled, or loaded like it (fixed_reference). "
                "Fix: remove reference, or set lora.train_rest to true"
            )


@dataclass(frozen=True)
class _Model:
    block: str
    """Its parameter block, such as ppo.actor."""
    scalar: bool = field(default=False, kw_only=True)
    """Whether its output layer is a vector: reward model and critic."""

    @property
    def name(self) -> str:
        return self.block.rpartition(".")[2]


@dataclass(frozen=True)
class TrainedModel(_Model):
    """A model in training."""

    config: TrainedModelConfig
    averaged: bool = False
    """Whether an average of its weights is kept (`ppo.ema`)."""


@dataclass(frozen=True)
class FrozenModel(_Model):
    """A frozen model."""

    config: FrozenDeepSpeedConfig
    """ZeRO stage and precision, both set."""


StageModel = TrainedModel | FrozenModel
"""A model that a stage loads; program, plan, dry run and presets read the same list."""


class SavingConfig(Block):
    """How often a training stage writes, and what it keeps; not part of its recipe."""

    log_every: PositiveInt = operational(1)
    """Steps between two lines of metrics."""
    checkpoint_every: PositiveInt | None = operational(None)
    """Steps between two checkpoints. None: only the checkpoints of `checkpoint_at_evaluations`."""
    checkpoint_at_evaluations: bool = operational(True)
    """Write a checkpoint after each evaluation. False, for large models: only every
    `checkpoint_every` steps and after the last step."""
    keep_last: PositiveInt = operational(2)
    """Number of newest checkpoints kept until the stage finishes: one to resume, and fallbacks."""
    keep_best: PositiveInt = operational(1)
    """Number of best evaluated models kept until the stage finishes. The best one is exported; the
    others stay if they are several."""

    def checkpoint_due(self, step: int, *, last: int, evaluated: bool) -> bool:
        """Whether a checkpoint is due after this step, as after the last: an export may fail."""
        regular = self.checkpoint_every is not None and step % self.checkpoint_every == 0
        return step == last or regular or (evaluated and self.checkpoint_at_evaluations)


def evaluation_steps(steps: int, evaluations: int) -> set[int]:
    """The steps after which a model is evaluated: evenly spaced, the last one among them."""
    return {round(steps * (i + 1) / evaluations) for i in range(evaluations)}


class SupervisedConfig(SavingConfig, TrainedModelConfig):
    """Fields common to SFT, reward modelling, DPO and KTO: passes over a fixed data set."""

    epochs: PositiveFloat = 1
    """Passes over the training rows; fractions are allowed."""
    batch_size: PositiveInt
    """Rows (SFT), comparisons (reward model, DPO) or answers (KTO) per step, over all ranks."""
    micro_batch_tokens: MicroBatchTokens = 2048
    """Largest number of tokens in a forward pass on each rank; a longer row has one of its own.
    auto: the largest power of two that fits this machine by the plan (docs/planning.md)."""
    evaluations: PositiveInt = 4
    """Number of evenly spaced evaluations on the held-out rows, the last one after the last step.
    The model with the lowest held-out loss is exported."""
    evaluate_at_start: bool = operational(False)
    """Also evaluate the model before its first step, for comparison. This model is never
    exported."""


class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning: next-token loss on responses. The best model has the lowest
    perplexity."""

    stage: ClassVar[str] = "sft"

    def models(self) -> list[StageModel]:
        return [TrainedModel(self.stage, self)]


class RewardModelConfig(SupervisedConfig):
    """Reward modelling on pairs of answers. The best model has the lowest held-out loss."""

    start: Literal["sft", "base", "own"] = "sft"
    """The model that gets a scalar head: the SFT model, its base model, or `base_model` below
    (docs/reward-model.md)."""
    base_model: BaseModelConfig | None = operational(None)  # its files are an input
    """With `start: own`: a model of another size, family or tokenizer, in the form of the parameter
    `base_model`."""
    loss: Annotated[str, REWARD_LOSS] = "bradley_terry"
    """Loss of a comparison: bradley_terry, or a function of yours (docs/extending.md)."""
    gate: float | None = operational(0.5)
    """PPO starts only if the lower end of the 95% interval on the held-out accuracy is above this
    value; 0.5 is chance. None: PPO starts with any reward model."""

    def models(self) -> list[StageModel]:
        return [TrainedModel("reward_model", self, scalar=True)]

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        yield from own_base_faults(self.start, self.base_model)


def own_base_faults(start: str, base_model: BaseModelConfig | None) -> Iterator[str]:
    """Faults of a model that may start from a base model of its own."""
    if start == "own" and base_model is None:
        yield "base_model: found none, expected one for start own. Fix: add {path: FOLDER OR NAME}"
    if start != "own" and base_model is not None:
        yield f"start: found {start}, expected own beside base_model. Fix: set start to own"
    if base_model is not None and base_model.trust_remote_code:
        yield (
            "base_model.trust_remote_code: found true, expected false: only the policy's model may "
            "bring code of its own. Fix: choose a model that transformers knows"
        )
