import itertools
import math

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pico_analyze.components.matrix import Flagged, Matrix, Undefined
from pico_analyze.metrics.similarity import canonical_correlations, linear_cka, pwcca

e1 = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64) / 2
e2 = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64) / 2
e3 = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64) / 2


def columns(*features):
    return torch.stack(features, 1)


Y4 = columns(e1, 0.5 * e2 + 0.75**0.5 * e3)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def related(n, p, q, seed=0):
    """Two representations that share some of what they hold."""
    shared = normal(n, 2, seed=seed)
    x = shared @ normal(2, p, seed=seed + 1) + normal(n, p, seed=seed + 2)
    y = shared @ normal(2, q, seed=seed + 3) + normal(n, q, seed=seed + 4)
    return x, y


def orthogonal(n, seed):
    return torch.linalg.qr(normal(n, n, seed=seed)).Q


def unbiased_hsic_by_loops(k, l):  # noqa: E741
    """Average over distinct (i, j, q, r) of k_ij (l_ij + l_qr - 2 l_iq): the definition as a U-statistic."""
    n = len(k)
    total = sum(k[i, j] * (l[i, j] + l[q, r] - 2 * l[i, q]) for i, j, q, r in itertools.permutations(range(n), 4))
    return total / (n * (n - 1) * (n - 2) * (n - 3))


def cka_by_matrices(x, y):
    """The estimators as they are printed, over n x n matrices of the features as they come."""
    n = len(x)
    h = np.eye(n) - 1 / n
    k, l = h @ (x @ x.T).numpy() @ h, h @ (y @ y.T).numpy() @ h  # noqa: E741
    plug_in = (k * l).sum() / math.sqrt((k * k).sum() * (l * l).sum())
    k, l = (x @ x.T).numpy(), (y @ y.T).numpy()  # noqa: E741
    np.fill_diagonal(k, 0)
    np.fill_diagonal(l, 0)

    def hsic(k, l):  # noqa: E741
        middle = k.sum() * l.sum() / ((n - 1) * (n - 2))
        return (np.trace(k @ l) + middle - 2 / (n - 2) * (k @ l).sum()) / (n * (n - 3))

    return {"plug_in": plug_in, "debiased": hsic(k, l) / math.sqrt(hsic(k, k) * hsic(l, l))}


def pwcca_by_eigenproblem(x, y):
    """CCA as a generalised eigenproblem of covariance matrices; needs full column ranks."""
    x, y = (z.double().numpy() - z.double().numpy().mean(0) for z in (x, y))
    cxy = x.T @ y
    squares, directions = scipy.linalg.eigh(cxy @ np.linalg.solve(y.T @ y, cxy.T), x.T @ x)
    k = min(x.shape[1], y.shape[1])
    rho, h = np.sqrt(np.clip(squares[::-1][:k], 0, 1)), (x @ directions)[:, ::-1][:, :k]
    alpha = np.abs(h.T @ x).sum(1)
    return float(alpha @ rho / alpha.sum())


