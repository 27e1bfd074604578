"""What a stage computes: its models, rows and passes, steps, operations, and files."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import mul
from pathlib import Path
from typing import Any

from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.config.policies import DistillConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.preferences import KTOConfig, ReferencedConfig
from rlhf_pipeline.config.sample import SampledConfig
from rlhf_pipeline.config.split import PHASES, SplitConfig
from rlhf_pipeline.config.stages import BLOCKS, POLICIES, StageConfig, SupervisedStage
from rlhf_pipeline.config.training import (
    DeepSpeedConfig,
    SavingConfig,
    StageModel,
    TrainedModel,
    TrainedModelConfig,
)
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.runtime.manifest import NAME, Manifest
from rlhf_pipeline.sizing.hardware import Hardware
from rlhf_pipeline.sizing.memory import BYTES, Lengths, Rows, trained_parameters
from rlhf_pipeline.sizing.models import Shape, base_model_shape

LEAST_RATE_SUM = 2e-4
"""In docs/smollm2.md, a sum of 5e-5 left a KL of 0.08 nats, and one of 6e-4 a KL of 1.3 and 1.9."""

Parameters = Mapping[str, Any]
"""Parameter blocks as plain values, by name: that of the stage, and `split`."""


Known = Mapping[str, Lengths] | None
"""The lengths of each phase; None: rows are as long as the split allows."""


@dataclass(frozen=True)
class Load:
    """What a stage computes on one rank."""

    config: StageConfig
    models: Sequence[StageModel]
    lengths: Lengths
    """Those of its phase; where the stage samples, with responses of the greatest length."""
    batch: int
    """Rows of an optimizer step, or prompts of an evaluation, over all ranks."""
    rows: Rows
    """The micro batches of an optimizer step."""

    @classmethod
    def of(cls, stage: str, parameters: Parameters, hardware: Hardware, lengths: Known) -> "Load":
        config = BLOCKS[stage].model_validate(parameters[stage])
        if lengths is None:
            lengths = limits(SplitConfig.model_validate(parameters["split"]))
        if isinstance(config, PPOConfig | EvaluateConfig):
            tokens = config.sampling.max_response_tokens
            own = replace(lengths["ppo"], response=tokens, longest_response=tokens)
            batch = config.minibatch_size if isinstance(config, PPOConfig) else config.prompts
        else:
            batch = config.batch_size
            if isinstance(config, SampledConfig):
                own = _sampled(config, lengths["ppo"])
            else:
                own = lengths[stage if stage in lengths else "reward_model"]  # DPO's comparisons
        # Micro batches have at most `micro_batch_tokens` tokens, or one longer row.
        whole = int(max(1, batch // hardware.world) * own.row)
        tokens = max(own.longest, min(config.micro_batch_tokens, whole))
        rows = Rows(
            tokens,
            passes=max(1, -(-whole // tokens)),
            computed=int(tokens * (own.prompt + own.response) / own.row),
            answers=int(tokens * own.response / own.row),
        )
        return cls(config, _models(config, parameters), own, batch, rows)


def _models(config: StageConfig, parameters: Parameters) -> Sequence[StageModel]:
    if not isinstance(config, EvaluateConfig):
        return config.models()
    actors = [(parameters.get(name) or {}).get("actor", {}) for name in POLICIES]
    trained = [parameters["sft"] or {}, next(filter(None, actors), {})]
    settings = [DeepSpeedConfig.model_validate(one.get("deepspeed", {})) for one in trained]
    return config.models(settings)


def _sampled(config: SampledConfig, prompts: Lengths) -> Lengths:
    """The rows of a round, if each prompt leaves one with answers of the greatest length."""
    copies = 1 if config.kind == "demonstrations" else 2
    tokens = copies * config.sampling.max_response_tokens
    rows = min(filter(None, (config.sample.prompts, prompts.rows)), default=None)
    return replace(prompts, rows=rows, response=tokens, longest_response=tokens, copies=copies)


def limits(split: SplitConfig) -> dict[str, Lengths]:
    """What the limits of the split allow: every row is as long as they say."""
    samples = [source.samples for source in split.sources if not source.is_test]
    train = 1 - split.validation_fraction - split.test_fraction

    def rows(phase: int) -> int | None:
        if None in samples:
            return None
        return int(sum(filter(None, samples)) * train * (split.weights[phase] / sum(split.weights)))

    prompt, response = split.max_prompt_tokens, split.max_response_tokens
    one = Lengths(rows(0), prompt, response, prompt, response)
    pairs = rows(1)
    return {
        "sft": one,
        "reward_model": Lengths(pairs, prompt, 2 * response, prompt, 2 * response, copies=2),
        "ppo": Lengths(rows(2), prompt, 0, prompt, 0),
        "kto": replace(one, rows=None if pairs is None else 2 * pairs),
    }


def measured(folder: Path, split: SplitConfig) -> dict[str, Lengths] | None:
    """The lengths of the newest split of those in `folder`; None if its parameters were others."""
    newest = max(folder.glob(f"*/{folder.name}/{NAME}"), default=None)
    if newest is None:
        return None
    made = SplitConfig.model_validate(Manifest.read(newest.parent).config["split"])
    if made.recipe() != split.recipe():
        return None
    files = json.loads((newest.parent / "report.json").read_text())["files"]
    sft, comparisons, prompts, labelled = (files[f"{x}/train.arrow"] for x in (*PHASES, "kto"))
    pairs = [(comparisons, "chosen_ids"), (comparisons, "rejected_ids")]
    found = {
        "sft": _lengths([(sft, "response_ids")]),
        "reward_model": _lengths(pairs, copies=2),
        "ppo": _lengths([(prompts, None)]),
        "kto": _lengths([*pairs, (labelled, "response_ids")]),
    }
    # A phase of weight 0 has no rows, and so no lengths.
    return limits(split) | {phase: lengths for phase, lengths in found.items() if lengths}


def _lengths(
    answers: Sequence[tuple[Mapping[str, Any], str | None]], copies: int = 1
) -> Lengths | None:
    """The lengths of the rows in files, with the column of their answers: `copies` in a row."""
    own = [(file, column) for file, column in answers if file["rows"]]
    if not own:
        return None
    rows = sum(file["rows"] for file, _ in own) // copies
    prompts = [file["tokens"]["prompt_ids"] for file, _ in own]
    responses = [file["tokens"][column] for file, column in own if column]
    longest = [response["max"] for response in responses]
    return Lengths(
        rows,
        prompt=sum(prompt["total"] for prompt in prompts) / (copies * rows),
        response=sum(response["total"] for response in responses) / rows,
        longest_prompt=max(prompt["max"] for prompt in prompts),
        longest_response=sum(longest) if copies > 1 else max(longest, default=0),
        copies=copies,
    )


@dataclass(frozen=True)
class Work:
    """What one stage does. None: not known before the split."""

    batch: int
    """Rows of an optimizer step, over all ranks."""
    rows_per_rank: int
    micro_batches: int
    """Forward passes of a rank in an optimizer step (gradient accumulation)."""
    steps: int | None = None
    """Lines of metrics: optimizer steps, or PPO's rollouts."""
    updates: int | None = None
    """Optimizer steps."""
    tokens: float | None = None
    """Tokens that are trained on in all epochs, or that an evaluation generates and scores."""
    flops: float | None = None
    """Floating-point operations of all ranks, without recomputation by gradient checkpointing."""
    checkpoints: int = 0
    """Bytes of the checkpoints that exist at a time, the one being written included."""
    saved_models: int = 0
    """Bytes of best models, last model and export."""
    rate_sum: float | None = None
    """Sum of the actor's learning rates over all updates of PPO, which bounds how far AdamW can
    move the weights. None for adapters, whose product is the change."""
    generator: str | None = None
    """What samples for PPO; the memory of `auto` is that of transformers."""

    @property
    def cannot_move(self) -> bool:
        """Whether PPO ends about where it began."""
        return self.rate_sum is not None and self.rate_sum < LEAST_RATE_SUM


