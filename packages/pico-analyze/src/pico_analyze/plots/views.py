"""The pictures: a quantity in, a figure out. Each view is one function."""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from numpy.typing import NDArray

from pico_analyze.plots import style
from pico_analyze.plots.axes import X_LABELS, scale_x, scale_y, short
from pico_analyze.plots.colours import Colours, rings, title
from pico_analyze.plots.quantities import (
    KEYS,
    LOSSES,
    Horizontal,
    Quantity,
    Series,
    Summary,
    remarks,
    summarise,
)
from pico_analyze.plots.style import DOUBLE, SINGLE, Stroke


def trajectory(quantity: Quantity, series: Sequence[Series], x: Horizontal, *, symlog: bool) -> Figure:
    """The quantity over training: for each size the median over layers, and two bands around it."""
    figure = style.figure(SINGLE, 2.6)
    axes = figure.subplots()
    _lines(axes, quantity, series, x, symlog=symlog, banded=quantity.in_layers)
    axes.set_ylabel(style.wrap(quantity.label, 2.0))
    style.legend(figure, *_present(quantity.rows, series))
    style.footnote(figure, _spread(quantity), _settings(quantity), remarks(quantity.rows), _hollow(quantity.rows))
    return figure


def layers(quantity: Quantity, series: Sequence[Series], x: Horizontal) -> Figure:
    """The quantity over training, a panel for each layer."""
    rows = quantity.rows[quantity.rows["layer"].notna()]
    numbers = sorted(int(layer) for layer in rows["layer"].unique())
    n_columns = min(len(numbers), 4 if len(numbers) <= 16 else 6)
    n_rows = math.ceil(len(numbers) / n_columns)
    figure = style.figure(DOUBLE if n_columns > 2 else SINGLE, 0.75 + 1.2 * n_rows)
    grid = figure.subplots(n_rows, n_columns, sharex=True, sharey=True, squeeze=False)
    drawn: list[NDArray[np.float64]] = []
    for place, axes in enumerate(grid.flat):
        if place >= len(numbers):
            axes.remove()
            continue
        layer = rows[rows["layer"] == numbers[place]]
        drawn += [summary.median for summary in _medians(axes, layer, series)]
        axes.set_title(f"layer {numbers[place]}", loc="left")
        lowest = place + n_columns >= len(numbers)
        axes.tick_params(labelbottom=lowest)
        scale_x(axes, rows["x"].to_numpy(), x, symlog=True, label=lowest)
    drawn += _ends(rows)
    scale_y(grid[0, 0], drawn, quantity)
    figure.supylabel(style.wrap(over_heads(quantity), 0.4 + 1.2 * n_rows))
    style.legend(figure, *_present(rows, series))
    settings = _settings(quantity, "layer")
    style.footnote(figure, settings, remarks(quantity.rows), _hollow(quantity.rows, within="layer"))
    return figure


def heat_map(quantity: Quantity, series: Sequence[Series], x: Horizontal) -> Figure:
    """The quantity by layer and checkpoint, a panel for each size, one colour scale for all."""
    rows = quantity.rows[quantity.rows["layer"].notna()]
    present = [index for index in range(len(series)) if (rows["series"] == index).any()]
    n_columns = min(len(present), 3)
    n_rows = math.ceil(len(present) / n_columns)
    n_layers = rows["layer"].nunique()
    width = DOUBLE if n_columns > 1 else SINGLE
    figure = style.figure(width, 0.75 + n_rows * min(3.0, max(1.2, 0.35 + 0.13 * n_layers)))
    grid = figure.subplots(n_rows, n_columns, sharey=True, squeeze=False)
    tables = [_layer_table(rows[rows["series"] == index]) for index in present]
    colours = Colours.of(quantity, [table.to_numpy() for table in tables])
    for place, axes in enumerate(grid.flat):
        if place >= len(present):
            axes.remove()
            continue
        image = _heat_panel(axes, tables[place], rows[rows["series"] == present[place]], colours)
        axes.set_title(series[present[place]].label)
        axes.set_xlabel(f"{X_LABELS[x]} (by checkpoint)")
        if place % n_columns == 0:
            axes.set_ylabel("layer")
    colours.bar(figure, image, n_rows, log=quantity.log)
    title(figure, over_heads(quantity))
    averaged = "Median over runs." if any(series[index].n_runs > 1 for index in present) else ""
    ringed = "Ring: flagged." if rows["status"].eq("flagged").any() else ""
    blank = "Grey: no value." if any(np.isnan(table.to_numpy()).any() for table in tables) else ""
    style.footnote(figure, averaged, blank, remarks(quantity.rows), ringed)
    return figure


