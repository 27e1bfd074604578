"""`torch.nn.attention.varlen.varlen_attn` on a CPU, written from its documentation."""

import torch
from torch import Tensor


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    kept_in: torch.dtype | None = None,
) -> Tensor:
    """Attention of the rows between two borders, (tokens, heads, width).

    The last query of a row is level with its last key. A window (left, right) lets a query see the
    keys from `left` before its place to `right` behind it; -1 is no limit. `kept_in` is not an
    argument of torch: probabilities and output are rounded to it, as in flash attention, and so are
    their gradients.
    """
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    queries, groups = query.shape[1], key.shape[1]
    assert queries == groups or (enable_gqa and queries % groups == 0)

    def kept(x: Tensor) -> Tensor:
        return x if kept_in is None else x.to(kept_in).to(x.dtype)

    key, value = (x.repeat_interleave(queries // groups, dim=1) for x in (key, value))
    parts = []
    for number in range(len(cu_seq_q) - 1):
        q = query[cu_seq_q[number] : cu_seq_q[number + 1]].transpose(0, 1)
        k, v = (x[cu_seq_k[number] : cu_seq_k[number + 1]].transpose(0, 1) for x in (key, value))
        rows, columns = q.shape[1], k.shape[1]
        assert rows <= max_q and columns <= max_k
        place = torch.arange(columns - rows, columns)[:, None]
        other = torch.arange(columns)
        left, right = window_size
        seen = torch.ones(rows, columns, dtype=torch.bool)
        if left >= 0:
            seen &= other >= place - left
        if right >= 0:
            seen &= other <= place + right
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        shares = kept(scores.masked_fill(~seen, -torch.inf).softmax(-1))
        parts.append(kept(shares @ v).transpose(0, 1))
    return torch.cat(parts)
