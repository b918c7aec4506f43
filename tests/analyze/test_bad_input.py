"""What a run may hold that no analysis wants to see: each costs its own values, with a reason, and nothing else."""

import json
import math
import shutil

import pytest
import torch

from pico_analyze import analyze, open_run
from pico_analyze.checkpoint.format import seal
from pico_analyze.metrics import METRICS

OV = {"component_name": "ov_circuit"}
SIMPLE = {"component_name": "simple", "layer_suffixes": "swiglu.w_2"}


def measured(runs, metrics, **keys):
    frame = analyze(runs, {"metrics": metrics} | keys)
    return frame[frame["kind"] != "training"].reset_index(drop=True)


def of_activations(name):
    """The entry that measures a metric on the activations of the probe, each side of a pair at one step or two."""
    entry = {"metric_name": name, "data_split": "val"}
    entry |= {"components": [part | {"data_type": "activations"} for part in (SIMPLE, OV)]}
    entry |= {"norm_type": "nuclear"} if name == "norm" else {}
    return entry | ({"target_checkpoint": 1} if METRICS[name].consumes == "pair" else {})


@pytest.mark.parametrize("n", [0, 1, 2])
def test_few_samples(make_run, n):
    def change(_, tensors):
        for key in [key for key in tensors if key[0] == "activations"]:
            tensors[key] = tensors[key][:n]

    folder = make_run(steps=(0, 1), change=change)
    names = [name for name, metric in METRICS.items() if "activations" in metric.fits]
    frame = measured(folder, [of_activations(name) for name in names])
    assert set(frame["metric"]) == set(names)
    assert set(frame["n"].dropna()) == {n}
    without = frame[frame["value"].isna()]
    assert set(without["status"]) <= {"undefined"}
    assert without["reason"].notna().all()
    assert not without["reason"].str.contains("failed").any()
    if n == 0:
        assert frame["value"].isna().all()
    similar = [name for name in names if METRICS[name].consumes == "pair" and name not in ("procrustes", "cka")]
    assert frame[frame["metric"].isin(similar)]["value"].isna().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_entry_that_is_not_finite(make_run, bad):
    """It costs the heads that it belongs to, and all heads side by side."""

    def change(step, tensors):
        if step == 1:
            tensors["weights", None, "layers.1.attention.o_proj"][3, 5] = bad  # of head 1
            tensors["weights", None, "layers.1.swiglu.w_2"][0, 0] = bad

    folder = make_run(steps=(0, 1), change=change)
    components = [part | {"data_type": "weights"} for part in (SIMPLE, OV)]
    metrics = [{"metric_name": name, "components": components} for name in ("per", "condition_number")]
    frame = measured(folder, metrics)
    lost = frame[frame["value"].isna()]
    assert set(lost["status"]) == {"undefined"}
    assert lost["reason"].str.contains("entries are not finite").all()
    places = lost[["step", "layer", "component", "head"]].astype(object)
    places = places.where(places.notna(), "all").drop_duplicates()
    assert set(map(tuple, places.values)) == {
        (1, 1, "simple", "all"),
        (1, 1, "ov_circuit", 1),
        (1, 1, "ov_circuit", "all"),
    }


def test_a_run_that_is_being_written(make_run, tmp_path):
    """A checkpoint that appears during an analysis belongs to the next one; what is half-written is none."""
    later = make_run("later", steps=(0, 1, 2, 3))
    folder = make_run("growing", steps=(0, 1, 2))
    metrics = [{"metric_name": "gini", "components": [SIMPLE | {"data_type": "weights"}]}]

    def grow(name, n_done, n_all, rows):
        if n_done == 1:
            (folder / "checkpoints" / "step_4.tmp").mkdir()
            shutil.copytree(later / "checkpoints" / "step_3", folder / "checkpoints" / "step_3")
            path = folder / "checkpoints" / "step_3" / "manifest.json"
            manifest = json.loads(path.read_text().replace("later", "growing"))
            path.write_text(json.dumps(manifest | {"sha256": seal(manifest)}))

    first = analyze(folder, {"metrics": metrics}, on_checkpoint=grow)
    assert sorted(set(first["step"])) == [0, 1, 2]
    assert first["value"].notna().all()
    again = analyze(folder, {"metrics": metrics}, previous=first)
    assert sorted(set(again["step"])) == [0, 1, 2, 3]
    assert (again.attrs["kept"], again.attrs["computed"], again.attrs["missing"]) == (6, 2, 0)


