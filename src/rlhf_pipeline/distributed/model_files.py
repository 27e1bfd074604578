"""Writing a model to disk in the Hugging Face format: whole models, and LoRA adapters."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.lean_deepspeed import DeepSpeedEngine
from rlhf_pipeline.distributed.read_back import require_same
from rlhf_pipeline.distributed.zero import whole_state_dict
from rlhf_pipeline.models.lora import trained_names, write_adapter
from rlhf_pipeline.models.scalar_head import pretrained
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.files import put_in_place, require_space


def save_model(model: nn.Module, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write safetensors, configuration, tokenizer, chat template and token contract.

    The folder is written completely or not at all. All ranks call this together; the first one
    writes the files and reads them back (`require_same`). `model` may be an engine.

    Raises:
        ArtifactError: transformers reads a different model from the files.
        StageError: the disk has too little space.
    """
    saved = pretrained(unwrapped(model))
    weights = whole_state_dict(saved)
    if _is_first():
        with _replaced(directory, weights) as partial:
            with heartbeat.while_writing(partial):
                saved.save_pretrained(partial, state_dict=dict(weights))
            require_same(saved, weights, partial)
            tokenizer.save_pretrained(partial)
            eos = getattr(saved.config, "eos_token_id", None)  # set by stage base_model
            TokenContract.of(tokenizer, eos).write(partial)


def save_adapter(model: nn.Module, base: str, directory: Path) -> None:
    """Write the weights that LoRA trains, completely or not at all; see `write_adapter`.

    All ranks call this together; the first one writes. `model` may be an engine.
    """
    module = unwrapped(model)
    weights = whole_state_dict(pretrained(module), trained_names(module))
    if _is_first():
        with _replaced(directory, weights) as partial:
            write_adapter(module, weights, base, partial)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside an engine; any other model unchanged."""
    return model.module if isinstance(model, DeepSpeedEngine) else model


def _is_first() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


@contextmanager
def _replaced(directory: Path, weights: dict[str, Tensor]) -> Iterator[Path]:
    """A folder to write to; on exit it replaces `directory`.

    Raises StageError if the disk has too little space for the weights.
    """
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    # Tied weights share their memory and are written once.
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in weights.values()}
    require_space(partial, sum(sizes.values()), f"the model for {directory}")
    yield partial
    put_in_place(partial, directory)
