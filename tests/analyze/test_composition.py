"""Composition scores against the plain product of the circuits, and the rows that they become."""

import math

import pandas as pd
import pytest
import torch

from pico_analyze import analyze
from pico_analyze.checkpoint.reader import open_run
from pico_analyze.components import COMPONENTS, ComponentError
from pico_analyze.components.matrix import Matrix, Undefined
from pico_analyze.metrics.spectral import composition_score

NAMES = ("q_composition", "k_composition", "v_composition")


def with_queries_and_keys(step, tensors):
    generator = torch.Generator().manual_seed(step + 7)
    for kind, _, module in list(tensors):
        if kind == "weights" and module.endswith("v_proj"):
            prefix, (kv, d) = module.removesuffix("v_proj"), tensors[kind, None, module].shape
            tensors["weights", None, f"{prefix}q_proj"] = torch.randn(d, d, generator=generator)
            tensors["weights", None, f"{prefix}k_proj"] = torch.randn(kv, d, generator=generator)


@pytest.fixture
def folder(make_run, make_shape):
    return make_run(steps=(0, 1), shape=make_shape(n_layers=3), change=with_queries_and_keys)


def entry(component, **keys):
    return {
        "metric_name": "composition_score",
        "components": [{"component_name": component, "data_type": "weights"} | keys],
    }


def measured(runs, *metrics, **keys):
    frame = analyze(runs, {"metrics": list(metrics), "steps": [0]} | keys)
    return frame[frame["kind"] != "training"].reset_index(drop=True)


