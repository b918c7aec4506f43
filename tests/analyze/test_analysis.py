import json
import logging
import shutil

import pandas as pd
import pytest
import torch

import pico_analyze.metrics
from pico_analyze.analysis import AnalysisError, analyze, describe, plan
from pico_analyze.checkpoint.format import CheckpointError, seal
from pico_analyze.checkpoint.reader import open_run
from pico_analyze.config import AnalysisConfig
from pico_analyze.results import ADDED, COLUMNS
from pico_analyze.strict_yaml import ConfigError, validated

OV = {"value_layer": "attention.v_proj", "output_layer": "attention.o_proj"}


def simple(kind="weights", suffix="swiglu.w_2", layers="all"):
    return {"component_name": "simple", "data_type": kind, "layer_suffixes": suffix, "layers": layers}


def circuit(kind="weights", layers="all", **options):
    return {"component_name": "ov_circuit", "data_type": kind, "layer_suffixes": OV, "layers": layers} | options


def metric(name, *components, split="val", **own):
    return {"metric_name": name, "data_split": split, "components": list(components or [simple()])} | own


def config(*metrics, steps="all"):
    return validated(AnalysisConfig, {"metrics": list(metrics), "steps": steps}, "test")


def measured(frame):
    return frame[frame["kind"] != "training"].reset_index(drop=True)


def csv(frame, folder):
    folder.mkdir(exist_ok=True)
    frame.to_csv(folder / "frame.csv")
    return (folder / "frame.csv").read_bytes()


@pytest.fixture
def n_computed(monkeypatch):
    """How often a metric was computed."""
    calls = []
    compute = pico_analyze.metrics.Metric.compute
    monkeypatch.setattr(
        pico_analyze.metrics.Metric,
        "compute",
        lambda self, *args, **kw: calls.append(self) or compute(self, *args, **kw),
    )
    return calls


