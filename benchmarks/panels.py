"""A figure with two rows of panels and one column for each seed or method.

The columns share the x-axis and the legend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

Column = TypeVar("Column")


@contextmanager
def panels(
    file: Path,
    columns: Sequence[Column],
    *,
    y_labels: tuple[str, str],
    x_label: str,
    size: tuple[float, float],
    title: str = "seed {}",
) -> Iterator[Callable[[Column], Sequence[Axes]]]:
    """Draw on the two panels of each column, upper one first, in the block; then save the figure.

    Args:
        file: a PNG file.
        columns: what each column shows, such as a seed.
        y_labels: labels of the two rows.
        x_label: label of the x-axis.
        size: width and height of a column, in inches.
        title: format of a column's title.
    """
    figure, axes = plt.subplots(
        2,
        len(columns),
        figsize=(size[0] * len(columns), size[1]),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    yield lambda column: axes[:, columns.index(column)]
    for place, column in enumerate(columns):
        axes[0, place].set_title(title.format(column))
        axes[1, place].set_xlabel(x_label)
    for row, name in enumerate(y_labels):
        axes[row, 0].set_ylabel(name)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(file, dpi=110)