def stage_work(
    stage: str, parameters: Parameters, shape: Shape, hardware: Hardware, lengths: Known
) -> Work:
    """The work of a stage; the arguments are those of `plan_stage`."""
    load = Load.of(stage, parameters, hardware, lengths)
    config, batch = load.config, load.batch
    if isinstance(config, EvaluateConfig):
        draws = max(config.baseline_draws, config.best_of_n)
        tokens = batch * (config.answers_per_prompt + draws) * load.lengths.row
        flops = 2 * forward_flops(shape, tokens, load.lengths.row)  # generation and reward model
        return Work(batch, -(-batch // hardware.world), 1, tokens=tokens, flops=flops)
    if isinstance(config, PPOConfig):
        own = _ppo(config, load, shape)
    else:
        own = _supervised(config, load, shape)
    own |= disk(config, load.models, shape)
    return Work(batch, batch // hardware.world, load.rows.passes, **own)


def forward_flops(shape: Shape, tokens: float, context: float, *, head: bool = True) -> float:
    """Operations of a forward pass: 2 for each weight and token, and those of causal attention over
    rows of `context` tokens on average."""
    weights = shape.matrices + (shape.vocab * shape.embedding if head else 0)
    return tokens * (2 * weights + 2 * shape.layers * shape.queries * context)


def training_flops(
    config: TrainedModelConfig, shape: Shape, tokens: float, context: float, *, head: bool = True
) -> float:
    """Operations of both passes: the backward one costs twice as much, with LoRA as much."""
    factor = 3 if config.lora is None else 2
    return factor * forward_flops(shape, tokens, context, head=head)


def _supervised(config: SupervisedStage, load: Load, shape: Shape) -> dict[str, Any]:
    if load.lengths.rows is None:
        return {}
    row = load.lengths.row
    steps = max(1, int(config.epochs * load.lengths.rows) // config.batch_size)
    tokens = steps * config.batch_size * row
    context, head = row / load.lengths.copies, not load.models[0].scalar
    flops = training_flops(config, shape, tokens, context, head=head)
    if isinstance(config, ReferencedConfig) and config.has_reference:
        # KTO: also both models on mismatched pairs
        passes = 3 if isinstance(config, KTOConfig) and config.kl != "none" else 1
        flops += passes * forward_flops(shape, tokens, context)
    if isinstance(config, SampledConfig):  # generation and scoring of all answers, in each round
        answers = config.sample.n * load.lengths.rows * context
        flops += 2 * forward_flops(shape, answers, context)
        steps, tokens, flops = config.rounds * steps, config.rounds * tokens, config.rounds * flops
    return {"steps": steps, "updates": steps, "tokens": tokens, "flops": flops}


def _ppo(config: PPOConfig, load: Load, shape: Shape) -> dict[str, Any]:
    row = load.lengths.row
    sampled = config.steps * config.responses_per_step * row
    passes = 1 if config.old_logprobs == "rollout" else 2  # generation, the policy that sampled
    flops = passes * forward_flops(shape, sampled, row)
    compared = config.ppo_epochs if config.has_teacher else 1
    flops += compared * forward_flops(reference_shape(config, shape), sampled, row)
    tokens = sampled * config.ppo_epochs
    for model in load.models:
        if model.scalar:
            flops += forward_flops(shape, sampled, row, head=False)
        if isinstance(model, TrainedModel):
            flops += training_flops(model.config, shape, tokens, row, head=not model.scalar)
    updates = config.steps * config.ppo_epochs * config.updates_per_epoch
    optimizer = config.actor.optimizer
    mean = 1.0 if optimizer.schedule == "constant" else 0.5  # of the peak
    rates = None if config.actor.lora else updates * optimizer.learning_rate * mean
    work = {"steps": config.steps, "updates": updates, "tokens": tokens, "flops": flops}
    return work | {"rate_sum": rates, "generator": config.generator}


def reference_shape(config: StageConfig, shape: Shape) -> Shape:
    """The sizes of the reference: those of the base model, or of a teacher (ConfigError if not
    known)."""
    if not isinstance(config, DistillConfig):
        return shape
    if (found := base_model_shape(config.teacher)) is None:
        raise ConfigError(
            f"distill.teacher.path: found {config.teacher.path}, whose sizes are not known on this "
            "machine. Fix: set it to a local folder with a config.json"
        )
    return found


def disk(config: SavingConfig, models: Sequence[StageModel], shape: Shape) -> dict[str, int]:
    """Bytes of checkpoints, and of the first model. A checkpoint has 12 bytes for each trained
    parameter (float32 weight, AdamW's moments), or 16 with an average of the weights."""
    trained = [model for model in models if isinstance(model, TrainedModel)]
    counts = [trained_parameters(model, shape) for model in trained]
    each = [12 + 4 * model.averaged for model in trained]
    saved = trained[0]
    size = BYTES[saved.config.deepspeed.precision]
    whole = size * (shape.body if saved.scalar else shape.parameters)
    kept = whole if saved.config.lora is None else size * counts[0]
    return {
        "checkpoints": (config.keep_last + 1) * sum(map(mul, each, counts)),
        "saved_models": (1 + saved.averaged) * ((config.keep_best + 1) * kept + whole),
    }
