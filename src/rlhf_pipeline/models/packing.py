"""Rows without padding: all rows of a batch one after another, as one row of N tokens.

Only attention reads other tokens, and must not cross the border between two rows: the attention
`packed` of transformers, registered here, attends within each row.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlhf_pipeline.models import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from rlhf_pipeline.models.sequences import Packed

PACKED = "packed"  # name of the attention in a model's configuration


def attends_only(model: PreTrainedModel) -> bool:
    """Whether nothing else reads other tokens: no convolution, state space, linear attention."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return not model._is_stateful and {*kinds} <= {"full_attention", "sliding_attention"}


def use_packed_attention(model: PreTrainedModel) -> None:
    """Give a model this attention if its family takes any."""
    is_sdpa = model.config._attn_implementation == "sdpa"
    if is_sdpa and model._supports_attention_backend and attends_only(model):
        model.set_attn_implementation(PACKED)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_rows: Packed | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each row of a packed batch; torch's SDPA for other batches.

    query is (1, heads, N, width); key and value have the heads of the key-value groups.
    """
    dtype = query.dtype
    if (rows := packed_rows) is None:
        query = query.to(key.dtype)  # a cache can be in float32, see `PreallocatedCache.unpack`
        if query.shape[2] == 1 and attention_mask is not None:
            return _of_one_token(query, key, value, attention_mask, scaling).to(dtype), None
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask,
            scaling=scaling, sliding_window=sliding_window, **kwargs,
        )  # fmt: skip
        return output.to(dtype), None
    capability = torch.cuda.get_device_capability(query.device) if query.is_cuda else None
    in_one = one_kernel(dtype, capability, query.shape[-1])
    if query.device.type == "cpu":  # there, torch's kernels are slower in bf16 than in float32
        query, key, value = query.float(), key.float(), value.float()
    # (1, N, heads, width), the layout of linear layers: rows are split and joined without a copy
    # in another order, backward too.
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    if rows.seen is not None:
        key, value = key[:, rows.seen], value[:, rows.seen]
    if in_one:
        from torch.nn.attention.varlen import varlen_attn

        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        found: Any = varlen_attn(
            query[0], key[0], value[0], rows.borders, rows.seen_borders,
            max(rows.lengths), max(rows.seen_lengths),
            scale=scaling, window_size=window, enable_gqa=query.shape[2] != key.shape[2],
        )  # fmt: skip
        return found[None].to(dtype), None
    queries = query.split(rows.lengths, dim=1)
    keys, values = (x.split(rows.seen_lengths, dim=1) for x in (key, value))
    parts = [
        _attention(q, k, v, scaling, sliding_window)
        for q, k, v in zip(queries, keys, values, strict=True)
    ]
    return torch.cat(parts, dim=1).to(dtype), None


def _of_one_token(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    """The attention of one token for each row, (B, 1, heads, width).

    The heads of a key-value group are so many queries of one head, so no kernel repeats the keys
    and values for each of them.
    """
    grouped = query.reshape(len(query), key.shape[1], -1, query.shape[3])
    found = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return found.reshape(len(query), 1, query.shape[1], value.shape[3])


def one_kernel(dtype: torch.dtype, capability: tuple[int, int] | None, width: int) -> bool:
    """Whether torch's flash attention takes packed rows; otherwise they are processed one by one.

    It needs bf16, a GPU of compute capability 8.0 or higher (None: a CPU), and heads whose width is
    a multiple of 8 and at most 256.
    """
    is_able = (capability or (0, 0)) >= (8, 0)
    return is_able and dtype == torch.bfloat16 and width % 8 == 0 and width <= 256


def _attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """The attention of the last T of S tokens, (1, T, heads, width) each."""
    length, seen, mask = query.shape[1], key.shape[1], None
    window = seen if sliding_window is None else sliding_window
    if seen > min(length, window):
        mask = torch.ones(length, seen, dtype=torch.bool, device=query.device)
        mask = mask.tril(seen - length).triu(seen - length + 1 - window)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    found = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling,
        enable_gqa=query.shape[2] != key.shape[2],
    )  # fmt: skip
    return found.transpose(1, 2)


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, sdpa_mask)
