"""Responses token by token.

A step reads and writes tensors that stay where they are: the newest tokens, their positions, and
the keys and values of the tokens so far, in memory that has room for whole responses.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.models.lean_transformers import Cache, PreTrainedModel
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


class RoomyLayer(DynamicLayer):
    """The keys and values of one layer, (rows, heads, room, width) each.

    The tokens of the prompts come in one call. Then each token of the responses is written in place
    at the cache's `column`, so nothing is copied.
    """

    is_initialized: bool

    def __init__(self, cache: "RoomyCache") -> None:
        super().__init__()
        self._cache = cache

    def write(self, keys: Tensor, values: Tensor) -> None:
        """Write the first columns of the first rows."""
        rows, heads, length, width = keys.shape
        if not self.is_initialized:
            self.is_initialized = True
            shape = self._cache.rows, heads, self._cache.room, width
            # Zeros: a masked column counts nothing, unless it happens to be NaN.
            self.keys, self.values = (x.new_zeros(*shape[:3], x.shape[3]) for x in (keys, values))
        for whole, states in ((self.keys, keys), (self.values, values)):
            whole[:rows, :, :length] = states

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the states; return all that the first rows attend to."""
        if self._cache.seen == 0:
            self.write(key_states, value_states)
            return key_states, value_states
        rows, end = len(key_states), self._cache.seen + 1
        for whole, states in ((self.keys, key_states), (self.values, value_states)):
            whole[:rows].index_copy_(2, self._cache.column, states.to(whole.dtype))
        return self.keys[:rows, :, :end], self.values[:rows, :, :end]

    def get_seq_length(self) -> int:
        return self._cache.seen


class RoomyCache(Cache):
    """A cache with a `RoomyLayer` for each layer of a model.

    Args:
        rows, room: the most rows and tokens.
        column: (1,) long, the column of the next token, on the device of the model.
    """

    def __init__(self, rows: int, room: int, column: Tensor) -> None:
        super().__init__(layer_class_to_replicate=lambda: RoomyLayer(self))
        self.rows, self.room, self.column = rows, room, column
        self.seen = 0
        """Tokens before the present forward pass, as far as a model asks."""

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
        while len(self.layers) < len(packed.layers):
            self.layers.append(RoomyLayer(self))
        for layer, states in zip(self.layers, packed.layers, strict=True):
            keys, values = (x[0][:, place].transpose(0, 1) for x in (states.keys, states.values))
            on_cpu = keys.device.type == "cpu"
            layer.write(*(x.float() if on_cpu else x for x in (keys, values)))
            states.keys = states.values = None  # frees each layer in its turn

    def keep_rows(self, rows: Tensor, end: int) -> None:
        """Move these rows to the front, with their first `end` columns."""
        for layer in self.layers:
            for whole in (layer.keys, layer.values):
                whole[: len(rows), :, :end] = whole[rows, :, :end]


