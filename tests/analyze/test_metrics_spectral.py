import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pico_analyze.components.matrix import Matrix, Undefined
from pico_analyze.metrics.spectral import (
    condition_number,
    effective_rank,
    norm,
    participation_ratio,
    per,
    spectral_entropy,
    stable_rank,
)

NORMS = ("frobenius", "nuclear", "spectral", "inf", "inf_operator")


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def orthogonal(n, seed):
    return torch.linalg.qr(normal(n, n, seed=seed)).Q


def spectrum(x):
    return Matrix.dense(x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=torch.float64)).spectrum().values


def shannon_per(x):
    """A second formula: the geometric mean of 1/p, each with weight p, over plain numpy singular values."""
    s = np.linalg.svd(x.double().numpy(), compute_uv=False)
    p = s[s > 0] / s.sum()
    return float(np.prod(p**-p)) / len(s)


class TestPER:
    @pytest.mark.parametrize(
        ("x", "value"),
        [
            (torch.diag(torch.tensor([2.0, 2.0, 0.0, 0.0])), 0.5),
            ([[1.0, 0.0], [0.0, 0.0]], 0.5),
            (torch.diag(torch.tensor([3.0, 1.0, 0.0])), 0.5849218),
            (torch.ones(3, 3), 1 / 3),
            (torch.eye(5), 1.0),
            ([[7.0]], 1.0),
            ([[3.0, 4.0]], 1.0),
        ],
    )
    def test_known_values(self, x, value):
        assert per(spectrum(x)) == pytest.approx(value, abs=5e-8)

    def test_equal_values_stay_in_range(self):
        for n in range(1, 300):
            assert 1 - 1e-12 < per(torch.full((n,), 0.1)) <= 1

    def test_zeros_are_undefined(self):
        with pytest.raises(Undefined, match="all singular values are zero"):
            per(spectrum(torch.zeros(3, 3)))

    @pytest.mark.parametrize("shape", [(1, 4), (9, 9), (20, 7), (7, 20)])
    def test_second_formula(self, shape):
        x = normal(*shape)
        assert per(spectrum(x)) == pytest.approx(shannon_per(x), rel=1e-12)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_storage_dtype(self, dtype):
        x = normal(40, 60, dtype=dtype)
        assert per(spectrum(x)) == pytest.approx(shannon_per(x), rel=1e-12)

    def test_order_of_the_values_does_not_matter(self):
        assert per(torch.tensor([0.0, 1.0, 3.0])) == per(torch.tensor([3.0, 1.0, 0.0]))

    def test_a_head_counts_head_dim_values(self):
        # Two equal non-zero values of a 6 x 6 circuit of head_dim 2 use all that the head has.
        left = torch.eye(6)[:, :2]
        assert per(Matrix.product(left, left.T).spectrum().values) == pytest.approx(1.0)


