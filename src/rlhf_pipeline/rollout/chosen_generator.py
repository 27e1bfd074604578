"""`generator: auto`: vLLM on GPUs that have the memory for it, else transformers."""

from importlib.util import find_spec
from math import ceil
from typing import Any, cast

from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.engine import free_memory
from rlhf_pipeline.distributed.lean_deepspeed import DeepSpeedEngine, get_accelerator
from rlhf_pipeline.distributed.world import World, on_gpu
from rlhf_pipeline.distributed.zero import whole_shape
from rlhf_pipeline.errors import ConfigError, StageError
from rlhf_pipeline.rollout.generation import Generator
from rlhf_pipeline.rollout.transformers_generator import TransformersGenerator
from rlhf_pipeline.rollout.vllm_generator import PAGE, VLLMGenerator, make_engine
from rlhf_pipeline.runtime.job import LaunchedJob


def chosen(
    policy: DeepSpeedEngine, contract: TokenContract, world: World, *, gather: bool, rows: int,
    longest: int, place: str, job: LaunchedJob, begun: str | None, refused: str | None, later: int,
) -> Generator:  # fmt: skip
    """vLLM if no rank has a reason against it, else transformers. All ranks call this together.

    Rank 0 prints the choice with its reason, and `job.choices` has both. `begun` is the generator
    of the steps before the checkpoint, which a run keeps; `refused` says why vLLM cannot answer
    with these parameters; `later` are the bytes that training allocates after the choice and keeps
    during a rollout. Raises StageError if a run that began with vLLM cannot keep it.
    """
    generator: Any
    why = "the run began with it" if begun == "transformers" else refused
    if why is None:
        why = _of_any_rank(_reason_against(policy, world, rows, longest, job, later), world)
    for make in (make_engine, VLLMGenerator):  # the generator computes with all ranks
        if why is None:
            try:
                generator = make(policy, contract, rows=rows, longest=longest, place=place)
            except ConfigError as error:
                why = error.message.partition(". Fix: ")[0]
            why = _of_any_rank(why, world)
    name = "vllm" if why is None else "transformers"
    if begun not in (None, name):
        raise StageError(
            f"{place}: found {name} for auto ({why}), expected {begun}, which has sampled up to "
            f"step {job.resume_from}. Fix: resume where {begun} can answer, or set {place} to "
            f"{name}, which begins again"
        )
    if why is not None:
        generator = TransformersGenerator(policy, contract, gather)
    why = why or "each rank has a GPU with memory for it"
    job.choices[place] = {"value": name, "reason": why}
    if world.rank == 0:
        print(f"{place}: auto is {name}: {why}", flush=True)
    return cast(Generator, generator)


def _of_any_rank(reason: str | None, world: World) -> str | None:
    """The reason of the first rank that has one."""
    return next(filter(None, world.gather(reason)), None)


def _reason_against(
    policy: DeepSpeedEngine, world: World, rows: int, longest: int, job: LaunchedJob, later: int
) -> str | None:
    """Why vLLM cannot answer on this rank, or is not to."""
    if world.deterministic:
        return "launch.deterministic is true, and vLLM does not repeat its results"
    if "vllm" not in job.versions or find_spec("vllm") is None:
        return f"rank {world.rank} has no package vllm"
    if not on_gpu():
        return f"rank {world.rank} has no GPU"
    free_memory()
    config, size = policy.module.config, policy.module.dtype.itemsize
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pages = PAGE * (1 + rows * ceil(longest / PAGE)) * 2 * config.num_hidden_layers * heads * width
    weights = sum(whole_shape(parameter).numel() for parameter in policy.module.parameters())
    needed, free = size * (weights + pages), max(0, get_accelerator().available_memory() - later)
    if needed > free:
        sizes = f"{needed / 2**30:.1f} GiB for weights and pages, of which {free / 2**30:.1f}"
        return f"vLLM needs {sizes} are free on rank {world.rank}"
    return None
