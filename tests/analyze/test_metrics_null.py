"""The permutation null: by hand, on unrelated and on equal sides, and as fast over orders as it is right."""

import inspect
from importlib import import_module

import numpy as np
import pytest
import torch

from pico_analyze.components.matrix import Matrix, Undefined
from pico_analyze.metrics import METRICS
from pico_analyze.metrics.null import orders, permutation_null

PAIRS = {
    "cka": [
        {"estimator": estimator, "kernel": kernel}
        for estimator in ("debiased", "plug_in", "minibatch")
        for kernel in ("linear", "rbf")
    ],
    "pwcca": [{"weights_from": "x"}, {"weights_from": "y"}],
    "mean_cca": [{}],
    "svcca": [{"variance": 0.9}],
    "procrustes": [{}],
    "rsa": [{"correlation": "spearman"}, {"correlation": "pearson"}],
    "mutual_knn": [{"k": 3, "distance": "cosine"}, {"k": 3, "distance": "euclidean"}],
}
every_pair = pytest.mark.parametrize(
    ("name", "chosen"),
    [
        pytest.param(name, one, id="-".join([name, *map(str, one.values())]))
        for name, all_of in PAIRS.items()
        for one in all_of
    ],
)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_every_pair_is_here():
    assert set(PAIRS) == {name for name, metric in METRICS.items() if metric.consumes == "pair"}


@every_pair
@pytest.mark.parametrize(("p", "q"), [(3, 4), (60, 70)], ids=["few features", "many features"])
def test_the_value_over_orders_is_that_of_permuted_rows(name, chosen, p, q):
    n = 30
    if p > n and name in ("pwcca", "mean_cca"):
        n = 200
    shared = normal(n, 2)
    x, y = (shared @ normal(2, k, seed=k) + normal(n, k, seed=k + 100) for k in (p, q))
    if chosen.get("estimator") == "minibatch":
        chosen = chosen | {"batch": 8}
    metric = METRICS[name]
    score = metric.scores(Matrix.dense(x), Matrix.dense(y), **chosen)
    for order in [torch.arange(n), *orders(n, 1, 3, seed=1)]:
        plain = metric.compute(Matrix.dense(x), Matrix.dense(y[order]), **chosen)
        assert score(order) == pytest.approx(plain, rel=1e-9, abs=1e-12)


@every_pair
def test_equal_sides_are_the_nearest(name, chosen):
    x = normal(40, 4)
    score = METRICS[name].scores(Matrix.dense(x), Matrix.dense(x), **chosen)
    value = METRICS[name].compute(Matrix.dense(x), Matrix.dense(x), **chosen)
    null = permutation_null(value, [score(order) for order in orders(40, 1, 19, seed=0)])
    assert null["p_value"] == 1 / 20
    assert null["calibrated"] == pytest.approx(1, abs=1e-9)


@every_pair
def test_unrelated_sides_are_calibrated(name, chosen):
    """Over many independent pairs the calibrated value is 0 on average and the p-value uniform."""
    n_pairs, found = 120, []
    for seed in range(n_pairs):
        x, y = (Matrix.dense(normal(24, k, seed=2 * seed + k)) for k in (3, 6))
        score = METRICS[name].scores(x, y, **chosen)
        value = METRICS[name].compute(x, y, **chosen)
        found.append(permutation_null(value, [score(order) for order in orders(24, 1, 19, seed=seed)]))
    calibrated = np.array([one["calibrated"] for one in found])
    p = np.array([one["p_value"] for one in found])
    assert abs(calibrated.mean()) < 4 * calibrated.std() / n_pairs**0.5
    assert np.allclose(p * 20, np.round(p * 20))
    # At most as often as alpha, but for the scatter of 120 pairs; ties (mutual_knn) make it rarer.
    for alpha in (0.1, 0.25, 0.5):
        share = (p <= alpha + 1e-9).mean()
        scatter = 3 * (alpha * (1 - alpha) / n_pairs) ** 0.5
        assert share <= alpha + scatter
        assert share >= alpha - scatter or name == "mutual_knn"


