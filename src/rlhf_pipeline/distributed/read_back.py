"""Checking that transformers reads a saved model exactly as it was in memory.

transformers decides on empty weights, which need no memory, what it would read: names, shapes,
precisions and ties. The values are compared one tensor at a time with the bytes of the files. So a
second model never needs to fit in memory, with one exception: a family that transformers stores in
another layout (experts of a mixture are one tensor in memory and many in the file) can be compared
only after transformers has converted it.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.models.lean_transformers import PreTrainedModel
from rlhf_pipeline.runtime import heartbeat

logger = logging.getLogger(__name__)

LARGEST_SECOND_MODEL = 2**34
"""Bytes of the largest model (16 GiB) that is loaded a second time if its layout requires it."""


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
            wrong = _differing(weights, stored) + _tied_otherwise(read, weights, stored)
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


def _differing(weights: Mapping[str, Tensor], stored: Mapping[str, Path]) -> list[str]:
    """Names of stored tensors whose bytes differ. Memory holds one tensor of a file at a time."""
    found = []
    for path in sorted(set(stored.values())):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                if not _identical(weights[name], file.get_tensor(name)):
                    found.append(name)
                heartbeat.tick()
    return found


def _tied_otherwise(
    read: PreTrainedModel, weights: Mapping[str, Tensor], stored: Mapping[str, Path]
) -> list[str]:
    """Names of tensors that are not stored and take the values of another one than in memory."""
    parameters = read.state_dict(keep_vars=True)
    sources = {id(parameters[name]): name for name in stored}
    return [
        name
        for name in weights.keys() - stored.keys()
        if (source := sources.get(id(parameters[name]))) is None
        or not _identical(weights[name], weights[source])
    ]


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