def circuits(checkpoint, layer, H, K):
    """W_QK and W_OV of each query head, multiplied out by plain slices."""
    q, k, v, o = (
        checkpoint.tensor(checkpoint.select("weights", layer=layer, role=role)[0]).double() for role in "qkvo"
    )
    E = len(q) // H
    qk, ov = [], []
    for h in range(H):
        mine, shared = slice(h * E, (h + 1) * E), slice(h // (H // K) * E, (h // (H // K) + 1) * E)
        qk.append(q[mine].T @ k[shared])
        ov.append(o[:, mine] @ v[shared])
    return qk, ov


@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
def test_equals_the_product_multiplied_out(make_run, make_shape, n_kv_heads):
    shape = make_shape(n_layers=3, n_kv_heads=n_kv_heads)
    folder = make_run(steps=(0,), shape=shape, change=with_queries_and_keys)
    checkpoint = open_run(folder).checkpoint(0)
    by_layer = [circuits(checkpoint, layer, 4, n_kv_heads) for layer in range(3)]
    frame = measured(folder, *map(entry, NAMES))
    assert len(frame) == 3 * 3 * 16
    for row in frame.itertuples():
        qk, ov = by_layer[row.layer]
        earlier = by_layer[row.reference_layer][1][row.reference_head]
        reads = {"q_composition": qk[row.head].T, "k_composition": qk[row.head], "v_composition": ov[row.head]}
        later = reads[row.component]
        expected = float((later @ earlier).norm() / (later.norm() * earlier.norm()))
        assert row.value == pytest.approx(expected, rel=1e-12)
        assert (row.status, row.n, row.d) == ("ok", 16, 16)
        assert 0 < row.value < 1


def test_the_other_metrics_are_those_of_the_product(folder):
    checkpoint = open_run(folder).checkpoint(0)
    (_, first), (_, second) = (circuits(checkpoint, layer, 4, 2) for layer in (0, 1))
    component = {"component_name": "v_composition", "data_type": "weights"}
    names = ("stable_rank", "effective_rank", "per", "spectral_entropy")
    frame = measured(folder, *({"metric_name": name, "components": [component]} for name in names))
    row = frame.query("metric == 'stable_rank' and layer == 1 and head == 2 and reference_head == 3")
    sigma = torch.linalg.svdvals(second[2] @ first[3])
    assert float(row["value"].item()) == pytest.approx(float(sigma.square().sum() / sigma[0] ** 2), rel=1e-10)
    assert frame["value"].notna().all()
    with pytest.raises(ValueError, match="gini of v_composition: does not fit this component; what fits: composition"):
        measured(folder, {"metric_name": "gini", "components": [component]})


def test_one_row_for_each_pair_of_heads(folder):
    frame = measured(folder, entry("q_composition"))
    pairs = frame[["layer", "head", "reference_layer", "reference_head"]]
    assert len(pairs.drop_duplicates()) == len(pairs) == 3 * 16
    assert set(map(tuple, frame[["layer", "reference_layer"]].drop_duplicates().values)) == {(1, 0), (2, 0), (2, 1)}
    assert frame["reference_step"].isna().all()
    columns = list(frame.columns)
    assert columns[columns.index("reference_step") + 1 :][:2] == ["reference_layer", "reference_head"]
    last = measured(folder, entry("q_composition", layers=[2]))
    pd.testing.assert_frame_equal(last, frame[frame["layer"] == 2].reset_index(drop=True))


def test_what_is_known_is_kept(folder):
    config = {"metrics": [entry(name) for name in NAMES]}
    first = analyze(folder, config)
    again = analyze(folder, config, previous=first)
    assert (again.attrs["computed"], again.attrs["kept"]) == (0, 2 * 3 * 3 * 16)
    pd.testing.assert_frame_equal(first, again)


def test_the_baseline_is_that_of_a_random_rotation():
    """The mean of |A U B|^2 over orthogonal U is |A|^2 |B|^2 / d, so random circuits score 0 about."""
    generator = torch.Generator().manual_seed(0)
    d = 12

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    a, b = normal(d, 3) @ normal(3, d), normal(d, 2) @ normal(2, d)
    scores = []
    for _ in range(4000):
        u = torch.linalg.qr(normal(d, d))
        turned = a @ (u.Q * u.R.diagonal().sign()) @ b
        scores.append(float(turned.square().sum() / (a.square().sum() * b.square().sum())))
    assert sum(scores) / len(scores) == pytest.approx(1 / d, rel=0.03)
    score = Matrix.of_core(torch.tensor([[0.5]], dtype=torch.float64), (d, d))
    assert composition_score(score, baseline="random") == pytest.approx(0.5 - 1 / math.sqrt(d), rel=1e-15)
    assert composition_score(score) == 0.5


def test_through_the_analysis_with_a_baseline(folder):
    plain = measured(folder, entry("k_composition"))["value"]
    less = measured(folder, entry("k_composition") | {"options": {"baseline": "random"}})
    assert set(less["parameters"]) == {'{"baseline": "random"}'}
    assert (plain - less["value"]).to_list() == pytest.approx([0.25] * 48)


def test_by_hand(make_run, make_shape):
    """The first layer writes the first direction; one head of the second reads it, the other reads the second one."""
    shape = make_shape(d_model=4, n_layers=2, n_heads=2, n_kv_heads=2).model_copy(update={"head_dim": 1})

    def change(_, tensors):
        for layer in (0, 1):
            for name in ("q_proj", "k_proj", "v_proj"):
                tensors["weights", None, f"layers.{layer}.attention.{name}"] = torch.eye(4)[:2]
            tensors["weights", None, f"layers.{layer}.attention.o_proj"] = torch.eye(4)[:, :2]
        tensors["weights", None, "layers.0.attention.o_proj"] = torch.tensor([[1.0, 0], [0, 0], [0, 0], [0, 0]])

    folder = make_run(steps=(0,), shape=shape, change=change)
    frame = measured(folder, *map(entry, NAMES)).set_index(["component", "head", "reference_head"])
    for name in NAMES:
        assert frame.loc[(name, 0, 0), "value"] == 1.0  # rank one, and it fits
        assert frame.loc[(name, 1, 0), "value"] == 0.0  # reads what is not written
        for head in (0, 1):  # the second head of the first layer writes nothing
            assert frame.loc[(name, head, 1), "status"] == "undefined"
            assert frame.loc[(name, head, 1), "reason"] == "the circuit of one of the two heads is zero"


@pytest.mark.parametrize("keys", [{"layers": [0]}, {"layers": [3]}])
def test_layers_that_cannot_be(folder, keys):
    with pytest.raises(ValueError, match=r"no layer stands before those asked for|layers \[3\] do not exist"):
        measured(folder, entry("q_composition", **keys))


def test_a_model_of_one_layer(make_run, make_shape):
    folder = make_run(steps=(0,), shape=make_shape(n_layers=1), change=with_queries_and_keys)
    with pytest.raises(ComponentError, match="heads of two layers are needed"):
        COMPONENTS["v_composition"].load()("weights", None, "all", None).select(open_run(folder).manifests[0])


def test_only_of_a_composition():
    with pytest.raises(Undefined, match="not the composition of two circuits"):
        composition_score(torch.ones(3, 3))
    with pytest.raises(ValueError, match="baseline: 'mean' is not allowed"):
        composition_score(torch.ones(3, 3), baseline="mean")
    with pytest.raises(Undefined, match="only its singular values are known"):
        Matrix.of_core(torch.ones(2, 2), (5, 5)).entries()
