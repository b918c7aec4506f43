import csv
import json
import math

import pandas as pd
import pytest

from pico_analyze.analysis import analyze, open_runs
from pico_analyze.config import AnalysisConfig
from pico_analyze.results import (
    COLUMNS,
    RUN_COLUMNS,
    ResultsError,
    alike,
    read,
    row_parameters,
    runs_table,
    table,
    write,
    write_pico_v0,
)
from pico_analyze.strict_yaml import validated

OV = {"value_layer": "attention.v_proj", "output_layer": "attention.o_proj"}
SIMPLE = {"component_name": "simple", "data_type": "weights", "layer_suffixes": "swiglu.w_2", "layers": "all"}
CIRCUIT = {"component_name": "ov_circuit", "data_type": "weights", "layer_suffixes": OV, "layers": "all"}


def metric(name, *components, split="val", **own):
    return {"metric_name": name, "data_split": split, "components": list(components or [SIMPLE])} | own


def config(*metrics, steps="all"):
    return validated(AnalysisConfig, {"metrics": list(metrics), "steps": steps}, "test")


@pytest.fixture
def frame():
    return table(
        [
            {"run": "a", "scale": 10, "step": 0, "layer": 0, "metric": "gini", "value": 0.1 + 0.2, "status": "ok"},
            {"run": "a", "scale": 10, "step": 1, "value": 1e-300, "status": "flagged", "reason": 'a "b",\nc'},
            {"run": "a", "scale": 10, "step": 2, "metric": "gini", "status": "undefined", "reason": "nan"},
            {"run": "é", "step": None, "metric": "gini", "value": None, "status": "missing", "reason": "none"},
        ]
    )  # fmt: skip


def test_columns_and_dtypes_are_fixed(frame):
    assert frame.dtypes.astype(str).to_dict() == COLUMNS
    assert table([]).dtypes.astype(str).to_dict() == COLUMNS
    assert list(COLUMNS)[:3] == ["run", "run_id", "suite"]
    assert list(COLUMNS)[-4:] == ["status", "reason", "content_hash", "reference_hash"]


def test_parquet_round_trip(frame, tmp_path):
    frame.attrs = {"computed": 3}
    write(frame, tmp_path / "new" / "folder")
    pd.testing.assert_frame_equal(read(tmp_path / "new" / "folder"), frame)
    assert frame.attrs == {"computed": 3}
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == ["results.csv", "results.parquet"]


def test_null_is_null_in_parquet(frame, tmp_path):
    import pyarrow.parquet

    write(frame, tmp_path)
    column = pyarrow.parquet.read_table(tmp_path / "results.parquet")["value"]
    assert column.null_count == 2
    assert column.to_pylist() == [0.1 + 0.2, 1e-300, None, None]


