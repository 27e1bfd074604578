"""The weights of a policy in training, whole and with adapters merged, for a copy that samples."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_pipeline.distributed.zero import gathered
from rlhf_pipeline.models.lean_transformers import PreTrainedModel


def without_weights(model: PreTrainedModel) -> PreTrainedModel:
    """The same model on the device `meta`, without adapters: its modules and their paths."""
    with torch.device("meta"):
        plain: PreTrainedModel = type(model)(deepcopy(model.config))
    return plain.eval()


def whole_weights(source: PreTrainedModel, layers: int = 1) -> Iterator[tuple[str, Tensor]]:
    """All weights by their names without adapters, adapters merged.

    All ranks iterate together. The weights of `layers` layers are gathered at a time.
    """
    plain = without_weights(source)
    of_layer: dict[str, list[str]] = {}  # modules with parameters; outside of layers, one by one
    for path, module in plain.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            number = next((i for i, part in enumerate(path.split(".")) if part.isdigit()), None)
            layer = path if number is None else ".".join(path.split(".")[: number + 1])
            of_layer.setdefault(layer, []).append(path)
    pieces = [*of_layer.values()]
    for start in range(0, len(pieces), layers):
        paths = [path for piece in pieces[start : start + layers] for path in piece]
        owners = {path: source.get_submodule(path) for path in paths}
        parameters = [p for module in owners.values() for p in module.parameters()]
        with gathered(parameters, changes=False):
            for path, module in owners.items():
                for name, _ in plain.get_submodule(path).named_parameters(recurse=False):
                    yield f"{path}.{name}".lstrip("."), with_adapters(module, name).detach()


def with_adapters(module: nn.Module, name: str) -> Tensor:
    """A parameter of a module; that of an adapted layer with its adapter added."""
    adapted: Any = module
    if not hasattr(module, "get_base_layer"):  # peft's layers have it
        return module.get_parameter(name)
    whole: Tensor = adapted.get_base_layer().get_parameter(name)
    if name != "weight":
        return whole
    added = sum(adapted.get_delta_weight(adapter) for adapter in adapted.active_adapters)
    return (whole + added).to(whole.dtype)
