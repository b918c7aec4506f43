"""Pictures of what is compared with what: squares of steps and layers, curves between runs, nulls and intervals."""

import doctest
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from pico_analyze import results
from pico_analyze.plots import comparisons, draw, maps, quantities, style, views

SIZES = {"small": 190_000, "large": 1_530_000}
STEPS = (0, 1, 10, 100)


def row(run: str, step: int, reference_step: int, layer: int = 0, **fields: Any) -> dict[str, Any]:
    return {
        "run": run,
        "run_id": f"id of {run}",
        "scale": SIZES[run],
        "step": step,
        "tokens": step * 1024,
        "split": "val",
        "kind": "activations",
        "component": "simple",
        "module": "swiglu.w_2",
        "layer": layer,
        "metric": "cka",
        "parameters": "{}",
        "reference_run": run,
        "reference_step": reference_step,
        "reference_layer": layer,
        "value": value(step, reference_step, layer),
        "status": "ok",
    } | fields


def value(step: int, reference_step: int, layer: int = 0) -> float:
    """1 on the diagonal, less with the distance."""
    return 1 - 0.1 * abs(math.log1p(step) - math.log1p(reference_step)) - 0.02 * layer * (step != reference_step)


def triangle(runs: Any = tuple(SIZES), n_layers: int = 2, **fields: Any) -> Iterator[dict[str, Any]]:
    for run in runs:
        for layer in range(n_layers):
            for t in STEPS:
                yield from (row(run, t, s, layer, **fields) for s in STEPS if s <= t)


def prepared(rows: Any) -> tuple[dict[str, quantities.Quantity], list[quantities.Series]]:
    table, series = quantities.prepare(results.table(rows), "step")
    found = quantities.quantities_of(table)
    assert len({quantity.name for quantity in found}) == len(found)
    return {quantity.rows["reference"].iloc[0]: quantity for quantity in found}, series


@pytest.fixture(autouse=True)
def _paper():
    with style.paper():
        yield


def images(figure: Figure) -> list[np.ndarray]:
    return [np.asarray(axes.images[0].get_array()) for axes in figure.axes if axes.images]


def test_doctests():
    assert doctest.testmod(comparisons).failed == 0


def test_a_triangle_is_a_square_and_two_curves():
    found, series = prepared(triangle())
    assert set(found) == {"each step", "the previous step", "step 0"}
    assert found["each step"].view == "steps"
    square = images(maps.steps(found["each step"], series, "step"))
    assert len(square) == 2  # a panel for each size
    expected = [[np.median([value(max(t, s), min(t, s), layer) for layer in (0, 1)]) for s in STEPS] for t in STEPS]
    np.testing.assert_allclose(square[0], expected)
    previous = found["the previous step"].rows
    assert sorted(zip(previous["step"], previous["reference_step"], strict=True))[0] == (1, 0)
    assert set(zip(previous["step"], previous["reference_step"], strict=True)) == {(1, 0), (10, 1), (100, 10)}


def test_what_is_not_symmetric_is_not_mirrored():
    found, series = prepared(triangle(["small"], metric="pwcca"))
    [square] = images(maps.steps(found["each step"], series, "step"))
    assert np.isnan(square[0, 3])
    assert square[3, 0] == pytest.approx(np.median([value(100, 0, layer) for layer in (0, 1)]))


def test_squares_are_square_and_say_what_they_show():
    found, series = prepared(triangle())
    for figure in (
        maps.steps(found["each step"], series, "step"),
        maps.steps_in_layers(found["each step"], series, "step"),
    ):
        figure.draw_without_rendering()
        panels = [axes for axes in figure.axes if axes.images]
        assert all(axes.get_aspect() == 1 for axes in panels)
        assert panels[0].get_ylabel() == "training step"
        assert panels[-1].get_xlabel() == "compared with training step"
        assert panels[0].get_xticklabels()[0].get_text() == "0"
        title = figure.get_suptitle().replace("\n", " ")
        assert title == "CKA of swiglu.w_2 activations (val), against each step"
        assert {axes.images[0].get_cmap().name for axes in panels} == {"viridis"}
        assert len({axes.images[0].norm for axes in panels}) == 1
    titles = [axes.get_title() for axes in figure.axes if axes.images]
    assert titles == ["0.19M, layer 0", "0.19M, layer 1", "1.5M, layer 0", "1.5M, layer 1"]


def test_layers_by_layers():
    rows = [
        row("small", step, step, layer, reference_layer=other, value=0.9 - 0.2 * (layer - other) + step / 1000)
        for step in (0, 10)
        for layer in range(3)
        for other in range(layer + 1)
    ]
    found, series = prepared(rows)
    assert set(found) == {"each layer"}
    figure = maps.layers(found["each layer"], series, "step")
    first, second = images(figure)
    np.testing.assert_allclose(first, 0.9 - 0.2 * np.abs(np.subtract.outer(range(3), range(3))))
    np.testing.assert_allclose(second, first + 0.01)
    assert [axes.get_title() for axes in figure.axes if axes.images] == ["step 0", "step 10"]