def test_a_checkpoint_that_vanishes_meanwhile(make_run):
    folder = make_run(steps=(0, 1, 2))
    metrics = [{"metric_name": "gini", "components": [SIMPLE | {"data_type": "weights"}]}]

    def remove(name, n_done, n_all, rows):
        shutil.rmtree(folder / "checkpoints" / "step_2", ignore_errors=True)

    frame = analyze(folder, {"metrics": metrics}, on_checkpoint=remove).query("kind != 'training'")
    assert frame[frame["step"] == 2]["status"].to_list() == ["missing", "missing"]
    assert frame[frame["step"] == 2]["reason"].str.contains("cannot be read").all()
    assert frame[frame["step"] != 2]["value"].notna().all()


def test_one_warning_for_each_damaged_file(make_run, caplog):
    folder = make_run(steps=(0, 1, 2))
    for step, file in ((1, "model.safetensors"), (2, "learning_dynamics/val_activations.safetensors")):
        path = folder / f"checkpoints/step_{step}/{file}"
        path.write_bytes(b"x" * path.stat().st_size)
    components = [part | {"data_type": "weights"} for part in (SIMPLE, OV)]
    metrics = [{"metric_name": "gini", "components": components}, of_activations("cka") | {"target_checkpoint": 0}]
    frame = measured(folder, metrics)
    weights, activations = caplog.messages
    assert "step_1/model.safetensors: 6 tensors (run demo, step 1): cannot be read: " in weights
    assert (
        "step_2/learning_dynamics/val_activations.safetensors: 4 tensors (run demo, step 2): cannot be read: "
        in activations
    )
    assert frame[frame["status"] == "missing"]["reason"].nunique() == 2


def test_runs_of_different_shapes(make_run, make_shape):
    """Widths, heads, groups and depths may differ between the runs of an analysis."""
    folders = [
        make_run("a", steps=(0, 1), shape=make_shape(16, n_layers=2, n_heads=4, n_kv_heads=2)),
        make_run("b", steps=(0, 1), shape=make_shape(24, n_layers=3, n_heads=6, n_kv_heads=1)),
        make_run("c", steps=(0, 1), shape=make_shape(12, n_layers=1, n_heads=3, n_kv_heads=3)),
    ]
    components = [part | {"data_type": "weights"} for part in (SIMPLE, OV)]
    metrics = [{"metric_name": "per", "components": components}, of_activations("cka")]
    frame = measured(folders, metrics)
    assert frame["value"].notna().all()
    for folder in folders:
        alone = measured(folder, metrics)
        together = frame[frame["run"] == folder.name].reset_index(drop=True)
        assert together.equals(alone)
        shape = open_run(folder).manifests[0].model
        assert set(together["head"].dropna()) == set(range(shape.n_heads))
        assert set(together["layer"]) == set(range(shape.n_layers))


def test_a_step_of_another_shape(make_run):
    """As after a change of the model in the middle of a run: each step is measured, what compares them is not."""

    def change(step, tensors):
        if step == 1:
            tensors["weights", None, "layers.0.swiglu.w_2"] = torch.ones(16, 20).tril()

    folder = make_run(steps=(0, 1, 2), change=change)
    weights = SIMPLE | {"data_type": "weights", "layers": [0]}
    delta = weights | {"component_name": "delta"}
    metrics = [
        {"metric_name": "gini", "components": [weights]},
        {"metric_name": "stable_rank", "target_checkpoint": 0, "components": [delta]},
        {"metric_name": "gini", "target_checkpoint": 0, "components": [delta]},
    ]
    frame = measured(folder, metrics, steps=[1, 2]).set_index(["component", "metric", "step"])
    frame = frame.sort_index()
    assert frame.loc["simple", "value"].notna().all()
    assert frame.loc[("simple", "gini", 1), "d"] == 20
    for metric in ("stable_rank", "gini"):
        row = frame.loc[("delta", metric, 1)]
        assert (row["status"], row["reason"]) == ("undefined", "no difference of the shapes 16 x 32 and 16 x 20")
        assert frame.loc[("delta", metric, 2), "status"] == "ok"
