"""The permutation null and the intervals, from the configuration to the table."""

import math

import numpy as np
import pandas as pd
import pytest
import torch

from pico_analyze import results
from pico_analyze.analysis import AnalysisError, analyze, plan
from pico_analyze.checkpoint.reader import open_run
from pico_analyze.config import AnalysisConfig
from pico_analyze.metrics.similarity import cka
from pico_analyze.strict_yaml import ConfigError, validated

ACTIVATIONS = {"component_name": "simple", "data_type": "activations", "layer_suffixes": "swiglu.w_2", "layers": [1]}
NULL = {"permutations": 19, "unit": "row", "seed": 3}
HALVES = {"resamples": 30, "unit": "row"}
PLUGIN = """
from pico_analyze.metrics import Metric
from pico_analyze.metrics.similarity import procrustes

def angle(x, y):
    import math
    return math.acos(procrustes(x, y))

METRICS = {
    "angle": Metric(f"{__name__}:angle", "pair", "angular Procrustes distance", "[0, pi/2]", "0 for the same shape", distance=True)
}
"""


def entry(metric="cka", component=ACTIVATIONS, **own):
    return {"metric_name": metric, "data_split": "val", "components": [component]} | own


def config(*entries, **more):
    return validated(AnalysisConfig, {"metrics": list(entries)} | more, "test")


def measured(runs, *entries, **more):
    frame = analyze(runs, config(*entries, **more))
    return frame[frame["kind"] != "training"].reset_index(drop=True)


def activation(folder, step):
    run = open_run(folder)
    [row] = run.checkpoint(step).select("activations", "val", 1, "swiglu.w_2")
    return run.checkpoint(step).tensor(row)


def test_the_null_of_a_row_is_that_of_its_tensors(run_folder):
    frame = measured(run_folder, entry(target_checkpoint=0, permutation_null=NULL))
    row = frame[frame["step"] == 2].iloc[0]
    x, y = activation(run_folder, 2), activation(run_folder, 0)
    generator = np.random.default_rng(3)
    null = [cka(x, y[torch.from_numpy(generator.permutation(24))]) for _ in range(19)]
    assert row["value"] == pytest.approx(cka(x, y), rel=1e-12)
    assert row["null_mean"] == pytest.approx(np.mean(null), rel=1e-9)
    assert row["null_quantile"] == pytest.approx(np.quantile(null, 0.95), rel=1e-9)
    assert row["calibrated"] == pytest.approx((row["value"] - np.mean(null)) / (1 - np.mean(null)), rel=1e-9)
    assert row["p_value"] == (1 + sum(one >= row["value"] for one in null)) / 20
    itself = frame[frame["step"] == 0].iloc[0]
    assert (itself["p_value"], itself["calibrated"]) == (1 / 20, pytest.approx(1))


def test_the_value_does_not_depend_on_what_is_asked_about_it(run_folder):
    plain = measured(run_folder, entry(target_checkpoint=0))
    more = measured(run_folder, entry(target_checkpoint=0, permutation_null=NULL, bootstrap=HALVES))
    assert plain["value"].equals(more["value"])
    assert plain[list(results.ADDED)].isna().all(axis=None)
    assert more[list(results.ADDED)].notna().all(axis=None)
    assert (more["low"] < more["value"]).any()
    assert (more["low"] <= more["high"]).all()


def test_sequences_are_the_units(run_folder):
    """24 rows of 4 sequences: 4 cannot be halved, and of their 24 orders one is the right one."""
    frame = measured(run_folder, entry(target_checkpoint=0, permutation_null={}, bootstrap={}), steps=[0])
    row = frame.iloc[0]
    assert row["reason"] == "no interval: 4 sequences are too few to leave half of them out; it takes 8"
    assert row["status"] == "flagged"
    assert pd.isna(row["low"])
    assert 2 / 201 < row["p_value"] < 0.1  # about 1 in 24


def test_intervals_of_single_matrices(run_folder):
    frame = measured(run_folder, entry("anisotropy", bootstrap=HALVES), entry("kurtosis", bootstrap=HALVES))
    assert frame["status"].eq("ok").all()
    assert (frame["low"] < frame["value"]).all()
    assert (frame["value"] < frame["high"]).all()


def test_a_half_without_a_value_leaves_the_value(run_folder):
    frame = measured(run_folder, entry("mutual_knn", target_checkpoint=0, options={"k": 12}, bootstrap=HALVES))
    assert frame["value"].notna().all()
    assert frame["low"].isna().all()
    assert frame["reason"].eq("no interval: 12 samples have no more than 11 neighbours each; k is 12").all()


def test_a_distance_is_reversed(run_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "angle_plugin.py").write_text(PLUGIN)
    asked = {"target_checkpoint": 0, "permutation_null": NULL}
    frame = measured(run_folder, entry("angle", **asked), entry("procrustes", **asked), plugins=["angle_plugin.py"])
    angle, cosine = (frame[frame["metric"] == name].set_index("step") for name in ("angle", "procrustes"))
    assert angle["p_value"].equals(cosine["p_value"])
    assert angle.loc[0, "calibrated"] == pytest.approx(1, abs=1e-6)
    assert angle.loc[2, "null_quantile"] == pytest.approx(math.acos(cosine.loc[2, "null_quantile"]), abs=1e-3)


def test_what_is_kept(run_folder):
    asked = config(entry(target_checkpoint=0, permutation_null=NULL, bootstrap=HALVES))
    first = analyze(run_folder, asked)
    again = analyze(run_folder, asked, previous=first)
    assert again.attrs["computed"] == 0
    pd.testing.assert_frame_equal(first, again, check_flags=False)
    other = analyze(run_folder, config(entry(target_checkpoint=0, permutation_null=NULL | {"seed": 4})), previous=first)
    assert other.attrs["kept"] == 0
    assert '"permutation_null": {"permutations": 19' in other["parameters"].iloc[-1]


def test_minibatches_through_the_configuration(run_folder):
    frame = measured(run_folder, entry(target_checkpoint=0, estimator="minibatch", batch=8), steps=[2])
    x, y = activation(run_folder, 2), activation(run_folder, 0)
    assert frame["value"].iloc[0] == pytest.approx(cka(x, y, "minibatch", batch=8), rel=1e-12)
    assert frame["parameters"].iloc[0] == '{"batch": 8, "estimator": "minibatch", "kernel": "linear"}'


@pytest.mark.parametrize(
    ("metric", "own", "message"),
    [
        ("gini", {"permutation_null": {}}, "permutation_null: is only for metrics that compare samples"),
        ("cka", {"target_checkpoint": 0, "batch": 8}, "batch: is only for estimator minibatch"),
    ],
)
def test_refused_by_the_plan(run_folder, metric, own, message):
    with pytest.raises(AnalysisError, match=message):
        plan([open_run(run_folder)], config(entry(metric, **own)))


def test_weights_have_no_samples(run_folder):
    weights = ACTIVATIONS | {"data_type": "weights"}
    with pytest.raises(AnalysisError, match="bootstrap: leaves out samples, and the rows of weights are none"):
        plan([open_run(run_folder)], config(entry("gini", weights, bootstrap={})))


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"permutation_null": {"permutation": 5}}, r"permutation_null\.permutation.*permutations"),
        ({"permutation_null": {"permutations": 0}}, r"permutation_null\.permutations"),
        ({"bootstrap": {"level": 95}}, r"bootstrap\.level"),
        ({"batch": 3}, "batch"),
    ],
)
def test_refused_by_the_configuration(own, message):
    with pytest.raises(ConfigError, match=message):
        config(entry(target_checkpoint=0, **own))