def test_csv_is_strict(frame, tmp_path):
    """Read by the standard library: a null is empty, a number has all its digits."""
    write(frame, tmp_path)
    with (tmp_path / "results.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == list(COLUMNS)
    assert [row["value"] for row in rows] == ["0.30000000000000004", "1e-300", "", ""]
    assert [row["layer"] for row in rows] == ["0", "", "", ""]
    assert [row["step"] for row in rows] == ["0", "1", "2", ""]
    assert [row["reason"] for row in rows] == ["", 'a "b",\nc', "nan", "none"]
    assert rows[3]["run"] == "é"


def test_an_infinite_value_is_a_bug(tmp_path):
    with pytest.raises(AssertionError):
        write(table([{"value": math.inf}]), tmp_path)


def test_writing_again_gives_the_same_bytes(run_folder, tmp_path):
    settings = config(metric("per", CIRCUIT), metric("gini"))
    for name in ("one", "two"):
        write(analyze(run_folder, settings), tmp_path / name)
    write(analyze(run_folder, settings, previous=read(tmp_path / "one")), tmp_path / "kept")
    for suffix in ("csv", "parquet"):
        assert len({(tmp_path / name / f"results.{suffix}").read_bytes() for name in ("one", "two", "kept")}) == 1


def test_a_failed_write_leaves_the_old_table(frame, tmp_path, monkeypatch):
    write(frame, tmp_path)
    monkeypatch.setattr(pd.DataFrame, "to_parquet", lambda *args, **kw: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write(frame.head(1), tmp_path)
    pd.testing.assert_frame_equal(read(tmp_path), frame)


def test_what_cannot_be_read(frame, tmp_path):
    with pytest.raises(ResultsError, match=r"results\.parquet does not exist; pico-analyze run writes it"):
        read(tmp_path)
    (tmp_path / "results.parquet").write_bytes(b"PAR1")
    with pytest.raises(ResultsError, match=r"results\.parquet cannot be read"):
        read(tmp_path)
    frame.drop(columns=["reason"]).to_parquet(tmp_path / "results.parquet")
    with pytest.raises(ResultsError, match="lacks the columns reason"):
        read(tmp_path)


def test_the_table_of_runs(make_run, make_shape, tmp_path):
    make_run("s-big", suite="s", shape=make_shape(d_model=32), seed=3)
    folder = make_run("s-small", suite="s", steps=(0, 5))
    runs = runs_table(open_runs([folder.parent]))
    assert runs.dtypes.astype(str).to_dict() == RUN_COLUMNS
    assert list(runs["run"]) == ["s-small", "s-big"]
    assert list(runs["n_parameters"]) == [16_000, 32_000]
    assert list(runs["steps"]) == ["[0, 5]", "[0, 1, 2, 10]"]
    assert list(runs["weights_seed"]) == [0, 3]
    assert runs["probe_hash"].nunique() == 1
    assert list(runs["path"]) == [str(folder), str(folder.with_name("s-big"))]
    write(runs, tmp_path, "runs")
    pd.testing.assert_frame_equal(read(tmp_path, "runs"), runs)


def test_parameters_spell_out_defaults():
    entry = config(metric("cka", SIMPLE | {"data_type": "activations"}, target_checkpoint=0)).metrics[0]
    assert row_parameters(entry, entry.components[0]) == '{"estimator": "debiased", "kernel": "linear"}'
    entry = config(metric("norm", CIRCUIT | {"order": "pico_v0"}, norm_type="inf")).metrics[0]
    assert row_parameters(entry, entry.components[0]) == '{"norm_type": "inf", "order": "pico_v0"}'


# ---- the published files


def strict(path):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def written(folder):
    return {str(path.relative_to(folder)): strict(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def test_pico_v0_names_and_keys(run_folder, tmp_path):
    gradients = SIMPLE | {"data_type": "gradients", "layers": [1]}
    settings = config(
        metric("hoyer", gradients, split="train"),
        metric("norm", CIRCUIT, SIMPLE, norm_type="nuclear"),
        metric("gini", split=None),
        steps=[0, 10],
    )
    frame = analyze(run_folder, settings)
    write_pico_v0(frame, tmp_path / "out", settings.metrics)
    files = written(tmp_path / "out")
    names = ("gini.json", "hoyer_train.json", "norm_val.json")
    assert list(files) == [f"step_{step}/{name}" for step in (0, 10) for name in names]
    assert list(files["step_10/hoyer_train.json"]) == ["layers.1.swiglu.w_2.gradients"]
    circuits = [
        f"layers.{i}.ov_circuit.weights{head}" for i in (0, 1) for head in (*(f".heads.{h}" for h in range(4)), "")
    ]
    assert list(files["step_0/norm_val.json"]) == [
        *circuits,
        "layers.0.swiglu.w_2.weights",
        "layers.1.swiglu.w_2.weights",
    ]
    row = frame[(frame["step"] == 10) & (frame["head"] == 2) & (frame["layer"] == 1)].iloc[0]
    assert files["step_10/norm_val.json"]["layers.1.ov_circuit.weights.heads.2"] == row["value"]


def test_pico_v0_without_collisions(run_folder, tmp_path):
    activations = SIMPLE | {"data_type": "activations"}
    settings = config(
        metric("norm", norm_type="nuclear"),
        metric("norm", norm_type="frobenius"),
        metric("norm", CIRCUIT, norm_type="frobenius"),
        metric("norm", norm_type="nuclear", split="train"),
        metric("cka", activations, target_checkpoint=0),
        metric("cka", activations, target_checkpoint="last"),
        metric("gini"),
        metric("gini", CIRCUIT),
        metric("per", CIRCUIT, CIRCUIT | {"order": "pico_v0"}),
        steps=[1],
    )
    frame = analyze(run_folder, settings)
    write_pico_v0(frame, tmp_path, settings.metrics)
    files = written(tmp_path / "step_1")
    assert set(files) == {
        "norm_val.json", "norm-frobenius_val.json", "norm-frobenius-2_val.json", "norm_train.json",
        "cka_val.json", "cka-last_val.json", "gini_val.json", "gini-2_val.json", "per_val.json", "per-2_val.json",
    }  # fmt: skip
    large = {name for name, content in files.items() if len(content) == 10}  # 2 layers x (4 heads and all of them)
    assert large == {"norm-frobenius-2_val.json", "gini-2_val.json", "per_val.json", "per-2_val.json"}
    assert all(len(files[name]) == 2 for name in files if name not in large)
    key = "layers.0.swiglu.w_2.activations"
    values = {
        row.reference_step: row.value for row in frame[(frame["metric"] == "cka") & (frame["layer"] == 0)].itertuples()
    }
    assert (files["cka_val.json"][key], files["cka-last_val.json"][key]) == (values[0], values[10])
    assert (
        files["per_val.json"]["layers.0.ov_circuit.weights"] != files["per-2_val.json"]["layers.0.ov_circuit.weights"]
    )


def test_pico_v0_undefined_is_null_and_missing_is_absent(make_run, tmp_path):
    folder = make_run(change=lambda _, tensors: tensors["weights", None, "layers.0.swiglu.w_2"].zero_())
    settings = config(metric("hoyer"), steps=[0, 3])
    write_pico_v0(analyze(folder, settings), tmp_path / "out", settings.metrics)
    files = written(tmp_path / "out")
    assert list(files) == ["step_0/hoyer_val.json"]
    assert files["step_0/hoyer_val.json"]["layers.0.swiglu.w_2.weights"] is None
    assert 0 < files["step_0/hoyer_val.json"]["layers.1.swiglu.w_2.weights"] < 1


def test_pico_v0_of_several_runs(make_run, tmp_path):
    runs = [make_run(name, steps=(0,), seed=seed) for seed, name in enumerate(("a", "b"))]
    settings = config(metric("gini"))
    write_pico_v0(analyze(runs, settings), tmp_path / "out", settings.metrics)
    files = written(tmp_path / "out")
    assert list(files) == ["a/step_0/gini_val.json", "b/step_0/gini_val.json"]
    assert files["a/step_0/gini_val.json"] != files["b/step_0/gini_val.json"]


def test_pico_v0_tells_layers_1_10_and_11_apart(make_run, make_shape, tmp_path):
    settings = config(metric("gini", SIMPLE | {"layers": [1]}), metric("gini", SIMPLE | {"layers": [11, 10]}))
    frame = analyze(make_run(steps=(0,), shape=make_shape(n_layers=12)), settings)
    write_pico_v0(frame, tmp_path, settings.metrics)
    files = written(tmp_path / "step_0")
    assert list(files["gini_val.json"]) == ["layers.1.swiglu.w_2.weights"]
    assert list(files["gini-2_val.json"]) == ["layers.10.swiglu.w_2.weights", "layers.11.swiglu.w_2.weights"]


def test_reasons_that_differ_in_numbers_are_one():
    assert alike(["only 9 of 12 left", "all zeros", "only 10 of 12 left"]) == [
        ("only 9 to 10 of 12 left", 2),
        ("all zeros", 1),
    ]
    files = ["step_4/model.safetensors cannot be read", "step_8/model.safetensors cannot be read"]
    assert sorted(alike(files)) == [(file, 1) for file in files]
    assert alike(["1,024 of 2.5", "512 of 2.5"]) == [("512 to 1,024 of 2.5", 2)]
