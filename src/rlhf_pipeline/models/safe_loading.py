"""Load models without executing what they ship, unless the user allows it."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers.utils import find_adapter_config_file

from rlhf_pipeline.errors import ArtifactError, PipelineError, without_secrets
from rlhf_pipeline.models.lean_transformers import AutoConfig


def loading_arguments(
    path: str | Path,
    *,
    revision: str | None = None,
    unpickle: bool = False,
    trust_remote_code: bool = False,
    device: torch.device | None = None,
) -> dict[str, Any]:
    """Check a model's folder and return the safe arguments of `from_pretrained`.

    Raises ArtifactError if the folder contains an adapter, or its configuration selects weights in
    another format than safetensors.

    Args:
        path: a folder, or a model id on the hub.
        unpickle: without safetensors, read the tensors of `pytorch_model.bin`, and nothing else.
        trust_remote_code: whether Python code that ships with the model may run.
        device: where the weights go, each as it is read. None or the CPU: main memory.
    """
    if find_adapter_config_file(str(path), revision=revision) is not None:
        raise ArtifactError(
            f"{path}: found an adapter (adapter_config.json), expected a whole model; transformers "
            "would add the adapter to the model. Fix: merge it into its base model (peft's "
            "merge_and_unload) and save the result, or remove the adapter's files"
        )
    config = AutoConfig.from_pretrained(
        path, revision=revision, trust_remote_code=trust_remote_code
    )
    weights = getattr(config, "transformers_weights", None)
    if weights is not None and not str(weights).endswith(
        (".safetensors", ".safetensors.index.json")
    ):
        raise ArtifactError(
            f"{path}: found transformers_weights {weights!r} in config.json, expected a "
            "safetensors file. Fix: save the model again with save_pretrained"
        )
    on_accelerator = device is not None and device.type != "cpu"
    return {
        "revision": revision,
        "trust_remote_code": trust_remote_code,
        "use_safetensors": None if unpickle else True,
        "device_map": {"": device} if on_accelerator else None,
    }


@contextmanager
def explain_loading_errors(path: str | Path) -> Iterator[None]:
    """Replace all errors of transformers and torch but "out of memory" by an ArtifactError."""
    try:
        yield
    except pickle.UnpicklingError as error:
        raise ArtifactError(
            f"{path}: found more than tensors in pytorch_model.bin, expected tensors only; reading "
            "the rest would execute it. Fix: get the model as safetensors from a trusted source"
        ) from error
    except (PipelineError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # the errors of a damaged file have no common base class
        message = without_secrets(str(error))
        if "trust_remote_code" in message:
            raise ArtifactError(
                f"{path}: the model needs its own Python code (auto_map in its configuration), "
                "which is not executed. Fix: read that code; if you trust it, set "
                "base_model.trust_remote_code to true (it applies to the base model and to the "
                "models trained from it)"
            ) from error
        if "safetensors" in message:
            raise ArtifactError(
                f"{path}: found no weights as safetensors. Fix: for a base model with "
                "pytorch_model.bin, set base_model.unpickle_weights to true (reads tensors, "
                "executes nothing); otherwise save the model again with save_pretrained"
            ) from error
        raise ArtifactError(
            f"{path}: transformers cannot load it: {type(error).__name__}: {message}. Fix: "
            "download or save it again"
        ) from error
