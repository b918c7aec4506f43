import itertools
import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pico_analyze.components.matrix import Undefined
from pico_analyze.metrics.sparsity import gini, hoyer, kurtosis

magnitudes = st.just(0.0) | st.floats(1e-6, 1e6)
not_all_zero = arrays(np.float64, st.integers(2, 30), elements=magnitudes).filter(np.any)


def stored(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gini_by_pairs(x):
    a = np.abs(np.asarray(x, dtype=np.float64).ravel())
    return np.abs(a[:, None] - a[None, :]).mean() / (2 * a.mean())


def gini_in_one_sum(x):
    a = np.sort(np.abs(x.double().numpy().ravel()))
    i = np.arange(1, a.size + 1)
    return float(((2 * i - a.size - 1) * a).sum() / (a.size * a.sum()))


class TestGini:
    @pytest.mark.parametrize(
        ("x", "value"),
        [
            (torch.tensor([1.0] * 500 + [2.0] * 500), 1 / 6),
            (torch.eye(1000)[0], 0.999),
            (torch.tensor([i % 100 + 1 for i in range(200)], dtype=torch.int8), 0.33),
            (torch.tensor([0, 4096], dtype=torch.int32).repeat_interleave(1 << 19), 0.5),
            (torch.tensor([1.0] * 70_000 + [0.0], dtype=torch.float16), 1 / 70_001),
        ],
    )
    def test_known_values(self, x, value):
        assert gini(x) == pytest.approx(value, rel=1e-12)

    def test_rounded_by_storage(self):
        x = (torch.arange(1, 1001) / 1000).bfloat16()
        assert gini(x) == pytest.approx(0.33299, abs=5e-6)  # 0.333 before rounding
        assert gini(x) == pytest.approx(gini_in_one_sum(x), rel=1e-13)

    @pytest.mark.parametrize("x", [[3.0], [2.0, -2.0], [[1.0, 1.0], [1.0, 1.0]]])
    def test_equal_magnitudes(self, x):
        assert gini(torch.tensor(x)) == 0

    def test_equal_magnitudes_stay_in_range(self):
        for n in range(2, 300):
            assert 0 <= gini(torch.full((n,), 0.1, dtype=torch.float64)) < 1e-12

    def test_half_normal(self):
        assert gini(stored(1000, 1000)) == pytest.approx(math.sqrt(2) - 1, abs=2e-3)

    def test_zeros_are_undefined(self):
        with pytest.raises(Undefined, match="all entries are zero"):
            gini(torch.zeros(4, 4))

    @given(not_all_zero)
    def test_equals_mean_absolute_difference(self, x):
        assert gini(torch.from_numpy(x)) == pytest.approx(gini_by_pairs(x), rel=1e-9, abs=1e-12)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
    def test_storage_dtype(self, dtype):
        x = stored(512, 512, dtype=dtype)
        assert gini(x) == pytest.approx(gini_in_one_sum(x), rel=1e-12)

    def test_integers_beyond_float32(self):
        x = torch.tensor([2**24 + 1, 2**24, 2**24 + 3, 1], dtype=torch.int64)
        assert gini(x) == pytest.approx(gini_by_pairs(x), rel=1e-14)
        assert gini(torch.tensor([-128, 0], dtype=torch.int8)) == 0.5

    @pytest.mark.parametrize("scale", [1e-320, 1e-200, 1e200, 1e307])
    def test_extreme_scales(self, scale):
        assert gini(torch.tensor([0.0, 2.0, 2.0, 4.0], dtype=torch.float64) * scale) == pytest.approx(3 / 8, rel=1e-3)

    def test_a_whole_number_of_chunks_or_not(self):
        for n in (65_535, 65_536, 65_537, 200_000):
            x = stored(n, dtype=torch.float32)
            assert gini(x) == pytest.approx(gini_in_one_sum(x), rel=1e-12)

    def test_leaves_its_input_alone(self):
        for x in (stored(5, 7), stored(5, 7, dtype=torch.float32), stored(5, 7).T):
            before = x.clone()
            gini(x)
            assert torch.equal(x, before)


class TestHoyer:
    @pytest.mark.parametrize(
        ("x", "value"),
        [
            ([1.0, 0.0, 0.0, 0.0], 1.0),
            ([3.0, 3.0, -3.0], 0.0),
            ([3.0, 4.0], (math.sqrt(2) - 7 / 5) / (math.sqrt(2) - 1)),
            ([[1, 2], [3, 4]], 2 - 10 / math.sqrt(30)),
        ],
    )
    def test_worked_by_hand(self, x, value):
        assert hoyer(torch.tensor(x)) == pytest.approx(value, abs=1e-12)

    def test_many_equal_float32(self):
        assert hoyer(torch.ones(3 << 23)) == pytest.approx(0, abs=1e-12)

    def test_undefined(self):
        with pytest.raises(Undefined, match="all entries are zero"):
            hoyer(torch.zeros(4, 4))
        for single in (3.0, 0.0):
            with pytest.raises(Undefined, match="a single entry"):
                hoyer(torch.tensor([single]))

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int32])
    def test_storage_dtype(self, dtype):
        x = (100 * stored(300, 400)).to(dtype)
        a, root = x.double().numpy(), math.sqrt(x.numel())
        expected = (root - np.abs(a).sum() / np.linalg.norm(a)) / (root - 1)
        assert hoyer(x) == pytest.approx(expected, rel=1e-12)

    @pytest.mark.parametrize("scale", [1e-320, 1e-200, 1e200, 1e307])
    def test_extreme_scales(self, scale):
        x = torch.tensor([0.0, 3.0, 4.0, 0.0], dtype=torch.float64)
        assert hoyer(x * scale) == pytest.approx(2 - 7 / 5, rel=1e-3)


