"""Writing a model in the Hugging Face format, and checking that it is read exactly as it was.

transformers decides on empty weights, which need no memory, what it would read: names, shapes,
precisions and ties. The values are compared one tensor at a time with the bytes of the files. So a
second model never needs to fit in memory, with one exception: a family that transformers stores in
another layout (experts of a mixture are one tensor in memory and many in the file) can be compared
only after transformers has converted it.
"""

import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.lean_deepspeed import DeepSpeedEngine
from rlhf_pipeline.distributed.zero import whole_state_dict
from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.models.lean_transformers import PreTrainedModel
from rlhf_pipeline.models.lora import trained_names, write_adapter
from rlhf_pipeline.models.mlflow_format import write_mlmodel
from rlhf_pipeline.models.scalar_head import pretrained
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.files import put_in_place, require_space

logger = logging.getLogger(__name__)
LARGEST_SECOND_MODEL = 2**34
"""Bytes of the largest model (16 GiB) that is loaded a second time if its layout requires it."""


def save_model(model: nn.Module, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write safetensors, configuration, tokenizer, chat template and token contract.

    A policy also gets the file that makes its folder an MLflow model.

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
            if saved is unwrapped(model):  # a policy has no scalar head around it
                write_mlmodel(partial)


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


def require_same(saved: PreTrainedModel, weights: Mapping[str, Tensor], directory: Path) -> None:
    """Require that transformers reads exactly these weights from the folder, bit for bit.

    The values of a model in another layout and above `LARGEST_SECOND_MODEL` are not compared; a
    warning says so. Raises ArtifactError with the first three weights that are missing, unexpected
    or different.
    """
    read, wrong = _read_empty(saved, weights, directory)
    if not wrong:
        stored = _stored_names(directory)
        if not stored.keys() <= weights.keys():
            wrong = _differing_if_converted(saved, weights, directory)
        else:
            wrong = _differing(read, weights, stored)
    if wrong:
        raise ArtifactError(
            f"{directory}: the saved model differs from the model in memory: {', '.join(wrong[:3])}"
        )


def _read_empty(
    saved: PreTrainedModel, weights: Mapping[str, Tensor], directory: Path
) -> tuple[PreTrainedModel, list[str]]:
    """The model that transformers would read, without values; names that it reads differently."""
    read, info = type(saved).from_pretrained(
        directory,
        dtype=saved.dtype,
        device_map="meta",
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    found = read.state_dict()
    differing = [
        name for name in weights if name not in found or not _alike(weights[name], found[name])
    ]
    mismatched = [name for name, *_ in info["mismatched_keys"]]
    return read, [*info["missing_keys"], *info["unexpected_keys"], *mismatched, *differing]


def _stored_names(directory: Path) -> dict[str, Path]:
    stored: dict[str, Path] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            stored |= dict.fromkeys(file.keys(), path)
    return stored


def _differing(
    read: PreTrainedModel, weights: Mapping[str, Tensor], stored: Mapping[str, Path]
) -> list[str]:
    """Names of weights whose bytes in the files differ. One tensor of a file at a time is read.

    A weight that is not stored is read as the one that transformers ties it to.
    """
    parameters, found = read.state_dict(keep_vars=True), []
    sources = {id(parameters[name]): name for name in stored}
    files = {path: safe_open(path, framework="pt") for path in {*stored.values()}}
    for name, weight in weights.items():
        source = name if name in stored else sources.get(id(parameters[name]))
        if source is None or not _identical(weight, files[stored[source]].get_tensor(source)):
            found.append(name)
        heartbeat.tick()
    return found


def _differing_if_converted(
    saved: PreTrainedModel, weights: Mapping[str, Tensor], directory: Path
) -> list[str]:
    """Names of tensors whose bytes differ in a second model, which is loaded whole."""
    size = sum({tensor.data_ptr(): tensor.nbytes for tensor in weights.values()}.values())
    if size > LARGEST_SECOND_MODEL:
        logger.warning(
            "%s: transformers stores this family in another layout, and %.0f GiB are too large to "
            "load a second time: names and shapes are checked, values are not",
            directory,
            size / 2**30,
        )
        return []
    found = type(saved).from_pretrained(directory, dtype=saved.dtype).state_dict()
    return [name for name in weights if not _identical(weights[name], found[name])]


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape


def _identical(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bytes; NaN equals itself."""
    one, other = one.detach().cpu(), other.detach().cpu()
    return _alike(one, other) and torch.equal(
        *(tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    )
