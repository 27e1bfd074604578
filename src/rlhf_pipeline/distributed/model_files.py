"""Writing a model in the Hugging Face format, and checking that it is read exactly as it was.

transformers decides on empty weights, which need no memory, what it would read: names, shapes,
precisions and ties. The values are compared one tensor at a time with the bytes of the files. Only
a family that transformers stores in another layout (experts of a mixture are one tensor in memory
and many in the file) is loaded a second time, because transformers has to convert it. The digests
of the weights are computed while they are written: `folder_digest` does not read large files again.
"""

import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.tensor_file import write_tensors
from rlhf_pipeline.distributed.zero import whole_state_dict
from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.models import PreTrainedModel
from rlhf_pipeline.models.forward import network_of
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.files import put_in_place, require_space

logger = logging.getLogger(__name__)
LARGEST_SECOND_MODEL = 2**34
"""Bytes of the largest model (16 GiB) that is loaded a second time; of others, no values are
compared."""


def save_model(model: nn.Module, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write safetensors, configuration, tokenizer, chat template and token contract.

    The folder is written completely or not at all. All ranks call this together; the first one
    writes. `model` may be an engine. Raises the errors of `require_same`, and StageError if the
    disk has too little space.
    """
    saved = network_of(model)
    weights = whole_state_dict(saved)
    if not _is_first():
        return
    with _replaced(directory, weights) as partial:
        with patch("transformers.modeling_utils.safe_save_file", write_tensors):
            saved.save_pretrained(partial, state_dict=dict(weights))
        require_same(saved, weights, partial)
        tokenizer.save_pretrained(partial)
        eos = getattr(saved.config, "eos_token_id", None)  # set by stage base_model
        TokenContract.of(tokenizer, eos).write(partial)


def save_adapter(model: nn.Module, base: str, directory: Path) -> None:
    """Write the weights that LoRA trains; see `save_model` and `write_adapter`."""
    from rlhf_pipeline.models.lora import trained_names, write_adapter

    weights = whole_state_dict(network_of(model), trained_names(model))
    if _is_first():
        with _replaced(directory, weights) as partial:
            write_adapter(model, weights, base, partial)


def _is_first() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


@contextmanager
def _replaced(directory: Path, weights: Mapping[str, Tensor]) -> Iterator[Path]:
    """A folder to write to; on exit it replaces `directory`."""
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    require_space(partial, _size(weights), f"the model for {directory}")
    yield partial
    put_in_place(partial, directory)


def _size(weights: Mapping[str, Tensor]) -> int:
    """Bytes of the weights; tied ones share their memory and are written once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in weights.values()}.values())


def require_same(saved: PreTrainedModel, weights: Mapping[str, Tensor], directory: Path) -> None:
    """Require that transformers reads exactly these weights from the folder, bit for bit.

    Raises ArtifactError with the first three weights that are missing, unexpected or different.
    """
    how: Any = {"ignore_mismatched_sizes": True, "output_loading_info": True, "dtype": saved.dtype}
    empty, info = type(saved).from_pretrained(directory, device_map="meta", **how)
    read = empty.state_dict(keep_vars=True)
    mismatched = [name for name, *_ in info["mismatched_keys"]]
    differing = [n for n, weight in weights.items() if n not in read or not _alike(weight, read[n])]
    wrong = [*info["missing_keys"], *info["unexpected_keys"], *mismatched, *differing]
    if wrong := wrong or _differing(saved, weights, read, directory):
        raise ArtifactError(
            f"{directory}: the saved model differs from the model in memory: {', '.join(wrong[:3])}"
        )


def _differing(
    saved: PreTrainedModel, weights: Mapping[str, Tensor], read: Mapping[str, Tensor], folder: Path
) -> list[str]:
    """Names of weights whose bytes in the files differ. One tensor of a file at a time is read.

    A weight that is not stored is read as the one that transformers ties it to: `read` contains
    the parameters of its model. A model in another layout is loaded whole.
    """
    files = [safe_open(path, framework="pt") for path in sorted(folder.glob("*.safetensors"))]
    stored = {name: file for file in files for name in file.keys()}  # noqa: SIM118
    if not stored.keys() <= weights.keys():
        if (size := _size(weights)) > LARGEST_SECOND_MODEL:
            logger.warning(
                f"{folder}: transformers stores this family in another layout, and "
                f"{size / 2**30:.0f} GiB are too large to load a second time: names and shapes "
                "are checked, values are not"
            )
            return []
        second = type(saved).from_pretrained(folder, dtype=saved.dtype).state_dict()
        return [name for name in weights if not _identical(weights[name], second[name])]
    sources, found = {id(read[name]): name for name in stored}, []
    for name, weight in weights.items():
        source = name if name in stored else sources.get(id(read[name]))
        if source is None or not _identical(weight, stored[source].get_tensor(source)):
            found.append(name)
        heartbeat.report_progress()
    return found


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape


def _identical(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bytes; NaN equals itself."""
    bytes_of = (x.detach().cpu().contiguous().view(-1).view(torch.uint8) for x in (one, other))
    return _alike(one, other) and torch.equal(*bytes_of)