class TestKurtosis:
    @pytest.mark.parametrize(
        ("x", "value"),
        [
            ([1.0, -1.0], -2.0),
            ([5.0, 5.0, 7.0, 7.0], -2.0),
            ([[0, 1], [0, 0]], 4 - 2 + 1 / 3 - 3),  # one of n differs: n - 2 + 1/(n - 1) - 3
            ([-2.0, 0.0, 0.0, 2.0], 8 / 2**2 - 3),
        ],
    )
    def test_worked_by_hand(self, x, value):
        assert kurtosis(torch.tensor(x)) == pytest.approx(value, rel=1e-12)

    def test_known_distributions(self):
        uniform = (torch.arange(100_000) + 0.5) / 100_000
        assert kurtosis(uniform) == pytest.approx(-1.2, abs=1e-6)
        assert kurtosis(stored(1000, 1000)) == pytest.approx(0, abs=0.02)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int32])
    def test_equals_scipy(self, dtype):
        x = (100 * stored(300, 400)).to(dtype)
        assert kurtosis(x) == pytest.approx(scipy.stats.kurtosis(x.double().numpy(), axis=None), rel=1e-10)

    @settings(max_examples=50)
    @given(x=not_all_zero, seed=st.integers(0, 99), scale=st.floats(1e-30, 1e30))
    def test_unchanged_by_scale_sign_and_order(self, x, seed, scale):
        if x.min() == x.max():
            return
        value = kurtosis(torch.from_numpy(x))
        assert -2 <= value <= len(x) - 2 + 1 / (len(x) - 1) - 3 + 1e-9
        moved = np.random.default_rng(seed).permutation(x) * -scale
        assert kurtosis(torch.from_numpy(moved)) == pytest.approx(value, rel=1e-6, abs=1e-9)

    def test_shifts(self):
        x = stored(500)
        assert kurtosis(x + 100) == pytest.approx(kurtosis(x), rel=1e-9)

    @pytest.mark.parametrize("constant", [0.0, 0.1, 1e300])
    @pytest.mark.parametrize("n", [1, 2, 7, 200_000])
    def test_equal_entries_are_undefined(self, n, constant):
        with pytest.raises(Undefined, match="all entries are equal"):
            kurtosis(torch.full((n,), constant, dtype=torch.float64))

    @pytest.mark.parametrize("scale", [1e-300, 1e300])
    def test_extreme_scales(self, scale):
        x = torch.tensor([-2.0, 0.0, 0.0, 2.0], dtype=torch.float64)
        assert kurtosis(x * scale) == pytest.approx(-1, rel=1e-9)

    def test_not_finite(self):
        with pytest.raises(Undefined, match="1 of 2 entries are not finite"):
            kurtosis(torch.tensor([1.0, math.nan]))


@pytest.mark.parametrize("measure", [gini, hoyer])
class TestBoth:
    @settings(max_examples=50)
    @given(x=not_all_zero, seed=st.integers(0, 99), scale=st.floats(1e-30, 1e30))
    def test_unchanged_by_scale_signs_order_and_shape(self, measure, x, seed, scale):
        value = measure(torch.from_numpy(x))
        assert 0 <= value <= 1
        rng = np.random.default_rng(seed)
        moved = rng.permutation(x) * rng.choice([-scale, scale], len(x))
        assert measure(torch.from_numpy(moved).unsqueeze(1)) == pytest.approx(value, abs=1e-12)

    def test_more_zeros_are_sparser(self, measure):
        values = [measure(torch.cat([torch.ones(4), torch.zeros(n)])) for n in (0, 4, 40)]
        assert all(a < b for a, b in itertools.pairwise(values))

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
    def test_not_finite(self, measure, bad, dtype):
        x = torch.ones(3, 4, dtype=dtype)
        x[1, 2] = bad
        with pytest.raises(Undefined, match="1 of 12 entries are not finite"):
            measure(x)

    def test_a_parameter_is_taken_as_its_values(self, measure):
        assert measure(torch.nn.Parameter(torch.eye(3))) == measure(torch.eye(3))
