import math

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pico_analyze.components.matrix import Flagged, Matrix, Undefined, largest_magnitude, singular_values

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def normal(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def graded(m, n, condition, seed=0):
    """(m, n) float64 with singular values 1 ... 1/condition, evenly spaced on a log scale."""
    k = min(m, n)
    u = torch.linalg.qr(normal(m, k, seed=seed)).Q
    v = torch.linalg.qr(normal(n, k, seed=seed + 1)).Q
    return (u * torch.logspace(0, -math.log10(condition), k, dtype=torch.float64)) @ v.T


def lapack(x):
    return torch.from_numpy(scipy.linalg.svdvals(x.double().numpy()))


def assert_spectrum(values, expected, rtol):
    torch.testing.assert_close(values, expected, rtol=rtol, atol=1e-15 * float(expected[0]))


class TestDense:
    def test_describes_itself(self):
        matrix = Matrix.dense(torch.ones(3, 5, dtype=torch.bfloat16))
        assert (matrix.shape, matrix.n_values, matrix.dtype) == ((3, 5), 3, "bfloat16")
        assert Matrix.dense(torch.ones(3, 5), dtype="float16").dtype == "float16"

    def test_entries_are_the_stored_tensor(self):
        tensor = normal(3, 5, dtype=torch.bfloat16)
        entries = Matrix.dense(tensor).entries()
        assert entries.dtype == torch.bfloat16
        assert entries.data_ptr() == tensor.data_ptr()

    @pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (6, 6), (5, 12), (12, 5)])
    @pytest.mark.parametrize("dtype", [*DTYPES, torch.int8, torch.int64])
    def test_spectrum_is_that_of_the_stored_numbers(self, shape, dtype):
        tensor = (10 * normal(*shape)).to(dtype)
        spectrum = Matrix.dense(tensor).spectrum()
        assert spectrum.values.dtype == torch.float64
        assert spectrum.shape == shape
        assert_spectrum(spectrum.values, lapack(tensor), rtol=1e-10)

    @pytest.mark.parametrize("exponent", range(11))
    @pytest.mark.parametrize("shape", [(40, 40), (30, 70), (70, 30)])
    def test_graded_spectra(self, shape, exponent):
        tensor = graded(*shape, 10.0**exponent)
        expected = torch.logspace(0, -exponent, min(shape), dtype=torch.float64)
        # The matrix itself was rounded: its smallest value is known to 1e-16 condition.
        torch.testing.assert_close(singular_values(tensor), expected, rtol=1e-6, atol=1e-14)

    def test_values_lost_by_the_gram_matrix_are_found(self):
        tensor = graded(40, 60, 1e9)
        gram = torch.linalg.eigvalsh(tensor @ tensor.T).clamp(min=0).sqrt()
        assert abs(float(gram[0]) / 1e-9 - 1) > 0.1  # what the test is about
        assert float(singular_values(tensor)[-1]) == pytest.approx(1e-9, rel=1e-5)

    @pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e-20, 1e20, 1e160, 1e300])
    def test_scale_neither_overflows_nor_vanishes(self, scale):
        tensor = normal(8, 5)
        torch.testing.assert_close(singular_values(tensor * scale) / scale, singular_values(tensor), rtol=1e-12, atol=0)

    def test_rounding_below_the_tolerance_is_zero(self):
        values = Matrix.dense(torch.tensor([[1.0, 2.0], [2.0, 4.0]])).spectrum().values
        assert values.tolist() == [pytest.approx(5.0, rel=1e-15), 0.0]

    def test_tolerance_counts_the_longer_side(self):
        tensor = torch.zeros(2, 1000, dtype=torch.float64)
        tensor[0, 0], tensor[1, 1] = 1.0, 2e-13  # between 2 eps and 1000 eps
        assert Matrix.dense(tensor).spectrum().values.tolist() == [1.0, 0.0]
        assert Matrix.dense(tensor[:, :2]).spectrum().values.tolist() == [1.0, pytest.approx(2e-13)]

    def test_spectrum_is_computed_once(self):
        matrix = Matrix.dense(normal(4, 4))
        assert matrix.spectrum() is matrix.spectrum()

    def test_zeros(self):
        assert Matrix.dense(torch.zeros(3, 4)).spectrum().values.tolist() == [0.0, 0.0, 0.0]

    @pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4)])
    def test_only_a_matrix_has_a_spectrum_and_rows(self, shape):
        matrix = Matrix.dense(torch.ones(shape))
        assert matrix.n_values == 0
        for ask in (matrix.spectrum, matrix.rows):
            with pytest.raises(Undefined, match="not a matrix"):
                ask()

    def test_vector_reason(self):
        with pytest.raises(Undefined) as caught:
            Matrix.dense(torch.ones(5)).spectrum()
        assert caught.value.reason == "a vector, not a matrix"

    def test_non_finite_entries_are_counted(self):
        tensor = torch.ones(3, 4)
        tensor[0, 0], tensor[1, 2] = math.nan, -math.inf
        with pytest.raises(Undefined, match="2 of 12 entries are not finite"):
            Matrix.dense(tensor).spectrum()

    def test_a_parameter_is_taken_as_its_values(self):
        weight = torch.nn.Parameter(torch.tensor([[3.0, 0.0], [0.0, 4.0]], dtype=torch.float64))
        assert Matrix.dense(weight).spectrum().values.tolist() == [4.0, 3.0]
        assert singular_values(weight).tolist() == [4.0, 3.0]


