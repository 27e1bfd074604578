"""Models with random weights, their inputs and their memory, for `gpu_worker.py`."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gpu_rows
import numpy as np
import pyarrow as pa
import torch
from gpu_rows import FOLDER, Tree

from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.sizing.fit import USABLE
from rlhf_pipeline.sizing.hardware import Hardware, main_memory
from rlhf_pipeline.sizing.memory import Lengths
from rlhf_pipeline.sizing.models import Shape
from rlhf_pipeline.sizing.stages import plan_stage

GIB = 2**30
UNUSED = 64
"""Ids at the end of a vocabulary that no row samples; a new tokenizer pads it likewise."""
SEED = 1


class SkipError(Exception):
    """Why a row cannot run here."""


@dataclass(frozen=True)
class Model:
    """A model with random weights, as the stages store it."""

    folder: Path
    shape: Shape
    contract: TokenContract


@cache
def world() -> Any:
    """The ranks of this launch."""
    from rlhf_pipeline.distributed.world import join

    return join(SEED, timeout_s=600.0)


def card() -> str:
    """The name of the GPU, or `CPU`."""
    return torch.cuda.get_device_name() if world().device.type == "cuda" else "CPU"


def make_model(settings: Tree, positions: int) -> Model:
    """The folder of a model of a published shape; the first rank makes it, once for all rows."""
    toy = settings.get("toy", False)
    fields = gpu_rows.architecture(settings["model"], toy=toy, positions=positions)
    name = f"{settings['model']}-{fields['max_position_embeddings']}{'-toy' * toy}"
    folder, vocabulary = FOLDER / "models" / name, fields["vocab_size"] - UNUSED
    contract = TokenContract("random", "none", 0, (vocabulary - 1,), None, vocabulary)
    if world().rank == 0 and not (folder / "token_contract.json").is_file():
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        from rlhf_pipeline.models import AutoConfig, AutoModelForCausalLM

        fields |= {"pad_token_id": 0, "eos_token_id": vocabulary - 1, "bos_token_id": None}
        torch.manual_seed(SEED)
        with torch.device(world().device):
            made = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(**fields), dtype=torch.bfloat16
            )
        made.save_pretrained(folder)
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        words = {text: number for number, text in enumerate(["<pad>", "<end>", *letters])}
        tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
        special = {"pad_token": "<pad>", "eos_token": "<end>"}
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
        contract.write(folder)
    world().barrier()
    return Model(folder, Shape.of(fields), contract)


def make_reward_model(model: Model) -> Path:
    """The folder of the same weights with a random scalar head."""
    from rlhf_pipeline.distributed.engine import untrained
    from rlhf_pipeline.models.scalar_head import store_score_mean

    folder = model.folder.with_name(f"{model.folder.name}-reward")
    if world().rank == 0 and not (folder / "token_contract.json").is_file():
        scores = untrained(model.folder, "bf16", device=world().device)
        scores.classifier.save_pretrained(folder)
        store_score_mean(folder, 0.0)
        model.contract.write(folder)
    world().barrier()
    release()
    return folder


def random_ids(rows: int, length: int, model: Model) -> list[list[int]]:
    """Rows of random tokens."""
    draw = np.random.default_rng(SEED)
    return draw.integers(1, model.contract.vocab_size - 1, (rows, length)).tolist()


def write_prompts(prompts: list[list[int]], model: Model) -> Path:
    """The folder of PPO's prompts."""
    folder, count = FOLDER / "prompts", len(prompts)
    if world().rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        model.contract.write(folder)
        messages = [[{"role": "user", "content": "random tokens"}]] * count
        table = pa.table(
            {"id": [str(n) for n in range(count)], "source": ["random"] * count,
             "prompt_ids": pa.array(prompts, pa.list_(pa.int32())), "messages": messages,
             "reference": pa.array([None] * count, pa.string())}
        )  # fmt: skip
        for part in ("train", "validation"):
            with (
                pa.OSFile(str(folder / f"{part}.arrow"), "wb") as sink,
                pa.ipc.new_stream(sink, table.schema) as writer,
            ):
                writer.write_table(table)
    world().barrier()
    return folder


def release() -> None:
    """Free what the row before held, and begin to measure memory."""
    from rlhf_pipeline.distributed.engine import release_freed

    release_freed()
    if world().device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib() -> float:
    """The most memory of this rank: what torch reserved, and what CUDA and libraries hold.

    On a CPU it is the most that the process ever had, over all rows.
    """
    if world().device.type != "cuda":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    free, total = torch.cuda.mem_get_info()
    others = total - free - torch.cuda.memory_reserved()
    return (torch.cuda.max_memory_reserved() + others) / GIB


def blocks_of(stage: str, config: Any, lengths: Lengths) -> Tree:
    """The parameters of a plan for rows of these lengths."""
    limits = {"max_prompt_tokens": lengths.prompt, "max_response_tokens": lengths.response}
    split = {"sources": [{"name": "synthetic"}], **limits}
    return {stage: config.model_dump(mode="json"), "split": split}


def planned_gib(stage: str, config: Any, lengths: Lengths, model: Model) -> float:
    """What the plan says of a rank; raises SkipError if that is more than there is."""
    on_gpu = world().device.type == "cuda"
    total = torch.cuda.mem_get_info()[1] if on_gpu else None
    hardware = Hardware(world().size, gpu_memory=total, main_memory=main_memory())
    planned = plan_stage(stage, blocks_of(stage, config, lengths), model.shape, hardware).peak / GIB
    if total is not None and planned > USABLE * total / GIB:
        raise SkipError(f"its plan is {planned:.0f} GiB, and the GPU has {total / GIB:.0f} GiB")
    return planned


def memory_beside(planned: float) -> Tree:
    """The peak beside the plan, whose error only a GPU shows: see `peak_gib`."""
    found = {"peak, GiB": peak_gib(), "planned, GiB": planned}
    if world().device.type == "cuda":
        found["plan is off by, %"] = 100 * (planned / found["peak, GiB"] - 1)
    return found
