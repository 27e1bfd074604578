"""Memory of a stage on one rank: what its models hold, and the phases in which they compute."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_pipeline.config.base_model import BaseModelConfig
from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.config.policies import POLICIES, DistillConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.sample import SampledConfig
from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.config.stages import BLOCKS, StageConfig
from rlhf_pipeline.config.training import DeepSpeedConfig, HybridConfig, StageModel, TrainedModel
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.sizing.hardware import Hardware
from rlhf_pipeline.sizing.memory import (
    BYTES,
    Lengths,
    ModelMemory,
    Numbers,
    Parts,
    Phase,
    Rows,
    forward,
    frozen_model,
    gathered_layer_bytes,
    generation,
    sharded_copy,
    trained_model,
    vllm_generation,
    weight_bytes,
)
from rlhf_pipeline.sizing.models import Shape, base_model_shape

LIBRARIES = 300 * 2**20
"""Bytes of a rank without a model: interpreter and libraries."""
CUDA = 1024 * 2**20
"""Bytes of a GPU for CUDA's context and the libraries' own buffers."""

Parameters = Mapping[str, Any]
"""Parameter blocks as plain values, by name."""
Found = list[tuple[ModelMemory, list[Phase]]]
"""The memory of each model, and its phases."""


@dataclass(frozen=True)
class StageMemory:
    """One stage on one rank, in bytes."""

    models: tuple[ModelMemory, ...]
    phases: tuple[Phase, ...]
    on_gpu: bool

    @property
    def libraries(self) -> int:
        return CUDA if self.on_gpu else LIBRARIES

    @property
    def held(self) -> int:
        return sum(sum(model.held.values()) for model in self.models)

    @property
    def largest(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def peak(self) -> int:
        """Bytes of a rank: of its GPU, or of main memory on the CPU."""
        return self.libraries + self.held + self.largest.total

    @property
    def lower_bound(self) -> int:
        """Bytes at any micro batch size: weights, optimizer, master copies, gradients."""
        return self.held + max((model.gradients for model in self.models), default=0)

    def main_of_node(self, ranks: int) -> int:
        offloaded = sum(sum(model.main.values()) for model in self.models)
        each = LIBRARIES + offloaded if self.on_gpu else self.peak
        return ranks * each + max((model.loading for model in self.models), default=0)

    def parts_of(self, model: ModelMemory) -> Parts:
        """The components of a model at the peak."""
        extra = self.largest.parts if self.largest.model == model.name else {}
        away = self.largest.away.get(model.name, {})
        return dict(Counter(model.held) - Counter(away) + Counter(extra))


@dataclass(frozen=True)
class StageLoad:
    """What a stage computes on one rank."""

    config: StageConfig
    lengths: Lengths
    rows: Rows
    """The micro batches of an optimizer step."""

    @classmethod
    def of(cls, stage: str, parameters: Parameters, hardware: Hardware) -> "StageLoad":
        """Every row is as long as `split`, or the stage's own sampling, allows."""
        config = BLOCKS[stage].model_validate(parameters[stage])
        split = SplitConfig.model_validate(parameters["split"])
        response = split.max_response_tokens
        copies = 1 if stage in ("sft", "kto") else 2  # others compare two answers
        if isinstance(config, PPOConfig | EvaluateConfig | SampledConfig):
            response = config.sampling.max_response_tokens
            compares = isinstance(config, SampledConfig) and config.kind == "comparisons"
            copies = 2 if compares else 1
        prompt, episodes = split.max_prompt_tokens, getattr(config, "episodes", None)
        if episodes is not None and episodes.has_turns:  # their prompts describe tools
            prompt = max(prompt, episodes.max_prompt_tokens)
        lengths = Lengths(prompt, copies * response, copies)
        if isinstance(config, PPOConfig):
            batch = config.minibatch_size
        else:
            batch = config.prompts if isinstance(config, EvaluateConfig) else config.batch_size
        # Micro batches have at most `micro_batch_tokens` tokens, or one longer row.
        whole = max(1, batch // hardware.world) * lengths.row
        tokens = max(lengths.row, min(config.micro_batch_tokens, whole))
        rows = Rows(
            passes=max(1, -(-whole // tokens)),
            computed=int(tokens * (lengths.prompt + lengths.response) / lengths.row),
            answers=int(tokens * lengths.response / lengths.row),
        )
        return cls(config, lengths, rows)


def plan_stage(stage: str, parameters: Parameters, shape: Shape, hardware: Hardware) -> StageMemory:
    """The memory of a stage; raises pydantic.ValidationError if a block is invalid."""
    load = StageLoad.of(stage, parameters, hardware)
    if isinstance(load.config, EvaluateConfig):  # the reward model may be the largest one
        shapes = shape, _own_shape(*_reward_base(parameters), shape)
        largest = max(shapes, key=lambda each: each.parameters)
        found = _evaluate(load, parameters, largest, hardware)
    else:
        found = []
        for model in load.config.models():
            own = _own_shape(*_base_of(model, load.config, parameters), shape)
            found.append(
                trained_model(model, own, hardware, load.rows)
                if isinstance(model, TrainedModel)
                else frozen_model(model, own, hardware, load.rows)
            )
        if isinstance(load.config, PPOConfig):
            _add_rollouts(found, load.config, load, shape, hardware)
            if isinstance(load.config, DistillConfig):
                reference = _own_shape("distill.teacher", load.config.teacher, shape)
                # Its last hidden states stay for the backward pass, and a layer that was sharded.
                teacher = load.config.reference.beside(load.config.actor.deepspeed)
                kept = load.rows.answers * reference.hidden
                kept += (teacher.zero_stage == 3) * reference.vocab * reference.embedding
                found[0][1][0].parts["teacher"] = kept * BYTES[teacher.precision or "fp32"]
    phases = tuple(phase for _, own in found for phase in own)
    memory = StageMemory(tuple(model for model, _ in found), phases, hardware.on_gpu)
    if isinstance(load.config, SampledConfig):  # it answers before it trains
        answering = load.config.sample.answering.model_dump(mode="json")
        own = {**parameters, "evaluate": answering, "sft": parameters[stage]}
        sampling = plan_stage("evaluate", own, shape, hardware)
        return max(memory, sampling, key=lambda each: each.peak)
    return memory


def _reward_base(parameters: Parameters) -> tuple[str, BaseModelConfig | None]:
    own = (parameters.get("reward_model") or {}).get("base_model")
    return "reward_model.base_model", None if own is None else BaseModelConfig.model_validate(own)


def _base_of(
    model: StageModel, config: StageConfig, parameters: Parameters
) -> tuple[str, BaseModelConfig | None]:
    """A parameter, and what it says of the model that one of a stage starts from; None: nothing."""
    if isinstance(config, DistillConfig) and model.name == "reference":
        return "distill.teacher", config.teacher
    critic = config.critic if isinstance(config, PPOConfig) and model.name == "critic" else None
    if critic is not None and critic.start != "reward_model":
        return f"{model.block}.base_model", critic.base_model
    return _reward_base(parameters) if model.scalar else ("", None)


def _own_shape(place: str, config: BaseModelConfig | None, shape: Shape) -> Shape:
    """The sizes of such a model, or else of the base model; ConfigError if they are not known."""
    if config is None:
        return shape
    if (found := base_model_shape(config)) is None:
        raise ConfigError(
            f"{place}.path: found {config.path}, whose sizes are not known on this machine. Fix: "
            "set it to a local folder with a config.json"
        )
    return found


def _add_rollouts(
    found: Found, config: PPOConfig, load: StageLoad, shape: Shape, hardware: Hardware
) -> None:
    ranks = hardware.world
    actor, phases = found[0]
    numbers = Numbers(BYTES[config.actor.deepspeed.precision], hardware.on_gpu)
    rows = min(config.sampling.batch_size_per_gpu, -(-config.rollout_batch_size // ranks))
    if config.generator == "vllm":  # which has pages for all rows, needed or not
        rows = config.sampling.batch_size_per_gpu
        sampling = vllm_generation(actor.name, shape, numbers, rows, load.lengths, config.hybrid)
        if not hardware.on_gpu:  # vLLM cannot sleep there
            held = ("vLLM's weights", "KV cache")
            actor.held.update({part: sampling.parts.pop(part) for part in held})
    else:
        gathered = _for_generation(config, actor, shape, numbers, ranks)
        together = config.hybrid.inference_tp_size if config.generator == "hybrid" else 1
        sampling = generation(actor.name, shape, numbers, rows, load.lengths, gathered, together)
    if hardware.on_gpu and config.offload_during_rollout:
        for model, _ in found:
            stay = ("weights", "sharded copy") if model is actor else ()
            leave = {n: size for n, size in model.held.items() if n not in (*stay, "buckets")}
            sampling.away[model.name] = leave
            model.main.update(leave)
    phases.append(sampling)
    critic = next((own for model, own in found if model.name == f"{config.stage}.critic"), None)
    if critic and config.ppo_epochs * config.updates_per_epoch == 1:
        # Scoring and update share the forward pass if the actual responses are short enough for a
        # single one, so both models keep theirs at once.
        phases[0].parts["activations"] += critic[0].parts["activations"]


def _for_generation(
    config: PPOConfig, actor: ModelMemory, shape: Shape, numbers: Numbers, ranks: int
) -> int:
    """Bytes of weights that exist for a rollout alone; `actor` holds a copy that remains."""
    weights = weight_bytes(TrainedModel(actor.name, config.actor), shape)
    deepspeed = config.actor.deepspeed
    if config.generator == "hybrid":
        layers = min(config.hybrid.tp_gather_partition_size, shape.layers)
        gathered = layers * shape.matrices // shape.layers
        copy = sharded_copy(shape, numbers, config.hybrid.inference_tp_size)
        if not config.hybrid.pin_parameters:
            return numbers.size * gathered + copy
        actor.held["sharded copy"] = copy
        return numbers.size * gathered
    is_split = deepspeed.zero_stage == 3 and (ranks > 1 or deepspeed.offload_parameters)
    return _gathered(config, weights, shape, numbers, is_split=is_split)


def _gathered(
    config: PPOConfig | EvaluateConfig, weights: int, shape: Shape, numbers: Numbers, *,
    is_split: bool,
) -> int:  # fmt: skip
    if not is_split:
        return 0
    return weights if config.gather_for_generation else gathered_layer_bytes(shape, numbers)


def _evaluate(load: StageLoad, parameters: Parameters, shape: Shape, hardware: Hardware) -> Found:
    """One model at a time: the largest of their precisions, sharded if all of them are."""
    config = load.config
    assert isinstance(config, EvaluateConfig)
    actors = [(parameters.get(name) or {}).get("actor", {}) for name in POLICIES]
    trained = [parameters["sft"] or {}, next(filter(None, actors), {})]
    settings = [DeepSpeedConfig.model_validate(one.get("deepspeed", {})) for one in trained]
    models = [each.config for each in config.models(settings)]
    size = max(BYTES[each.precision] for each in models if each.precision)
    numbers = Numbers(size, hardware.on_gpu)
    is_sharded = all(each.zero_stage == 3 for each in models)
    weights = numbers.size * shape.parameters
    is_split = is_sharded and hardware.world > 1
    rows = min(config.sampling.batch_size_per_gpu, config.prompts)
    if config.generator == "vllm":
        rows, whole = config.sampling.batch_size_per_gpu, HybridConfig()
        sampling = vllm_generation("evaluate", shape, numbers, rows, load.lengths, whole)
    else:
        gathered = _gathered(config, weights, shape, numbers, is_split=is_split)
        sampling = generation("evaluate", shape, numbers, rows, load.lengths, gathered)
    scoring = forward("evaluate", shape, numbers, load.rows, scalar=True, sharded=is_sharded)
    held = {"weights": weights // hardware.world if is_sharded else weights}
    return [(ModelMemory("evaluate", held), [sampling, scoring])]
