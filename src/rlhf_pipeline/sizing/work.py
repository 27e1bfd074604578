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
    OptimizerConfig,
    SavingConfig,
    StageModel,
    TrainedModel,
    TrainedModelConfig,
)
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.runtime.manifest import NAME, Manifest
from rlhf_pipeline.sizing.hardware import Hardware
from rlhf_pipeline.sizing.memory import BYTES, Rows, trained_parameters
from rlhf_pipeline.sizing.models import base_model_shape
from rlhf_pipeline.sizing.shape import Shape

LEAST_RATE_SUM = 2e-4
"""In docs/smollm2.md, a sum of 5e-5 left a KL of 0.08 nats, and one of 6e-4 a KL of about 2."""


@dataclass(frozen=True)
class Lengths:
    """The training rows of a phase."""

    rows: int | None
    """None: not known before the split."""
    prompt: float
    """Mean tokens of a prompt."""
    response: float
    """Mean tokens of a response: of both answers for comparisons, 0 for prompts alone."""
    longest_prompt: int
    longest_response: int
    copies: int = 1
    """Times that a row contains its prompt: 2 for comparisons."""

    @property
    def row(self) -> float:
        return self.copies * self.prompt + self.response

    @property
    def longest(self) -> int:
        return self.copies * self.longest_prompt + self.longest_response


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
    def of(
        cls,
        stage: str,
        parameters: Mapping[str, Any],
        hardware: Hardware,
        lengths: Mapping[str, Lengths] | None,
    ) -> "Load":
        """What a stage computes; the arguments are those of `plan_stage`."""
        config = BLOCKS[stage].model_validate(parameters[stage])
        if lengths is None:
            lengths = limits(SplitConfig.model_validate(parameters["split"]))
        if isinstance(config, EvaluateConfig):
            actors = [(parameters.get(name) or {}).get("actor", {}) for name in POLICIES]
            trained = [parameters["sft"] or {}, next(filter(None, actors), {})]
            settings = [DeepSpeedConfig.model_validate(t.get("deepspeed", {})) for t in trained]
            models: Sequence[StageModel] = config.models(settings)
        else:
            models = config.models()
        if isinstance(config, PPOConfig | EvaluateConfig):
            tokens = config.sampling.max_response_tokens
            own = replace(lengths["ppo"], response=tokens, longest_response=tokens)
            batch = config.minibatch_size if isinstance(config, PPOConfig) else config.prompts
        else:
            phase = stage if stage in lengths else "reward_model"  # DPO has its comparisons
            own = lengths[phase]
            if isinstance(config, SampledConfig):
                own = sampled(config, lengths["ppo"])
            batch = config.batch_size
        rows = _micro_batches(batch, own, config.micro_batch_tokens, hardware.world)
        return cls(config, models, own, batch, rows)


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
    """Tokens that are trained on in all epochs, or that an evaluation generates and scores."""
    flops: float | None
    """Floating-point operations of all ranks, without recomputation by gradient checkpointing."""
    checkpoints: int = 0
    """Bytes of the checkpoints that exist at a time, the one being written included."""
    saved_models: int = 0
    """Bytes of best models, last model and export."""
    rate_sum: float | None = None
    """Sum of the actor's learning rates over all updates of PPO, which bounds how far AdamW can
    move the weights. None for adapters, whose product is the change."""

    @property
    def cannot_move(self) -> bool:
        """Whether PPO ends about where it began."""
        return self.rate_sum is not None and self.rate_sum < LEAST_RATE_SUM


def sampled(config: SampledConfig, prompts: Lengths) -> Lengths:
    """The rows of a round, if each prompt leaves one with answers of the greatest length."""
    copies = 1 if config.kind == "demonstrations" else 2
    tokens = copies * config.sampling.max_response_tokens
    rows = min(filter(None, (config.sample.prompts, prompts.rows)), default=None)
    return replace(prompts, rows=rows, response=tokens, longest_response=tokens, copies=copies)