class TestCKA:
    def test_plug_in_by_hand(self):
        x = columns(3 * e1, e2)
        assert linear_cka(x, Y4, "plug_in") == pytest.approx(9.25 / math.sqrt(164), rel=1e-14)
        assert linear_cka(x + 7, 2 * Y4 - 3, "plug_in") == pytest.approx(9.25 / math.sqrt(164), rel=1e-14)

    def test_debiased_by_hand(self):
        # Of 4 samples unbiased HSIC sees three numbers, one for each way to split them into two pairs:
        # x_1 x_2 + x_3 x_4, less the mean of the three such sums.
        x, y = torch.tensor([[0.0], [1.0], [2.0], [6.0]]), torch.tensor([[0.0], [3.0], [1.0], [2.0]])

        def split_sums(z):
            a, b, c, d = z.flatten().tolist()
            sums = np.array([a * b + c * d, a * c + b * d, a * d + b * c])
            return sums - sums.mean()

        s, t = split_sums(x), split_sums(y)
        assert linear_cka(x, y) == pytest.approx(s @ t / math.sqrt((s @ s) * (t @ t)), rel=1e-12)

    @pytest.mark.parametrize(("n", "p", "q"), [(4, 2, 3), (6, 3, 2), (7, 10, 12)])
    def test_debiased_by_loops(self, n, p, q):
        x, y = related(n, p, q)
        k, l = (x @ x.T).numpy(), (y @ y.T).numpy()  # noqa: E741
        expected = unbiased_hsic_by_loops(k, l) / math.sqrt(unbiased_hsic_by_loops(k, k) * unbiased_hsic_by_loops(l, l))
        assert linear_cka(x, y) == pytest.approx(expected, rel=1e-9)

    @pytest.mark.parametrize("estimator", ["debiased", "plug_in"])
    @settings(max_examples=30, deadline=None)
    @given(n=st.integers(5, 12), p=st.integers(2, 20), q=st.integers(2, 20), seed=st.integers(0, 99))
    def test_features_or_samples_give_the_printed_formula(self, estimator, n, p, q, seed):
        x, y = related(n, p, q, seed=seed)
        assert linear_cka(x, y, estimator) == pytest.approx(cka_by_matrices(x, y)[estimator], rel=1e-9, abs=1e-10)

    @pytest.mark.parametrize("estimator", ["debiased", "plug_in"])
    @settings(max_examples=20, deadline=None)
    @given(
        n=st.integers(6, 15),
        p=st.integers(1, 6),
        q=st.integers(1, 6),
        seed=st.integers(0, 99),
        scale=st.floats(1e-20, 1e20),
    )
    def test_invariances(self, estimator, n, p, q, seed, scale):
        x, y = related(n, p, q, seed=seed)
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
        value = linear_cka(x, y, estimator)
        assert -1 <= value <= 1
        for x2, y2 in (
            (y, x),
            (-scale * x, y),
            (x, y @ orthogonal(q, seed)),
            (x + 3, y - normal(q, seed=seed)),
            (x[order], y[order]),
            (x.flip(1), y),
            (torch.cat([x, torch.full((n, 1), 5.0)], 1), y),
        ):
            assert linear_cka(x2, y2, estimator) == pytest.approx(value, rel=1e-9, abs=1e-10)
        same = linear_cka(x, scale * x @ orthogonal(p, seed), estimator)
        assert 1 - 1e-9 < same <= 1

    def test_few_samples_of_unrelated_features(self):
        pairs = [(normal(32, 512, seed=2 * i), normal(32, 512, seed=2 * i + 1)) for i in range(20)]
        for x, y in pairs:
            plug_in = linear_cka(x, y, "plug_in")
            assert plug_in > 0.9
            assert isinstance(plug_in, Flagged)
            assert "32 samples of 512 features" in plug_in.reason
        debiased = [linear_cka(x, y) for x, y in pairs]
        assert abs(np.mean(debiased)) < 0.03  # each scatters by 1 / sqrt(n (n - 3) / 2) = 0.05
        assert max(map(abs, debiased)) < 0.2
        assert not any(isinstance(value, Flagged) for value in debiased)

    def test_debiased_is_right_on_average_and_may_be_negative(self):
        values = [linear_cka(normal(8, 20, seed=i), normal(8, 20, seed=1000 + i)) for i in range(300)]
        assert min(values) < 0
        assert abs(np.mean(values)) < 0.05

    @pytest.mark.parametrize("n", [2, 3])
    def test_fewer_than_four_samples(self, n):
        with pytest.raises(Undefined, match=f"{n} samples; unbiased HSIC needs 4"):
            linear_cka(normal(n, 5), normal(n, 5, seed=1))
        assert 0 < linear_cka(normal(n, 5), normal(n, 5, seed=1), "plug_in") <= 1

    def test_samples_equally_far_apart(self):
        for seed in range(10):  # rounding leaves the HSIC a little above or below 0
            simplex = orthogonal(5, seed) + 2
            with pytest.raises(Undefined, match="unbiased HSIC of y with itself is 0"):
                linear_cka(normal(5, 3), simplex)
        with pytest.raises(Undefined, match="unbiased HSIC of x with itself is 0"):
            linear_cka(torch.eye(7)[:, :1], normal(7, 3))
        assert linear_cka(normal(5, 3), torch.eye(5), "plug_in") > 0

    def test_products_are_never_formed(self, monkeypatch):
        x, y = Matrix.product(normal(9, 4), normal(4, 50)), Matrix.product(normal(9, 6, seed=1), normal(2, 3, 40))
        dense = linear_cka(x.entries(), y.entries())
        monkeypatch.setattr(Matrix, "entries", None)
        assert linear_cka(x, y) == pytest.approx(dense, rel=1e-10)

    def test_unknown_estimator(self):
        with pytest.raises(ValueError, match="estimator: 'biased' is not allowed"):
            linear_cka(normal(5, 2), normal(5, 2), "biased")


