"""Keys and values of the tokens so far, with room for those of the response."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer

from rlhf_pipeline.models.lean_transformers import Cache, DynamicCache


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
    """The layers of a model."""

    def __init__(self, room: int) -> None:
        super().__init__(layer_class_to_replicate=lambda: RoomyLayer(room))

    def keep_rows(self, indices: Tensor) -> None:
        """Forget the other rows."""
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