def limits(split: SplitConfig) -> dict[str, Lengths]:
    """What the limits of the split allow: every row is as long as they say."""
    prompt, response = split.max_prompt_tokens, split.max_response_tokens
    rows = {phase: expected_rows(split, index) for index, phase in enumerate(PHASES)}
    return {
        "sft": Lengths(rows["sft"], prompt, response, prompt, response),
        "reward_model": Lengths(
            rows["reward_model"], prompt, 2 * response, prompt, 2 * response, copies=2
        ),
        "ppo": Lengths(rows["ppo"], prompt, 0, prompt, 0),
        "kto": Lengths(
            None if rows["reward_model"] is None else 2 * rows["reward_model"],
            prompt, response, prompt, response,
        ),
    }  # fmt: skip


def expected_rows(split: SplitConfig, index: int) -> int | None:
    """Training rows of a phase, if every source has a number of samples."""
    samples = [source.samples for source in split.sources if not source.is_test]
    if None in samples:
        return None
    train = 1 - split.validation_fraction - split.test_fraction
    share = split.weights[index] / sum(split.weights)
    return int(sum(filter(None, samples)) * train * share)


def measured(folder: Path, split: SplitConfig) -> dict[str, Lengths] | None:
    """The lengths of the newest split of those in `folder`; None if its parameters were others."""
    newest = max(folder.glob(f"*/{folder.name}/{NAME}"), default=None)
    if newest is None:
        return None
    made = SplitConfig.model_validate(Manifest.read(newest.parent).config["split"])
    if made.recipe() != split.recipe():
        return None
    files = json.loads((newest.parent / "report.json").read_text())["files"]
    rows: dict[str, Any] = {phase: files[f"{phase}/train.arrow"] for phase in PHASES}
    rows["kto"] = _answers(rows["reward_model"], files.get("kto/train.arrow"))
    # A phase of weight 0 has no rows, and so no lengths.
    return limits(split) | {name: _of_file(file) for name, file in rows.items() if file["rows"]}


def _answers(comparisons: Mapping[str, Any], labelled: Mapping[str, Any] | None) -> dict[str, Any]:
    """Both answers of each comparison, and labelled ones, described as one file.

    A split of an earlier version has no labelled ones.
    """
    rows = {"chosen_ids": comparisons, "rejected_ids": comparisons, "response_ids": labelled}
    own = [(file, name) for name, file in rows.items() if file and file["rows"]]

    def together(counts: list[Mapping[str, int]]) -> dict[str, int]:
        return {
            "total": sum(one["total"] for one in counts),
            "max": max((one["max"] for one in counts), default=0),
        }

    return {
        "rows": sum(file["rows"] for file, _ in own),
        "tokens": {
            "prompt_ids": together([file["tokens"]["prompt_ids"] for file, _ in own]),
            "response_ids": together([file["tokens"][name] for file, name in own]),
        },
    }


def _of_file(file: Mapping[str, Any]) -> Lengths:
    tokens, rows = file["tokens"], file["rows"]
    answers = [counts for column, counts in tokens.items() if column != "prompt_ids"]
    return Lengths(
        rows=rows,
        prompt=tokens["prompt_ids"]["total"] / rows,
        response=sum(answer["total"] for answer in answers) / rows,
        longest_prompt=tokens["prompt_ids"]["max"],
        longest_response=sum(answer["max"] for answer in answers),
        copies=max(1, len(answers)),
    )