def beside_loss(quantity: Quantity, series: Sequence[Series], x: Horizontal, losses: Sequence[Quantity]) -> Figure:
    """The loss above the quantity, over the same axis; of two losses the first is the thick line."""
    figure = style.figure(SINGLE, 3.9)
    above, below = figure.subplots(2, 1, sharex=True)
    runs = quantity.rows["member"].unique()
    drawn: list[NDArray[np.float64]] = []
    for place, loss in enumerate(losses):
        rows = loss.rows[loss.rows["member"].isin(runs)]
        drawn += [summary.median for summary in _medians(above, rows, series, faint=place > 0)]
    scale_y(above, drawn, losses[0])
    above.set_ylabel("loss (nats per token)" if len(losses) > 1 else style.wrap(losses[0].label, 1.5))
    _lines(below, quantity, series, x, symlog=True, banded=quantity.in_layers)
    below.set_ylabel(style.wrap(quantity.label, 1.5))
    figure.align_ylabels([above, below])
    style.legend(figure, *_present(quantity.rows, series))
    names = [loss.metric.replace("val_loss", "validation").replace("train_loss", "training") for loss in losses]
    which = f"Loss: {names[0]}, faint {names[1]}." if len(losses) > 1 else ""
    style.footnote(
        figure, which, _spread(quantity), _settings(quantity), remarks(quantity.rows), _hollow(quantity.rows)
    )
    return figure


def overview(chosen: Sequence[Quantity], series: Sequence[Series], x: Horizontal) -> Figure:
    """The main quantities side by side, with one legend."""
    n_columns = min(len(chosen), 3 if len(chosen) in (5, 6, 9) else 4)
    n_rows = math.ceil(len(chosen) / n_columns)
    figure = style.figure(DOUBLE if n_columns > 1 else SINGLE, 0.6 + 1.5 * n_rows)
    grid = figure.subplots(n_rows, n_columns, squeeze=False)
    for place, axes in enumerate(grid.flat):
        if place >= len(chosen):
            axes.remove()
            continue
        quantity = chosen[place]
        lowest = place + n_columns >= len(chosen)
        _lines(axes, quantity.bare(), series, x, symlog=True, banded=quantity.in_layers, label=lowest)
        width = figure.get_figwidth() / n_columns - 0.2
        words = (quantity.title, quantity.subject or quantity.unit)
        axes.set_title("\n".join(style.wrap(part, width) for part in words if part))
    rows = pd.concat([quantity.rows for quantity in chosen])
    style.legend(figure, *_present(rows, series))
    style.footnote(figure, _spread(*chosen), remarks(rows), _hollow(rows))
    return figure


def main_quantities(found: Sequence[Quantity], n: int = 12) -> list[Quantity]:
    """The n quantities for an overview: a loss, then each metric in turn, whole layers before heads."""
    losses = [quantity for quantity in found if quantity.metric in LOSSES]
    titles: dict[str, list[Quantity]] = {}
    for quantity in sorted(found, key=lambda quantity: bool(quantity.per)):
        shown = {other.label for group in titles.values() for other in group}
        if quantity.metric not in LOSSES and not quantity.view and quantity.label not in shown:
            titles.setdefault(quantity.title, []).append(quantity)
    turns = [group[turn] for turn in range(len(found)) for group in titles.values() if turn < len(group)]
    chosen = losses[:1] + turns[: n - len(losses[:1])]
    return [quantity for quantity in found if quantity in chosen]


def _lines(
    axes: Axes,
    quantity: Quantity,
    series: Sequence[Series],
    x: Horizontal,
    *,
    symlog: bool,
    banded: bool,
    label: bool = True,
) -> None:
    summaries = _medians(axes, quantity.rows, series)
    drawn = [summary.median for summary in summaries]
    if banded:
        for index, stroke in enumerate(style.strokes(series)):
            rows = quantity.rows[quantity.rows["series"] == index]
            if len(rows):
                style.bands(axes, pooled := summarise(rows), stroke)
                drawn.append(pooled.levels)
    drawn += _ends(quantity.rows)
    scale_x(axes, quantity.rows["x"].to_numpy(), x, symlog=symlog, label=label)
    scale_y(axes, drawn, quantity)


def _ends(rows: pd.DataFrame) -> list[NDArray[np.float64]]:
    """What else the axis must hold: intervals and nulls."""
    values = rows[["low", "high", "null_quantile"]].to_numpy(dtype=float)
    return [values] if np.isfinite(values).any() else []


def _medians(axes: Axes, rows: pd.DataFrame, series: Sequence[Series], *, faint: bool = False) -> list[Summary]:
    """A line for each run through the median at each x."""
    strokes = style.strokes(series)
    summaries = []
    for _, run in rows.groupby(["series", "member"], sort=True):
        stroke = strokes[run["series"].iloc[0]]
        summaries.append(summary := summarise(run))
        _uncertainty(axes, run, stroke)
        if faint:
            axes.plot(summary.x, summary.median, stroke.dash, color=stroke.colour, alpha=0.45, linewidth=0.6)
        else:
            style.line(axes, summary.x, summary.median, summary.hollow, stroke)
    return summaries


