"""Keys and values of the tokens so far, in memory that has room for whole responses."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer

from rlhf_pipeline.models.lean_transformers import Cache


class PromptLayer(DynamicLayer):
    """The keys and values of one layer that a single forward pass makes."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep the states, without a copy."""
        self.keys, self.values = key_states, value_states
        return key_states, value_states


def prompt_cache() -> Cache:
    """A cache for one forward pass."""
    return Cache(layer_class_to_replicate=PromptLayer)


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