def _micro_batches(batch: int, lengths: Lengths, budget: int, ranks: int) -> Rows:
    whole = int(max(1, batch // ranks) * lengths.row)
    tokens = max(lengths.longest, min(budget, whole))
    return Rows(
        tokens,
        passes=max(1, -(-whole // tokens)),
        computed=int(tokens * (lengths.prompt + lengths.response) / lengths.row),
        answers=int(tokens * lengths.response / lengths.row),
    )


def stage_work(
    stage: str,
    parameters: Mapping[str, Any],
    shape: Shape,
    hardware: Hardware,
    lengths: Mapping[str, Lengths],
) -> Work:
    """The work of a stage; the arguments are those of `plan_stage`."""
    load = Load.of(stage, parameters, hardware, lengths)
    config = load.config
    if isinstance(config, EvaluateConfig):
        return _evaluate(config, load, shape, hardware.world)
    if isinstance(config, PPOConfig):
        own = _ppo(config, load, shape)
    else:
        own = _supervised(config, load, shape)
    return Work(
        batch=load.batch,
        rows_per_rank=load.batch // hardware.world,
        micro_batches=load.rows.passes,
        **own,
        **disk(config, load.models, shape),
    )


def forward_flops(shape: Shape, tokens: float, context: float, *, head: bool = True) -> float:
    """Operations of a forward pass: 2 for each weight and token, and those of causal attention over
    rows of `context` tokens on average."""
    weights = shape.matrices + (shape.vocab * shape.embedding if head else 0)
    return tokens * (2 * weights + 2 * shape.layers * shape.queries * context)


def training_flops(
    config: TrainedModelConfig, shape: Shape, tokens: float, context: float, *, head: bool = True
) -> float:
    """Operations of a forward and a backward pass, which costs twice as much (with LoRA as
    much)."""
    factor = 3 if config.lora is None else 2
    return factor * forward_flops(shape, tokens, context, head=head)


def _supervised(config: SupervisedStage, load: Load, shape: Shape) -> dict[str, Any]:
    row = load.lengths.row
    if load.lengths.rows is None:
        return dict.fromkeys(("steps", "updates", "tokens", "flops"))
    steps = max(1, int(config.epochs * load.lengths.rows) // config.batch_size)
    tokens = steps * config.batch_size * row
    context, head = row / load.lengths.copies, not load.models[0].scalar
    flops = training_flops(config, shape, tokens, context, head=head)
    if isinstance(config, ReferencedConfig) and config.has_reference:
        # KTO: also both models on mismatched pairs
        passes = 3 if isinstance(config, KTOConfig) else 1
        flops += passes * forward_flops(shape, tokens, context)
    if isinstance(config, SampledConfig):  # generation and scoring of all answers, in each round
        answers = config.sample.n * load.lengths.rows * context
        flops += 2 * forward_flops(shape, answers, context)
        steps, tokens, flops = config.rounds * steps, config.rounds * tokens, config.rounds * flops
    return {"steps": steps, "updates": steps, "tokens": tokens, "flops": flops}


def _ppo(config: PPOConfig, load: Load, shape: Shape) -> dict[str, Any]:
    row = load.lengths.row
    sampled = config.steps * config.responses_per_step * row
    flops = 2 * forward_flops(shape, sampled, row)  # generation, the policy that sampled
    flops += forward_flops(reference_shape(config, shape), sampled, row)
    tokens = sampled * config.ppo_epochs
    for model in load.models:
        if model.scalar:
            flops += forward_flops(shape, sampled, row, head=False)
        if isinstance(model, TrainedModel):
            flops += training_flops(model.config, shape, tokens, row, head=not model.scalar)
    updates = config.steps * config.ppo_epochs * config.updates_per_epoch
    rates = None if config.actor.lora else rate_sum(config.actor.optimizer, updates)
    work = {"steps": config.steps, "updates": updates, "tokens": tokens, "flops": flops}
    return work | {"rate_sum": rates}


def reference_shape(config: StageConfig, shape: Shape) -> Shape:
    """The sizes of the reference: those of the base model, or of a teacher.

    Raises ConfigError if nothing on this machine says those of the teacher.
    """
    if not isinstance(config, DistillConfig):
        return shape
    if (found := base_model_shape(config.teacher)) is None:
        raise ConfigError(
            f"distill.teacher.path: found {config.teacher.path}, whose sizes are not known on this "
            "machine. Fix: set it to a local folder with a config.json"
        )
    return found


def rate_sum(config: OptimizerConfig, updates: int) -> float:
    """Sum of the learning rates of all updates: half the peak on average, unless constant."""
    mean = 1.0 if config.schedule == "constant" else 0.5
    return updates * config.learning_rate * mean


def _evaluate(config: EvaluateConfig, load: Load, shape: Shape, ranks: int) -> Work:
    answers = config.prompts * (
        config.answers_per_prompt + max(config.baseline_draws, config.best_of_n)
    )
    tokens = answers * load.lengths.row
    return Work(
        batch=config.prompts,
        rows_per_rank=-(-config.prompts // ranks),
        micro_batches=1,
        steps=None,
        updates=None,
        tokens=tokens,
        flops=2 * forward_flops(shape, tokens, load.lengths.row),  # generation and reward model
    )


def disk(config: SavingConfig, models: Sequence[StageModel], shape: Shape) -> dict[str, int]:
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
