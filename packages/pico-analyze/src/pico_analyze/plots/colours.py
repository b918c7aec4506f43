"""The colours of the maps: one scale for all panels of a figure, its bar, and the marks on it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patheffects import withStroke
from numpy.typing import NDArray

from pico_analyze.plots import style
from pico_analyze.plots.axes import log_format, log_ticks, value_range
from pico_analyze.plots.quantities import Quantity

NO_VALUE = "0.7"


@dataclass(frozen=True)
class Colours:
    """Which number has which colour."""

    norm: Normalize
    cmap: str

    @classmethod
    def of(cls, quantity: Quantity, tables: Sequence[NDArray[np.float64]]) -> "Colours":
        """One scale for all that is shown: about 0, which is white, where numbers of both signs have a meaning."""
        values = np.concatenate([table.ravel() for table in tables])
        low, high = float(np.nanmin(values)), float(np.nanmax(values))
        if quantity.signed:
            end = max(abs(low), abs(high)) or 1.0
            return cls(Normalize(-end, end), "RdBu_r")
        shown = value_range([values], quantity)
        if high - low < 0.1 * (shown[1] - shown[0]):  # do not stretch the colours over rounding errors
            low, high = shown
        return cls(LogNorm(low, high) if quantity.log else Normalize(low, high), "viridis")

    def image(self, axes: Axes, table: NDArray[np.float64], aspect: Any) -> AxesImage:
        """A cell for each number, the first row at the bottom; grey where there is none."""
        axes.grid(False)
        axes.set_facecolor(NO_VALUE)
        return axes.imshow(
            table, norm=self.norm, cmap=self.cmap, aspect=aspect, origin="lower", interpolation="nearest"
        )

    def bar(self, figure: Figure, image: AxesImage, n_rows: int, *, log: bool) -> None:
        """The key of the colours, to the right of all panels."""
        bar = figure.colorbar(image, ax=figure.axes, pad=0.02, aspect=18 * n_rows)
        bar.outline.set_visible(False)
        if log:
            low, high = self.norm.vmin or 1.0, self.norm.vmax or 1.0
            bar.set_ticks(log_ticks(low, high))
            bar.ax.yaxis.set_major_formatter(log_format(low, high))
            bar.ax.minorticks_off()


def rings(axes: Axes, columns: Sequence[int], rows: Sequence[int]) -> None:
    """A ring on each of these cells, seen on every colour."""
    axes.plot(
        columns,
        rows,
        linestyle="none",
        marker="o",
        markersize=2.4,
        markerfacecolor="none",
        markeredgecolor="white",
        markeredgewidth=0.5,
        path_effects=[withStroke(linewidth=1.2, foreground="black")],
    )


def title(figure: Figure, text: str) -> None:
    """What the colours show, above all panels: beside the bar there is no room for it."""
    figure.suptitle(style.wrap(text, figure.get_figwidth() - 0.2))
