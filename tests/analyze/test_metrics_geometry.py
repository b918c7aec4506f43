import itertools
import math

import numpy as np
import pytest
import scipy.spatial
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pico_analyze.components.matrix import Flagged, Matrix, Undefined
from pico_analyze.metrics.geometry import anisotropy, dead_units, intrinsic_dimension

STORED = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int16]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthogonal(n, seed):
    return torch.linalg.qr(normal(n, n, seed=seed)).Q


def mean_cosine(x):
    """Over all pairs, one by one."""
    rows = x.double().numpy()
    cosines = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in itertools.combinations(rows, 2)]
    return float(np.mean(cosines))


def two_nn(x, discard):
    """The algorithm as it is printed, with a tree for the neighbours and numpy's least squares."""
    points = np.unique(x.double().numpy(), axis=0)
    distances, _ = scipy.spatial.cKDTree(points).query(points, k=3)
    mu = np.sort(distances[:, 2] / distances[:, 1])
    n = len(mu)
    kept = min(round((1 - discard) * n), n - 1)
    horizontal, vertical = np.log(mu[:kept]), -np.log(1 - np.arange(1, kept + 1) / n)
    return float(np.linalg.lstsq(horizontal[:, None], vertical, rcond=None)[0][0])


class TestDeadUnits:
    def test_by_hand(self):
        x = torch.tensor([[1.0, 0.0, 3.0, -2.0], [1.0, 0.0, 3.1, 2.0], [1.0, 0.0, 3.0, 0.0]])
        assert dead_units(x) == 0.5
        assert dead_units(torch.zeros(3, 4)) == 1.0
        assert dead_units(normal(20, 5)) == 0.0
        assert dead_units(torch.relu(torch.tensor([[-1.0, 2.0], [-3.0, 1.0]]))) == 0.5

    def test_tolerance_is_a_share_of_the_largest_magnitude(self):
        x = torch.tensor([[100.0, 5.0, 1.0], [-100.0, 5.9, 1.0]])
        assert [dead_units(x, tolerance) for tolerance in (0.0, 0.008, 0.01)] == [1 / 3, 1 / 3, 2 / 3]
        assert dead_units(torch.tensor([[1.0, 0.1], [1.0 + 1e-7, 0.2]], dtype=torch.float64), 0.0) == 0
        assert dead_units(torch.tensor([[1.0, 0.1], [1.0 + 1e-7, 0.2]], dtype=torch.float64)) == 0.5

    @settings(max_examples=20, deadline=None)
    @given(n=st.integers(2, 9), d=st.integers(1, 9), seed=st.integers(0, 99), scale=st.floats(1e-150, 1e150))
    def test_a_count_of_columns(self, n, d, seed, scale):
        x = torch.relu(normal(n, d, seed=seed) - 1)
        expected = sum(len(set(column.tolist())) == 1 for column in x.T) / d
        assert dead_units(x, 0.0) == pytest.approx(expected)
        assert dead_units(-scale * x.flip(0).flip(1)) == pytest.approx(dead_units(x))

    @pytest.mark.parametrize("dtype", STORED)
    def test_storage_dtype(self, dtype):
        x = (10 * torch.relu(normal(6, 40) - 1)).to(dtype)
        assert 0 < dead_units(x) == dead_units(x.double()) < 1

    def test_products_and_extremes(self):
        left = normal(6, 3)
        left[:, 1] = 2.0
        assert dead_units(Matrix.product(left, torch.eye(3, dtype=torch.float64))) == pytest.approx(1 / 3)
        assert dead_units(torch.tensor([[1.7e308, 0.0], [-1.7e308, 0.0]], dtype=torch.float64)) == 0.5

    def test_undefined(self):
        with pytest.raises(Undefined, match="a single sample"):
            dead_units(torch.ones(1, 4))
        with pytest.raises(Undefined, match="a vector, not a matrix"):
            dead_units(torch.ones(4))
        with pytest.raises(Undefined, match="no entries"):
            dead_units(torch.ones(0, 4))


