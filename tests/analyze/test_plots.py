"""Pictures of a synthetic results table: what is drawn, how it is named, and what is refused."""

import doctest
import json
import logging
import math
import struct
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.text import Text

from pico_analyze import results
from pico_analyze.metrics import METRICS
from pico_analyze.plots import PlotError, axes, draw, quantities, style, views

SIZES = {"zz-small": 190_000, "mm-medium": 508_000, "aa-large": 1_530_000}  # not in the order of the names
STEPS = (0, 1, 2, 4, 8, 100, 1000)


def row(run: str = "zz-small", step: int = 0, **fields: Any) -> dict[str, Any]:
    return {
        "run": run,
        "run_id": f"id of {run}",
        "suite": "demo",
        "scale": SIZES.get(run),
        "weights_seed": 1,
        "data_seed": 2,
        "dropout_seed": 3,
        "step": step,
        "tokens": step * 1024,
        "kind": "weights",
        "component": "simple",
        "module": "swiglu.w_2",
        "layer": 0,
        "metric": "gini",
        "parameters": "{}",
        "value": 0.5,
        "status": "ok",
    } | fields


def metric_rows(
    runs: Sequence[str] = tuple(SIZES), steps: Sequence[int] = STEPS, n_layers: int = 4, **fields: Any
) -> Iterator[dict[str, Any]]:
    """A value for each run, step and layer, all different and within [0.2, 0.8]."""
    for size, run in enumerate(runs):
        for step in steps:
            for layer in range(n_layers):
                value = 0.2 + 0.04 * math.log1p(step) + 0.05 * layer + 0.03 * size
                yield row(run, step, layer=layer, value=value, **fields)


def loss_rows(runs: Sequence[str] = tuple(SIZES), steps: Sequence[int] = STEPS) -> Iterator[dict[str, Any]]:
    for run in runs:
        for step in steps:
            for metric, split in (("train_loss", "train"), ("val_loss", "val")):
                fields = {"metric": metric, "split": split, "kind": "training", "component": "loss"}
                yield row(run, step, **fields, module=None, layer=None, value=7.6 - 0.4 * math.log1p(step))


def prepared(rows: Any, x: Any = "step") -> tuple[list[quantities.Quantity], list[quantities.Series]]:
    table, series = quantities.prepare(results.table(rows), x)
    return quantities.quantities_of(table), series


def only(rows: Any, x: Any = "step") -> tuple[quantities.Quantity, list[quantities.Series]]:
    found, series = prepared(rows, x)
    assert len(found) == 1
    return found[0], series


@pytest.fixture
def paper() -> Iterator[None]:
    with style.paper():
        yield


def connected(figure: Figure, place: int = 0) -> list[Any]:
    """The lines of one panel, without the marks on them."""
    return [line for line in figure.axes[place].lines if line.get_linestyle() != "None"]


