"""Square pictures of what is compared with what: each step with each, each layer with each."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from pico_analyze.plots import style
from pico_analyze.plots.axes import X_LABELS, short
from pico_analyze.plots.colours import Colours, title
from pico_analyze.plots.quantities import Horizontal, Quantity, Series, remarks
from pico_analyze.plots.style import DOUBLE, SINGLE
from pico_analyze.plots.views import over_heads

SYMMETRIC = ("cka", "mean_cca", "svcca", "procrustes", "rsa", "mutual_knn")
N_STEPS = 4  # panels of a layer x layer picture


@dataclass(frozen=True)
class Panel:
    """One square: its title, values (rows of the picture upwards), and what its rows and columns are."""

    title: str
    values: NDArray[np.float64]
    down: Sequence[str]
    along: Sequence[str]


def steps(quantity: Quantity, series: Sequence[Series], x: Horizontal) -> Figure:
    """Each step with each: a panel for each size, the median over layers, heads and replicates."""
    panels = [
        _steps_panel(series[int(str(index))].label, rows, quantity)
        for index, rows in quantity.rows.groupby("series", sort=True)
    ]
    over = "Median over layers." if quantity.rows["layer"].nunique() > 1 else ""
    return _draw(quantity, panels, _step_words(quantity, x), over)


def steps_in_layers(quantity: Quantity, series: Sequence[Series], x: Horizontal) -> Figure:
    """Each step with each: a row of panels for each size, a panel for each layer."""
    panels = []
    for (index, layer), rows in quantity.rows.groupby(["series", "layer"], sort=True):
        name = f"{series[int(str(index))].label}, " if quantity.rows["series"].nunique() > 1 else ""
        panels.append(_steps_panel(f"{name}layer {layer}", rows, quantity))
    return _draw(quantity, panels, _step_words(quantity, x), "", per_row=int(quantity.rows["layer"].nunique()))


def layers(quantity: Quantity, series: Sequence[Series], x: Horizontal) -> Figure:
    """Each layer with each: a row of panels for each size, at some steps from the first to the last."""
    panels = []
    own = bool(quantity.rows["reference_run"].eq(quantity.rows["run"]).all())
    beside = bool(quantity.rows["reference_step"].eq(quantity.rows["step"]).all())
    n_columns = 1
    for index, rows in quantity.rows.groupby("series", sort=True):
        name = f"{series[int(str(index))].label}, " if quantity.rows["series"].nunique() > 1 else ""
        times = np.unique(rows["x"])
        shown = times[np.unique(np.linspace(0, len(times) - 1, N_STEPS).round().astype(int))]
        n_columns = max(n_columns, len(shown))
        for time in shown:
            table = _table(
                rows[rows["x"] == time], "layer", "reference_layer", mirrored=own and beside and _symmetric(quantity)
            )
            title = name + (f"step {short(time)}" if x == "step" else f"{short(time)} tokens")
            names = [[str(int(number)) for number in side] for side in (table.index, table.columns)]
            panels.append(Panel(title, table.to_numpy(), *names))
    other = f" at step {quantity.rows['reference_step'].iloc[0]}" if own and not beside else ""
    other = other if own else f" of {_run_of(quantity)}"
    return _draw(quantity, panels, ("layer", f"compared with layer{other}"), "", per_row=n_columns)


def _steps_panel(title: str, rows: pd.DataFrame, quantity: Quantity) -> Panel:
    own = bool(rows["reference_run"].eq(rows["run"]).all())
    table = _table(rows, "x", "reference_x", mirrored=own and _symmetric(quantity))
    return Panel(
        title, table.to_numpy(), *([short(float(place)) for place in side] for side in (table.index, table.columns))
    )


def _table(rows: pd.DataFrame, down: str, along: str, *, mirrored: bool) -> pd.DataFrame:
    """The median of what shares a place; below the diagonal too where that is the same."""
    table = rows.groupby([down, along])["y"].median().unstack().astype(float)
    if mirrored:
        names = sorted({*table.index, *table.columns})
        table = table.reindex(index=names, columns=names)
        table = table.where(table.notna(), table.T)
    return table


def _symmetric(quantity: Quantity) -> bool:
    return quantity.metric in SYMMETRIC or bool(quantity.rows["component"].eq("delta").all())


def _step_words(quantity: Quantity, x: Horizontal) -> tuple[str, str]:
    own = quantity.rows["reference_run"].eq(quantity.rows["run"]).all()
    return X_LABELS[x], f"compared with {X_LABELS[x]}" + ("" if own else f" of {_run_of(quantity)}")


def _run_of(quantity: Quantity) -> str:
    return f"run {quantity.rows['reference_run'].iloc[0]}"


def _draw(quantity: Quantity, panels: Sequence[Panel], words: tuple[str, str], over: str, per_row: int = 3) -> Figure:
    """The panels in rows, one colour scale for all; ``words`` say what goes up and what goes along."""
    n_columns = min(len(panels), per_row if per_row <= 6 else 4)
    n_rows = math.ceil(len(panels) / n_columns)
    width = DOUBLE if n_columns > 1 else SINGLE
    side = (width - 0.9) / n_columns - 0.35  # of a square, in inches
    figure = style.figure(width, 0.55 + n_rows * (side + 0.32))
    grid = figure.subplots(n_rows, n_columns, squeeze=False)
    colours = Colours.of(quantity, [panel.values for panel in panels])
    for place, axes in enumerate(grid.flat):
        if place >= len(panels):
            axes.remove()
            continue
        panel = panels[place]
        image = colours.image(axes, panel.values, "equal")
        axes.set_title(style.wrap(panel.title, side))
        _ticks(axes, panel, side)
        if place % n_columns == 0:
            axes.set_ylabel(style.wrap(words[0], side))
        if place + n_columns >= len(panels):
            axes.set_xlabel(style.wrap(words[1], side))
    colours.bar(figure, image, n_rows, log=quantity.log)
    title(figure, over_heads(quantity))
    blank = "Grey: no value, or not compared." if any(np.isnan(panel.values).any() for panel in panels) else ""
    by_checkpoint = "A row and a column for each checkpoint." if quantity.view == "steps" else ""
    style.footnote(figure, by_checkpoint, over, blank, remarks(quantity.rows))
    return figure


def _ticks(axes: Axes, panel: Panel, side: float) -> None:
    most = max(2, int(side / 0.28))
    for axis, names in ((axes.yaxis, panel.down), (axes.xaxis, panel.along)):
        shown = range(0, len(names), math.ceil(len(names) / most))
        axis.set_ticks(list(shown), [names[place] for place in shown])
