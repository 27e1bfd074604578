"""Generation by a Hugging Face model, from one uniform random number per token.

Responses are decoded token by token, with keys and values of the tokens so far in tensors that have
room for the whole response. On a CPU, the weights are in the layout of oneDNN meanwhile.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from rlhf_pipeline.config.training import SamplingConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.lean_deepspeed import DeepSpeedEngine
from rlhf_pipeline.distributed.zero import for_generation, is_sharded
from rlhf_pipeline.models.forward import LogprobHead, probe_capabilities
from rlhf_pipeline.models.lean_transformers import Cache, DynamicCache, PreTrainedModel
from rlhf_pipeline.models.sequences import Sequences, collate, pad
from rlhf_pipeline.rl.logprobs import sampled
from rlhf_pipeline.rollout.generation import Seed, uniform_draws
from rlhf_pipeline.rollout.records import Rollout
from rlhf_pipeline.runtime import heartbeat

FINISHED = 0.25
"""Finished rows leave a batch once they are this share of it, because leaving copies the cache of
the other rows."""
LOOK_EVERY = 16
"""Tokens between two looks at which rows have finished, of all ranks or of the host at its GPU."""
REPACKED_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class TransformersGenerator:
    """Samples from a Hugging Face model, or from one in a DeepSpeed engine."""

    policy: PreTrainedModel | DeepSpeedEngine
    """A model without dropout; an engine may be in training mode."""
    contract: TokenContract  # the tokens of the policy
    gather: bool = True
    """Whether to gather the weights of an engine at ZeRO stage 3 once for each call. This needs
    memory for the whole model; False gathers each layer at each token."""

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        seeds: Sequence[Seed],
        prompt_numbers: Sequence[int] | None = None,
    ) -> Rollout:
        packed = probe_capabilities(self.policy).packed
        numbers = torch.tensor(prompt_numbers or range(len(prompts)))
        draws = uniform_draws(seeds, sampling.max_response_tokens)
        responses: list[list[int]] = [[] for _ in prompts]
        logprobs = torch.zeros(draws.shape, dtype=torch.float64)
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        size = sampling.batch_size_per_gpu
        with (
            for_generation(self.policy, gather=self.gather) as model,
            repacked(model, min(size, len(prompts))),
        ):
            for index in lengths.argsort(stable=True).split(size):
                batch = Decoding(
                    model=model,
                    contract=self.contract,
                    temperature=sampling.temperature,
                    draws=draws[index].to(self.policy.device, non_blocking=True),
                    synced=is_sharded(model) and not self.gather,
                )
                ids, mask = pad([prompts[i] for i in index], self.contract.pad_id, left=True)
                batch.run(ids, mask, numbers[index] if packed else None)
                # One copy, so the host waits for the device once.
                tokens, logprobs[index] = torch.stack([batch.tokens.double(), batch.logprobs]).cpu()
                for i, row in zip(index.tolist(), tokens.long().tolist(), strict=True):
                    responses[i] = _until_eos(row, self.contract.eos_ids)
        sequences = collate(prompts, responses, self.contract.pad_id, prompt_numbers=prompt_numbers)
        return Rollout(sequences, logprobs[:, : sequences.response_ids.shape[1]].float())


@dataclass
class Decoding:
    """Responses to one batch of prompts, token by token.

    Rows that have finished leave the batch. Shapes: B rows of the batch, A rows that are left, R
    tokens of a response, V tokens of the vocabulary.
    """

    model: Any
    contract: TokenContract
    temperature: float
    draws: Tensor  # (B, R) uniform numbers in [0, 1)
    synced: bool  # every rank must take part in every forward pass
    tokens: Tensor = field(init=False)  # (B, R) long
    logprobs: Tensor = field(init=False)  # (B, R) float32

    def __post_init__(self) -> None:
        self.tokens = torch.full_like(self.draws, self.contract.pad_id, dtype=torch.long)
        self.logprobs = torch.zeros_like(self.draws, dtype=torch.float32)

    def run(self, ids: Tensor, mask: Tensor, numbers: Tensor | None) -> None:
        """Fill `tokens` and `logprobs`. The prompts are (B, P) and left-padded, in main memory.

        `numbers` are (B,): prompts with the same number are read once, packed. None: the model does
        not read packed rows.
        """
        device, (_, width) = self.draws.device, ids.shape
        steps = self.draws.shape[1]
        lengths = mask.sum(1).to(device, non_blocking=True)
        logits, cache = self._read(ids, mask, width + steps, numbers)
        attended = torch.nn.functional.pad(mask, (0, steps), value=True).to(
            device, non_blocking=True
        )
        rows = torch.arange(len(ids), device=device)
        finished = torch.zeros_like(rows, dtype=torch.bool)
        eos = torch.tensor(self.contract.eos_ids).to(device, non_blocking=True)
        for step in range(steps):
            heartbeat.tick()
            tokens, logprobs = sampled(
                logits, self.draws[rows, step], self.temperature, self.contract.vocab_size
            )
            self.tokens[rows, step] = tokens
            self.logprobs[rows, step] = logprobs
            finished = finished | torch.isin(tokens, eos)
            if step + 1 == steps:
                return
            if self.synced:
                if self._all_ranks_finished(finished, step):
                    return
            elif (
                known := self._known(finished, step)
            ) is not None and known.sum() >= FINISHED * len(known):
                left = (~known).nonzero().squeeze(1).to(rows.device)
                if not len(left):
                    return
                cache.keep_rows(left)
                rows, finished, attended = rows[left], finished[left], attended[left]
                lengths, tokens = lengths[left], tokens[left]
            logits = self.model(
                input_ids=tokens[:, None],
                attention_mask=attended[:, : width + step + 1],
                position_ids=lengths[:, None] + step,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]

    def _read(
        self, ids: Tensor, mask: Tensor, room: int, numbers: Tensor | None
    ) -> tuple[Tensor, "RoomyCache"]:
        """The logits (B, V) after the prompts, and the cache."""
        device = self.draws.device
        if numbers is not None:
            numbered = torch.cat([ids.masked_fill(~mask, -1), numbers[:, None]], dim=1)
            numbered, copies = torch.unique(numbered, dim=0, return_inverse=True)
            ids, mask = numbered[:, :-1].clamp(min=0), numbered[:, :-1] >= 0
        nothing = torch.empty(len(ids), 0, dtype=torch.long)
        prompts = Sequences(ids, mask, nothing, nothing.bool(), nothing.bool()).to(device)
        if numbers is not None:
            copies = copies.to(device, non_blocking=True)
            rows = prompts.packed()
            states = DynamicCache()
            logits = self.model(
                **rows.model_inputs(),
                past_key_values=states,
                use_cache=True,
                logits_to_keep=rows.ends,
            ).logits[0]
            return logits[copies], unpacked(states, prompts.prompt_mask, copies, room)
        cache = RoomyCache(room)
        logits = self.model(
            **prompts.model_inputs(), past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits[:, -1]
        return logits, cache

    def _all_ranks_finished(self, finished: Tensor, step: int) -> bool:
        if (step + 1) % LOOK_EVERY:
            return False
        unfinished = (~finished).any().float()
        torch.distributed.all_reduce(unfinished)
        return not bool(unfinished)

    def _known(self, finished: Tensor, step: int) -> Tensor | None:
        """Which rows have finished, if the host looks; None: it does not.

        Looking at each token would make the host wait for its GPU, so it looks at fixed tokens.
        Rounding depends on the number of rows, so if the time decided, a rollout could not be
        repeated, and ranks that sample the same tokens would part.
        """
        is_due = finished.device.type == "cpu" or (step + 1) % LOOK_EVERY == 0
        return finished.cpu() if is_due else None


def _until_eos(row: list[int], eos_ids: Sequence[int]) -> list[int]:
    """The response up to and including its first EOS; all of it if there is none."""
    end = next((count for count, token in enumerate(row, 1) if token in eos_ids), len(row))
    return row[:end]


class RoomyLayer(DynamicLayer):
    """The keys and values of one layer. A new token is written in place; nothing is copied.

    `keys` and `values` are views of the filled part, (B, heads, T, width).
    """

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        begin = self.get_seq_length()
        end = begin + key_states.shape[2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._all = [
                states.new_zeros(*states.shape[:2], self.room, states.shape[3])
                for states in (key_states, value_states)
            ]
        for whole, states in zip(self._all, (key_states, value_states), strict=True):
            whole[:, :, begin:end] = states
        self.keys, self.values = (whole[:, :, :end] for whole in self._all)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        end = self.get_seq_length()
        self._all = [whole[indices] for whole in self._all]
        self.keys, self.values = (whole[:, :, :end] for whole in self._all)


class RoomyCache(Cache):
    """A cache with a `RoomyLayer` for each layer of a model."""

    def __init__(self, room: int) -> None:
        super().__init__(layer_class_to_replicate=lambda: RoomyLayer(room))

    def keep_rows(self, indices: Tensor) -> None:
        """Keep the rows with these numbers, and forget the others."""
        for layer in self.layers:
            layer.batch_select_indices(indices)


def unpacked(packed: DynamicCache, mask: Tensor, rows: Tensor, room: int) -> RoomyCache:
    """The cache of packed prompts as that of left-padded ones.

    It is in float32 on a CPU: `packed_attention` would otherwise convert all of it for each token.

    Args:
        packed: keys and values of N tokens, (1, heads, N, width) each.
        mask: (U, P) bool, True for the N tokens, row by row.
        rows: (B,) the row of `mask` that each row of the result repeats.
        room: tokens of prompt and response, at most.
    """
    cache = RoomyCache(room)
    place = (mask.flatten().cumsum(0) - 1).clamp(min=0).view(mask.shape)[rows]  # padding: any token
    for number, layer in enumerate(packed.layers):
        states = (x[0][:, place].transpose(0, 1) for x in (layer.keys, layer.values))
        cache.update(*(x.float() if x.device.type == "cpu" else x for x in states), number)
        layer.keys = layer.values = None  # frees each layer in its turn
    return cache


@contextmanager
def repacked(model: nn.Module, rows: int) -> Iterator[None]:
    """Rearrange the weights, for inputs of `rows` rows; the block computes the same as without.

    Generation multiplies few rows by every weight, for each token again. torch lets the BLAS
    library rearrange a weight at every call, which takes longer than the product itself. The
    operators here are those that torch's compiler uses (torch 2.13).

    It needs memory for a second copy of the weights. On a GPU, and for weights that are sharded,
    it has no effect.
    """
    layers = [
        layer for layer in model.modules() if isinstance(layer, nn.Linear) and _is_supported(layer)
    ]
    try:
        for layer in layers:
            packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), rows)
            vars(layer)["forward"] = partial(_linear, packed, layer.bias)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


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