def legend_labels(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def note(figure: Figure) -> str:
    return figure.get_supxlabel().replace("\n", " ")


def assert_all_text_inside(figure: Figure) -> None:
    figure.draw_without_rendering()
    width, height = figure.bbox.width, figure.bbox.height
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text():
            box = text.get_window_extent()
            inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1
            on_axis = text.axes is None or text in (text.axes.title, text.axes.xaxis.label, text.axes.yaxis.label)
            assert inside or not on_axis, text.get_text()


# What is on disk


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A small table drawn in every view and format: its rows and the files."""
    folder = tmp_path_factory.mktemp("drawn")
    rows = [*metric_rows(n_layers=2, steps=(0, 1, 10))]
    rows += loss_rows(steps=(0, 1, 10))
    results.write(results.table(rows), folder)
    return rows, draw(folder, metrics=["gini"]), folder


def test_every_view_in_every_format(drawn):
    _, paths, folder = drawn
    stems = ["overview"]
    for view in ("trajectory-linear", "trajectory-symlog", "layers", "heatmap", "loss"):
        stems.append(f"gini_simple-swiglu.w_2_weights/{view}")
    expected = [folder / "plots" / f"{stem}.{end}" for stem in stems for end in ("png", "svg", "pdf")]
    assert sorted(paths) == sorted(expected)
    assert sorted(path for path in (folder / "plots").rglob("*") if path.is_file()) == sorted(expected)
    assert paths[0].name == "overview.png"
    for path in paths:
        start = path.read_bytes()[:24]
        if path.suffix == ".png":
            assert start.startswith(b"\x89PNG")
            width, _ = struct.unpack(">II", start[16:24])
            assert width in (700, 1400)  # 3.5 or 7 inches at 200 dpi
        elif path.suffix == ".svg":
            assert ElementTree.parse(path).getroot().tag.endswith("svg")
        else:
            assert start.startswith(b"%PDF")


def test_the_same_bytes_whatever_the_order_of_rows_and_the_settings_which_are_left_alone(drawn, tmp_path):
    import matplotlib.pyplot as plt

    rows, paths, folder = drawn
    results.write(results.table(rows[::-1]), tmp_path)
    before, open_figures = dict(mpl.rcParams), plt.get_fignums()
    with mpl.rc_context({"font.size": 40, "lines.color": "red", "svg.fonttype": "path"}):
        changed = dict(mpl.rcParams)
        again = draw(tmp_path, formats=("svg",), metrics=["gini"])
        shared = draw(tmp_path, tmp_path / "shared" / "plots", formats=("svg",), metrics=["gini"], n_jobs=2)
        assert dict(mpl.rcParams) == changed
    assert dict(mpl.rcParams) == before
    assert plt.get_fignums() == open_figures
    plain = {path.relative_to(folder): path.read_bytes() for path in paths if path.suffix == ".svg"}
    assert {path.relative_to(tmp_path): path.read_bytes() for path in again} == plain
    assert {path.relative_to(tmp_path / "shared"): path.read_bytes() for path in shared} == plain


def test_formats_output_folder_metrics_and_progress(tmp_path):
    results.write(results.table([*metric_rows(n_layers=1), *metric_rows(metric="hoyer", n_layers=1)]), tmp_path)
    seen = []

    def progress(jobs):
        seen.extend(name for name, _ in jobs)
        return jobs[:2]

    top = tmp_path / "a" / "b"
    paths = draw(tmp_path, top, formats=["svg"], metrics=["hoyer"], progress=progress)
    assert len(seen) == 5
    everything = []
    draw(tmp_path, top, progress=lambda jobs: everything.extend(name for name, _ in jobs) or [])
    assert len(everything) == 9
    assert all(name.startswith(("hoyer_", "overview")) for name in seen)
    assert paths == [top / "overview.svg", top / "hoyer_simple-swiglu.w_2_weights" / "trajectory-linear.svg"]


def test_text_of_the_table_is_text(tmp_path, paper):
    name = r"a $x^2$ & <b> \frac"
    rows = [*metric_rows([name], scale=None)]
    rows[0] |= {"value": None, "status": "undefined", "reason": "cost $5 or $6"}
    quantity, series = only(rows)
    (path,) = style.save(views.trajectory(quantity, series, "step", symlog=False), tmp_path / "picture", ["svg"])
    words = [element.text for element in ElementTree.parse(path).iter() if element.tag.endswith("text")]
    assert name in words
    assert any("cost $5 or $6" in (word or "") for word in words)


# Names of files and quantities


def test_file_names():
    rows = [
        row(metric="norm", parameters='{"norm_type": "nuclear"}', split="val"),
        row(component="ov_circuit", module="attention", kind="gradients", split="train", metric="per"),
        row(component="ov_circuit", module="attention", kind="gradients", split="train", metric="per", head=0),
        row(metric="cka", kind="activations", split="val", reference_run="zz-small", reference_step=900),
        row(metric="cka", parameters='{"debiased": false, "power": 1e-6}'),
        row(metric="mine/of: all?", module=None),
    ]
    assert {quantity.name for quantity in prepared(rows)[0]} == {
        "norm-nuclear_simple-swiglu.w_2_weights-val",
        "per_ov_circuit-attention_gradients-train",
        "per_ov_circuit-attention-heads_gradients-train",
        "cka-vs-step-900_simple-swiglu.w_2_activations-val",
        "cka-debiased-false-power-1e-06_simple-swiglu.w_2_weights",
        "mine-of-all_simple_weights",
    }


def test_names_stay_apart_and_short_on_any_file_system():
    rows = [row(metric=metric) for metric in ("case", "CASE", "a b", "a:b", "m" * 300)]
    names = [quantity.name for quantity in prepared(rows)[0]]
    assert len({name.lower() for name in names}) == 5
    assert max(map(len, names)) <= 130


def test_labels_in_plain_words():
    ov = {"component": "ov_circuit", "module": "attention"}
    rows = [
        row(**ov, kind="gradients", split="train", metric="per"),
        row(**ov, kind="gradients", split="train", metric="per", head=0),
        row(metric="norm", parameters='{"norm_type": "frobenius"}', split="val"),
        row(metric="cka", kind="activations", split="val", reference_run="zz-small", reference_step=900),
        row(metric="val_loss", component="loss", kind="training", module=None, layer=None, split="val"),
        row(metric="my_own", parameters='{"k": 1}'),
        row(metric="my_own", parameters='{"k": 2}'),
    ]
    assert {quantity.label for quantity in prepared(rows)[0]} == {
        "PER of OV circuit gradients (train)",
        "PER of OV circuit gradients (train), per head",
        "Frobenius norm of swiglu.w_2 weights",
        "CKA of swiglu.w_2 activations (val), against step 900",
        "validation loss (nats per token)",
        "my own (k 1) of swiglu.w_2 weights",
        "my own (k 2) of swiglu.w_2 weights",
    }


def test_a_reference_in_another_run_is_named_also_for_that_run():
    rows = [row(run, metric="cka", reference_run="zz-small", reference_step=900) for run in SIZES]
    quantity, _ = only(rows)
    assert quantity.subject.endswith("against run zz-small at step 900")


def test_runs_that_are_compared_with_their_last_step_share_a_quantity():
    rows = [
        row(run, step, metric="cka", reference_run=run, reference_step=last)
        for run, last in (("zz-small", 900), ("aa-large", 450))
        for step in (0, last)
    ]
    assert only(rows)[0].subject == "swiglu.w_2 weights, against the last step"
    fixed = [one | {"reference_step": 450} for one in rows]
    assert only(fixed)[0].subject == "swiglu.w_2 weights, against step 450"


# Series


def test_series_are_ordered_by_parameters(paper):
    quantity, series = only(metric_rows())
    assert [one.label for one in series] == ["0.19M", "0.51M", "1.5M"]
    assert legend_labels(views.trajectory(quantity, series, "step", symlog=True)) == [
        "parameters:",
        "0.19M",
        "0.51M",
        "1.5M",
    ]
    lightness = [np.dot(stroke.colour[:3], (0.2126, 0.7152, 0.0722)) for stroke in style.strokes(series)]
    assert lightness == sorted(lightness)


def test_runs_that_differ_only_in_seeds_are_replicates(paper):
    rows = []
    for seed in (1, 2, 3):
        rows += [
            one | {"run": f"s{seed}", "run_id": f"s{seed}", "weights_seed": seed} for one in metric_rows(["zz-small"])
        ]
    rows += metric_rows(["aa-large"])
    quantity, series = only(rows)
    assert [(one.label, one.n_runs) for one in series] == [("0.19M (n = 3)", 3), ("1.5M", 1)]
    lines = connected(views.trajectory(quantity, series, "step", symlog=False))
    colours = [to_hex(line.get_color()) for line in lines]
    assert len(lines) == 4
    assert colours[0] == colours[1] == colours[2] != colours[3]
    assert lines[0].get_linewidth() < lines[3].get_linewidth()
    words = note(views.trajectory(quantity, series, "step", symlog=False))
    assert words == "Line: median over layers, for each run. Bands: middle 50 % and 80 %, of all runs."


@pytest.mark.parametrize(
    "change",
    [{"weights_seed": 1}, {"suite": None}, {"data_seed": None}],
    ids=["the same seeds", "no suite", "an unknown seed"],
)
def test_other_runs_of_one_size_are_not_replicates(change):
    rows = []
    for seed in (1, 2):
        fields = {"run": f"s{seed}", "run_id": f"s{seed}", "weights_seed": seed} | change
        rows += [one | fields for one in metric_rows(["zz-small"])]
    _, series = only(rows)
    assert [one.label for one in series] == ["0.19M s1", "0.19M s2"]


# The numbers drawn


def test_bands_and_line_are_numpy_percentiles(paper):
    values = {0: [1.0, 2.0, 4.0, 8.0, 16.0], 10: [3.0, 3.5, 5.0, 9.0, 11.0]}
    rows = [
        row(step=step, layer=layer, value=v, metric="mine") for step in values for layer, v in enumerate(values[step])
    ]
    quantity, series = only(rows)
    figure = views.trajectory(quantity, series, "step", symlog=False)
    (line,) = connected(figure)
    np.testing.assert_array_equal(line.get_xdata(), [0, 10])
    np.testing.assert_allclose(line.get_ydata(), [np.percentile(values[step], 50) for step in values])
    bands = [one for one in figure.axes[0].collections if isinstance(one, PolyCollection)]
    assert len(bands) == 2
    for band, (low, high) in zip(bands, ((25, 75), (10, 90)), strict=True):
        vertices = band.get_paths()[0].vertices
        for step, column in values.items():
            ys = vertices[vertices[:, 0] == step, 1]
            np.testing.assert_allclose([ys.min(), ys.max()], np.percentile(column, [low, high]))


def test_one_line_for_each_size_with_its_own_code(paper):
    quantity, series = only(metric_rows())
    lines = connected(views.trajectory(quantity, series, "step", symlog=True))
    assert len(lines) == 3
    assert len({to_hex(line.get_color()) for line in lines}) == 3
    assert len({line.get_linestyle() for line in lines}) == 3


def test_an_undefined_value_is_a_gap_and_a_footnote(paper):
    rows = list(metric_rows(["zz-small"], n_layers=1))
    rows[2] |= {"value": None, "status": "undefined", "reason": "numerically singular"}
    quantity, series = only(rows)
    figure = views.trajectory(quantity, series, "step", symlog=True)
    (line,) = connected(figure)
    assert np.isnan(line.get_ydata()).tolist() == [False, False, True, False, False, False, False]
    marked = [x for marks in figure.axes[0].lines if marks.get_linestyle() == "None" for x in marks.get_xdata()]
    assert sorted(marked) == [0, 1, 4, 8, 100, 1000]
    assert "1 of 7 values undefined: numerically singular." in note(figure)


def test_flagged_and_partly_undefined_points_are_hollow(paper):
    rows = list(metric_rows(["zz-small"], n_layers=2))
    rows[2] |= {"value": None, "status": "missing", "reason": "no such file"}  # step 1, layer 0
    rows[6] |= {"status": "flagged", "reason": "few samples"}  # step 4, layer 0
    quantity, series = only(rows)
    figure = views.trajectory(quantity, series, "step", symlog=True)
    (hollow,) = [marks for marks in figure.axes[0].lines if to_hex(marks.get_markerfacecolor()) == "#ffffff"]
    assert hollow.get_xdata().tolist() == [1, 4]
    assert "1 of 14 values missing: no such file. 1 flagged: few samples." in note(figure)
    assert note(figure).endswith("Hollow: flagged or some values missing.")


def test_a_lone_point_is_seen_in_a_line_without_marks(paper):
    rows = list(metric_rows(["zz-small"], steps=range(100), n_layers=1))
    for step in (49, 51):
        rows[step] |= {"value": None, "status": "undefined", "reason": "all zeros"}
    quantity, series = only(rows)
    figure = views.trajectory(quantity, series, "step", symlog=False)
    (marks,) = [line for line in figure.axes[0].lines if line.get_linestyle() == "None"]
    assert marks.get_xdata().tolist() == [50]


def test_heads_are_pooled_in_bands_and_summarised_by_their_median_in_panels(paper):
    values = [1.0, 2.0, 9.0, 10.0]
    rows = [
        row(layer=layer, head=head, metric="mine", value=v + 100 * layer)
        for layer in (0, 1)
        for head, v in enumerate(values)
    ]
    quantity, series = only(rows)
    assert quantity.label == "mine of swiglu.w_2 weights, per head"
    figure = views.trajectory(quantity, series, "step", symlog=False)
    assert connected(figure)[0].get_ydata() == [np.median([*values, *(v + 100 for v in values)])]
    assert note(figure) == "Line: median over layers and heads. Bands: middle 50 % and 80 %."
    panels = views.layers(quantity, series, "step")
    assert [connected(panels, place)[0].get_ydata()[0] for place in (0, 1)] == [5.5, 105.5]
    assert panels.get_supylabel().replace("\n", " ") == "mine of swiglu.w_2 weights, median over heads"


def test_pairs_of_heads_are_named(paper):
    rows = [row(layer=1, head=h, reference_layer=0, reference_head=g, **SIGNED) for h in (0, 1) for g in (0, 1)]
    quantity, series = only(rows)
    assert quantity.label == "composition score above chance of Q-composition weights, per pair of heads"
    assert views.heat_map(quantity, series, "step").get_suptitle().endswith("median over pairs of heads")
    figure = views.trajectory(quantity, series, "step", symlog=False)
    assert note(figure).startswith("Line: median over layers and pairs of heads.")


def test_the_overview_says_what_its_lines_are_over(paper):
    heads = [row(layer=layer, head=head, metric="mine") for layer in (0, 1) for head in (0, 1)]
    for rows, words in (
        (heads, "Line: median over layers and heads."),
        ([*heads, *metric_rows()], "Line: median over layers; of values per head over heads too."),
        (metric_rows(), "Line: median over layers."),
    ):
        figure = views.overview(*prepared(rows), "step")
        assert note(figure) == f"{words} Bands: middle 50 % and 80 %."


def test_a_panel_for_each_layer_also_when_sizes_differ_in_depth(paper):
    quantity, series = only([*metric_rows(["zz-small"], n_layers=2), *metric_rows(["aa-large"], n_layers=5)])
    figure = views.layers(quantity, series, "step")
    assert [panel.get_title(loc="left") for panel in figure.axes] == [f"layer {layer}" for layer in range(5)]
    assert [len(connected(figure, place)) for place in range(5)] == [2, 2, 1, 1, 1]
    assert len({panel.get_ylim() for panel in figure.axes}) == 1


def test_heat_map_holds_the_values_on_one_scale(paper):
    rows = list(metric_rows())
    rows[1] |= {"value": None, "status": "undefined", "reason": "all zeros"}  # zz-small, step 0, layer 1
    rows[9] |= {"status": "flagged", "reason": "few samples"}  # zz-small, step 2, layer 1
    quantity, series = only(rows)
    figure = views.heat_map(quantity, series, "step")
    panels = [panel for panel in figure.axes if panel.get_images()]
    images = [panel.get_images()[0] for panel in panels]
    assert [panel.get_title() for panel in panels] == ["0.19M", "0.51M", "1.5M"]
    assert len({image.norm for image in images}) == 1
    table = pd.DataFrame(rows)
    for image, run in zip(images, SIZES, strict=True):
        assert isinstance(image, AxesImage)
        expected = table[table["run"] == run].pivot(index="layer", columns="step", values="value")
        np.testing.assert_allclose(np.ma.filled(image.get_array(), np.nan), expected.to_numpy(dtype=float))
    assert panels[0].lines[0].get_xydata().tolist() == [[2, 1]]
    assert figure.get_suptitle() == "Gini coefficient of swiglu.w_2 weights"
    assert "Grey: no value." in note(figure)
    assert "Ring: flagged." in note(figure)


@pytest.mark.parametrize(("values", "scale"), [((0.1, 0.9), (0.1, 0.9)), ((0.5, 0.5 + 1e-9), (0.49, 0.51))])
def test_colours_span_the_values_but_not_rounding_errors(paper, values, scale):
    quantity, series = only([row(step=step, value=value) for step, value in enumerate(values)])
    norm = views.heat_map(quantity, series, "step").axes[0].get_images()[0].norm
    assert (norm.vmin, norm.vmax) == pytest.approx(scale)


def test_heat_map_has_the_layers_that_were_measured(paper):
    quantity, series = only([row(layer=layer, value=layer / 10) for layer in (2, 5)])
    (panel, _) = views.heat_map(quantity, series, "step").axes
    assert panel.get_images()[0].get_array().tolist() == [[0.2], [0.5]]
    assert [text.get_text() for text in panel.get_yticklabels()] == ["2", "5"]


SIGNED = {"metric": "composition_score", "parameters": '{"baseline": "random"}', "component": "q_composition"}
UNSIGNED = SIGNED | {"parameters": '{"baseline": "none"}'}


@pytest.mark.parametrize(
    ("fields", "values", "limits"),
    [
        ({"metric": "kurtosis"}, (-0.5, 2.0), (-2.0, 2.0)),
        ({"metric": "kurtosis"}, (0.01, 3.0), (-3.0, 3.0)),
        (SIGNED, (0.1, 0.2), (-0.2, 0.2)),
        (UNSIGNED, (0.1, 0.2), None),
        ({"metric": "cka"}, (-0.01, 0.9), None),
        ({"metric": "mine"}, (-0.5, 0.1), (-0.5, 0.5)),
        ({"metric": "mine"}, (0.5, 0.1), None),
        ({"metric": "rsa"}, (0.0, 0.0), (-1.0, 1.0)),
    ],
)
def test_colours_are_centred_on_zero_where_signs_have_a_meaning(paper, fields, values, limits):
    quantity, series = only([row(step=step, value=value, **fields) for step, value in enumerate(values)])
    image = views.heat_map(quantity, series, "step").axes[0].get_images()[0]
    if limits is None:
        assert image.get_cmap().name == "viridis"
        assert (image.norm.vmin, image.norm.vmax) == (min(values), max(values))
    else:
        assert image.get_cmap().name == "RdBu_r"
        assert (image.norm.vmin, image.norm.vmax) == limits
        np.testing.assert_allclose(image.get_cmap()(image.norm(0.0)), (1, 1, 1, 1), atol=0.05)


def test_what_can_be_negative_is_signed():
    declared = {name for name, metric in METRICS.items() if metric.range.startswith("[-")}
    assert declared - {"cka"} == {name for name, look in quantities.METRICS.items() if look.signed is True}
    assert METRICS["composition_score"].range == "[0, 1]; random: [-1, 1]"


def test_a_line_at_zero_where_it_is_within_the_axis(paper):
    for values, seen in (((-1.0, 2.0), True), ((1.0, 2.0), False)):
        quantity, series = only([row(step=step, metric="kurtosis", value=v) for step, v in enumerate(values)])
        lines = views.trajectory(quantity, series, "step", symlog=False).axes[0].lines
        assert any(list(line.get_ydata()) == [0, 0] for line in lines) == seen


def test_heat_map_takes_the_median_over_replicates(paper):
    rows = [
        row(f"s{seed}", run_id=f"s{seed}", weights_seed=seed, scale=1_000_000, metric="mine", value=value)
        for seed, value in enumerate((1.0, 2.0, 30.0))
    ]
    quantity, series = only(rows)
    figure = views.heat_map(quantity, series, "step")
    assert figure.axes[0].get_images()[0].get_array().tolist() == [[2.0]]
    assert note(figure) == "Median over runs."


def test_loss_stands_above_the_metric_on_the_same_axis(paper):
    found, series = prepared([*metric_rows(), *loss_rows()])
    losses, quantity = found[:2], found[2]
    figure = views.beside_loss(quantity, series, "step", losses)
    above, below = figure.axes
    assert above.get_xlim() == below.get_xlim()
    assert above.get_xscale() == below.get_xscale() == "symlog"
    assert above.get_ylabel() == "loss (nats per token)"
    assert len(connected(figure)) == 6
    assert len(connected(figure, 1)) == 3
    assert note(figure).startswith("Loss: validation, faint training.")


def test_a_quantity_of_runs_without_loss_has_no_loss_view(tmp_path):
    for folder, runs in (("without", ["aa-large"]), ("with", ["zz-small"])):
        rows = [*metric_rows(["zz-small"], n_layers=1, steps=(0, 1)), *loss_rows(runs)]
        results.write(results.table(rows), tmp_path / folder)
        names = []
        draw(tmp_path / folder, progress=lambda jobs, names=names: names.extend(name for name, _ in jobs) or [])
        assert ("gini_simple-swiglu.w_2_weights/loss" in names) == (folder == "with")


def test_overview_has_at_most_twelve_panels_and_one_legend(paper):
    rows = [*loss_rows()]
    for metric in ("per", "gini", "hoyer"):
        for module in ("a", "b", "c", "d", "e", "f"):
            rows += metric_rows(metric=metric, module=module, n_layers=1)
    rows += metric_rows(metric="own", n_layers=1)
    found, series = prepared(rows)
    chosen = views.main_quantities(found)
    assert [quantity.metric for quantity in chosen] == ["val_loss"] + ["per"] * 4 + ["gini"] * 3 + ["hoyer"] * 3 + [
        "own"
    ]
    figure = views.overview(chosen, series, "step")
    assert len(figure.axes) == 12
    assert len(figure.legends) == 1


# The axes


def test_symlog_shows_the_first_steps_and_the_thousands(paper):
    quantity, series = only(metric_rows())
    for symlog in (True, False):
        figure = views.trajectory(quantity, series, "step", symlog=symlog)
        figure.draw_without_rendering()
        (panel,) = figure.axes
        assert panel.get_xscale() == ("symlog" if symlog else "linear")
        pixels = panel.transData.transform([(step, 0.5) for step in STEPS])[:, 0]
        points = np.diff(pixels) * 72 / figure.dpi
        assert bool((points > 8).all()) == symlog  # far enough apart to tell the marks from each other
    low, high = panel.get_xlim()
    shown = [text.get_text() for text in panel.get_xticklabels() if low <= text.get_position()[0] <= high]
    assert shown == ["0", "250", "500", "750", "1k"]


def test_symlog_ticks(paper):
    quantity, series = only(metric_rows())
    (panel,) = views.trajectory(quantity, series, "step", symlog=True).axes
    assert panel.get_xticks().tolist() == [0, 1, 10, 100, 1000]
    assert [panel.xaxis.get_major_formatter()(tick, 0) for tick in panel.get_xticks()] == ["0", "1", "10", "100", "1k"]
    assert panel.get_xlabel() == "training step, log scale"


def test_tokens_axis_keeps_the_gap_of_a_missing_checkpoint(paper):
    rows = list(metric_rows(["zz-small"], n_layers=1))
    rows[5] |= {"tokens": None, "value": None, "status": "missing", "reason": "no checkpoint"}
    quantity, series = only(rows, "tokens")
    figure = views.trajectory(quantity, series, "tokens", symlog=True)
    (line,) = connected(figure)
    assert line.get_xdata().tolist() == [step * 1024 for step in STEPS]
    assert np.isnan(line.get_ydata()).tolist() == [step == 100 for step in STEPS]
    assert figure.axes[0].get_xlabel() == "tokens seen, log scale"


@pytest.mark.parametrize(
    ("metric", "values", "scale"),
    [
        ("condition_number", (2.0, 3.0), "log"),
        ("norm", (2.0, 3.0), "linear"),
        ("norm", (0.01, 3.0), "log"),
        ("norm", (0.0, 3.0), "linear"),
        ("gini", (0.001, 0.9), "linear"),
    ],
)
def test_which_axes_are_logarithmic(paper, metric, values, scale):
    quantity, series = only([row(step=step, metric=metric, value=value) for step, value in enumerate(values)])
    assert views.trajectory(quantity, series, "step", symlog=False).axes[0].get_yscale() == scale


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((0.1, 0.9), (-0.02, 1.02)),  # most of the range: all of it
        ((0.4, 0.6), (0.39, 0.61)),
        ((0.5, 0.5), (0.49, 0.51)),  # never narrower than 0.02
        ((0.9, 0.9999999), (0.895, 1.005)),
        ((-0.1, 0.9), (-0.122, 1.022)),  # an unbiased estimate below 0 is not cut off
    ],
)
def test_limits_of_a_bounded_metric(values, expected):
    quantity, _ = only([row(metric="cka")])
    assert axes.value_range([np.array(values)], quantity) == pytest.approx(expected, abs=1e-6)


def test_ticks_of_a_logarithmic_axis():
    assert axes.log_ticks(20, 9e4) == [100, 1000, 10000]
    assert axes.log_ticks(8, 200) == [10, 30, 100]
    assert axes.log_ticks(9, 60) == [10, 20, 50]
    assert axes.log_ticks(11, 14.5) == [11, 12, 13, 14]
    assert len(axes.log_ticks(1, 1e30)) <= 6


@pytest.mark.parametrize("n_layers", [1, 18])
def test_text_stays_inside_the_page(paper, n_layers):
    long = {
        "metric": "condition_number",
        "module": "attention.some_long_projection",
        "kind": "activations",
        "split": "val",
    }
    rows = [*metric_rows(n_layers=n_layers, **long, reference_run="a-run-of-another-suite", reference_step=143000)]
    rows[0] |= {"value": None, "status": "undefined", "reason": "a reason that goes on " * 6}
    found, series = prepared([*rows, *loss_rows()])
    quantity = found[2]
    figures = [views.layers(quantity, series, "tokens"), views.heat_map(quantity, series, "tokens")]
    if n_layers == 1:  # the others do not change with the depth
        figures += [
            views.trajectory(quantity, series, "tokens", symlog=True),
            views.beside_loss(quantity, series, "tokens", found[:2]),
            views.overview(found, series, "tokens"),
        ]
    for figure in figures:
        assert figure.get_figwidth() in (3.5, 7.0)
        assert_all_text_inside(figure)


# What cannot be drawn


def test_a_quantity_without_values_is_logged_and_the_rest_drawn(tmp_path, caplog):
    singular = {"metric": "condition_number", "value": None, "status": "undefined", "reason": "numerically singular"}
    results.write(results.table([row(), row(**singular)]), tmp_path)
    with caplog.at_level(logging.WARNING):
        paths = draw(tmp_path, formats=["svg"])
    assert caplog.messages == [
        "not drawn: condition number of swiglu.w_2 weights; 1 of 1 values undefined: numerically singular."
    ]
    assert not [path for path in paths if path.parent.name.startswith("condition_number")]


def test_only_defined_at_step_zero_is_drawn(tmp_path):
    results.write(results.table([row(value=0.0)]), tmp_path)
    assert len(draw(tmp_path, formats=["png"], progress=lambda jobs: jobs[1:4])) == 3


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([], {}, "has no rows"),
        (
            [row(value=None, status="undefined", reason="all zeros")],
            {},
            "nothing to draw: 1 of 1 values undefined: all zeros",
        ),
        ([row(), row(metric="per")], {"metrics": ["pre"]}, "there is no 'pre' in these results; there are gini, per"),
        ([row()], {"formats": ["png", "gif"]}, "formats: 'gif' is none of png, svg, pdf"),
        ([row()], {"x": "epoch"}, "x: 'epoch' is none of step, tokens"),
        ([row(tokens=None)], {"x": "tokens"}, "no row has a number of tokens"),
    ],
)
def test_refusals(tmp_path, rows, options, message):
    results.write(results.table(rows), tmp_path)
    with pytest.raises(PlotError, match=message):
        draw(tmp_path, **options)
    assert not (tmp_path / "plots").exists()


def test_folders_that_do_not_do(tmp_path):
    with pytest.raises(PlotError, match="no such folder"):
        draw(tmp_path / "nowhere")
    with pytest.raises(PlotError, match=r"results\.parquet"):
        draw(tmp_path)
    (tmp_path / "results.parquet").write_bytes(b"not a table")
    with pytest.raises(PlotError, match=r"results\.parquet"):
        draw(tmp_path)
    results.write(results.table([row()]), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(PlotError, match="cannot be made"):
        draw(tmp_path, tmp_path / "file")


@pytest.mark.parametrize("module", [quantities, axes], ids=lambda module: module.__name__)
def test_examples_in_docstrings(module):
    outcome = doctest.testmod(module)
    assert outcome.attempted > 0
    assert outcome.failed == 0


def test_parameters_are_read_as_json():
    text = json.dumps({"norm_type": "inf_operator"})
    assert only([row(metric="norm", parameters=text)])[0].title == "largest absolute row sum"
