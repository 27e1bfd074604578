"""Responses token by token, with keys and values in memory that is allocated once.

Shapes: B rows of a batch, n the rows that are left, P prompt tokens, R tokens of a response, V
tokens of the vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.models import Cache, PreTrainedModel
from rlhf_pipeline.models.sequences import Sequences
from rlhf_pipeline.rl.logprobs import sampled
from rlhf_pipeline.runtime import heartbeat

FINISHED = 0.25
"""Finished rows leave once they are this share of a batch, because leaving copies the keys and
values of the other rows."""
LOOK_EVERY = 16
"""Tokens between two looks at which rows have finished, of all ranks or of the host at its GPU."""


class PromptLayer(DynamicLayer):
    """The keys and values of one layer that a single forward pass makes."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep the states, without a copy."""
        self.keys, self.values = key_states, value_states
        return key_states, value_states


class PreallocatedLayer(DynamicLayer):
    """The keys and values of one layer, (rows, heads, capacity, width) each.

    The tokens of the prompts come in one call. Then each token of the responses is written in
    place, so nothing is copied.
    """

    is_initialized: bool

    def __init__(self, cache: "PreallocatedCache") -> None:
        super().__init__()
        self._cache = cache

    def write(self, keys: Tensor, values: Tensor) -> None:
        """Write the first columns."""
        rows, heads, length, _ = keys.shape
        if not self.is_initialized:
            self.is_initialized = True
            shape = rows, heads, self._cache.capacity
            # Zeros: a masked column counts nothing, unless it happens to be NaN.
            self.keys, self.values = (x.new_zeros(*shape, x.shape[3]) for x in (keys, values))
        self.keys[:, :, :length], self.values[:, :, :length] = keys, values

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the states; return all that the first rows attend to."""
        rows, seen = len(key_states), self._cache.seen
        if seen == 0:
            self.write(key_states, value_states)
            return key_states, value_states
        for whole, states in ((self.keys, key_states), (self.values, value_states)):
            whole[:rows, :, seen : seen + 1] = states
        return self.keys[:rows, :, : seen + 1], self.values[:rows, :, : seen + 1]

    def get_seq_length(self) -> int:
        return self._cache.seen

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Move these rows to the front, with the columns that were seen."""
        for whole in (self.keys, self.values):
            seen = whole[:, :, : self._cache.seen]
            seen[: len(beam_idx)] = seen[beam_idx]


class PreallocatedCache(Cache):
    """A cache with a `PreallocatedLayer` of `capacity` tokens for each layer of keys and values.
    Others are those of transformers: states of linear attention, which tokens do not lengthen."""

    def __init__(self, config: PreTrainedConfig, capacity: int) -> None:
        plain = DynamicLayer, DynamicSlidingWindowLayer
        layers = DynamicCache(config=config).layers
        super().__init__([PreallocatedLayer(self) if type(x) in plain else x for x in layers])
        self.capacity = capacity
        self.seen = 0
        """Tokens before the present forward pass."""

    def unpack(self, packed: Cache, mask: Tensor, rows: Tensor) -> None:
        """Write the states of packed prompts as those of left-padded ones.

        They are in float32 on a CPU: `packed_attention` would otherwise convert all of them for
        each token.

        Args:
            packed: keys and values of N tokens, (1, heads, N, width) each.
            mask: (U, P) bool, True for the N tokens, row by row.
            rows: (B,) the row of `mask` that each row of the result repeats.
        """
        place = (mask.flatten().cumsum(0) - 1).clamp(min=0).view(mask.shape)[rows]  # or any token
        for layer, states in zip(self.layers, packed.layers, strict=True):
            keys, values = (x[0][:, place].transpose(0, 1) for x in (states.keys, states.values))
            on_cpu = keys.device.type == "cpu"
            layer.write(*(x.float() if on_cpu else x for x in (keys, values)))
            states.keys = states.values = None  # frees each layer in its turn