def test_calibration_takes_out_the_width():
    """Plug-in CKA of unrelated features rises with their number; against its null it does not."""
    raw, calibrated = [], []
    for p in (8, 200):
        x, y = (Matrix.dense(normal(40, p, seed=p + side)) for side in (0, 1))
        score = METRICS["cka"].scores(x, y, estimator="plug_in")
        value = METRICS["cka"].compute(x, y, estimator="plug_in")
        raw.append(value)
        calibrated.append(permutation_null(value, [score(order) for order in orders(40, 1, 50, seed=0)])["calibrated"])
    assert raw[1] > raw[0] + 0.4
    assert max(map(abs, calibrated)) < 0.08


class TestByHand:
    def test_a_similarity(self):
        null = permutation_null(0.5, [0.1, 0.2, 0.5, 0.0], quantile=0.75)
        assert null == pytest.approx(
            {"null_mean": 0.2, "null_quantile": 0.275, "calibrated": 0.3 / 0.8, "p_value": 2 / 5}
        )

    def test_a_distance_is_reversed(self):
        similarities = [0.1, 0.2, 0.5, 0.0]
        null = permutation_null(1 - 0.5, [1 - one for one in similarities], quantile=0.75, distance=True)
        assert null == pytest.approx(
            {"null_mean": 0.8, "null_quantile": 0.725, "calibrated": 0.3 / 0.8, "p_value": 2 / 5}
        )

    def test_rounding_decides_nothing(self):
        assert permutation_null(0.3, [0.3 - 1e-15, 0.1])["p_value"] == 2 / 3

    def test_a_null_at_the_top_says_nothing(self):
        with pytest.raises(Undefined, match="samples paired at random agree entirely too"):
            permutation_null(1.0, [1.0, 1.0])


class TestOrders:
    def test_sequences_stay_together(self):
        for order in orders(12, 3, 20, seed=4):
            groups = order.view(-1, 3)
            assert (groups[:, 0] % 3 == 0).all()
            assert (groups[:, 1:] - groups[:, :-1] == 1).all()
            assert sorted(order.tolist()) == list(range(12))

    def test_all_orders_are_as_likely(self):
        drawn = [tuple(order.tolist()) for order in orders(3, 1, 3000, seed=0)]
        assert sorted({drawn.count(one) for one in set(drawn)})[0] > 400
        assert len(set(drawn)) == 6

    def test_a_single_sequence(self):
        with pytest.raises(Undefined, match="a single sequence"):
            orders(6, 6, 5, seed=0)

    def test_the_seed(self):
        first, again, other = (torch.stack(orders(50, 1, 3, seed)) for seed in (1, 1, 2))
        assert first.equal(again)
        assert not first.equal(other)


def test_dependent_rows_need_whole_sequences():
    """Two unrelated sides whose rows come in groups of equals: single rows find them alike far too often, groups do not."""
    often = {1: 0, 8: 0}
    for seed in range(60):
        x, y = (
            normal(10, 4, seed=2 * seed + side).repeat_interleave(8, 0) + 0.1 * normal(80, 4, seed=side)
            for side in (0, 1)
        )
        score = METRICS["cka"].scores(Matrix.dense(x), Matrix.dense(y))
        value = score(torch.arange(80))
        for unit in often:
            at_random = [score(order) for order in orders(80, unit, 19, seed=seed)]
            often[unit] += permutation_null(value, at_random)["p_value"] <= 0.05
    assert often[1] > 20
    assert often[8] <= 8


def test_the_functions_over_orders_take_what_the_metrics_take():
    for metric in METRICS.values():
        if metric.over_orders is not None:
            paths = (metric.function, metric.over_orders)
            plain, over = (getattr(import_module(path.split(":")[0]), path.split(":")[1]) for path in paths)
            given = [
                {name: one.default for name, one in inspect.signature(function).parameters.items()}
                for function in (plain, over)
            ]
            assert given[0] == given[1]
