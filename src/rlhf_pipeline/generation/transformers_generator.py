"""Generation by a Hugging Face model, from one uniform random number per token.

On a CPU, the weights are in the layout of oneDNN meanwhile.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_pipeline.config.training import SamplingConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.zero import (
    DeepSpeedEngine,
    for_generation,
    is_sharded,
    with_adapters,
)
from rlhf_pipeline.generation.decoding import decode
from rlhf_pipeline.generation.generator import Seed, uniform_draws
from rlhf_pipeline.generation.records import Rollout
from rlhf_pipeline.models import PreTrainedModel
from rlhf_pipeline.models.forward import LogprobHead, probe_capabilities
from rlhf_pipeline.models.sequences import collate, pad

REPACKED_DTYPES = (torch.float32, torch.bfloat16)


class TransformersGenerator:
    """Samples from a Hugging Face model, or from one in a DeepSpeed engine.

    Args:
        policy: a model without dropout; an engine may be in training mode.
        gather: whether to gather the weights of an engine at ZeRO stage 3 once for each call. This
            needs memory for the whole model; False gathers each layer at each token.
    """

    def __init__(
        self,
        policy: PreTrainedModel | DeepSpeedEngine,
        contract: TokenContract,
        gather: bool = True,
    ) -> None:
        self._policy, self._contract, self._gather = policy, contract, gather

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        seeds: Sequence[Seed],
        prompt_numbers: Sequence[int] | None = None,
    ) -> Rollout:
        packed, pad_id = probe_capabilities(self._policy).packed, self._contract.pad_id
        numbers = torch.tensor(prompt_numbers or range(len(prompts)))
        draws = uniform_draws(seeds, sampling.max_response_tokens)
        responses: list[list[int]] = [[] for _ in prompts]
        logprobs = torch.zeros(draws.shape, dtype=torch.float64)
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        size = min(sampling.batch_size_per_gpu, len(prompts))
        with for_generation(self._policy, gather=self._gather) as model, repacked(model, size):
            for index in reversed(lengths.argsort(stable=True).split(size)):
                ids, mask = pad([prompts[i] for i in index], pad_id, left=True)
                found = decode(
                    model,
                    self._contract,
                    ids,
                    mask,
                    numbers[index] if packed else None,
                    draws[index],
                    sampling.temperature,
                    device=self._policy.device,
                    synced=is_sharded(model) and not self._gather,
                )
                # One copy, so the host waits for the device once.
                tokens, logprobs[index] = torch.stack([each.double() for each in found]).cpu()
                for i, row in zip(index.tolist(), tokens.long().tolist(), strict=True):
                    ends = (n for n, token in enumerate(row, 1) if token in self._contract.eos_ids)
                    responses[i] = row[: next(ends, len(row))]
        sequences = collate(prompts, responses, pad_id, prompt_numbers=prompt_numbers)
        own = logprobs[:, : sequences.response_ids.shape[1]].float()
        return Rollout(sequences, own.masked_fill(~sequences.real_mask, 0.0))


@contextmanager
def repacked(model: nn.Module, rows: int) -> Iterator[None]:
    """Rearrange the weights, for inputs of `rows` rows; the block computes the same as without.

    Generation multiplies few rows by every weight, for each token again. torch lets the BLAS
    library rearrange a weight at every call, which takes longer than the product itself. The
    operators here are those that torch's compiler uses (torch 2.13). Adapters of LoRA are added to
    the weights meanwhile, so a layer has one product instead of three.

    It needs memory for a second copy of the weights. On a GPU, and for weights that are sharded,
    it has no effect.
    """
    layers = _linear_layers(model)
    try:
        for layer in layers:
            weight = with_adapters(layer, "weight").detach()
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
            vars(layer)["forward"] = partial(_linear, packed, layer.bias)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _linear_layers(module: nn.Module) -> list[Any]:
    """The layers to rearrange; of one with adapters, not its parts."""
    adapted: Any = module
    base = adapted.get_base_layer() if hasattr(module, "get_base_layer") else module
    if isinstance(base, nn.Linear):
        return [module] if _is_supported(base) else []
    return [layer for child in module.children() for layer in _linear_layers(child)]


def _is_supported(layer: nn.Linear) -> bool:
    weight = layer.weight
    return (
        type(layer) in (nn.Linear, LogprobHead)
        and weight.device.type == "cpu"
        and weight.numel() > 0
        and weight.dtype in REPACKED_DTYPES
        and torch.backends.mkldnn.is_available()
        and (weight.dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def _linear(packed: Tensor, bias: Tensor | None, inputs: Tensor) -> Tensor:
    output: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, packed, bias, "none", [], "")
    return output