class TestPWCCA:
    @pytest.mark.parametrize(
        ("x", "value"),
        [
            (columns(3 * e1, e2), 0.875),
            (columns(3 * e1, e1 + e2), 0.9),
            (columns(3 * e1 + e2, e2), 0.8),
            (columns(3 * e1 + 5, e2), 0.875),
            (columns(3 * e1, e2 + 5), 0.875),
        ],
    )
    def test_worked_by_hand(self, x, value):
        result = pwcca(x, Y4)
        assert result == pytest.approx(value, rel=1e-12)
        assert isinstance(result, Flagged)
        assert result.reason == "too few samples: 4 for ranks 2 and 2, which fill the space"

    def test_wider_side_gives_the_weights(self):
        x = torch.tensor([[1, 0, 2], [0, 1, 1], [3, 1, 0], [1, 2, 2], [0, 0, 1]])
        y = torch.tensor([[1, 0], [0, 1], [1, 1], [2, 1], [0, 3]])
        assert pwcca(x, y) == pytest.approx(0.7196231, abs=5e-8)
        assert pwcca(y, x, weights_from="y") == pytest.approx(0.7196231, abs=5e-8)
        assert pwcca(x, y, weights_from="y") == pytest.approx(pwcca(y, x), rel=1e-12)
        assert pwcca(x, y, weights_from="y") != pytest.approx(0.7196231, abs=1e-3)

    def test_low_rank_latent_in_many_features(self):
        latent = normal(500, 8)
        x, y = latent @ normal(8, 96, seed=1), latent @ normal(8, 96, seed=2)
        assert pwcca(x, y) == pytest.approx(1, abs=1e-12)
        assert pwcca(x.float(), y.float()) == pytest.approx(1, abs=1e-9)
        assert len(canonical_correlations(x.float(), y.float()).correlations) == 8  # not its rounding noise
        rounded = pwcca(x.bfloat16(), y.bfloat16())
        assert 0.99 < rounded < 0.9999
        assert rounded == pytest.approx(pwcca_by_eigenproblem(x.bfloat16(), y.bfloat16()), rel=1e-6)

    @settings(max_examples=30, deadline=None)
    @given(p=st.integers(1, 8), q=st.integers(1, 8), seed=st.integers(0, 99))
    def test_equals_the_eigenproblem(self, p, q, seed):
        x, y = related(30, p, q, seed=seed)
        assert pwcca(x, y) == pytest.approx(pwcca_by_eigenproblem(x, y), rel=1e-8)
        assert pwcca(x, y, weights_from="y") == pytest.approx(pwcca_by_eigenproblem(y, x), rel=1e-8)

    @settings(max_examples=20, deadline=None)
    @given(p=st.integers(1, 6), q=st.integers(1, 6), seed=st.integers(0, 99), scale=st.floats(1e-20, 1e20))
    def test_invariances(self, p, q, seed, scale):
        x, y = related(40, p, q, seed=seed)
        mixing = normal(q, q, seed=seed) + 3 * torch.eye(q)
        order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
        value = pwcca(x, y)
        assert 0 <= value <= 1
        assert not isinstance(value, Flagged)
        for x2, y2 in (
            (x, y @ mixing),
            (x, torch.cat([y, y @ mixing], 1)),
            (x * -scale, y),
            (x + 2, y - normal(q, seed=seed)),
            (x[order], y[order]),
            (x.flip(1), y),
        ):
            assert pwcca(x2, y2) == pytest.approx(value, rel=1e-7)
        assert 1 - 1e-9 < pwcca(y, y @ mixing) <= 1
        assert canonical_correlations(y, y @ mixing).correlations.max() <= 1

    def test_correlations_under_invertible_maps_of_both_sides(self):
        x, y = related(40, 5, 3)
        rho = canonical_correlations(x, y).correlations
        assert rho.shape == (3,)
        moved = canonical_correlations(x @ normal(5, 5, seed=8) + 1, y @ normal(3, 3, seed=9))
        torch.testing.assert_close(moved.correlations, rho, rtol=1e-9, atol=0)
        torch.testing.assert_close(canonical_correlations(y, x).correlations, rho, rtol=1e-12, atol=0)

    def test_variates(self):
        x, y = related(40, 5, 3)
        rho, h, g, warning = canonical_correlations(x, y)
        assert warning is None
        for variates, side in ((h, x), (g, y)):
            torch.testing.assert_close(variates.T @ variates, torch.eye(3, dtype=torch.float64))
            torch.testing.assert_close(variates.sum(0), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-13)
            centred = side - side.mean(0)
            fit = torch.linalg.lstsq(centred, variates).solution
            torch.testing.assert_close(centred @ fit, variates)
        torch.testing.assert_close(h.T @ g, torch.diag(rho))

    @pytest.mark.parametrize(("share", "rank"), [(2e-6, 2), (5e-7, 1)])
    def test_rank_tolerance(self, share, rank):
        x = torch.linalg.qr(normal(20, 2) - normal(20, 2).mean(0)).Q * torch.tensor([1.0, share])
        y = normal(20, 3, seed=1)
        assert len(canonical_correlations(x, y).correlations) == rank
        assert len(canonical_correlations(y, torch.cat([x, x, x], 1)).correlations) == rank

    def test_unrelated(self):
        assert pwcca(columns(e1, e2)[:, :1], columns(e2)) == pytest.approx(0, abs=1e-15)

    def test_products_are_never_formed(self, monkeypatch):
        x = Matrix.product(normal(40, 4) + 5, normal(4, 50, seed=1))
        y = Matrix.product(normal(40, 6, seed=2), normal(2, 3, 40, seed=3))
        dense = pwcca(x.entries(), y.entries()), pwcca(x.entries(), y.entries(), weights_from="y")
        monkeypatch.setattr(Matrix, "entries", None)
        assert pwcca(x, y) == pytest.approx(dense[0], rel=1e-10)
        assert pwcca(x, y, weights_from="y") == pytest.approx(dense[1], rel=1e-10)

    def test_too_few_samples(self):
        with pytest.raises(Undefined, match="5 samples are too few for features of rank 4"):
            pwcca(normal(5, 2), normal(5, 4, seed=1))
        with pytest.raises(Undefined, match="8 samples are too few for features of rank 7"):
            pwcca(normal(8, 200), normal(8, 2, seed=1))
        assert 0 < pwcca(normal(64, 200)[:, :3], normal(64, 4) @ normal(4, 200, seed=1)) < 1

    def test_flagged_from_where_the_spans_fill_the_space(self):
        assert not isinstance(pwcca(normal(12, 5), normal(12, 5, seed=1)), Flagged)
        assert isinstance(pwcca(normal(12, 5), normal(12, 6, seed=1)), Flagged)

    def test_both_ways_for_any_widths(self):
        x, y = normal(200, 4), normal(200, 8, seed=1)
        assert 0 < pwcca(x, y) < 1
        assert 0 < pwcca(y, x) < 1

    def test_unknown_side(self):
        with pytest.raises(ValueError, match="weights_from: 'both' is not allowed"):
            pwcca(normal(9, 2), normal(9, 2), weights_from="both")


