"""How the pictures look: type sizes, colours, lines, legend, footnote, and how a figure becomes files."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from pico_analyze.plots.quantities import MEDIAN, Series, Summary

SINGLE, DOUBLE = 3.5, 7.0  # the widths of a column and of a page, in inches
FORMATS = ("png", "svg", "pdf")

NOTE_SIZE = 6.0
GREY = "0.35"

# What the user has set for other figures does not leak in, except what belongs to the session.
_SESSION = ("backend", "interactive", "toolbar", "webagg", "tk.", "timezone", "docstring")
_OURS = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica"],  # the first comes with matplotlib
    "font.size": 7.0,
    "axes.labelsize": 7.0,
    "axes.titlesize": 7.0,
    "axes.titlepad": 3.0,
    "axes.labelpad": 2.0,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "legend.fontsize": 7.0,
    "legend.title_fontsize": 7.0,
    "figure.labelsize": 7.0,
    "figure.titlesize": 7.0,
    "axes.linewidth": 0.5,
    "xtick.major.width": 0.5,
    "ytick.major.width": 0.5,
    "xtick.minor.width": 0.35,
    "ytick.minor.width": 0.35,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.minor.size": 1.5,
    "ytick.minor.size": 1.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.92",
    "grid.linewidth": 0.4,
    "lines.linewidth": 1.1,
    "lines.markersize": 2.4,
    "legend.frameon": False,
    "legend.handlelength": 2.2,
    "legend.columnspacing": 1.2,
    "savefig.dpi": 200,
    "text.parse_math": False,  # names from the table are text, whatever they hold
    "svg.fonttype": "none",
    "svg.hashsalt": "pico-analyze",
    "pdf.fonttype": 42,
}
# No date and no version: the same table gives the same bytes.
_METADATA: dict[str, dict[str, str | None]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


@contextmanager
def paper() -> Iterator[None]:
    """Draw and save inside this; matplotlib's settings are as before when it ends."""
    default = mpl.rcParamsDefault
    settings: Any = {key: default[key] for key in default if not key.startswith(_SESSION)} | _OURS
    with mpl.rc_context(settings):
        yield


def figure(width: float, height: float) -> Figure:
    """An empty figure of that size in inches, which belongs to no window and to no list of open figures."""
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, stem: Path, formats: Sequence[str]) -> list[Path]:
    """Write ``<stem>.<format>`` for each format."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # laid out once, for all formats
    paths = [stem.with_name(f"{stem.name}.{extension}") for extension in formats]
    for path, extension in zip(paths, formats, strict=True):
        figure.savefig(path, format=extension, metadata=_METADATA[extension])
    return paths


@dataclass(frozen=True)
class Stroke:
    """How the line of a series looks: two codes, colour and dash with marker, that say the same."""

    colour: tuple[float, float, float, float]
    dash: Literal["-", "--", "-.", ":"]
    marker: str
    width: float


def strokes(series: Sequence[Series]) -> list[Stroke]:
    """A stroke for each series: darker is smaller. Replicates are drawn thin."""
    places = np.linspace(0.0, 0.8, len(series)) if len(series) > 1 else [0.0]
    colours = mpl.colormaps["plasma"](places)  # even steps of lightness, safe for the colour-blind
    return [
        Stroke(
            colour=(float(red), float(green), float(blue), 1.0),
            dash=("-", "--", "-.", ":")[place % 4],
            marker=("o", "s", "^", "D", "v", "P", "X")[place % 7],
            width=0.6 if one.n_runs > 1 else 1.1,
        )
        for place, (one, (red, green, blue, _)) in enumerate(zip(series, colours, strict=True))
    ]


def line(axes: Axes, x: NDArray[np.float64], y: NDArray[np.float64], hollow: NDArray[np.bool_], stroke: Stroke) -> None:
    """A line that breaks where y is nan; checkpoints are marked, hollow where asked.

    A line with very many points has marks only where they are hollow or would otherwise not be seen.
    """
    axes.plot(x, y, stroke.dash, color=stroke.colour, linewidth=stroke.width)
    seen = np.isfinite(y)
    alone = seen & ~np.r_[False, seen[:-1]] & ~np.r_[seen[1:], False]
    full = (seen if len(x) <= 40 else alone) & ~hollow
    for chosen, face in ((full, stroke.colour), (seen & hollow, "white")):
        if chosen.any():
            axes.plot(
                x[chosen],
                y[chosen],
                linestyle="none",
                marker=stroke.marker,
                markerfacecolor=face,
                markeredgecolor=stroke.colour,
                markeredgewidth=0.6,
                zorder=3,
            )


def bands(axes: Axes, summary: Summary, stroke: Stroke) -> None:
    """The inner and the outer band around the median."""
    for inward, opacity in ((1, 0.20), (2, 0.10)):
        low, high = summary.levels[MEDIAN - inward], summary.levels[MEDIAN + inward]
        axes.fill_between(summary.x, low, high, color=stroke.colour, alpha=opacity, linewidth=0)


def wrap(text: str, inches: float, size: float = 7.0) -> str:
    """The text in lines that fit a length at a font size; a letter is about 0.55 of its size wide."""
    return fill(text, max(12, int(inches * 72 / (0.55 * size))), break_on_hyphens=False)


def legend(figure: Figure, series: Sequence[Series], strokes: Sequence[Stroke]) -> None:
    """One key for the whole figure, above the axes, in order of size."""
    labels = [one.label for one in series]
    handles = [
        Line2D([], [], color=stroke.colour, linestyle=stroke.dash, marker=stroke.marker, linewidth=stroke.width)
        for stroke in strokes
    ]
    title = "parameters" if all(math.isfinite(one.scale) for one in series) else None
    entry = max(len(label) for label in labels) * 0.047 + 0.42  # inches
    columns = max(1, int((figure.get_figwidth() - 0.1) / entry))
    if title and len(labels) < columns:  # there is room for the title in the line
        labels.insert(0, f"{title}:")
        handles.insert(0, Line2D([], [], linestyle="none"))
        title = None
    figure.legend(
        handles,
        labels,
        title=title,
        loc="outside upper center",
        ncols=min(columns, len(labels)),
        borderpad=0.1,
    )


def footnote(figure: Figure, *sentences: str) -> None:
    """Small print below everything, which the layout makes room for."""
    text = " ".join(sentence for sentence in sentences if sentence)
    if text:
        figure.supxlabel(
            wrap(text, figure.get_figwidth() - 0.1, NOTE_SIZE),
            x=0.01,
            ha="left",
            fontsize=NOTE_SIZE,
            color=GREY,
        )
