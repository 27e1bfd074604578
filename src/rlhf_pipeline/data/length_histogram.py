"""Percentiles of lengths in tokens, and their histogram with the limit."""

from __future__ import annotations

from collections import Counter
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
    ordered = sorted(counts.items())
    ranks = np.cumsum([rows for _, rows in ordered])
    described = {"total": sum(length * rows for length, rows in ordered), "max": ordered[-1][0]}
    for percent in (50, 90, 99):
        rank = -(-int(ranks[-1]) * percent // 100)
        described[f"p{percent}"] = ordered[int(np.searchsorted(ranks, rank))][0]
    return described


def draw(axes: Axes, name: str, counts: Mapping[int, int], limit: int) -> None:
    """Draw the distribution of lengths, and how many exceed the limit.

    `name` is the kind of the texts, in the singular.
    """
    from matplotlib.ticker import MaxNLocator

    total = sum(counts.values())
    over = sum(count for length, count in counts.items() if length > limit)
    axes.set_title(f"{name.capitalize()}s ({total:,})", loc="left", pad=26)
    axes.set(xlabel="length in tokens", ylabel=f"number of {name}s")
    axes.spines[["top", "right"]].set_visible(False)
    if not counts:
        axes.set(xticks=[], yticks=[])
        return
    width, bars = histogram(counts, limit)
    last, longest, end = max(bars), max(counts), max(bars) + width - 0.5
    for is_over, color, label in (
        (False, _BLUE, f"within the limit ({limit:,})"),
        (True, _ORANGE, f"over {limit:,}: {over:,} ({over / total:.1%})"),
    ):
        if shown := {start: bars[start] for start in bars if (start > limit) == is_over}:
            drawn = axes.bar(
                [start - 0.5 for start in shown],
                list(shown.values()),
                width,
                align="edge",
                color=color,
                label=label,
            )
    if longest > end:
        drawn[-1].set(hatch="////", edgecolor="white", linewidth=0)
        axes.set_xlabel(f"length in tokens (hatched: {last:,} to {longest:,})")
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


def histogram(counts: Mapping[int, int], limit: int) -> tuple[int, dict[int, int]]:
    """Count lengths in bars of equal width; return (width, first length of a bar -> number).

    No bar contains lengths on both sides of the limit. The bars cover 99% of the lengths, and the
    limit if it is near or exceeded; one more bar contains the rest of the tail.
    """
    end = summary(counts)["p99"]
    if max(counts) > limit or limit <= 3 * end:
        end = max(end, limit)
    width = ceil(end / _BARS)
    last = _first(end, width, limit)
    bars = Counter({last: 0})
    for length, count in counts.items():
        bars[min(_first(length, width, limit), last + width)] += count
    return width, dict(sorted(bars.items()))


def _first(length: int, width: int, limit: int) -> int:
    """The first length of the bar that contains `length`."""
    return limit + 1 + (length - limit - 1) // width * width
