"""LoRA (Hu et al. 2021) by peft: low-rank adapters beside frozen linear layers.

An adapted layer computes W x + (alpha / rank) B A x, with A (rank, in) random and B (out, rank) zero at the start. The
adapters are put into the model itself, which stays what it was to all that use it. peft is imported where it is needed
only: that takes a second.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_pipeline.config.architecture import suggestion
from rlhf_pipeline.config.training import LoRAConfig
from rlhf_pipeline.errors import ArtifactError, ConfigError
from rlhf_pipeline.models.scalar_head import HEAD, TokenScores, pretrained

if TYPE_CHECKING:
    from peft import LoraConfig, LoraModel

M = TypeVar("M", bound=nn.Module)
WEIGHTS = "adapter_model.safetensors"
"""peft's name for an adapter's weights."""
ADAPTER = "default"
"""peft's name for the only adapter; parameters have it in theirs, files do not."""
PREFIX = "base_model.model."
"""peft's path to the adapted model in that file."""


def add_adapters(model: nn.Module, config: LoRAConfig) -> LoraModel:
    """Put adapters into the model and let train what `config` says: adapters, a scalar head, perhaps the rest.

    Raises:
        ConfigError: a target is no linear layer of the model.
    """
    from peft import LoraModel

    adapted = pretrained(model)
    tuner = LoraModel(adapted, _peft_config(adapted, config), ADAPTER)
    for name, parameter in adapted.named_parameters():
        if config.train_rest:
            parameter.requires_grad_(not name.endswith(".base_layer.weight"))
        elif isinstance(model, TokenScores) and name.startswith(f"{HEAD}."):
            parameter.requires_grad_(True)
    return tuner


def trained_names(model: nn.Module) -> list[str]:
    """Names of the parameters that train, as the Hugging Face model has them."""
    return [
        name for name, parameter in pretrained(model).named_parameters() if parameter.requires_grad
    ]


def write_adapter(model: nn.Module, weights: Mapping[str, Tensor], base: str, folder: Path) -> None:
    """Write what has been trained in peft's format: `PeftModel.from_pretrained(base_model, folder)` reads it, unless more
    than adapters and a scalar head is in it (`train_rest`).

    Args:
        model: with adapters.
        weights: those that train (`trained_names`), whole.
        base: what the model without adapters is called.
        folder: is made.
    """
    settings = copy.copy(cast("dict[str, LoraConfig]", pretrained(model).peft_config)[ADAPTER])
    settings.base_model_name_or_path = base
    settings.modules_to_save = [HEAD] if isinstance(model, TokenScores) else None
    settings.inference_mode = True
    settings.target_modules = sorted(
        settings.target_modules
    )  # peft holds a set: its order would differ from run to run
    settings.save_pretrained(folder)
    stored = {_stored_name(name): weight.cpu().contiguous() for name, weight in weights.items()}
    save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})


def merged(model: M, config: LoRAConfig, adapter: Path) -> M:
    """The model with what `write_adapter` wrote added to its weights; it has no adapters any more.

    Do this in fp32: in bf16 most of a small change is lost to rounding.

    Args:
        model: what training started from; it is changed.
        config: the adapters were made by it.
        adapter: folder.

    Raises:
        ArtifactError: the weights in the folder are not those that training by `config` has.
    """
    tuner = add_adapters(model, config)
    stored = load_file(adapter / WEIGHTS)
    weights = {name: _stored_name(name) for name in trained_names(model)}
    if differing := set(weights.values()) ^ stored.keys():
        raise ArtifactError(
            f"{adapter / WEIGHTS} does not fit the model: {', '.join(sorted(differing)[:4])}"
        )
    pretrained(model).load_state_dict(
        {own: stored[name] for own, name in weights.items()}, strict=False
    )
    tuner.merge_and_unload()
    return model


def _stored_name(name: str) -> str:
    return PREFIX + name.replace(f".{ADAPTER}.", ".")


class WithoutAdapters(nn.Module):
    """A model in training as it was at its start: it infers with its adapters switched off. The two share all weights."""

    def __init__(self, trained: nn.Module) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer

        super().__init__()
        self.trained = trained
        self._adapted = [
            module for module in trained.modules() if isinstance(module, BaseTunerLayer)
        ]

    @torch.no_grad()
    def forward(self, **inputs: Any) -> Any:
        """What the model returns, without gradient."""
        self._switch(on=False)
        try:
            return self.trained(**inputs)
        finally:
            self._switch(on=True)

    def _switch(self, *, on: bool) -> None:
        for layer in self._adapted:
            layer.enable_adapters(on)


def _peft_config(model: PreTrainedModel, config: LoRAConfig) -> LoraConfig:
    from peft import LoraConfig

    return LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # peft divides it by the rank
        target_modules=_targets(model, config),
        fan_in_fan_out=any(
            isinstance(module, Conv1D) for module in model.modules()
        ),  # GPT-2's weights are (in, out)
        task_type="SEQ_CLS" if hasattr(model, HEAD) else "CAUSAL_LM",
    )


def _targets(model: PreTrainedModel, config: LoRAConfig) -> list[str]:
    """Names of the layers to adapt. Not among them is what turns hidden states into logits or a scalar: it may be tied to
    the embeddings, or trains itself."""
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
                f"lora.target_modules: {target!r} is no linear layer of {model.config.model_type} that can be adapted"
                f"{suggestion(target, known)}; it has {', '.join(known)}"
            )
    return sorted(config.target_modules)