def test_triangle_and_layers_share_their_diagonal():
    more = [row("small", step, step, 1, reference_layer=0, value=0.3) for step in STEPS]
    found, _ = prepared([*triangle(["small"]), *more])
    assert set(found) == {"each step", "the previous step", "step 0", "each layer"}
    assert len(found["each step"].rows) == 2 * 10
    assert len(found["each layer"].rows) == 4 * 3


def test_layers_of_another_run():
    rows = [
        row("large", 10, 10, layer, reference_run="small", reference_layer=other, value=0.1 * layer + 0.01 * other)
        for layer in range(3)
        for other in range(2)
    ]
    found, series = prepared(rows)
    [(words, quantity)] = found.items()
    assert words == "each layer of run small"
    figure = maps.layers(quantity, series, "step")
    assert images(figure)[0].shape == (3, 2)
    assert figure.axes[0].get_xlabel() == "compared with layer of run small"


def test_curves_between_runs():
    rows = [row("large", step, step, reference_run="small", value=0.5) for step in STEPS]
    found, _ = prepared(rows)
    [(words, quantity)] = found.items()
    assert words == "run small"
    assert quantity.label == "CKA of swiglu.w_2 activations (val), against run small"
    assert quantity.name == "cka-vs-run-small_simple-swiglu.w_2_activations-val"


def test_each_step_of_another_run():
    rows = [row("large", t, s, reference_run="small") for t in STEPS for s in STEPS]
    found, series = prepared(rows)
    figure = maps.steps(found["each step of run small"], series, "step")
    assert figure.axes[0].get_xlabel() == "compared with training step of run small"
    np.testing.assert_allclose(images(figure)[0], [[value(t, s) for s in STEPS] for t in STEPS])


@pytest.mark.parametrize(
    "rows", [[row("large", t, s, reference_run="small") for t in STEPS for s in STEPS], list(triangle())]
)
def test_over_tokens(rows):
    table, series = quantities.prepare(results.table(rows), "tokens")
    square = next(quantity for quantity in quantities.quantities_of(table) if quantity.view == "steps")
    figure = maps.steps(square, series, "tokens")
    assert figure.axes[0].get_ylabel() == "tokens seen"
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["0", "1.02k", "10.2k", "102k"]


def test_nulls_and_intervals_are_drawn_and_explained():
    asked = '{"bootstrap": {"level": 0.9, "unit": "row"}, "permutation_null": {"quantile": 0.95, "unit": "sequence"}}'
    extra = {"low": 0.4, "high": 0.95, "null_mean": 0.05, "null_quantile": 0.2, "calibrated": 0.6, "p_value": 0.005}
    rows = [row("small", step, 0, layer, parameters=asked, **extra) for step in STEPS for layer in (0, 1)]
    found, series = prepared(rows)
    quantity = found["step 0"]
    assert quantity.name == "cka-null-interval-vs-step-0_simple-swiglu.w_2_activations-val"
    figure = views.layers(quantity, series, "step")
    assert all(any(isinstance(part, PolyCollection) for part in axes.collections) for axes in figure.axes)
    assert all(
        any(line.get_linestyle() == ":" and (line.get_ydata() == 0.2).all() for line in axes.lines)
        for axes in figure.axes
    )
    note = figure._supxlabel.get_text().replace("\n", " ")
    assert "Band: 90 % interval from halves of the rows. Dotted: 95 % quantile with permuted sequences." in note
    low, high = figure.axes[0].get_ylim()
    assert low < 0.2
    assert high > 0.95
    line = views.trajectory(quantity.calibrated(), series, "step", symlog=True).axes[0].lines[0]
    assert (line.get_ydata() == 0.6).all()
    trajectory = views.trajectory(quantity, series, "step", symlog=True)
    assert "Band:" not in trajectory._supxlabel.get_text()  # the bands there are over layers


def test_everything_is_drawn(tmp_path):
    extra = {
        "null_mean": 0.05,
        "null_quantile": 0.2,
        "calibrated": 0.6,
        "p_value": 0.005,
        "parameters": '{"permutation_null": {"quantile": 0.95, "unit": "row"}}',
    }
    layers = [row("small", 0, 0, 1, reference_layer=0, value=0.3, parameters='{"kernel": "rbf"}')]
    results.write(results.table([*triangle(**extra), *layers]), tmp_path)
    written = {str(path.relative_to(tmp_path / "plots")) for path in draw(tmp_path, formats=["png"])}
    name = "cka-null-vs-each-step_simple-swiglu.w_2_activations-val"
    assert {f"{name}/step-by-step{view}.png" for view in ("", "-in-layers", "-calibrated")} <= written
    assert "cka-rbf-vs-each-layer_simple-swiglu.w_2_activations-val/layer-by-layer.png" in written
    assert "cka-null-vs-the-previous-step_simple-swiglu.w_2_activations-val/calibrated.png" in written