def test_values_are_those_of_the_stored_tensors(run_folder):
    """Checked against formulas written out here, on tensors read by plain safetensors."""
    from safetensors.torch import load_file

    frame = measured(
        analyze(
            run_folder,
            config(
                metric("norm", simple(), norm_type="frobenius"),
                metric("hoyer", simple("gradients"), split="train"),
                metric("norm", circuit(), norm_type="nuclear"),
                metric("gini", simple("activations")),
                steps=[0, 10],
            ),
        )
    )
    for step in (0, 10):
        folder = run_folder / "checkpoints" / f"step_{step}"
        weights = load_file(folder / "model.safetensors")
        gradients = load_file(folder / "learning_dynamics" / "train_gradients.safetensors")
        activations = load_file(folder / "learning_dynamics" / "val_activations.safetensors")

        def value(metric, layer, step=step, **where):
            rows = frame[(frame["metric"] == metric) & (frame["layer"] == layer) & (frame["step"] == step)]
            for column, wanted in where.items():
                rows = rows[rows[column].isna() if wanted is None else rows[column] == wanted]
            (found,) = rows["value"]
            return found

        for layer in (0, 1):
            w = weights[f"model.layers.{layer}.swiglu.w_2.weight"].double()
            assert value("norm", layer, component="simple") == pytest.approx(w.square().sum().sqrt().item(), rel=1e-12)
            g = gradients[f"layers.{layer}.swiglu.w_2"].double().flatten()
            n = g.numel()
            hoyer = (n**0.5 - g.abs().sum() / g.norm()) / (n**0.5 - 1)
            assert value("hoyer", layer) == pytest.approx(hoyer.item(), rel=1e-12)
            a = activations[f"layers.{layer}.swiglu.w_2"].double().abs().flatten().sort().values
            i = torch.arange(1, len(a) + 1)
            gini = ((2 * i - len(a) - 1) * a).sum() / (len(a) * a.sum())
            assert value("gini", layer) == pytest.approx(gini.item(), rel=1e-9)
            v = weights[f"model.layers.{layer}.attention.v_proj.weight"].double()
            o = weights[f"model.layers.{layer}.attention.o_proj.weight"].double()
            heads = [o[:, 4 * h : 4 * h + 4] @ v[4 * (h // 2) : 4 * (h // 2) + 4] for h in range(4)]
            for h, matrix in enumerate(heads):
                nuclear = torch.linalg.svdvals(matrix).sum().item()
                assert value("norm", layer, component="ov_circuit", head=h) == pytest.approx(nuclear, rel=1e-9)
            nuclear = torch.linalg.svdvals(torch.cat(heads, dim=1)).sum().item()
            assert value("norm", layer, component="ov_circuit", head=None) == pytest.approx(nuclear, rel=1e-9)


def test_a_row_says_everything(run_folder):
    frame = analyze(run_folder, config(metric("cka", circuit("activations", [1]), target_checkpoint=0), steps=[10]))
    assert list(frame.columns) == list(COLUMNS)
    run = open_run(run_folder)
    row = measured(frame).iloc[0].to_dict()
    assert {name for name, value in row.items() if pd.isna(value)} == {
        "suite",
        "reason",
        "reference_head",
        *ADDED,
    }  # no null, no interval
    assert row | dict.fromkeys(ADDED) | {"value": 0, "content_hash": "", "reference_hash": ""} == {
        "run": "demo", "run_id": "id-demo", "suite": None, "scale": 16_000,
        "weights_seed": 0, "data_seed": 1, "dropout_seed": 2, "step": 10, "tokens": 320,
        "split": "val", "kind": "activations", "component": "ov_circuit", "module": "attention", "layer": 1, "head": 0,
        "metric": "cka", "parameters": '{"estimator": "debiased", "kernel": "linear"}', "reference_run": "demo", "reference_step": 0,
        "reference_layer": 1, "reference_head": None, **dict.fromkeys(ADDED),
        "value": 0, "n": 24, "d": 16, "dtype": "BF16+F32", "status": "ok", "reason": None,
        "content_hash": "", "reference_hash": "",
    }  # fmt: skip
    hashes = measured(analyze(run, config(metric("gini", circuit("activations", [1])), steps=[0, 10])))
    assert row["content_hash"] == hashes[hashes["step"] == 10]["content_hash"].iloc[0]
    assert row["reference_hash"] == hashes[hashes["step"] == 0]["content_hash"].iloc[0]


def test_simple_rows_carry_the_hash_of_the_tensor(run_folder):
    frame = measured(analyze(run_folder, config(metric("gini"), steps=[2])))
    rows = open_run(run_folder).checkpoint(2).select("weights", module="swiglu.w_2")
    assert list(frame["content_hash"]) == [row.sha256 for row in rows]
    assert frame["split"].isna().all()  # a weight has no split, whatever the entry says


def test_a_tensor_compared_with_itself(run_folder):
    entries = [metric(name, circuit("activations"), target_checkpoint="last") for name in ("cka", "pwcca")]
    frame = measured(analyze(run_folder, config(*entries)))
    assert set(frame["reference_step"]) == {10}
    assert frame[frame["step"] == 10]["value"].to_list() == pytest.approx([1.0] * 20)
    assert (frame[frame["step"] != 10]["value"].abs() < 0.9).all()


def test_losses_stand_beside_the_metrics(run_folder):
    frame = analyze(run_folder, config(metric("gini"), steps=[0, 1, 10]))
    losses = frame[frame["kind"] == "training"]
    assert list(zip(losses["step"], losses["metric"], losses["value"], strict=True)) == [
        (0, "train_loss", 4.0),
        (0, "val_loss", 4.5),
        (1, "train_loss", 3.9),
        (10, "train_loss", 3.0),
        (10, "val_loss", 3.5),
    ]
    assert set(losses["component"]) == {"loss"}


def test_runs_are_ordered_by_size(make_run, make_shape):
    for name, d_model in {"sizes-a": 32, "sizes-b": 16}.items():
        folder = make_run(name, steps=(0,), suite="sizes", shape=make_shape(d_model=d_model))
    frame = analyze(folder.parent / "sizes", config(metric("gini")))
    assert list(dict.fromkeys(frame["run"])) == ["sizes-b", "sizes-a"]
    assert list(dict.fromkeys(frame["scale"])) == [16_000, 32_000]


def test_twice_the_same_bytes(run_folder, tmp_path):
    settings = config(
        metric("per", circuit(), simple("gradients")), metric("cka", simple("activations"), target_checkpoint=0)
    )
    assert csv(analyze(run_folder, settings), tmp_path) == csv(analyze(run_folder, settings), tmp_path)


def test_two_entries_for_the_same_thing_are_one(run_folder):
    """For weights both splits are the same tensors, so the published habit of naming a split adds no rows."""
    one = analyze(run_folder, config(metric("gini")))
    pd.testing.assert_frame_equal(analyze(run_folder, config(metric("gini"), metric("gini", split="train"))), one)


def test_the_same_metric_any_number_of_times(run_folder):
    kinds = ("frobenius", "nuclear", "spectral", "inf", "inf_operator")
    frame = measured(analyze(run_folder, config(*(metric("norm", norm_type=kind) for kind in kinds), steps=[0])))
    assert list(frame["parameters"]) == [f'{{"norm_type": "{kind}"}}' for kind in kinds for _ in range(2)]


# ---- what has no value


def test_undefined_is_a_row_with_a_reason(make_run):
    def change(step, tensors):
        tensors["gradients", "val", "layers.0.swiglu.w_2"].zero_()
        tensors["weights", None, "layers.1.swiglu.w_2"][0, 0] = float("nan")

    frame = measured(
        analyze(
            make_run(steps=(0,), change=change),
            config(
                metric("hoyer", simple("gradients")),
                metric("condition_number", simple("gradients")),
                metric("gini", simple()),
                metric("per", simple()),
                metric("norm", simple(), norm_type="frobenius"),
                metric("per", simple(suffix="attention_norm", layers=[0])),
            ),
        )
    )
    reasons = frame["reason"].fillna("")
    where = zip(frame["metric"], frame["kind"], frame["module"], frame["layer"], strict=True)
    status = dict(zip(where, zip(frame["status"], reasons, strict=True), strict=True))
    assert status["hoyer", "gradients", "swiglu.w_2", 0] == ("undefined", "all entries are zero")
    assert status["hoyer", "gradients", "swiglu.w_2", 1] == ("ok", "")
    assert status["condition_number", "gradients", "swiglu.w_2", 0][0] == "undefined"
    for name in ("gini", "per", "norm"):
        assert status[name, "weights", "swiglu.w_2", 0] == ("ok", "")
        assert status[name, "weights", "swiglu.w_2", 1] == ("undefined", "1 of 512 entries are not finite")
    assert status["per", "weights", "attention_norm", 0] == ("undefined", "a vector, not a matrix")
    assert (frame["value"].isna() == (frame["status"] == "undefined")).all()
    vector = frame[frame["module"] == "attention_norm"].iloc[0]
    assert (vector["n"], pd.isna(vector["d"])) == (16, True)


def test_a_doubtful_value_is_flagged(run_folder):
    """24 samples of two times 16 features: some canonical correlations are 1 whatever the data."""
    frame = measured(
        analyze(run_folder, config(metric("pwcca", simple("activations"), target_checkpoint=0), steps=[1]))
    )
    assert set(frame["status"]) == {"flagged"}
    assert frame["value"].notna().all()
    assert frame["reason"].notna().all()


def test_content_of_another_step_is_flagged(make_run):
    """Two steps with the same bytes, as several public series have them."""

    def change(step, tensors):
        if step == 2:
            for layer in (0, 1):
                tensors["weights", None, f"layers.{layer}.attention.v_proj"] = torch.ones(8, 16)
        if step == 10:
            tensors["weights", None, "layers.1.attention.v_proj"] = torch.ones(8, 16)

    frame = measured(
        analyze(make_run(change=change), config(metric("gini", simple(suffix="attention.v_proj"), circuit())))
    )
    flagged = frame[frame["status"] == "flagged"]
    assert list(zip(flagged["component"], flagged["step"], flagged["layer"], flagged["reason"], strict=True)) == [
        ("simple", 2, 1, "the same content as step 10"),
        ("simple", 10, 1, "the same content as step 2"),
    ]  # the circuit has another output projection, so it is not the same
    assert flagged["value"].notna().all()


def test_content_of_another_step_is_seen_by_a_rerun_too(run_folder):
    folder = run_folder
    settings = config(metric("gini", simple(suffix="swiglu.w_2")), steps=[0])
    first = analyze(folder, settings)
    assert set(measured(first)["status"]) == {"ok"}
    twin = folder / "checkpoints" / "step_1"
    manifest = json.loads((folder / "checkpoints" / "step_0" / "manifest.json").read_text()) | {"step": 1}
    shutil.copytree(folder / "checkpoints" / "step_0", twin, dirs_exist_ok=True)
    (twin / "manifest.json").write_text(json.dumps(manifest | {"sha256": seal(manifest)}))
    again = analyze(folder, settings, previous=first)
    assert list(measured(again)["reason"]) == ["the same content as step 1"] * 2
    pd.testing.assert_frame_equal(again, analyze(folder, settings))
    assert analyze(folder, settings, previous=again).attrs == {"computed": 0, "kept": 2, "missing": 0}


def test_a_tampered_tensor_is_named_and_never_used(run_folder, flip_byte, caplog, tmp_path):
    settings = config(metric("gini", simple(), circuit()), metric("per", simple(), circuit()))
    clean = measured(analyze(run_folder, settings))
    checkpoint = open_run(run_folder).checkpoint(2)
    (row,) = checkpoint.select("weights", layer=1, role="o")
    flip_byte(checkpoint.folder, row)
    frame = measured(analyze(run_folder, settings))
    hit = (frame["step"] == 2) & (frame["layer"] == 1) & (frame["component"] == "ov_circuit")
    assert (frame["status"] == "missing").eq(hit).all()
    assert frame[hit][["value", "n", "content_hash"]].isna().all(axis=None)
    assert frame[hit]["reason"].str.contains("o_proj.weight (run demo, step 2)", regex=False).all()
    assert "o_proj.weight (run demo, step 2)" in caplog.text
    pd.testing.assert_frame_equal(frame[~hit], clean[~hit])


def test_a_tampered_reference(run_folder, flip_byte):
    checkpoint = open_run(run_folder).checkpoint(0)
    (row,) = checkpoint.select("activations", "val", layer=0, role="v")
    flip_byte(checkpoint.folder, row)
    frame = measured(
        analyze(run_folder, config(metric("cka", simple("activations", "v_proj"), target_checkpoint=0), steps=[1]))
    )
    assert list(frame["status"]) == ["missing", "ok"]
    assert frame["reason"][0].startswith("the reference: ")


def test_missing_steps_are_rows(run_folder):
    shutil.rmtree(run_folder / "checkpoints" / "step_1")
    (run_folder / "checkpoints" / "step_2" / "manifest.json").unlink()
    settings = config(
        metric("gini", circuit()), metric("cka", simple("activations"), target_checkpoint=0), steps=[0, 1, 2, 10]
    )
    frame = measured(analyze(run_folder, settings))
    per_step = frame.groupby("step")["status"].agg(["size", "unique"])
    assert list(per_step["size"]) == [12] * 4  # 2 layers x (4 heads + 1), and 2 layers
    assert [set(status) for status in per_step["unique"]] == [{"ok"}, {"missing"}, {"missing"}, {"ok"}]
    assert set(frame[frame["step"] == 1]["reason"]) == {"there is no step 1"}
    assert frame[frame["step"] == 2]["reason"].str.contains("not written to its end").all()
    columns = ["layer", "head", "metric", "module", "parameters"]
    assert frame[frame["step"] == 1][columns].reset_index(drop=True).equals(frame[frame["step"] == 0][columns])


def test_all_steps_show_the_damaged_one(run_folder):
    (run_folder / "checkpoints" / "step_2" / "model.safetensors").unlink()
    frame = measured(analyze(run_folder, config(metric("gini"))))
    assert list(dict.fromkeys(frame["step"])) == [0, 1, 2, 10]
    assert set(frame[frame["step"] == 2]["status"]) == {"missing"}


def test_a_step_without_capture_is_a_gap(make_run):
    def change(step, tensors):
        if step == 1:
            for key in [key for key in tensors if key[0] == "activations"]:
                del tensors[key]

    frame = measured(analyze(make_run(change=change), config(metric("gini", simple("activations")))))
    assert set(frame[frame["step"] == 1]["status"]) == {"missing"}
    assert set(frame[frame["step"] != 1]["status"]) == {"ok"}


# ---- doing it again


SETTINGS = (metric("per", circuit(), simple("gradients")), metric("pwcca", simple("activations"), target_checkpoint=10))


def test_a_rerun_computes_nothing(run_folder, n_computed):
    first = analyze(run_folder, config(*SETTINGS))
    n_values = len(measured(first))
    assert first.attrs == {"computed": n_values, "kept": 0, "missing": 0}
    n_computed.clear()
    again = analyze(run_folder, config(*SETTINGS), previous=first)
    assert n_computed == []
    assert again.attrs == {"computed": 0, "kept": n_values, "missing": 0}
    pd.testing.assert_frame_equal(again, first)


def test_one_more_metric_computes_only_that(run_folder, n_computed):
    first = analyze(run_folder, config(*SETTINGS))
    n_computed.clear()
    more = config(metric("gini", simple()), *SETTINGS)
    again = analyze(run_folder, more, previous=first)
    assert len(n_computed) == 2 * 4  # layers x steps
    pd.testing.assert_frame_equal(again, analyze(run_folder, more))
    assert again.attrs["kept"] == len(measured(first))


def test_other_parameters_are_not_kept(run_folder):
    first = analyze(run_folder, config(metric("norm", norm_type="nuclear")))
    assert analyze(run_folder, config(metric("norm", norm_type="inf")), previous=first).attrs["kept"] == 0
    first = analyze(run_folder, config(metric("cka", simple("activations"), target_checkpoint=0)))
    other = config(metric("cka", simple("activations"), target_checkpoint=1))
    assert analyze(run_folder, other, previous=first).attrs["kept"] == 0


def test_other_content_is_computed_again(make_run):
    first = analyze(make_run(), config(*SETTINGS))
    shutil.rmtree(open_run(make_run()).path)
    folder = make_run(change=lambda step, tensors: tensors["weights", None, "layers.0.attention.v_proj"].mul_(2 + step))
    again = analyze(folder, config(*SETTINGS), previous=first)
    assert again.attrs["computed"] == 4 * 5  # the circuits of layer 0 at 4 steps
    pd.testing.assert_frame_equal(again, analyze(folder, config(*SETTINGS)))


def test_what_was_missing_is_tried_again(make_run, run_folder):
    step = run_folder / "checkpoints" / "step_2"
    step.rename(run_folder / "elsewhere")
    settings = config(*SETTINGS, steps=[0, 1, 2, 10])
    first = analyze(run_folder, settings)
    assert first.attrs["missing"] == 14
    (run_folder / "elsewhere").rename(step)
    again = analyze(run_folder, settings, previous=first)
    assert again.attrs == {"computed": 14, "kept": 42, "missing": 0}
    pd.testing.assert_frame_equal(again, analyze(run_folder, settings))


def test_a_step_that_vanishes_is_not_kept(run_folder):
    settings = config(*SETTINGS, steps=[0, 1, 2, 10])
    first = analyze(run_folder, settings)
    shutil.rmtree(run_folder / "checkpoints" / "step_2")
    again = analyze(run_folder, settings, previous=first)
    assert set(measured(again[again["step"] == 2])["status"]) == {"missing"}
    assert again[again["step"] == 2]["content_hash"].isna().all()


# ---- what is refused


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (metric("ginni"), "no metric 'ginni'.*did you mean 'gini'"),
        (metric("gini", simple() | {"component_name": "simpel"}), "no component 'simpel'.*did you mean 'simple'"),
        (metric("gini", simple(suffix="o_projj")), r"no module ends in 'o_projj'.*attention\.v_proj"),
        (metric("gini", simple(layers=[0, 99])), r"layers \[99\] do not exist; there are 0 to 1"),
        (
            metric("cka", simple("weights"), target_checkpoint=0),
            "does not fit weights; what fits: gini, hoyer, per, condition_number, norm",
        ),
        (
            metric("per", {"component_name": "delta", "data_type": "weights", "role": "v"}),
            "per of delta: target_checkpoint: is needed; give a step, or last",
        ),
        (
            metric("per", {"component_name": "full_ov_circuit", "data_type": "weights"}),
            "does not fit this component; what fits: eigenvalue_positivity",
        ),
        (
            metric("intrinsic_dimension", simple("weights")),
            "measures activations and does not fit weights; what fits: gini",
        ),
        (
            metric("dead_units", simple("activations"), options={"tolerance": -1}),
            "tolerance: -1 is not allowed; needed: a number from 0 to 1",
        ),
        (
            metric("pwcca", simple("activations"), split="train", target_checkpoint=0),
            "the same samples at every step.*data_split: val",
        ),
        (
            metric("hoyer", target_checkpoint=0),
            r"metrics\[1\], hoyer of simple: target_checkpoint: 0 is only for metrics that compare: cka, pwcca",
        ),
        (
            metric("cka", simple("activations"), target_checkpoint=7),
            "target_checkpoint: there is no step 7; run demo has the steps 0, 1, 2, 10",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_computed(run_folder, n_computed, entry, message):
    with pytest.raises(AnalysisError, match=message):
        analyze(run_folder, config(metric("gini"), entry))
    assert n_computed == []


def test_all_problems_at_once(run_folder):
    bad = config(
        metric("ginni"), metric("gini", simple(layers=[5])), metric("gini", simple("activations", "mlp")), steps=[3, 4]
    )
    with pytest.raises(AnalysisError) as error:
        plan([open_run(run_folder)], bad)
    lines = str(error.value).splitlines()
    assert len(lines) == 5
    for line, words in zip(lines[1:], ("steps: none of those", "ginni", "layers", "'mlp'"), strict=True):
        assert words in line


def test_equal_parameters_are_one_cell(run_folder):
    """However a number is written, it is the same measurement."""
    entries = [
        metric("dead_units", simple("activations"), options=options)
        for options in ({}, {"tolerance": 1e-6}, {"tolerance": 0}, {"tolerance": 0.0})
    ]
    frame = measured(analyze(run_folder, config(*entries, steps=[0])))
    assert frame["parameters"].value_counts().to_dict() == {'{"tolerance": 1e-06}': 2, '{"tolerance": 0.0}': 2}


def test_delta_is_measured_against_its_reference(run_folder, monkeypatch):
    """Norms of W_t - W_s; the difference and its spectrum serve all metrics."""
    from safetensors.torch import load_file

    import pico_analyze.measure as module

    made = []
    monkeypatch.setattr(module, "difference", lambda *sides, of=module.difference: made.append(1) or of(*sides))
    delta = {"component_name": "delta", "data_type": "weights", "role": "down"}
    entries = [
        metric("norm", delta, norm_type=kind, target_checkpoint=1, split=None) for kind in ("frobenius", "nuclear")
    ]
    frame = measured(analyze(run_folder, config(*entries, metric("per", delta, target_checkpoint=1, split=None))))
    assert len(made) == 4 * 2
    assert set(frame["reference_step"]) == {1}
    weights = {
        step: load_file(run_folder / "checkpoints" / f"step_{step}" / "model.safetensors") for step in (0, 1, 2, 10)
    }
    for row in frame[frame["metric"] == "norm"].itertuples():
        w, v = (weights[step][f"model.layers.{row.layer}.swiglu.w_2.weight"].double() for step in (row.step, 1))
        order = json.loads(row.parameters)["norm_type"][:3]
        assert row.value == pytest.approx(float(torch.linalg.matrix_norm(w - v, order)), rel=1e-9)
        assert row.content_hash != row.reference_hash or row.step == 1
    still = frame[(frame["metric"] == "per") & (frame["step"] == 1)]
    assert set(still["reason"]) == {"all singular values are zero"}


def test_moments_of_the_optimizer(make_run):
    def change(step, tensors):
        if step:
            tensors["optimizer", "exp_avg", "layers.1.swiglu.w_2"] = torch.full((16, 32), float(step))
            tensors["optimizer", "exp_avg_sq", "layers.1.swiglu.w_2"] = torch.full((16, 32), 0.5)

    moments = {"component_name": "simple", "data_type": "optimizer", "role": "down"}
    entry = metric("norm", moments, norm_type="inf", split=None)
    frame = measured(analyze(make_run(steps=(0, 2), change=change), config(entry)))
    values = {(row.step, row.module): (row.status, row.value) for row in frame.fillna({"value": -1.0}).itertuples()}
    assert values == {
        (0, "swiglu.w_2.exp_avg"): ("missing", -1.0),
        (0, "swiglu.w_2.exp_avg_sq"): ("missing", -1.0),
        (2, "swiglu.w_2.exp_avg"): ("ok", 2.0),
        (2, "swiglu.w_2.exp_avg_sq"): ("ok", 0.5),
    }
    assert frame["split"].isna().all()
    assert set(frame.loc[frame["step"] == 0, "reason"]) == {"step 0: this checkpoint holds no optimizer state"}


def test_a_run_without_activations(make_run):
    folder = make_run(splits=())
    with pytest.raises(
        AnalysisError, match="no activations of split val were captured; besides weights there are none"
    ):
        analyze(folder, config(metric("gini", simple("activations"))))
    assert set(measured(analyze(folder, config(metric("gini"))))["status"]) == {"ok"}


def test_one_run_of_several_lacks_a_layer(make_run, make_shape):
    make_run("two"), make_run("three", shape=make_shape(n_layers=3))
    runs = [make_run("two").parent / name for name in ("two", "three")]
    with pytest.raises(AnalysisError, match=r"run two: layers \[2\] do not exist"):
        analyze(runs, config(metric("gini", simple(layers=[2]))))
    frame = measured(analyze(runs, config(metric("gini", simple()), steps=[0])))
    assert frame.groupby("run").size().to_dict() == {"two": 2, "three": 3}


def test_runs_that_cannot_be_analysed(make_run, tmp_path):
    folder = make_run(steps=(0,))
    shutil.copytree(folder, folder.with_name("copy"))
    with pytest.raises(AnalysisError, match="hold the same run"):
        analyze(folder.parent, config(metric("gini")))
    (folder / "checkpoints" / "step_0" / "manifest.json").unlink()
    with pytest.raises(AnalysisError, match=r"run demo has no complete checkpoint; .*not written to its end"):
        analyze(folder, config(metric("gini")))
    with pytest.raises(AnalysisError, match="no run is given"):
        analyze([], config(metric("gini")))
    with pytest.raises(CheckpointError, match="no run there"):
        analyze(tmp_path / "nothing", config(metric("gini")))


def test_a_mapping_is_a_configuration(run_folder):
    raw = {"metrics": [metric("gini")], "steps": [0]}
    assert len(measured(analyze(run_folder, raw))) == 2
    with pytest.raises(ConfigError, match="target_checkpoint"):
        analyze(run_folder, {"metrics": [metric("cka", simple("activations"))]})


def test_progress_and_plan_in_words(run_folder, caplog):
    seen = []
    settings = config(metric("gini", circuit()), metric("norm", norm_type="inf"), steps=[0, 1, 3])
    with caplog.at_level(logging.INFO):
        analyze(run_folder, settings, on_checkpoint=lambda *args: seen.append((*args[:3], len(args[3]))))
    assert seen == [("demo step 3", 1, 3, 13), ("demo step 0", 2, 3, 14), ("demo step 1", 3, 3, 13)]
    assert "24 values computed, 0 kept from before, 12 missing" in caplog.text
    assert describe(plan([open_run(run_folder)], settings)) == [
        "gini of ov_circuit weights attention, layers 0, 1: 3 checkpoints, 30 values, 10 of them missing",
        'norm {"norm_type": "inf"} of simple weights swiglu.w_2, layers 0, 1: '
        "3 checkpoints, 6 values, 2 of them missing",
    ]


def test_a_broken_training_log_is_named_before_anything_is_computed(run_folder, n_computed):
    path = run_folder / "metrics.jsonl"
    path.write_text(path.read_text().replace('"loss": 3.9', '"loss": 1e999'))
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl, line 2: 1e999 is not a finite number"):
        analyze(run_folder, config(metric("gini")))
    assert n_computed == []
