from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.config.stages import BLOCKS, SupervisedStage
from rlhf_pipeline.config.training import (
    DeepSpeedConfig,
    StageModel,
    TrainedModel,
)
from rlhf_pipeline.sizing.activations import Numbers
from rlhf_pipeline.sizing.hardware import Hardware
from rlhf_pipeline.sizing.lengths import Lengths, limits
from rlhf_pipeline.sizing.memory import (
    BYTES,
    ModelMemory,
    Parts,
    Phase,
    Rows,
    forward,
    frozen_model,
    generation,
    one_layer,
    sharded_copy,
    trained_model,
    weight_bytes,
)
from rlhf_pipeline.sizing.shape import Shape

LIBRARIES = 300 * 2**20
"""Bytes of a rank without a model: interpreter and libraries."""
CUDA = 1024 * 2**20
"""Bytes of a GPU for CUDA's context and the libraries' own buffers."""
USABLE = 0.92
"""Share of the memory that tensors can fill. The allocator leaves gaps. And GPUs with ECC have
up to 8% less than their data sheets say: a T4 has 14.8 of 16 GiB, an L4 22.5 of 24."""


@dataclass(frozen=True)
class StageMemory:
    """One stage on one rank, in bytes."""

    stage: str
    models: tuple[ModelMemory, ...]
    phases: tuple[Phase, ...]
    libraries: int
    """Without any model."""
    on_gpu: bool

    @property
    def held(self) -> int:
        """What all models hold at all times."""
        return sum(sum(model.held.values()) for model in self.models)

    @property
    def largest(self) -> Phase:
        """The phase of the peak."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def peak(self) -> int:
        """Bytes of a rank: of its GPU, or of main memory on the CPU."""
        return self.libraries + self.held + self.largest.total

    @property
    def certain(self) -> int:
        """What no micro batch is too small for: weights, optimizer, master copies, gradients."""
        return self.held + max((model.gradients for model in self.models), default=0)

    @property
    def main(self) -> int:
        """Bytes of main memory of a rank."""
        offloaded = sum(sum(model.main.values()) for model in self.models)
        return LIBRARIES + offloaded if self.on_gpu else self.peak

    def main_of_node(self, ranks: int) -> int:
        """Bytes of main memory of a node with so many ranks."""
        return ranks * self.main + max((model.loading for model in self.models), default=0)

    def parts_of(self, model: ModelMemory) -> Parts:
        """The components of a model at the peak."""
        extra = self.largest.parts if self.largest.model == model.name else {}
        return {
            name: model.held.get(name, 0) + extra.get(name, 0)
            for name in dict.fromkeys([*model.held, *extra])
            if model.held.get(name, 0) + extra.get(name, 0)
        }


def plan_stage(
    stage: str,
    parameters: Mapping[str, Any],
    shape: Shape,
    hardware: Hardware,
    lengths: Mapping[str, Lengths] | None = None,
) -> StageMemory:
    """The memory of a stage.

    Args:
        stage: sft, reward_model, ppo, dpo or evaluate.
        parameters: the blocks as plain values, by name: that of the stage, and `split`.
        shape: the sizes of the base model.
        hardware: the ranks.
        lengths: rows and tokens by phase; None: as the limits of the split allow.

    Raises:
        pydantic.ValidationError: a block is invalid.
    """
    config = BLOCKS[stage].model_validate(parameters[stage])
    if lengths is None:
        lengths = limits(SplitConfig.model_validate(parameters["split"]))
    if isinstance(config, PPOConfig):
        found = _ppo(config, lengths["ppo"], shape, hardware)
    elif isinstance(config, EvaluateConfig):
        trained = [parameters["sft"], parameters.get("ppo", {}).get("actor", {})]
        settings = [DeepSpeedConfig.model_validate(each.get("deepspeed", {})) for each in trained]
        found = _evaluate(config, settings, lengths["ppo"], shape, hardware)
    else:
        phase = "sft" if stage == "sft" else "reward_model"
        found = _supervised(config, lengths[phase], shape, hardware)
    models = tuple(model for model, _ in found)
    phases = tuple(phase for _, own in found for phase in own)
    libraries = CUDA if hardware.on_gpu else LIBRARIES
    return StageMemory(stage, models, phases, libraries, hardware.on_gpu)


def rows_of_step(batch: int, lengths: Lengths, budget: int, ranks: int) -> Rows:
    """The micro batches of an optimizer step: of `batch` rows of all ranks, at most `budget` tokens
    each."""
    whole = int(max(1, batch // ranks) * lengths.row)
    tokens = max(lengths.longest, min(budget, whole))
    return Rows(
        tokens,
        passes=max(1, -(-whole // tokens)),
        computed=int(tokens * (lengths.prompt + lengths.response) / lengths.row),
        answers=int(tokens * lengths.response / lengths.row),
    )


Found = list[tuple[ModelMemory, list[Phase]]]


def _models(models: list[StageModel], shape: Shape, hardware: Hardware, rows: Rows) -> Found:
    """The memory of each model, and its phases."""
    return [
        trained_model(model, shape, hardware, rows)
        if isinstance(model, TrainedModel)
        else frozen_model(model, shape, hardware, rows)
        for model in models
    ]


def _supervised(
    config: SupervisedStage,
    lengths: Lengths,
    shape: Shape,
    hardware: Hardware,
) -> Found:
    rows = rows_of_step(config.batch_size, lengths, config.micro_batch_tokens, hardware.world)
    return _models(config.models(), shape, hardware, rows)


def _ppo(config: PPOConfig, lengths: Lengths, shape: Shape, hardware: Hardware) -> Found:
    response, ranks = config.sampling.max_response_tokens, hardware.world
    lengths = lengths.sampled(response)
    rows = rows_of_step(config.minibatch_size, lengths, config.micro_batch_tokens, ranks)
    found = _models(config.models(), shape, hardware, rows)
    actor, phases = found[0]
    numbers = Numbers(BYTES[config.actor.deepspeed.precision], hardware.on_gpu)
    copy = _for_generation(config, actor, shape, numbers, ranks)
    phases.append(
        generation(
            "ppo.actor",
            shape,
            numbers,
            rows=min(config.sampling.batch_size_per_gpu, -(-config.rollout_batch_size // ranks)),
            prompt=lengths.longest_prompt,
            response=response,
            gathered=copy,
            together=config.hybrid.inference_tp_size if config.generator == "hybrid" else 1,
        )
    )
    critic = next((own for model, own in found if model.name == "ppo.critic"), None)
    if critic and rows.passes * config.ppo_epochs * config.updates_per_epoch == 1:
        # Scoring and update share the forward passes, so both models keep theirs at once.
        phases[0].parts["activations"] += critic[0].parts["activations"]
    return found


def _for_generation(
    config: PPOConfig, actor: ModelMemory, shape: Shape, numbers: Numbers, ranks: int
) -> int:
    """Bytes of weights that exist for a rollout alone; `actor` holds a copy that remains."""
    weights = weight_bytes(TrainedModel(actor.name, config.actor), shape)
    deepspeed = config.actor.deepspeed
    if config.generator == "vllm":
        return weights
    if config.generator == "hybrid":
        layers = min(config.hybrid.tp_gather_partition_size, shape.layers)
        gathered = layers * shape.matrices // shape.layers
        copy = sharded_copy(shape, numbers, config.hybrid.inference_tp_size)
        if not config.hybrid.pin_parameters:
            return numbers.size * gathered + copy
        actor.held["sharded copy"] = copy
        return numbers.size * gathered
    if deepspeed.zero_stage < 3 or (ranks == 1 and not deepspeed.offload_parameters):
        return 0
    return weights if config.gather_for_generation else one_layer(shape, numbers)


def _evaluate(
    config: EvaluateConfig,
    trained: list[DeepSpeedConfig],
    lengths: Lengths,
    shape: Shape,
    hardware: Hardware,
) -> Found:
    """One model at a time: the largest of their precisions, sharded if all of them are."""
    models = [model.config for model in config.models(trained)]
    size = max(BYTES[each.precision] for each in models if each.precision)
    numbers = Numbers(size, hardware.on_gpu)
    is_sharded = all(each.zero_stage == 3 for each in models)
    lengths = lengths.sampled(config.sampling.max_response_tokens)
    scored = rows_of_step(config.prompts, lengths, config.micro_batch_tokens, hardware.world)
    weights = numbers.size * shape.parameters
    gathered = weights if config.gather_for_generation else one_layer(shape, numbers)
    sampling = generation(
        "evaluate",
        shape,
        numbers,
        rows=min(config.sampling.batch_size_per_gpu, config.prompts),
        prompt=lengths.longest_prompt,
        response=lengths.longest_response,
        gathered=gathered if is_sharded and hardware.world > 1 else 0,
    )
    scoring = forward("evaluate", shape, numbers, scored, scalar=True, sharded=is_sharded)
    held = {"weights": weights // hardware.world if is_sharded else weights}
    return [(ModelMemory("evaluate", held), [sampling, scoring])]
