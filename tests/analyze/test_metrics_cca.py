import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from representations import normal, related

from pico_analyze.components.matrix import Flagged, Matrix, Undefined
from pico_analyze.metrics.cca import canonical_correlations, mean_cca, pwcca, svcca

e1 = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64) / 2
e2 = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64) / 2
e3 = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64) / 2


def columns(*features):
    return torch.stack(features, 1)


Y4 = columns(e1, 0.5 * e2 + 0.75**0.5 * e3)


def orthogonal(n, seed):
    return torch.linalg.qr(normal(n, n, seed=seed)).Q


def pwcca_by_eigenproblem(x, y):
    """CCA as a generalised eigenproblem of covariance matrices; needs full column ranks."""
    x, y = (z.double().numpy() - z.double().numpy().mean(0) for z in (x, y))
    cxy = x.T @ y
    squares, directions = scipy.linalg.eigh(cxy @ np.linalg.solve(y.T @ y, cxy.T), x.T @ x)
    k = min(x.shape[1], y.shape[1])
    rho, h = np.sqrt(np.clip(squares[::-1][:k], 0, 1)), (x @ directions)[:, ::-1][:, :k]
    alpha = np.abs(h.T @ x).sum(1)
    return float(alpha @ rho / alpha.sum())


def correlations_by_eigenproblem(x, y):
    """Canonical correlations from the eigenvalues of S_xx^-1 S_xy S_yy^-1 S_yx; needs full column ranks."""
    joint = np.cov(x.double().numpy(), y.double().numpy(), rowvar=False)
    p = x.shape[1]
    xx, xy, yy = joint[:p, :p], joint[:p, p:], joint[p:, p:]
    squares = np.linalg.eigvals(np.linalg.solve(xx, xy) @ np.linalg.solve(yy, xy.T)).real
    return np.sqrt(np.clip(np.sort(squares)[::-1][: min(x.shape[1], y.shape[1])], 0, 1))


def principal(x, variance):
    """The scores of the principal components that hold the variance, by an eigenproblem of the covariance."""
    values, vectors = np.linalg.eigh(np.cov(x.double().numpy(), rowvar=False))
    values, vectors = values[::-1], vectors[:, ::-1]
    kept = 1 + int(np.sum(np.cumsum(values) / values.sum() < variance - 1e-12))
    return torch.from_numpy(x.double().numpy() @ vectors[:, :kept])


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


class TestMeanCCA:
    def test_by_hand(self):
        x = columns(3 * e1, e2)
        assert mean_cca(x[:, :1], Y4[:, :1]) == pytest.approx(1)  # e1 and e1
        assert mean_cca(x, Y4) == pytest.approx((1 + 0.5) / 2, rel=1e-12)  # e1 with e1, e2 with .5 e2 + .87 e3
        assert mean_cca(x, Y4).reason == "too few samples: 4 for ranks 2 and 2, which fill the space"

    @settings(max_examples=30, deadline=None)
    @given(p=st.integers(1, 8), q=st.integers(1, 8), seed=st.integers(0, 99))
    def test_equals_the_eigenproblem(self, p, q, seed):
        x, y = related(30, p, q, seed=seed)
        assert mean_cca(x, y) == pytest.approx(correlations_by_eigenproblem(x, y).mean(), rel=1e-6)

    @settings(max_examples=20, deadline=None)
    @given(p=st.integers(1, 6), q=st.integers(1, 6), seed=st.integers(0, 99), scale=st.floats(1e-20, 1e20))
    def test_invariances(self, p, q, seed, scale):
        x, y = related(40, p, q, seed=seed)
        value = mean_cca(x, y)
        assert 0 <= value <= 1
        mix_x, mix_y = normal(p, p, seed=seed) + 3 * torch.eye(p), normal(q, q, seed=seed + 1) + 3 * torch.eye(q)
        for x2, y2 in ((y, x), (x @ mix_x * scale, y @ mix_y), (x + 2, y.flip(1)), (x.flip(0), y.flip(0))):
            assert mean_cca(x2, y2) == pytest.approx(value, rel=1e-7)
        assert mean_cca(x, x @ mix_x) == pytest.approx(1, rel=1e-9)


class TestSVCCA:
    def test_drops_what_has_little_variance(self):
        """The first directions agree, the second, of 1 % of the deviation, do not."""
        common = normal(60, 1)
        x = torch.cat([common, 0.01 * normal(60, 1, seed=1)], 1)
        y = torch.cat([common, 0.01 * normal(60, 1, seed=2)], 1)
        assert svcca(x, y) > 0.999
        assert svcca(x, y, 1.0) == pytest.approx(mean_cca(x, y), rel=1e-9)
        assert mean_cca(x, y) < 0.7

    @settings(max_examples=30, deadline=None)
    @given(
        p=st.integers(2, 8), q=st.integers(2, 8), seed=st.integers(0, 99), variance=st.sampled_from([0.3, 0.8, 0.99, 1])
    )
    def test_second_formula(self, p, q, seed, variance):
        x, y = related(30, p, q, seed=seed)
        expected = correlations_by_eigenproblem(principal(x, variance), principal(y, variance)).mean()
        assert svcca(x, y, variance) == pytest.approx(expected, rel=1e-6)

    @pytest.mark.parametrize("shape", [(40, 6), (12, 60)])
    def test_tall_and_wide(self, shape):
        n, p = shape
        x, y = normal(n, 2) @ normal(2, p, seed=1), normal(n, 2) @ normal(2, p, seed=2)  # one latent, two maps
        noise = 1e-3 * normal(n, p, seed=3)
        assert svcca(x + noise, y) == pytest.approx(1, abs=1e-4)

    @settings(max_examples=20, deadline=None)
    @given(p=st.integers(1, 6), q=st.integers(1, 6), seed=st.integers(0, 99), scale=st.floats(1e-20, 1e20))
    def test_invariances(self, p, q, seed, scale):
        x, y = related(40, p, q, seed=seed)
        value = svcca(x, y, 0.9)
        assert 0 <= value <= 1
        moved = x @ orthogonal(p, seed) * scale + scale
        for x2, y2 in ((y, x), (moved, y), (x, y.flip(1)), (x.flip(0), y.flip(0))):
            assert svcca(x2, y2, 0.9) == pytest.approx(value, rel=1e-7)

    def test_keeps_at_least_one_direction(self):
        x, y = related(40, 5, 5)
        first = correlations_by_eigenproblem(principal(x, 0.0), principal(y, 0.0))
        assert first.shape == (1,)
        assert svcca(x, y, 0.0) == pytest.approx(first[0], rel=1e-9)

    def test_few_samples_of_few_kept_directions_have_a_value(self):
        x, y = related(12, 40, 40)
        with pytest.raises(Undefined, match="12 samples are too few"):
            mean_cca(x, y)
        assert 0 < svcca(x, y, 0.5) <= 1


@pytest.mark.parametrize("measure", [pwcca, mean_cca, svcca])
class TestEach:
    def test_single_feature(self, measure):
        x, y = related(40, 1, 1)
        correlation = float(np.corrcoef(x.flatten(), y.flatten())[0, 1])
        assert measure(x, y) == pytest.approx(abs(correlation), rel=1e-12)

    def test_no_product_is_formed(self, measure, monkeypatch):
        x, y = Matrix.product(normal(40, 4), normal(4, 50, seed=1)), Matrix.product(normal(40, 3, seed=2), normal(3, 9))
        dense = measure(x.entries(), y.entries())
        monkeypatch.setattr(Matrix, "entries", None)
        assert measure(x, y) == pytest.approx(dense, rel=1e-9)