class TestConditionNumber:
    @pytest.mark.parametrize(
        ("x", "value"),
        [
            ([[2.0, 0.0], [0.0, 8.0]], 4.0),
            ([[5.0]], 1.0),
            ([[3.0, 4.0]], 1.0),
            ([[1.0, 1.0], [0.0, 1.0]], (3 + 5**0.5) / 2),
        ],
    )
    def test_worked_by_hand(self, x, value):
        assert condition_number(spectrum(x)) == pytest.approx(value, rel=1e-12)

    @pytest.mark.parametrize("x", [[[1.0, 2.0], [2.0, 4.0]], [[1.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]])
    def test_numerically_singular(self, x):
        with pytest.raises(Undefined) as caught:
            condition_number(spectrum(x))
        assert caught.value.reason == "numerically singular"
        with pytest.raises(Undefined, match="numerically singular"):
            condition_number(torch.linalg.svdvals(torch.tensor(x, dtype=torch.float64)))

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("shape", [(30, 30), (20, 50)])
    def test_equals_numpy(self, dtype, shape):
        x = normal(*shape, dtype=dtype)
        assert condition_number(spectrum(x)) == pytest.approx(np.linalg.cond(x.double().numpy()), rel=1e-9)

    def test_structural_zeros_of_a_head_do_not_make_it_singular(self):
        left, right = normal(64, 16), normal(16, 64, seed=1)
        dense = np.linalg.svd((left @ right).numpy(), compute_uv=False)
        assert condition_number(Matrix.product(left, right).spectrum().values) == pytest.approx(
            dense[0] / dense[15], rel=1e-9
        )


class TestRanks:
    @pytest.mark.parametrize("measure", [stable_rank, effective_rank, participation_ratio])
    def test_counts_equal_directions(self, measure):
        for k in range(1, 6):
            x = torch.diag(torch.tensor([3.0] * k + [0.0] * (6 - k)))
            counted = measure(x) if measure is participation_ratio else measure(spectrum(x))
            assert counted == pytest.approx(k, rel=1e-12)
        with pytest.raises(Undefined, match="all singular values are zero"):
            measure(torch.zeros(3, 3) if measure is participation_ratio else torch.zeros(3))

    def test_by_hand(self):
        x = torch.diag(torch.tensor([2.0, 1.0, 1.0]))
        assert stable_rank(spectrum(x)) == pytest.approx(1.5)
        assert participation_ratio(x) == pytest.approx(36 / 18)
        assert effective_rank(spectrum(x)) == pytest.approx(2**1.5)  # entropy of 1/2, 1/4, 1/4 is 1.5 bits
        # Shares of energy 4/6, 1/6, 1/6.
        entropy = -(2 / 3) * math.log(2 / 3) - (1 / 3) * math.log(1 / 6)
        assert spectral_entropy(spectrum(x)) == pytest.approx(entropy / math.log(3))

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int16])
    @pytest.mark.parametrize("shape", [(12, 12), (20, 7), (7, 20)])
    def test_second_formula(self, dtype, shape):
        x = (10 * normal(*shape)).to(dtype)
        a = x.double().numpy()
        s = np.linalg.svd(a, compute_uv=False)
        assert stable_rank(spectrum(x)) == pytest.approx(
            (np.linalg.norm(a, "fro") / np.linalg.norm(a, 2)) ** 2, rel=1e-12
        )
        assert participation_ratio(x) == pytest.approx(np.sum(a * a) ** 2 / np.sum((a @ a.T) ** 2), rel=1e-12)
        covariance = np.linalg.eigvalsh(np.cov(a, rowvar=False))
        assert participation_ratio(x, "columns") == pytest.approx(
            covariance.sum() ** 2 / (covariance**2).sum(), rel=1e-12
        )
        assert effective_rank(spectrum(x)) == pytest.approx(math.exp(scipy.stats.entropy(s)), rel=1e-12)
        expected = scipy.stats.entropy(s**2, base=len(s))
        assert spectral_entropy(spectrum(x)) == pytest.approx(expected, rel=1e-12)

    def test_per_is_the_share(self):
        values = spectrum(normal(9, 14))
        assert effective_rank(values) == pytest.approx(9 * per(values), rel=1e-14)

    def test_limits_stay_in_range(self):
        for n in range(2, 200):
            values = torch.full((n,), 0.1, dtype=torch.float64)
            assert n - 1e-9 < effective_rank(values) <= n
            assert 1 - 1e-12 < spectral_entropy(values) <= 1
        one = torch.tensor([0.3, 0.0])
        assert (effective_rank(one), stable_rank(one), spectral_entropy(one)) == (1, 1, 0)
        with pytest.raises(Undefined, match="a single singular value"):
            spectral_entropy(torch.tensor([2.0]))

    def test_centring(self):
        x = normal(30, 6)
        assert participation_ratio(x + 1e3) == pytest.approx(1, abs=1e-3)  # the mean is the only direction
        assert participation_ratio(x + 1e3, "columns") == pytest.approx(participation_ratio(x, "columns"), rel=1e-9)
        with pytest.raises(Undefined, match="every feature of x is constant"):
            participation_ratio(torch.full((5, 3), 0.1), "columns")
        with pytest.raises(Undefined, match="every feature of x is constant"):
            participation_ratio(torch.ones(1, 3), "columns")
        with pytest.raises(ValueError, match="centre: 'rows' is not allowed"):
            participation_ratio(x, "rows")

    @pytest.mark.parametrize("centre", ["none", "columns"])
    def test_products_are_never_formed(self, centre, monkeypatch):
        product = Matrix.product(normal(12, 3), normal(3, 10, seed=1))
        expected = participation_ratio(product.entries(), centre)
        monkeypatch.setattr(Matrix, "entries", None)
        assert participation_ratio(product, centre) == pytest.approx(expected, rel=1e-12)


