"""The axes of the pictures: their scales, limits, ticks and numbers."""

import math
from collections.abc import Iterable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator
from numpy.typing import NDArray

from pico_analyze.plots.quantities import Horizontal, Quantity

X_LABELS = {"step": "training step", "tokens": "tokens seen"}
TICK_STEPS = [1, 2, 2.5, 5, 10]  # what may lie between two ticks of a linear axis, times a power of ten


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
    """The horizontal axis: linear, or logarithmic from the first checkpoint after 0 on."""
    if label:
        axes.set_xlabel(X_LABELS[x] + (", log scale" if symlog else ""))
    after = xs[xs > 0]
    if symlog and len(after):
        axes.set_xscale("symlog", linthresh=float(after.min()), linscale=0.4)
        major, minor = symlog_ticks(float(after.min()), float(after.max()), zero=bool(xs.min() == 0))
        axes.xaxis.set_major_locator(FixedLocator(major))
        axes.xaxis.set_minor_locator(FixedLocator(minor))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=TICK_STEPS, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(short))
    if xs.min() < xs.max():  # a margin as wide to the eye on the left as on the right
        scale = axes.xaxis.get_transform()
        low, high = scale.transform(np.array([xs.min(), xs.max()], dtype=float))
        margin = 0.03 * (high - low)
        axes.set_xlim(*scale.inverted().transform(np.array([low - margin, high + margin])))


def symlog_ticks(first: float, last: float, *, zero: bool) -> tuple[list[float], list[float]]:
    """Major ticks at 0, at most five powers of ten between first and last, and at the last where there is room for its number; minor
    ticks between them.

    >>> symlog_ticks(1, 30, zero=True)
    ([0.0, 1.0, 10.0], [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 20.0, 30.0])
    >>> symlog_ticks(10, 90, zero=False)
    ([10.0, 90], [20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0])
    """
    powers = range(math.floor(math.log10(first)), math.ceil(math.log10(last)) + 1)
    ticks = [m * 10.0**power for power in powers for m in range(1, 10)]
    within = [tick for tick in ticks if first <= tick <= last]
    decades = [tick for tick in within if tick in ticks[::9]] or [first]
    shown = decades[:: math.ceil(len(decades) / 5)]
    width = math.log10(last / first)
    if last > first and math.log10(last / shown[-1]) > max(
        0.6, 0.18 * width
    ):  # a number is as wide as about a sixth of a panel
        shown.append(last)
    minor = [tick for tick in within if tick not in (*decades, *shown)]
    return [0.0] * zero + shown, minor


def scale_y(axes: Axes, drawn: Iterable[NDArray[np.float64]], quantity: Quantity) -> None:
    """The vertical axis for what is drawn: logarithmic if the quantity is, within its bounds."""
    low, high = value_range(drawn, quantity)
    if quantity.signed and low < 0 < high:
        for one in axes.get_shared_y_axes().get_siblings(axes):
            one.axhline(0, color="0.6", linewidth=0.5, zorder=1)
    if not quantity.log:
        axes.set_ylim(low, high)
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=TICK_STEPS))
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
    least = 0.02 if quantity.limits else 1e-3 * max(abs(low), abs(high)) or 1.0
    extra = max(0.05 * (high - low), (least - (high - low)) / 2)
    if quantity.limits is None:
        return low - extra, high + extra
    # An unbiased estimate may leave the bounds of what it estimates: the data has the last word.
    floor, ceiling = min(quantity.limits[0], low), max(quantity.limits[1], high)
    edge = 0.02 * (ceiling - floor)
    if high - low > 0.6 * (ceiling - floor):
        return floor - edge, ceiling + edge
    return max(floor - edge, low - extra), min(ceiling + edge, high + extra)


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
