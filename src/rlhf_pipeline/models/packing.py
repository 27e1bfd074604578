"""Rows without padding: all rows of a batch one after another, as one row of N tokens.

Linear layers, norms and embeddings treat each token alone, so they need no change. Attention must
not cross the border between two rows: the attention `packed` of transformers, registered here,
attends within each row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

PACKED = "packed"
"""Name of the attention in a model's configuration."""


def use_packed_attention(model: PreTrainedModel) -> None:
    """Give a model this attention if its family takes any."""
    if (
        model.config._attn_implementation == "sdpa"
        and model._supports_attention_backend
        and not model._is_stateful
    ):
        model.set_attn_implementation(PACKED)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    row_lengths: tuple[int, ...] | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each row of a packed batch; torch's SDPA for other batches.

    query is (1, heads, N, width), key and value have the heads of the key-value groups.
    """
    if row_lengths is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask,
            scaling=scaling, sliding_window=sliding_window, **kwargs,
        )  # fmt: skip
    parts = []
    for q, k, v in zip(*(x.split(row_lengths, dim=2) for x in (query, key, value)), strict=True):
        length = q.shape[2]
        band = None
        if sliding_window is not None and length > sliding_window:
            band = torch.ones(length, length, dtype=torch.bool, device=q.device)
            band = band.tril().triu(1 - sliding_window)
        parts.append(
            scaled_dot_product_attention(
                q, k, v, attn_mask=band, is_causal=band is None, scale=scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        )  # fmt: skip
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


def _mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """A packed batch has no mask; others have that of torch's SDPA."""
    if attention_mask is None:
        return None
    return sdpa_mask(*args, attention_mask=attention_mask, **kwargs)


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, _mask)
