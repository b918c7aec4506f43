"""Pictures of a results table, and of nothing but the table.

In: a folder that holds the results of an analysis. Out: PNG, SVG and PDF files. `quantities` says what there
is to draw, `views` draws it, `style` says how it looks. matplotlib's settings and open figures are left
alone, in a notebook too.
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import pandas as pd
from joblib import Parallel, cpu_count, delayed
from matplotlib.figure import Figure

from pico_analyze import results
from pico_analyze.plots import maps, style, views
from pico_analyze.plots.axes import X_LABELS
from pico_analyze.plots.quantities import (
    LOSSES,
    Horizontal,
    PlotError,
    Quantity,
    Series,
    prepare,
    quantities_of,
    remarks,
)

__all__ = ["PlotError", "draw"]

Job = tuple[str, Callable[[], Figure]]

WORTH_A_PROCESS = 12  # figures take about as long as a process takes to start

log = logging.getLogger(__name__)


def draw(
    results_folder: str | Path,
    output_folder: str | Path | None = None,
    *,
    x: Horizontal = "step",
    formats: Sequence[str] = style.FORMATS,
    metrics: Sequence[str] | None = None,
    progress: Callable[[list[Job]], Iterable[Job]] = iter,
    n_jobs: int | None = None,
) -> list[Path]:
    """Draw every quantity of a results table in every view, and an overview; returns the files written.

    ``overview.<format>`` stands at the top, all else in a folder for each quantity, ``<quantity>/<view>.<format>``; a
    quantity is called ``<metric>[-<parameter>]_<component>[-<module>]_<kind>[-<split>]``. Views:
    ``trajectory-linear`` and ``trajectory-symlog``, for what has layers also ``layers`` and ``heatmap``, where the
    table holds losses ``loss``, and where it holds a permutation null ``calibrated``. What compares each step with each has
    ``step-by-step`` in their place, what compares each layer with each ``layer-by-layer``. A quantity without any
    value is not drawn, and logged.

    Args:
        results_folder: holds ``results.parquet``.
        output_folder: where the files go; None is ``plots`` in the results folder.
        x: the horizontal axis, training steps or tokens seen.
        formats: any of png, svg, pdf.
        metrics: names of metrics to draw; none given draws all.
        progress: wraps the list of figures while they are drawn, such as ``tqdm``.
        n_jobs: how many processes draw; the files do not depend on it. None takes the CPUs that there are, where there
            are figures enough for them.

    Raises:
        PlotError: there is nothing to draw, or no such metric, format or axis.
    """
    for name, given, allowed in (("x", [x], tuple(X_LABELS)), ("formats", formats, style.FORMATS)):
        if wrong := [value for value in given if value not in allowed]:
            raise PlotError(f"{name}: {wrong[0]!r} is none of {', '.join(allowed)}")
    rows, series = prepare(_read(Path(results_folder)), x)
    if rows.empty:
        raise PlotError(f"{results_folder}: no row has a number of {x}, so there is nothing to draw over {x}")
    known = quantities_of(rows)
    losses = [quantity for quantity in known if quantity.metric in LOSSES]
    jobs = _jobs(_drawable(known, metrics), losses, series, x)
    folder = Path(results_folder, "plots") if output_folder is None else Path(output_folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlotError(f"{folder}: the folder for the pictures cannot be made ({error.strerror})") from None
    if n_jobs is None:
        n_jobs = min(cpu_count(), math.ceil(len(jobs) / WORTH_A_PROCESS))
    place = folder.absolute()  # a process that drew before may stand elsewhere
    written = Parallel(n_jobs=n_jobs)(delayed(_save)(make, place / name, formats) for name, make in progress(jobs))
    return [folder / path.relative_to(place) for paths in written for path in paths]


def _save(make: Callable[[], Figure], stem: Path, formats: Sequence[str]) -> list[Path]:
    """Draw one figure and write its files."""
    stem.parent.mkdir(exist_ok=True)
    with style.paper():
        return style.save(make(), stem, formats)


def _read(folder: Path) -> pd.DataFrame:
    if not folder.is_dir():
        raise PlotError(f"{folder}: no such folder; give the folder of results that `pico-analyze run` has printed")
    try:
        table = results.read(folder)
    except results.ResultsError as error:
        raise PlotError(str(error)) from None
    if table.empty:
        raise PlotError(f"{folder}/results.parquet has no rows, so there is nothing to draw")
    return table


def _drawable(known: Sequence[Quantity], metrics: Sequence[str] | None) -> list[Quantity]:
    """The quantities asked for that have at least one value."""
    names = sorted({quantity.metric for quantity in known})
    if unknown := [metric for metric in metrics or () if metric not in names]:
        raise PlotError(f"metrics: there is no {unknown[0]!r} in these results; there are {', '.join(names)}")
    asked = [quantity for quantity in known if not metrics or quantity.metric in metrics]
    found = [quantity for quantity in asked if quantity.has_values()]
    if not found:
        raise PlotError(f"nothing to draw: {remarks(pd.concat([quantity.rows for quantity in asked]))}")
    for quantity in asked:
        if quantity not in found:
            log.warning("not drawn: %s; %s", quantity.label, remarks(quantity.rows))
    return found


def _jobs(chosen: Sequence[Quantity], losses: Sequence[Quantity], series: Sequence[Series], x: Horizontal) -> list[Job]:
    """Path in the folder of pictures, without the format, and maker of every figure."""
    jobs: list[Job] = [("overview", partial(views.overview, views.main_quantities(chosen), series, x))]
    for quantity in chosen:
        if quantity.view:
            jobs += [(f"{quantity.name}/{view}", make) for view, make in _maps(quantity, series, x)]
            continue
        views_of: list[tuple[str, Callable[[], Figure]]] = [
            ("trajectory-linear", partial(views.trajectory, quantity, series, x, symlog=False)),
            ("trajectory-symlog", partial(views.trajectory, quantity, series, x, symlog=True)),
        ]
        if quantity.in_layers:
            views_of.append(("layers", partial(views.layers, quantity, series, x)))
            views_of.append(("heatmap", partial(views.heat_map, quantity, series, x)))
        beside = [loss for loss in losses if loss.has_values(quantity.rows["member"])]
        if beside and quantity.metric not in LOSSES:
            views_of.append(("loss", partial(views.beside_loss, quantity, series, x, beside)))
        if quantity.has("calibrated"):
            views_of.append(("calibrated", partial(views.trajectory, quantity.calibrated(), series, x, symlog=True)))
        jobs += [(f"{quantity.name}/{view}", make) for view, make in views_of]
    return jobs


def _maps(quantity: Quantity, series: Sequence[Series], x: Horizontal) -> list[tuple[str, Callable[[], Figure]]]:
    """The pictures of a quantity that compares each step, or each layer, with each."""
    draw_map, name = (maps.steps, "step-by-step") if quantity.view == "steps" else (maps.layers, "layer-by-layer")
    views_of: list[tuple[str, Callable[[], Figure]]] = [(name, partial(draw_map, quantity, series, x))]
    if quantity.view == "steps" and quantity.rows["layer"].nunique() > 1:
        views_of.append((f"{name}-in-layers", partial(maps.steps_in_layers, quantity, series, x)))
    if quantity.has("calibrated"):
        views_of.append((f"{name}-calibrated", partial(draw_map, quantity.calibrated(), series, x)))
    return views_of
