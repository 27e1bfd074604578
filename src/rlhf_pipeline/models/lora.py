"""LoRA (Hu et al. 2021) by peft: low-rank adapters beside frozen linear layers.

An adapted layer computes W x + (alpha / rank) B A x, with A (rank, in) random and B (out, rank)
zero at the start. Adapters are inserted into the model in place, so its callers need no change.
Functions import peft themselves, because the import takes a second.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rlhf_pipeline.config.training import LoRAConfig
from rlhf_pipeline.errors import ArtifactError, ConfigError, suggestion
from rlhf_pipeline.models import PreTrainedModel
from rlhf_pipeline.models.forward import network_of
from rlhf_pipeline.models.loading import HEAD

M = TypeVar("M", bound=nn.Module)
WEIGHTS = "adapter_model.safetensors"  # peft's file of adapter weights
ADAPTER = "default"  # peft's name of the only adapter, in parameter names but not in the file


def add_adapters(model: nn.Module, config: LoRAConfig) -> Any:
    """Insert adapters, set which parameters train, and return peft's `LoraModel`.

    Adapters and a scalar head train; with `config.train_rest`, all others without an adapter, too.
    Raises ConfigError if a target is not a linear layer of the model.
    """
    from peft import LoraConfig, LoraModel

    adapted = network_of(model)
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # peft divides it by the rank
        target_modules=targets(adapted, config),
        # GPT-2's weights are (in, out).
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in adapted.modules()),
        task_type="SEQ_CLS" if hasattr(adapted, HEAD) else "CAUSAL_LM",
    )
    tuner = LoraModel(adapted, settings, ADAPTER)
    for name, parameter in adapted.named_parameters():
        if config.train_rest:
            parameter.requires_grad_(not name.endswith(".base_layer.weight"))
        elif name.startswith(f"{HEAD}."):
            parameter.requires_grad_(True)
    return tuner


def trained_names(model: nn.Module) -> list[str]:
    """The names of the trainable parameters in the Hugging Face model."""
    return [name for name, weight in network_of(model).named_parameters() if weight.requires_grad]


def write_adapter(model: nn.Module, weights: Mapping[str, Tensor], base: str, folder: Path) -> None:
    """Write the trained weights in peft's format.

    `PeftModel.from_pretrained(base_model, folder)` reads the result, except with `train_rest`.
    `weights` are those of `trained_names`, whole. `base` names the model without adapters.
    """
    adapted: Any = network_of(model)
    settings = copy.copy(adapted.peft_config[ADAPTER])
    settings.base_model_name_or_path = base
    settings.modules_to_save = [HEAD] if hasattr(adapted, HEAD) else None
    settings.inference_mode = True
    # peft keeps a set, whose order differs from run to run.
    settings.target_modules = sorted(settings.target_modules)
    settings.save_pretrained(folder)
    stored = {_stored_name(name): weight.cpu().contiguous() for name, weight in weights.items()}
    save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})


def merged(model: M, config: LoRAConfig, adapter: Path) -> M:
    """Merge a stored adapter into the model's weights in place, and return the plain model.

    The model is the one that training started from, in fp32: bf16 would round away most of a small
    change. Raises ArtifactError if the weights in the folder `adapter` do not match `config`.
    """
    tuner = add_adapters(model, config)
    stored = load_file(adapter / WEIGHTS)
    weights = {name: _stored_name(name) for name in trained_names(model)}
    if differing := set(weights.values()) ^ stored.keys():
        raise ArtifactError(
            f"{adapter / WEIGHTS} does not match the model and its lora block. Differing weights: "
            f"{', '.join(sorted(differing)[:4])}"
        )
    found = {own: stored[name] for own, name in weights.items()}
    network_of(model).load_state_dict(found, strict=False)
    tuner.merge_and_unload()
    return model


def _stored_name(name: str) -> str:
    return "base_model.model." + name.replace(f".{ADAPTER}.", ".")


class WithoutAdapters(nn.Module):
    """The model as it was before training: it infers with adapters disabled, and shares weights."""

    def __init__(self, trained: nn.Module) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer

        super().__init__()
        self.trained = trained
        self._adapted = [part for part in trained.modules() if isinstance(part, BaseTunerLayer)]

    @torch.no_grad()
    def forward(self, **inputs: Any) -> Any:
        for layer in self._adapted:
            layer.enable_adapters(False)
        try:
            return self.trained(**inputs)
        finally:
            for layer in self._adapted:
                layer.enable_adapters(True)


def targets(
    model: PreTrainedModel, config: LoRAConfig, place: str = "lora.target_modules"
) -> list[str]:
    """The names of the layers to adapt; ConfigError, which names `place`, for an unknown one."""
    # A language model's head may be tied to the embeddings, and a scalar head trains itself.
    output = (model.get_output_embeddings(), getattr(model, HEAD, None))
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module not in output
    ]
    known = sorted({name.rpartition(".")[2] for name in linear})
    if config.target_modules == "all-linear":
        return known
    for target in config.target_modules:
        if not any(f".{name}".endswith(f".{target}") for name in linear):
            raise ConfigError(
                f"{place}: found {target!r}{suggestion(target, known)}, expected "
                f"all-linear or linear layers of {model.config.model_type}: {', '.join(known)}"
            )
    return sorted(config.target_modules)