class TestAnisotropy:
    @pytest.mark.parametrize(
        ("x", "value"),
        [
            ([[1.0, 0.0], [0.0, 2.0]], 0.0),
            ([[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]], 1.0),
            ([[1.0, 1.0], [-2.0, -2.0]], -1.0),
            ([[1.0, 0.0], [1.0, 1.0]], math.sqrt(0.5)),
            ([[1.0, 0.0], [-0.5, 0.75**0.5], [-0.5, -(0.75**0.5)]], -0.5),  # they cancel: -1 / (n - 1)
        ],
    )
    def test_by_hand(self, x, value):
        assert anisotropy(torch.tensor(x, dtype=torch.float64)) == pytest.approx(value, abs=1e-15)

    @settings(max_examples=25, deadline=None)
    @given(n=st.integers(2, 12), d=st.integers(1, 8), seed=st.integers(0, 99), shift=st.floats(-3, 3))
    def test_equals_all_pairs(self, n, d, seed, shift):
        x = normal(n, d, seed=seed) + shift
        value = anisotropy(x)
        assert value == pytest.approx(mean_cosine(x), abs=1e-13)
        assert -1 / (n - 1) <= value <= 1
        scales = torch.rand(n, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.1
        assert anisotropy(scales * x.flip(0) @ orthogonal(d, seed)) == pytest.approx(value, abs=1e-13)

    @pytest.mark.parametrize("dtype", STORED)
    def test_storage_dtype(self, dtype):
        x = (10 * normal(30, 6) + 4).to(dtype)
        assert anisotropy(x) == pytest.approx(mean_cosine(x), rel=1e-12)

    def test_products_are_never_formed(self, monkeypatch):
        product = Matrix.product(normal(9, 8), normal(2, 4, 30, seed=1))
        expected = mean_cosine(product.entries())
        monkeypatch.setattr(Matrix, "entries", None)
        assert anisotropy(product) == pytest.approx(expected, rel=1e-10)

    def test_rows_of_zeros_are_left_out(self):
        x = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
        assert anisotropy(x) == pytest.approx(math.sqrt(0.5))
        assert anisotropy(x).reason == "1 of 3 rows are zero and left out"
        with pytest.raises(Undefined, match="1 rows that are not zero"):
            anisotropy(x[:2])

    @pytest.mark.parametrize("scale", [1e-200, 1e200])
    def test_extreme_scales(self, scale):
        x = normal(5, 3)
        assert anisotropy(x * scale) == pytest.approx(mean_cosine(x), rel=1e-12)


class TestIntrinsicDimension:
    @pytest.mark.parametrize("dimension", [1, 2, 4])
    def test_finds_the_dimension(self, dimension):
        # One value scatters by 4 % of the dimension; the mean of eight by 1.4 %.
        generator = torch.Generator().manual_seed(0)
        uniform = torch.rand(8, 2000, dimension, generator=generator, dtype=torch.float64)
        values = [intrinsic_dimension(points @ normal(dimension, 20)) for points in uniform]
        assert np.mean(values) == pytest.approx(dimension, rel=0.06)

    def test_of_a_curve(self):
        t = torch.rand(1500, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 6
        spiral = torch.stack([t * t.cos(), t * t.sin(), t], 1)
        assert intrinsic_dimension(spiral) == pytest.approx(1, rel=0.08)

    @settings(max_examples=20, deadline=None)
    @given(n=st.integers(3, 40), d=st.integers(1, 6), seed=st.integers(0, 99), discard=st.sampled_from([0.0, 0.1, 0.5]))
    def test_equals_the_printed_algorithm(self, n, d, seed, discard):
        x = normal(n, d, seed=seed)
        assert intrinsic_dimension(x, discard) == pytest.approx(two_nn(x, discard), rel=1e-9)

    @settings(max_examples=15, deadline=None)
    @given(d=st.integers(1, 6), seed=st.integers(0, 99), scale=st.floats(1e-100, 1e100))
    def test_invariances(self, d, seed, scale):
        x = normal(30, d, seed=seed)
        value = intrinsic_dimension(x)
        for other in (x * -scale, x + 2, x.flip(0), x.flip(1), x @ orthogonal(d, seed), torch.cat([x, x], 1)):
            assert intrinsic_dimension(other) == pytest.approx(value, rel=1e-7)

    @pytest.mark.parametrize("dtype", STORED)
    def test_storage_dtype(self, dtype):
        x = (100 * normal(60, 6)).to(dtype)
        assert intrinsic_dimension(x) == pytest.approx(two_nn(x, 0.1), rel=1e-9)

    def test_products_are_never_formed(self, monkeypatch):
        product = Matrix.product(normal(40, 4), normal(4, 50, seed=1))
        expected = two_nn(product.entries(), 0.1)
        monkeypatch.setattr(Matrix, "entries", None)
        assert intrinsic_dimension(product) == pytest.approx(expected, rel=1e-8)

    def test_equal_samples_count_once(self):
        x = normal(20, 3)
        doubled = torch.cat([x, x[:5], x[:1]])
        assert intrinsic_dimension(doubled) == pytest.approx(intrinsic_dimension(x), rel=1e-12)
        assert isinstance(intrinsic_dimension(doubled), Flagged)
        assert intrinsic_dimension(doubled).reason == "6 of 26 samples equal another one"
        assert not isinstance(intrinsic_dimension(x), Flagged)

    @pytest.mark.parametrize("x", [torch.zeros(1, 3), torch.ones(5, 3), torch.tensor([[0.0], [1.0], [1.0], [0.0]])])
    def test_too_few_samples(self, x):
        with pytest.raises(Undefined, match=r"[12] different samples; two neighbours need 3"):
            intrinsic_dimension(x)

    def test_equally_far(self):
        with pytest.raises(Undefined, match="equally far from its two nearest neighbours"):
            intrinsic_dimension(torch.eye(6))


@pytest.mark.parametrize("measure", [dead_units, anisotropy, intrinsic_dimension])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_not_finite(measure, bad):
    x = torch.ones(3, 4)
    x[1, 2] = bad
    with pytest.raises(Undefined, match="1 of 12 entries are not finite"):
        measure(x)