def _uncertainty(axes: Axes, rows: pd.DataFrame, stroke: Stroke) -> None:
    """The interval of a single value as a band; what unrelated samples hardly pass as a dotted line, in the median."""
    if rows["low"].notna().any() and not rows["x"].duplicated().any():
        ends = rows.sort_values("x")
        axes.fill_between(
            ends["x"].to_numpy(),
            ends["low"].to_numpy(),
            ends["high"].to_numpy(),
            color=stroke.colour,
            alpha=0.2,
            linewidth=0,
        )
    if rows["null_quantile"].notna().any():
        limit = rows.groupby("x")["null_quantile"].median()
        axes.plot(limit.index.to_numpy(), limit.to_numpy(), ":", color=stroke.colour, linewidth=0.6)


def _settings(quantity: Quantity, *panel: str) -> str:
    """What the band of an interval and the line of a null stand for, in panels for each ``panel``."""
    parameters = json.loads(quantity.rows["parameters"].iloc[0] or "{}")
    words = []
    if (bootstrap := parameters.get("bootstrap")) and not quantity.rows.duplicated(["member", "x", *panel]).any():
        words.append(f"Band: {100 * bootstrap['level']:g} % interval from halves of the {_units(bootstrap)}.")
    if (null := parameters.get("permutation_null")) and quantity.has("null_quantile"):
        words.append(f"Dotted: {100 * null['quantile']:g} % quantile with permuted {_units(null)}.")
    return " ".join(words)


def _units(settings: dict[str, Any]) -> str:
    return "sequences" if settings["unit"] == "sequence" else "rows"


def _layer_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Layers x checkpoints: the median over heads and replicates, nan where there is no value."""
    return rows.groupby(["layer", "x"])["y"].median().unstack().astype(float)


def _heat_panel(axes: Axes, table: pd.DataFrame, rows: pd.DataFrame, colours: Colours) -> AxesImage:
    image = colours.image(axes, table.to_numpy(), "auto")
    flagged = rows[rows["status"].eq("flagged")]
    columns, layers_of = list(table.columns), list(table.index)
    rings(axes, [columns.index(x) for x in flagged["x"]], [layers_of.index(layer) for layer in flagged["layer"]])
    shown = np.unique(np.linspace(0, len(table.columns) - 1, min(len(table.columns), 5)).round().astype(int))
    axes.set_xticks(shown, [short(table.columns[column]) for column in shown])
    every = math.ceil(len(table) / 8)
    axes.set_yticks(range(0, len(table), every), [str(layer) for layer in table.index[::every]])
    return image


def _present(rows: pd.DataFrame, series: Sequence[Series]) -> tuple[list[Series], list[Stroke]]:
    """The series that these rows hold, with the strokes they have in every picture."""
    present = set(rows["series"])
    pairs = [pair for index, pair in enumerate(zip(series, style.strokes(series), strict=True)) if index in present]
    return [one for one, _ in pairs], [stroke for _, stroke in pairs]


def over_heads(quantity: Quantity) -> str:
    """The label of a picture that shows the median over heads."""
    return quantity.label.replace(f", per {quantity.per}", f", median over {quantity.several}")


def _spread(*shown: Quantity) -> str:
    """What lines and bands are over, of those that belong to layers."""
    layered = [one for one in shown if one.in_layers and one.rows.duplicated(["member", "x"]).any()]
    if not layered:
        return ""
    heads = {quantity.per: quantity.several for quantity in layered}
    if len(heads) == 1:
        over = "layers" + "".join(f" and {several}" for several in heads.values() if several)
    else:
        over = "layers" + "".join(f"; of values per {per} over {several} too" for per, several in heads.items() if per)
    rows = pd.concat([quantity.rows for quantity in layered])
    replicates = rows.groupby("series")["member"].nunique().max() > 1
    runs = (", for each run", ", of all runs") if replicates else ("", "")
    return f"Line: median over {over}{runs[0]}. Bands: middle 50 % and 80 %{runs[1]}."


def _hollow(rows: pd.DataFrame, *, within: str = "x") -> str:
    """What hollow marks stand for here; ``within`` a layer, or within all that shares an x."""
    cell = [rows[key] for key in ("member", *KEYS, "x", within)]
    absent = rows["y"].isna().groupby(cell, dropna=False).mean()
    partly = bool(absent.between(0, 1, inclusive="neither").any())
    flagged = bool(rows["status"].eq("flagged").any())
    words = [word for word, true in (("flagged", flagged), ("some values missing", partly)) if true]
    return f"Hollow: {' or '.join(words)}." if words else ""