def decode(
    model: PreTrainedModel,
    contract: TokenContract,
    ids: Tensor,
    mask: Tensor,
    numbers: Tensor | None,
    draws: Tensor,
    temperature: float,
    *,
    device: torch.device,
    synced: bool,
) -> tuple[Tensor, Tensor]:
    """Sample responses to prompts: tokens and log-probabilities, (B, R) each.

    What follows the first EOS of a row has no meaning.

    Args:
        ids, mask: (B, P) prompts, left-padded, in main memory.
        numbers: (B,) prompts with the same number are read once, all of them without padding; None:
            each is read, with padding.
        draws: (B, R) uniform numbers in [0, 1).
        synced: whether every rank must take part in every forward pass.
    """
    (rows, width), steps = ids.shape, draws.shape[1]
    cache = PreallocatedCache(model.config, width + steps)
    logits = _prefill(model, cache, ids, mask, numbers, device)
    visible = torch.zeros(rows, cache.capacity, dtype=torch.bool, device=device)
    visible[:, :width].copy_(mask, non_blocking=True)
    one_mask = numbers is not None and takes_prepared_mask(model.config, cache.capacity)
    positions = mask.sum(1, keepdim=True).to(device, non_blocking=True)
    draws = draws.to(device, non_blocking=True)
    eos = torch.tensor(contract.eos_ids).to(device, non_blocking=True)
    places = torch.arange(rows, device=device)  # of the rows that are left, in the batch
    finished = torch.zeros(rows, dtype=torch.bool, device=device)
    tokens = torch.zeros(rows, steps, dtype=torch.long, device=device)
    logprobs = torch.zeros(rows, steps, device=device)
    for step in range(steps):
        drawn = draws[:, step][places]
        newest, tokens_logprobs = sampled(logits, drawn, temperature, contract.vocab_size)
        tokens[:, step].index_copy_(0, places, newest)
        logprobs[:, step].index_copy_(0, places, tokens_logprobs)
        finished |= (newest[:, None] == eos).any(1)
        if step + 1 == steps:
            break
        heartbeat.report_progress()
        cache.seen = width + step
        left = _rows_left(finished, step + 1, synced=synced)
        if left == 0:
            break
        if left < len(places):
            order = finished.byte().argsort(stable=True)[:left]
            cache.reorder_cache(order)
            compacted = (x[order] for x in (visible, positions, places, finished, newest))
            visible, positions, places, finished, newest = compacted
        visible[:, cache.seen].fill_(True)
        seen = visible[:, : cache.seen + 1]
        inputs = {
            "input_ids": newest[:, None],
            "attention_mask": seen[:, None, None] if one_mask else seen,
            "position_ids": positions,
        }
        logits = _forward(model, inputs, cache)[:, -1]
        positions = positions + 1
    cache.layers.clear()  # the next batch needs their memory before a garbage collection
    return tokens, logprobs


def _prefill(
    model: PreTrainedModel,
    cache: PreallocatedCache,
    ids: Tensor,
    mask: Tensor,
    numbers: Tensor | None,
    device: torch.device,
) -> Tensor:
    """Read the prompts into the cache; return the logits (B, V) after them."""
    if numbers is not None:
        numbered = torch.cat([ids.masked_fill(~mask, -1), numbers[:, None]], dim=1)
        numbered, copies = torch.unique(numbered, dim=0, return_inverse=True)
        ids, mask = numbered[:, :-1].clamp(min=0), numbered[:, :-1] >= 0
    nothing = torch.empty(len(ids), 0, dtype=torch.long)
    prompts = Sequences(ids, mask, nothing, nothing.bool(), nothing.bool()).to(device)
    if numbers is None:
        return _forward(model, prompts.model_inputs(), cache)[:, -1]
    copies = copies.to(device, non_blocking=True)
    rows, states = prompts.packed(), Cache(layer_class_to_replicate=PromptLayer)
    logits = _forward(model, rows.model_inputs(), states, keep=rows.ends)[0]
    cache.unpack(states, prompts.prompt_mask, copies)
    return logits[copies]


def _forward(model: Any, inputs: dict[str, Any], cache: Cache, keep: Tensor | int = 1) -> Tensor:
    found = model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=keep)
    logits: Tensor = found.logits
    return logits


def _rows_left(finished: Tensor, step: int, *, synced: bool) -> int:
    """The rows to compute further: those without an EOS, or all of them.

    Looking at each token would make the host wait for its GPU, so it looks at fixed tokens.
    Rounding depends on the number of rows, so if the time decided, a rollout could not be
    repeated, and ranks that sample the same tokens would part.
    """
    rows = len(finished)
    if step % LOOK_EVERY and (synced or finished.device.type != "cpu"):
        return rows
    if synced:
        unfinished = (~finished).any().float()
        torch.distributed.all_reduce(unfinished)
        return rows if bool(unfinished) else 0
    left = rows - int(finished.sum())
    return left if rows - left >= FINISHED * rows else rows


def takes_prepared_mask(config: PreTrainedConfig, capacity: int) -> bool:
    """Whether one mask holds for all layers: no layer has a shorter window than the capacity.

    transformers takes a mask of four dimensions as it is. From one of two dimensions it makes a
    mask for each kind of layer, and waits for the GPU meanwhile.
    """
    config = config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    return kinds == {"full_attention"} and (window is None or window >= capacity)