@pytest.mark.parametrize("measure", [linear_cka, pwcca])
class TestBoth:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int16])
    def test_storage_dtype(self, measure, dtype):
        x, y = ((10 * z).to(dtype) for z in related(40, 6, 5))
        assert measure(x, y) == pytest.approx(measure(x.double(), y.double()), rel=1e-12)
        assert measure(x, y) == pytest.approx(measure(Matrix.dense(x), Matrix.dense(y)), rel=1e-12)

    @pytest.mark.parametrize("constant", [0.0, 0.1, 1e8])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_constant_features(self, measure, constant, dtype):
        flat = torch.full((10, 3), constant, dtype=dtype)
        with pytest.raises(Undefined, match="every feature of y is constant"):
            measure(normal(10, 3), flat)
        product = Matrix.product(flat, normal(3, 20))
        with pytest.raises(Undefined, match="every feature of x is constant"):
            measure(product, normal(10, 3))

    def test_other_samples(self, measure):
        with pytest.raises(Undefined, match="10 samples of x, 9 of y"):
            measure(normal(10, 3), normal(9, 3))

    def test_vectors(self, measure):
        with pytest.raises(Undefined, match="a vector, not a matrix"):
            measure(normal(10), normal(10))

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_not_finite(self, measure, bad):
        x = normal(10, 3)
        x[2, 1] = bad
        with pytest.raises(Undefined, match="1 of 30 entries are not finite"):
            measure(normal(10, 3), x)

    @pytest.mark.parametrize("scale", [1e-150, 1e150])
    def test_extreme_scales(self, measure, scale):
        x, y = related(40, 6, 5)
        assert measure(x * scale, y / scale) == pytest.approx(measure(x, y), rel=1e-9)

    def test_single_feature(self, measure):
        x, y = related(40, 1, 1)
        correlation = float(np.corrcoef(x.flatten(), y.flatten())[0, 1])
        if measure is pwcca:
            assert pwcca(x, y) == pytest.approx(abs(correlation), rel=1e-12)
        else:
            assert linear_cka(x, y, "plug_in") == pytest.approx(correlation**2, rel=1e-12)
