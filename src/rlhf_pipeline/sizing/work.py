"""Work and disk of a stage: batches, steps, tokens, floating-point operations, files."""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import mul
from typing import Any

from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.stages import BLOCKS, SupervisedStage
from rlhf_pipeline.config.training import (
    DPOConfig,
    OptimizerConfig,
    SavingConfig,
    StageModel,
    TrainedModel,
    TrainedModelConfig,
)
from rlhf_pipeline.sizing.hardware import Hardware
from rlhf_pipeline.sizing.lengths import Lengths
from rlhf_pipeline.sizing.memory import BYTES, trained_parameters
from rlhf_pipeline.sizing.shape import Shape
from rlhf_pipeline.sizing.stages import rows_of_step

LEAST_RATE_SUM = 2e-4
"""In docs/smollm2.md, a sum of 5e-5 left a KL of 0.08 nats, and one of 6e-4 a KL of about 2."""


@dataclass(frozen=True)
class Work:
    """What one stage does. None: not known before the split."""

    batch: int
    """Rows of an optimizer step, over all ranks."""
    rows_per_rank: int
    micro_batches: int
    """Forward passes of a rank in an optimizer step (gradient accumulation)."""
    steps: int | None
    """Lines of metrics: optimizer steps, or PPO's rollouts."""
    updates: int | None
    """Optimizer steps."""
    tokens: float | None
    """Tokens that are trained on, in all epochs; that are generated and scored, for an evaluation.
    """
    flops: float | None
    """Floating-point operations of all ranks, without recomputation by gradient checkpointing."""
    checkpoints: int
    """Bytes of the checkpoints that exist at a time, the one being written included."""
    saved_models: int
    """Bytes of best models, last model and export."""
    rate_sum: float | None = None
    """Sum of the actor's learning rates over all updates of PPO. AdamW changes a weight by about
    the learning rate in an update, so this bounds how far training can move the policy. None for
    adapters, whose product is the change."""

    @property
    def cannot_move(self) -> bool:
        """Whether PPO ends about where it began."""
        return self.rate_sum is not None and self.rate_sum < LEAST_RATE_SUM


def stage_work(
    stage: str,
    parameters: Mapping[str, Any],
    shape: Shape,
    hardware: Hardware,
    lengths: Mapping[str, Lengths],
) -> Work:
    """The work of a stage; the arguments are those of `plan_stage`."""
    config = BLOCKS[stage].model_validate(parameters[stage])
    if isinstance(config, PPOConfig):
        return _ppo(config, lengths["ppo"], shape, hardware)
    if isinstance(config, EvaluateConfig):
        return _evaluate(config, lengths["ppo"], shape, hardware)
    return _supervised(stage, config, lengths, shape, hardware)


def forward_flops(shape: Shape, tokens: float, context: float, *, head: bool = True) -> float:
    """Operations of a forward pass: 2 for each weight and token, and those of causal attention.

    `context` is the mean number of tokens of a row.
    """
    weights = shape.matrices + (shape.vocab * shape.embedding if head else 0)
    return tokens * (2 * weights + 2 * shape.layers * shape.queries * context)


def training_flops(
    config: TrainedModelConfig, shape: Shape, tokens: float, context: float, *, head: bool = True
) -> float:
    """Forward and backward pass: the backward pass costs twice the forward one, and once with LoRA,
    whose frozen matrices have no gradient."""
    factor = 3 if config.lora is None else 2
    return factor * forward_flops(shape, tokens, context, head=head)


def _supervised(
    stage: str,
    config: SupervisedStage,
    lengths: Mapping[str, Lengths],
    shape: Shape,
    hardware: Hardware,
) -> Work:
    own = lengths["sft" if stage == "sft" else "reward_model"]
    ranks, is_pair = hardware.world, stage != "sft"
    micro = rows_of_step(config.batch_size, own, config.micro_batch_tokens, ranks)
    steps = tokens = flops = None
    if own.rows is not None:
        steps = max(1, int(config.epochs * own.rows) // config.batch_size)
        tokens = steps * config.batch_size * own.row
        context, head = own.row / (1 + is_pair), stage != "reward_model"
        flops = training_flops(config, shape, tokens, context, head=head)
        if isinstance(config, DPOConfig):
            flops += forward_flops(shape, tokens, context)
    return Work(
        batch=config.batch_size,
        rows_per_rank=config.batch_size // ranks,
        micro_batches=micro.passes,
        steps=steps,
        updates=steps,
        tokens=tokens,
        flops=flops,
        **disk(config, config.models(), shape),
    )


def _ppo(config: PPOConfig, lengths: Lengths, shape: Shape, hardware: Hardware) -> Work:
    response, ranks = config.sampling.max_response_tokens, hardware.world
    lengths = lengths.sampled(response)
    row = lengths.row
    micro = rows_of_step(config.minibatch_size, lengths, config.micro_batch_tokens, ranks)
    sampled = config.steps * config.responses_per_step * row
    passes = 3.0  # generation, the policy that sampled, its reference
    flops = passes * forward_flops(shape, sampled, row)
    tokens = sampled * config.ppo_epochs
    for model in config.models():
        if model.scalar:
            flops += forward_flops(shape, sampled, row, head=False)
        if isinstance(model, TrainedModel):
            flops += training_flops(model.config, shape, tokens, row, head=not model.scalar)
    updates = config.steps * config.ppo_epochs * config.updates_per_epoch
    return Work(
        batch=config.minibatch_size,
        rows_per_rank=config.minibatch_size // ranks,
        micro_batches=micro.passes,
        steps=config.steps,
        updates=updates,
        tokens=tokens,
        flops=flops,
        **disk(config, config.models(), shape),
        rate_sum=None if config.actor.lora else rate_sum(config.actor.optimizer, updates),
    )


def rate_sum(config: OptimizerConfig, updates: int) -> float:
    """Sum of the learning rates of all updates: half the peak on average, unless constant."""
    mean = 1.0 if config.schedule == "constant" else 0.5
    return updates * config.learning_rate * mean


def _evaluate(config: EvaluateConfig, lengths: Lengths, shape: Shape, hardware: Hardware) -> Work:
    row = lengths.prompt + config.sampling.max_response_tokens
    answers = config.prompts * (
        config.answers_per_prompt + max(config.baseline_draws, config.best_of_n)
    )
    tokens = answers * row
    return Work(
        batch=config.prompts,
        rows_per_rank=-(-config.prompts // hardware.world),
        micro_batches=1,
        steps=None,
        updates=None,
        tokens=tokens,
        flops=2 * forward_flops(shape, tokens, row),  # generation, and the reward model
        checkpoints=0,
        saved_models=0,
    )


def disk(config: SavingConfig, models: list[StageModel], shape: Shape) -> dict[str, int]:
    """Bytes of checkpoints and of saved models.

    A checkpoint has 12 bytes for each trained parameter: its float32 weight and AdamW's moments, or
    16 with an average of the weights. The first model is saved; `config` says how many are kept.
    """
    trained = [model for model in models if isinstance(model, TrainedModel)]
    counts = [trained_parameters(model, shape) for model in trained]
    each = [12 + 4 * model.averaged for model in trained]
    saved = trained[0]
    size = BYTES[saved.config.deepspeed.precision]
    whole = size * (shape.body if saved.scalar else shape.parameters)
    kept = whole if saved.config.lora is None else size * counts[0]
    policies = 1 + saved.averaged
    return {
        "checkpoints": (config.keep_last + 1) * sum(map(mul, each, counts)),
        "saved_models": policies * ((config.keep_best + 1) * kept + whole),
    }
