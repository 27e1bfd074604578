"""A figure with two rows of panels and one column per seed; the x-axis and legend are shared."""

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
    y_labels: tuple[str, str],
    x_label: str,
    size: tuple[float, float],
) -> Iterator[Callable[[int], Sequence[Axes]]]:
    """Draw on the two panels of each seed, upper one first, inside the block; then save the figure.

    Args:
        file: a PNG file.
        seeds: one for each column.
        y_labels: labels of the two rows.
        x_label: label of the x-axis.
        size: width and height of a column, in inches.
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
        axes[1, column].set_xlabel(x_label)
    for row, name in enumerate(y_labels):
        axes[row, 0].set_ylabel(name)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(file, dpi=110)
