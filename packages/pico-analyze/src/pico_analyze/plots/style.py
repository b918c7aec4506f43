"""How the pictures look: type sizes, colours, axes, legend, footnote, and how a figure becomes files."""

import math
from collections.abc import Iterable, Iterator, Sequence
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
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator
from numpy.typing import NDArray

from pico_analyze.plots.quantities import MEDIAN, Horizontal, Quantity, Series, Summary

SINGLE, DOUBLE = 3.5, 7.0  # the widths of a column and of a page, in inches
FORMATS = ("png", "svg", "pdf")

X_LABELS = {"step": "training step", "tokens": "tokens seen"}
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


def line(
    axes: Axes, x: NDArray[np.float64], y: NDArray[np.float64], hollow: NDArray[np.bool_], stroke: Stroke
) -> None:
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


def short(value: float, _: object = None) -> str:
    """A tick's number in few characters.

    >>> [short(x) for x in (0, 1, 0.25, 1000, 2500, 131072, 3e6, 2e12)]
    ['0', '1', '0.25', '1k', '2.5k', '131k', '3M', '2T']
    """
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:.3g}"


def scale_x(axes: Axes, xs: NDArray[np.float64], x: Horizontal, *, symlog: bool, label: bool = True) -> None:
    """The horizontal axis: linear, or logarithmic beyond the first checkpoint after 0."""
    if label:
        axes.set_xlabel(X_LABELS[x] + (", log scale" if symlog else ""))
    axes.xaxis.set_major_formatter(FuncFormatter(short))
    after = xs[xs > 0]
    if not symlog or not len(after):
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=True))
    else:
        first, last = float(after.min()), float(after.max())
        axes.set_xscale("symlog", linthresh=first, linscale=0.4)
        decades = [
            10.0**power for power in range(math.ceil(math.log10(first)), math.floor(math.log10(last)) + 1)
        ]
        every = math.ceil(len(decades) / 5)
        zero = [0.0] if xs.min() == 0 else []
        axes.xaxis.set_major_locator(FixedLocator(zero + (decades[::every] or [first])))
        between = [
            m * 10.0**p
            for p in range(math.floor(math.log10(first)), math.ceil(math.log10(last)))
            for m in range(2, 10)
        ]
        axes.xaxis.set_minor_locator(FixedLocator([tick for tick in between if first <= tick <= last]))
        axes.xaxis.set_major_formatter(FuncFormatter(short))  # set_xscale has replaced it
        axes.xaxis.set_minor_formatter(NullFormatter())
    if len(xs) > 1:
        low, high = (axes.transData.transform((value, 1.0))[0] for value in (xs.min(), xs.max()))
        edges = axes.transData.inverted().transform(
            [(low - 0.03 * (high - low), 0), (high + 0.03 * (high - low), 0)]
        )
        axes.set_xlim(edges[0, 0], edges[1, 0])


def scale_y(axes: Axes, drawn: Iterable[NDArray[np.float64]], quantity: Quantity) -> None:
    """The vertical axis for what is drawn: logarithmic if the quantity is, within its bounds."""
    low, high = value_range(drawn, quantity)
    if not quantity.log:
        axes.set_ylim(low, high)
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        return
    axes.set_yscale("log")
    margin = (high / low) ** 0.05
    axes.set_ylim(low / margin, high * margin)
    axes.yaxis.set_major_locator(FixedLocator(log_ticks(low / margin, high * margin)))
    axes.yaxis.set_major_formatter(log_format(low, high))
    axes.yaxis.set_minor_locator(NullLocator())


def value_range(drawn: Iterable[NDArray[np.float64]], quantity: Quantity) -> tuple[float, float]:
    """From where to where a quantity is shown: all that is drawn, never zoomed into rounding errors.

    A bounded quantity is shown whole when what is drawn fills most of its range.
    """
    values = np.concatenate([np.ravel(array) for array in drawn])
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    if quantity.log:
        return (low, high) if high > 1.01 * low else (low / 1.1, high * 1.1)
    least = 0.02 if quantity.limits else max(1e-3 * max(abs(low), abs(high)), 1e-12)
    extra = max(0.05 * (high - low), (least - (high - low)) / 2)
    if quantity.limits is None:
        return low - extra, high + extra
    floor, ceiling = quantity.limits
    span = ceiling - floor
    if high - low > 0.6 * span:
        return min(floor, low) - 0.02 * span, max(ceiling, high) + 0.02 * span
    # An unbiased estimate may leave the bounds of what it estimates, so the data has the last word.
    return max(min(floor, low) - 0.01 * span, low - extra), min(
        max(ceiling, high) + 0.01 * span, high + extra
    )


def log_ticks(low: float, high: float) -> list[float]:
    """At least two, at most six ticks of a logarithmic axis: powers of ten, else 1-2-5, else even."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for within in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0)):
        ticks = [tick for power in powers for m in within if low <= (tick := m * 10.0**power) <= high]
        if len(ticks) >= 3:
            return ticks[:: math.ceil(len(ticks) / 6)]
    return [float(tick) for tick in MaxNLocator(4).tick_values(low, high) if low <= tick <= high]


def log_format(low: float, high: float) -> FuncFormatter:
    """How the ticks of a logarithmic axis are written: as they are where that is short, else as powers."""
    return FuncFormatter(short if low >= 1e-3 and high < 1e6 else power_of_ten)


def power_of_ten(value: float, _: object = None) -> str:
    """A tick such as 10⁴, or 3·10⁴ off the powers.

    >>> power_of_ten(1e4), power_of_ten(3e-2)
    ('10⁴', '3·10⁻²')
    """
    power = math.floor(math.log10(value) + 1e-9)
    raised = "10" + str(power).translate(_RAISED)
    lead = value / 10.0**power
    return raised if abs(lead - 1) < 1e-6 else f"{lead:.3g}·{raised}"


_RAISED = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


def wrap(text: str, inches: float, size: float = 7.0) -> str:
    """The text in lines that fit a length at a font size; a letter is about 0.55 of its size wide."""
    return fill(text, max(12, int(inches * 72 / (0.55 * size))), break_on_hyphens=False)


def legend(figure: Figure, series: Sequence[Series], strokes: Sequence[Stroke]) -> None:
    """One key for the whole figure, above the axes, in order of size."""
    labels = [one.label for one in series]
    handles = [
        Line2D(
            [], [], color=stroke.colour, linestyle=stroke.dash, marker=stroke.marker, linewidth=stroke.width
        )
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
