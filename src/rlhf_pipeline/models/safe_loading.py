"""What is read of a model's folder, and what never is: pickles and code are executed only where the user says so."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.utils import find_adapter_config_file

from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.redaction import without_secrets


def loading_arguments(
    path: str | Path,
    *,
    revision: str | None = None,
    unpickle: bool = False,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Arguments of `from_pretrained` for a model, after a look at what else is in its folder.

    Args:
        path: a folder, or an id on the hub.
        revision: on the hub.
        unpickle: read `pytorch_model.bin`, tensors only, where there are no safetensors.

    Raises:
        ArtifactError: it is an adapter; or its configuration names weights that are no safetensors.
    """
    if find_adapter_config_file(str(path), revision=revision) is not None:
        raise ArtifactError(
            f"{path} holds an adapter (adapter_config.json), which transformers would put into the model; merge it into its "
            "base model (peft's merge_and_unload) and save that, or remove the adapter's files"
        )
    config = AutoConfig.from_pretrained(
        path, revision=revision, trust_remote_code=trust_remote_code
    )
    weights = getattr(config, "transformers_weights", None)
    if weights is not None and not str(weights).endswith(
        (".safetensors", ".safetensors.index.json")
    ):
        raise ArtifactError(
            f"{path}: transformers_weights in its config.json is {weights!r}, which is no safetensors file"
        )
    return {
        "revision": revision,
        "trust_remote_code": trust_remote_code,
        "use_safetensors": None if unpickle else True,
    }


@contextmanager
def explained(path: str | Path) -> Iterator[None]:
    """Turn the refusals of transformers and torch into an ArtifactError that names the option."""
    try:
        yield
    except pickle.UnpicklingError as error:
        raise ArtifactError(
            f"{path}: its pytorch_model.bin holds more than tensors, and is not read: it would be executed. Get the model as "
            "safetensors from somewhere you trust"
        ) from error
    except (OSError, ValueError) as error:
        told = without_secrets(str(error))
        if "trust_remote_code" in told:
            raise ArtifactError(
                f"{path} brings Python code of its own (auto_map in its configuration), which is not executed. Read that code; "
                "if you trust it, set base_model.trust_remote_code to true, which is about the base model and what comes of it"
            ) from error
        if "safetensors" in told:
            raise ArtifactError(
                f"{path} has no weights as safetensors. For a base model with pytorch_model.bin set "
                "base_model.unpickle_weights to true: tensors are read, nothing is executed. Else save it again with "
                "transformers' save_pretrained, which writes safetensors"
            ) from error
        raise
