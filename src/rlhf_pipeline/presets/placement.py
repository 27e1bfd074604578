from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Literal

from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.config.policies import POLICIES
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.stages import BLOCKS, StageConfig
from rlhf_pipeline.config.training import FrozenModel, TrainedModel
from rlhf_pipeline.sizing.fit import Changes, changed, fits
from rlhf_pipeline.sizing.hardware import Hardware
from rlhf_pipeline.sizing.models import Shape
from rlhf_pipeline.sizing.stages import StageMemory, plan_stage

Method = Literal["full", "lora", "qlora"]
TOKENS = ((8192, 4096, 2048), (1024,))
"""Tokens of a micro batch to try; the last ones leave a GPU idle, so all else is tried before."""
ROWS = (64, 32, 16, 8)
"""Responses at a time to try, on each rank."""
TENSOR_PARALLEL = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose copies for generation can be sharded (a plan in transformers)."""


def place(
    stage: str, parameters: Mapping[str, Any], shape: Shape, hardware: Hardware, method: Method
) -> tuple[Changes, StageMemory] | None:
    """The first settings that fit, in the order of their costs, with their memory; or None."""

    def planned(settings: Changes) -> StageMemory:
        changes = {f"{stage}.{name}": value for name, value in settings.items()}
        return plan_stage(stage, changed(parameters, changes), shape, hardware)

    block = {"micro_batch_tokens": TOKENS[0][0]} | parameters[stage]
    config = BLOCKS[stage].model_validate(block)
    for tokens, strategy in product(TOKENS, [*_strategies(config, shape, hardware, method)]):
        sizes = [strategy | size for size in _sizes(stage, tokens)]
        if fits(planned(sizes[-1]), hardware):  # the smallest
            for settings in sizes:
                if fits(memory := planned(settings), hardware):
                    return settings, memory
    return None


def _sizes(stage: str, tokens: Sequence[int]) -> Iterator[Changes]:
    """Sizes of micro batches and of batches for generation, larger ones first."""
    samples = stage in (*POLICIES, "evaluate")
    batches = [{"sampling.batch_size_per_gpu": rows} for rows in ROWS] if samples else [{}]
    for number, batch in product(tokens, batches):
        yield {"micro_batch_tokens": number} | batch


def _strategies(
    config: StageConfig, shape: Shape, hardware: Hardware, method: Method
) -> Iterator[Changes]:
    """What is sharded, recomputed and offloaded, cheaper ones first. At stage 3, which reduces
    gradients in bf16 anyway, sums in bf16 are exact where each rank has one row of a minibatch."""
    sharded = hardware.world > 1
    if isinstance(config, EvaluateConfig):
        yield {"precision": "bf16", "zero_stage": 0}
        if sharded:
            yield {"precision": "bf16", "zero_stage": 3, "gather_for_generation": False}
        return
    models, is_ppo = config.models(), isinstance(config, PPOConfig)
    one_row = isinstance(config, PPOConfig) and config.minibatch_size == hardware.world
    frozen_models = [model.name for model in models if isinstance(model, FrozenModel)]
    # The block of a supervised stage is that of its model.
    trained = [
        f"{model.name}." if is_ppo else "" for model in models if isinstance(model, TrainedModel)
    ]
    for zero, recomputes, offloads in _training(sharded, method):
        deepspeed: Changes = {"zero_stage": zero, "precision": "bf16"}
        deepspeed |= {"accumulate": "bf16"} if one_row and zero == 3 else {}
        deepspeed |= {"offload_optimizer": True} if offloads else {}
        settings: Changes = {}
        for model in trained:
            settings |= {f"{model}gradient_checkpointing": True} if recomputes else {}
            settings[f"{model}deepspeed"] = deepspeed
        for frozen, generator in product(
            _frozen(frozen_models, sharded and zero < 3) if recomputes else ({},),
            _generators(shape, hardware) if is_ppo and zero == 3 else ({},),
        ):
            yield generator | settings | frozen


def _training(sharded: bool, method: Method) -> Iterator[tuple[int, bool, bool]]:
    """ZeRO stage, gradient checkpointing, offloaded optimizer."""
    yield from ((1, False, False), (1, True, False))
    if method == "full":
        yield from ((2, True, False), (3, True, False)) if sharded else ()
        yield from ((2, True, True), (3, True, True)) if sharded else ((1, True, True),)
    elif method == "lora" and sharded:
        yield (3, True, False)


def _frozen(models: Sequence[str], sharded: bool) -> Iterator[Changes]:
    """Places of the frozen models: a whole copy, shards, main memory."""
    yield {}
    if models and sharded:
        yield {f"{model}.deepspeed": {"zero_stage": 3} for model in models}
    if models:
        block = {"zero_stage": 3, "offload_parameters": True}
        yield {f"{model}.deepspeed": block for model in models}


def _generators(shape: Shape, hardware: Hardware) -> Iterator[Changes]:
    """How a sharded actor samples: gathered whole, as a sharded copy, layer by layer."""
    yield {}
    ways = next(n for n in (8, 4, 2, 1) if hardware.ranks % n == 0 and shape.kv_heads % n == 0)
    if shape.model_type in TENSOR_PARALLEL and ways > 1:
        yield {"generator": "hybrid", "hybrid.inference_tp_size": ways}
    yield {"gather_for_generation": False}