class Decoder:
    """Samples responses to a batch of prompts.

    Shapes: B the most rows of a batch, n the rows that are left, R tokens of a response, S columns
    of keys and values, V tokens of the vocabulary.

    Args:
        prepared: whether one mask of four dimensions holds for all layers.
        synced: whether every rank must take part in every forward pass.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        contract: TokenContract,
        *,
        rows: int,
        room: int,
        tokens: int,
        device: torch.device,
        prepared: bool,
        synced: bool,
    ) -> None:
        self._model, self._contract = model, contract
        self._prepared, self._synced = prepared, synced
        self._temperature = 1.0
        long: Any = {"dtype": torch.long, "device": device}
        self._column, self._step = torch.zeros(1, **long), torch.zeros(1, **long)
        self._cache = RoomyCache(rows, room, self._column)
        self._visible = torch.zeros(rows, room, dtype=torch.bool, device=device)  # (B, S)
        self._eos = torch.tensor(contract.eos_ids).to(device, non_blocking=True)
        self._ids = torch.zeros(rows, 1, **long)
        self._positions = torch.zeros(rows, 1, **long)
        self._places = torch.zeros(rows, **long)  # of the rows that are left, in the batch
        self._finished = torch.zeros(rows, dtype=torch.bool, device=device)
        self._draws = torch.zeros(rows, tokens, dtype=torch.float64, device=device)
        self._tokens = torch.zeros(rows, tokens, **long)
        self._logprobs = torch.zeros(rows, tokens, device=device)

    def run(
        self, ids: Tensor, mask: Tensor, numbers: Tensor | None, draws: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities of the responses, (b, R) each.

        What follows the first EOS of a row has no meaning.

        Args:
            ids, mask: (b, P) prompts, left-padded, in main memory.
            numbers: (b,) prompts with the same number are read once; None: each is read.
            draws: (b, R) uniform numbers in [0, 1).
        """
        (count, width), steps = ids.shape, draws.shape[1]
        self._temperature, rows = temperature, count
        self._begin(mask, draws, self._read(ids, mask, numbers))
        for step in range(1, steps):
            seen = width + step - 1
            heartbeat.tick()
            if (left := self._look(rows, step)) is not None:
                if left == 0:
                    break
                if left < rows:
                    self._keep(rows, left, seen)
                    rows = left
            self._compute(rows, seen)
        self._cache.layers.clear()  # the next batch needs their memory before a garbage collection
        return self._tokens[:count, :steps], self._logprobs[:count, :steps]

    def _read(self, ids: Tensor, mask: Tensor, numbers: Tensor | None) -> Tensor:
        """Read the prompts; return the logits (n, V) after them."""
        device, cache = self._column.device, self._cache
        if numbers is not None:
            numbered = torch.cat([ids.masked_fill(~mask, -1), numbers[:, None]], dim=1)
            numbered, copies = torch.unique(numbered, dim=0, return_inverse=True)
            ids, mask = numbered[:, :-1].clamp(min=0), numbered[:, :-1] >= 0
        nothing = torch.empty(len(ids), 0, dtype=torch.long)
        prompts = Sequences(ids, mask, nothing, nothing.bool(), nothing.bool()).to(device)
        cache.seen = 0
        if numbers is None:
            return self._forward(prompts.model_inputs(), cache)[:, -1]
        copies = copies.to(device, non_blocking=True)
        rows, states = prompts.packed(), Cache(layer_class_to_replicate=PromptLayer)
        logits = self._forward(rows.model_inputs(), states, keep=rows.ends)[0]
        cache.unpack(states, prompts.prompt_mask, copies)
        return logits[copies]

    def _begin(self, mask: Tensor, draws: Tensor, logits: Tensor) -> None:
        """Fill the tensors of a batch, and sample its first token."""
        rows, width = mask.shape
        device = self._column.device
        self._visible.zero_()
        self._visible[:rows, :width].copy_(mask, non_blocking=True)
        self._positions[:rows, 0].copy_(mask.sum(1) - 1, non_blocking=True)
        self._draws[:rows, : draws.shape[1]].copy_(draws, non_blocking=True)
        self._places[:rows] = torch.arange(rows, device=device)
        self._finished.zero_()
        self._step.zero_()
        self._column.fill_(width - 1)
        self._sample(rows, logits)

    def _sample(self, rows: int, logits: Tensor) -> None:
        """Sample the token of a step for the first rows, and go on to the next step."""
        draws = self._draws.index_select(1, self._step).squeeze(1)[self._places[:rows]]
        tokens, logprobs = sampled(logits, draws, self._temperature, self._contract.vocab_size)
        place = self._places[:rows], self._step.expand(rows)
        self._tokens.index_put_(place, tokens)
        self._logprobs.index_put_(place, logprobs)
        self._ids[:rows, 0] = tokens
        self._finished[:rows] |= (tokens[:, None] == self._eos).any(1)
        self._step += 1
        self._column += 1
        self._positions[:rows] += 1

    def _look(self, rows: int, step: int) -> int | None:
        """The number of rows without an EOS; None if the host does not look, or keeps all rows.

        Looking at each token would make the host wait for its GPU, so it looks at fixed tokens.
        Rounding depends on the number of rows, so if the time decided, a rollout could not be
        repeated, and ranks that sample the same tokens would part.
        """
        if step % LOOK_EVERY and (self._synced or self._finished.device.type != "cpu"):
            return None
        if self._synced:
            unfinished = (~self._finished[:rows]).any().float()
            torch.distributed.all_reduce(unfinished)
            return rows if bool(unfinished) else 0
        left = rows - int(self._finished[:rows].sum())
        return left if rows - left >= FINISHED * rows else None

    def _keep(self, rows: int, size: int, end: int) -> None:
        """Move the `size` unfinished rows to the front."""
        order = self._finished[:rows].byte().argsort(stable=True)[:size]
        self._cache.keep_rows(order, end)
        for tensor in (self._visible, self._ids, self._positions, self._places, self._finished):
            tensor[:size] = tensor[order]

    def _compute(self, rows: int, seen: int) -> None:
        """Process the newest token of the first rows, after `seen` others; sample the next one."""
        self._cache.seen = seen
        self._visible[:rows].index_fill_(1, self._column, True)
        visible = self._visible[:rows, : seen + 1]
        inputs = {
            "input_ids": self._ids[:rows],
            "attention_mask": visible[:, None, None] if self._prepared else visible,
            "position_ids": self._positions[:rows],
        }
        self._sample(rows, self._forward(inputs, self._cache)[:, -1])

    def _forward(self, inputs: dict[str, Any], cache: Any, keep: Tensor | int = 1) -> Tensor:
        model: Any = self._model
        found = model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=keep)
        logits: Tensor = found.logits
        return logits


def takes_prepared_mask(config: PreTrainedConfig, room: int) -> bool:
    """Whether one mask holds for all layers: no layer has a window that is shorter than the room.

    transformers takes a mask of four dimensions as it is. From one of two dimensions it makes a
    mask for each kind of layer, and waits for the GPU meanwhile.
    """
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    return kinds == {"full_attention"} and (window is None or window >= room)
