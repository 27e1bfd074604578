from collections.abc import Mapping
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BARS = 48
"""Maximum number of bars, without the bar of the tail."""

_BLUE, _ORANGE = "#4477aa", "#ee7733"  # safe for colour blindness


def summary(counts: Mapping[int, int]) -> dict[str, int]:
    """Total, maximum and percentiles of lengths; `counts` maps a length to its number of texts.

    Percentiles are nearest rank: the smallest length that at least p percent do not exceed.
    """
    lengths, rows = _columns(counts)
    percentiles = np.percentile(lengths, (50, 90, 99), weights=rows, method="inverted_cdf")
    p50, p90, p99 = map(int, percentiles)
    total, longest = int(lengths @ rows), int(lengths.max())
    return {"total": total, "max": longest, "p50": p50, "p90": p90, "p99": p99}


def draw(axes: "Axes", name: str, counts: Mapping[int, int], limit: int) -> None:
    """Draw the distribution of lengths, and how many exceed the limit.

    `name` is the kind of the texts, in the singular.
    """
    from matplotlib.ticker import MaxNLocator

    lengths, rows = _columns(counts)
    is_over = lengths > limit
    total, over = int(rows.sum()), int(rows[is_over].sum())
    axes.set_title(f"{name.capitalize()}s ({total:,})", loc="left", pad=26)
    axes.set(xlabel="length in tokens", ylabel=f"number of {name}s")
    axes.spines[["top", "right"]].set_visible(False)
    if not counts:
        axes.set(xticks=[], yticks=[])
        return
    edges = bar_edges(counts, limit)
    longest, end = int(lengths.max()), edges[-1]
    for chosen, color, label in (
        (~is_over, _BLUE, f"within the limit ({limit:,})"),
        (is_over, _ORANGE, f"over {limit:,}: {over:,} ({over / total:.1%})"),
    ):
        if chosen.any():
            shown = np.minimum(lengths[chosen], end)  # the last bar contains its right edge
            axes.hist(shown, edges.tolist(), weights=rows[chosen], color=color, label=label)
    if longest > end:
        axes.patches[-1].set(hatch="////", edgecolor="white", linewidth=0)
        axes.set_xlabel(f"length in tokens (hatched: {edges[-2] + 0.5:,.0f} to {longest:,})")
    if limit < end:
        axes.axvline(limit + 0.5, color="0.25", linewidth=1, linestyle="--", clip_on=False)
    axes.set_xlim(0, end)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))
        axis.set_major_formatter("{x:,.0f}")
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.03),
        borderpad=0,
        borderaxespad=0,
        ncols=2,
        frameon=False,
        handlelength=1,
    )


def bar_edges(counts: Mapping[int, int], limit: int) -> np.ndarray:
    """The edges of bars of equal width. None contains lengths on both sides of the limit.

    The bars cover 99% of the lengths, and the limit if it is near or exceeded; one more bar is for
    the rest of the tail.
    """
    longest, end = max(counts), summary(counts)["p99"]
    if longest > limit or limit <= 3 * end:
        end = max(end, limit)
    width = ceil(end / _BARS)
    last = ceil((end - limit) / width)
    has_tail = longest > limit + last * width
    return limit + 0.5 + width * np.arange(-ceil(limit / width), last + has_tail + 1)


def _columns(counts: Mapping[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Lengths, and the number of texts of each, both (N,)."""
    return np.array([*counts], np.int64), np.array([*counts.values()], np.int64)
