"""A figure of panels: two rows that share what lies across, a column a seed, one legend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes


@contextmanager
def panels(
    file: Path,
    seeds: Sequence[int],
    *,
    upright: tuple[str, str],
    across: str,
    size: tuple[float, float],
) -> Iterator[Callable[[int], Sequence[Axes]]]:
    """Inside the block a seed's two panels, from above, may be drawn on; then the figure is saved.

    Args:
        file: where to, as PNG.
        seeds: one for each column.
        upright: names of the rows.
        across: name of what lies across.
        size: of a column, in inches: width and height.
    """
    columns = len(seeds)
    figure, axes = plt.subplots(
        2,
        columns,
        figsize=(size[0] * columns, size[1]),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    yield lambda seed: axes[:, seeds.index(seed)]
    for column, seed in enumerate(seeds):
        axes[0, column].set_title(f"seed {seed}")
        axes[1, column].set_xlabel(across)
    for row, name in enumerate(upright):
        axes[row, 0].set_ylabel(name)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(file, dpi=110)