class TestNorm:
    def test_worked_by_hand(self):
        x = torch.tensor([[1.0, 2.0], [3.0, -4.0]])
        # x^T x = [[10, -10], [-10, 20]]: eigenvalues 15 +- 5 sqrt(5)
        large, small = math.sqrt(15 + 5 * 5**0.5), math.sqrt(15 - 5 * 5**0.5)
        expected = {
            "frobenius": math.sqrt(30),
            "nuclear": large + small,
            "spectral": large,
            "inf": 4.0,
            "inf_operator": 7.0,
        }
        for norm_type, value in expected.items():
            assert norm(x, norm_type) == pytest.approx(value, rel=1e-14), norm_type

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int16])
    def test_equals_numpy(self, dtype):
        x = (10 * normal(20, 30)).to(dtype)
        a = x.double().numpy()
        numpy_order = {"frobenius": "fro", "nuclear": "nuc", "spectral": 2, "inf_operator": np.inf}
        for norm_type, order in numpy_order.items():
            assert norm(x, norm_type) == pytest.approx(np.linalg.norm(a, order), rel=1e-12), norm_type
        assert norm(x, "inf") == np.abs(a).max()

    @pytest.mark.parametrize("norm_type", NORMS)
    def test_product_equals_its_dense_product(self, norm_type):
        left, right = normal(12, 6), normal(2, 3, 10, seed=1)
        product = Matrix.product(left, right)
        assert norm(product, norm_type) == pytest.approx(norm(product.entries(), norm_type), rel=1e-12)

    @pytest.mark.parametrize("norm_type", ["frobenius", "nuclear", "spectral"])
    def test_products_are_never_formed(self, norm_type, monkeypatch):
        product = Matrix.product(normal(12, 3), normal(3, 10, seed=1))
        monkeypatch.setattr(Matrix, "entries", None)
        assert norm(product, norm_type) > 0

    def test_frobenius_of_a_product_that_nearly_cancels(self):
        # [O, dO] [dV; V] whose two terms agree to 6 digits but for the sign.
        o, v = normal(20, 4), normal(4, 20, seed=1)
        left, right = torch.cat([o, -o], 1), torch.cat([v, v + 1e-6 * normal(4, 20, seed=2)])
        assert norm(Matrix.product(left, right), "frobenius") == pytest.approx(float((left @ right).norm()), rel=1e-8)

    def test_ov_circuit_is_not_its_transposed_order(self):
        value, output = normal(16, 64), normal(64, 16, seed=1)
        circuit = Matrix.product(output, value)
        for norm_type, order in (("nuclear", "nuc"), ("frobenius", "fro")):
            exact = np.linalg.norm((output @ value).numpy(), order)
            assert norm(circuit, norm_type) == pytest.approx(exact, rel=1e-12)
            assert norm(value @ output, norm_type) < exact / 1.5

    @pytest.mark.parametrize("norm_type", NORMS)
    def test_zeros(self, norm_type):
        assert norm(torch.zeros(3, 4), norm_type) == 0.0

    def test_a_vector_has_entries_only(self):
        x = torch.tensor([3.0, -4.0])
        assert (norm(x, "frobenius"), norm(x, "inf")) == (5.0, 4.0)
        for norm_type in ("nuclear", "spectral", "inf_operator"):
            with pytest.raises(Undefined, match="a vector, not a matrix"):
                norm(x, norm_type)

    @pytest.mark.parametrize("norm_type", NORMS)
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_not_finite(self, norm_type, bad):
        x = torch.ones(3, 4)
        x[1, 2] = bad
        with pytest.raises(Undefined, match="1 of 12 entries are not finite"):
            norm(x, norm_type)

    def test_many_float32_entries(self):
        # Summed in float32 this is off by 1e-3.
        x = torch.full((3 << 22,), 0.1)
        assert norm(x, "frobenius") == pytest.approx(float(x[0]) * math.sqrt(3 << 22), rel=1e-12)

    def test_extreme_scales(self):
        x = torch.tensor([[3.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
        for scale in (1e-200, 1e200):
            for norm_type, value in (("frobenius", 5.0), ("nuclear", 7.0), ("spectral", 4.0)):
                assert norm(x * scale, norm_type) / scale == pytest.approx(value, rel=1e-12)

    def test_unknown_type(self):
        with pytest.raises(ValueError, match=r"norm_type: 'fro' is not allowed.*frobenius"):
            norm(torch.eye(2), "fro")


@settings(max_examples=25, deadline=None)
@given(m=st.integers(1, 10), n=st.integers(1, 10), seed=st.integers(0, 99), scale=st.floats(1e-20, 1e20))
def test_invariances(m, n, seed, scale):
    x = normal(m, n, seed=seed)
    rotated = orthogonal(m, seed + 1) @ x @ orthogonal(n, seed + 2)
    for measure in (per, condition_number, stable_rank, effective_rank):
        value = measure(spectrum(x))
        for other in (x * scale, x.T, rotated, x.flip(0), x.flip(1)):
            assert measure(spectrum(other)) == pytest.approx(value, rel=1e-6)
    for norm_type in ("frobenius", "nuclear", "spectral"):
        value = norm(x, norm_type)
        assert norm(rotated, norm_type) == pytest.approx(value, rel=1e-10)
        assert norm(x.T, norm_type) == pytest.approx(value, rel=1e-10)
    for norm_type in NORMS:
        value = norm(x, norm_type)
        assert norm(x * -scale, norm_type) == pytest.approx(value * scale, rel=1e-10)
        assert norm(x.flip(0), norm_type) == pytest.approx(value, rel=1e-12)
        assert norm(x.flip(1), norm_type) == pytest.approx(value, rel=1e-12)


@settings(max_examples=25, deadline=None)
@given(m=st.integers(2, 10), n=st.integers(2, 10), seed=st.integers(0, 99))
def test_ranks_are_ordered(m, n, seed):
    """Rényi entropies of one distribution fall with their order: exp(H_1), exp(H_2), exp(H_inf) of the energies."""
    x = normal(m, n, seed=seed)
    rank, k = effective_rank(spectrum(x)), min(m, n)
    energy_rank = math.exp(spectral_entropy(spectrum(x)) * math.log(k))
    assert 1 <= stable_rank(spectrum(x)) <= participation_ratio(x) * (1 + 1e-12)
    assert participation_ratio(x) <= energy_rank * (1 + 1e-12)
    assert energy_rank <= rank * (1 + 1e-12)
    assert rank <= k
    rotated = orthogonal(m, seed + 1) @ x @ orthogonal(n, seed + 2)
    assert participation_ratio(rotated) == pytest.approx(participation_ratio(x), rel=1e-9)
    assert spectral_entropy(spectrum(rotated)) == pytest.approx(spectral_entropy(spectrum(x)), rel=1e-9)


@settings(max_examples=25, deadline=None)
@given(m=st.integers(1, 10), n=st.integers(1, 10), seed=st.integers(0, 99))
def test_inequalities_between_norms(m, n, seed):
    x = normal(m, n, seed=seed)
    frobenius, nuclear, spectral, entry, operator = (norm(x, norm_type) for norm_type in NORMS)
    slack = 1 + 1e-12
    assert entry <= spectral * slack
    assert spectral <= frobenius * slack
    assert frobenius <= nuclear * slack
    assert nuclear <= math.sqrt(min(m, n)) * frobenius * slack
    assert spectral <= math.sqrt(m) * operator * slack
    assert operator <= math.sqrt(n) * spectral * slack