class TestProduct:
    def test_describes_itself(self):
        matrix = Matrix.product(normal(6, 2, dtype=torch.float32), normal(2, 5, dtype=torch.float32))
        assert (matrix.shape, matrix.n_values, matrix.dtype) == ((6, 5), 2, "float32")
        assert Matrix.product(normal(3, 4), normal(4, 5)).n_values == 3
        assert Matrix.product(normal(6, 4), normal(4, 5), n_values=2).n_values == 2
        assert len(Matrix.product(normal(6, 4), normal(4, 5), n_values=2).spectrum().values) == 2
        assert Matrix.product(normal(6, 4), normal(2, 2, 5)).shape == (6, 10)

    def test_ov_circuit_by_hand(self):
        value, output = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0], [1.0]])
        matrix = Matrix.product(output, value)
        assert matrix.entries().tolist() == [[0.0, 0.0], [1.0, 0.0]]
        assert matrix.spectrum().values.tolist() == [1.0]

    def test_ov_gradient_by_hand(self):
        o, v, d_o, d_v = 2.0, 3.0, 3.0, 2.0
        matrix = Matrix.product(torch.tensor([[o, d_o]]), torch.tensor([[d_v], [v]]))
        assert matrix.entries().tolist() == [[13.0]]
        assert matrix.spectrum().values.tolist() == [pytest.approx(13.0, rel=1e-14)]

    @pytest.mark.parametrize("dtype", DTYPES)
    @settings(max_examples=25, deadline=None)
    @given(
        m=st.integers(1, 12), r=st.integers(1, 6), n=st.integers(1, 12), b=st.integers(1, 3), seed=st.integers(0, 99)
    )
    def test_equals_the_product_multiplied_out(self, dtype, m, r, n, b, seed):
        left, right = normal(m, b * r, seed=seed, dtype=dtype), normal(b, r, n, seed=seed + 1, dtype=dtype)
        matrix = Matrix.product(left, right)
        blocks = zip(left.double().split(r, 1), right.double(), strict=True)
        dense = torch.cat([left_b @ right_b for left_b, right_b in blocks], dim=1)
        basis = normal(m, 3, seed=seed + 2)

        assert matrix.shape == tuple(dense.shape)
        torch.testing.assert_close(matrix.entries(), dense)
        torch.testing.assert_close(matrix.rows() @ matrix.rows().T, dense @ dense.T, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(matrix.project(basis), basis.T @ dense, rtol=1e-12, atol=1e-12)
        expected = lapack(dense)[: matrix.n_values]
        # A value that is small by chance is known to rounding of the largest.
        torch.testing.assert_close(matrix.spectrum().values, expected, rtol=1e-9, atol=1e-13 * float(expected[0]))

    def test_block_diagonal_right_factor_is_the_same_matrix(self):
        left, blocks = normal(6, 8), normal(4, 2, 5)
        stacked, diagonal = Matrix.product(left, blocks), Matrix.product(left, torch.block_diag(*blocks))
        torch.testing.assert_close(stacked.entries(), diagonal.entries())
        assert_spectrum(stacked.spectrum().values, diagonal.spectrum().values, rtol=1e-12)

    @pytest.mark.parametrize("exponent", range(10))
    def test_graded_spectra(self, exponent):
        left = graded(50, 8, 10.0 ** (exponent / 2))
        right = graded(8, 60, 10.0 ** (exponent / 2), seed=5)
        expected = lapack(left @ right)[:8]
        torch.testing.assert_close(Matrix.product(left, right).spectrum().values, expected, rtol=1e-6, atol=0)

    @pytest.mark.parametrize("unbalance", [1e-12, 1e-6, 1e6, 1e12])
    def test_scale_of_the_factors_does_not_matter(self, unbalance):
        # As for gradients, [O, dO] [dV; V]: dO and dV are many orders smaller than O and V.
        o, d_o, v, d_v = normal(20, 4), normal(20, 4, seed=1), normal(4, 20, seed=2), normal(4, 20, seed=3)
        even = Matrix.product(torch.cat([o, d_o], 1), torch.cat([d_v, v]))
        uneven = Matrix.product(torch.cat([o, d_o * unbalance], 1), torch.cat([d_v * unbalance, v]))
        torch.testing.assert_close(uneven.spectrum().values / unbalance, even.spectrum().values, rtol=1e-10, atol=0)

    @pytest.mark.parametrize("exponent", range(9))
    def test_the_right_factor_is_reduced_as_accurately_whatever_its_condition(self, exponent):
        """By Cholesky where that is accurate, otherwise by QR."""
        right = graded(8, 60, 10.0**exponent)
        expected = torch.logspace(0, -exponent, 8, dtype=torch.float64)
        torch.testing.assert_close(
            Matrix.product(torch.eye(8, dtype=torch.float64), right).spectrum().values, expected, rtol=1e-6, atol=0
        )

    @pytest.mark.parametrize(
        "right", [torch.ones(3, 20), torch.zeros(3, 20), normal(3, 20) * 1e-300, normal(3, 20) * 1e200]
    )
    def test_right_factors_that_cholesky_cannot_reduce(self, right):
        left = normal(9, 3) * 1e-3
        triangle = torch.linalg.qr(right.double().T, mode="r").R
        rows = Matrix.product(left, right).rows()
        assert rows.isfinite().all()
        torch.testing.assert_close(rows, left @ triangle.T, rtol=1e-10, atol=0)

    def test_structural_zeros_do_not_count(self):
        value, output = normal(16, 64), normal(64, 16, seed=1)
        spectrum = Matrix.product(output, value).spectrum()
        assert spectrum.shape == (64, 64)
        assert len(spectrum.values) == 16
        assert spectrum.values[-1] > 0

    @pytest.mark.parametrize("broken", ["left", "right"])
    def test_a_factor_that_is_not_finite(self, broken):
        factors = {"left": torch.ones(3, 2), "right": torch.ones(2, 4)}
        factors[broken][0, 0] = math.inf
        matrix = Matrix.product(**factors)
        for ask in (matrix.spectrum, matrix.rows):
            with pytest.raises(Undefined, match=r"1 of [68] entries are not finite"):
                ask()


def test_largest_magnitude():
    assert largest_magnitude(torch.tensor([1.0, -4.0, 3.0])) == 4.0
    assert largest_magnitude(torch.tensor([-128, 127], dtype=torch.int8)) == 128.0
    with pytest.raises(Undefined, match="no entries"):
        largest_magnitude(torch.empty(0, 3))


def test_flagged_is_a_float_with_a_reason():
    value = Flagged(0.25, "few samples")
    assert (value, value.reason, value * 2) == (0.25, "few samples", 0.5)
    assert np.float64(value) == 0.25
