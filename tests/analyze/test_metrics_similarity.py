import itertools
import math
from functools import partial

import numpy as np
import pytest
import scipy.linalg
import scipy.spatial
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from representations import normal, related

from pico_analyze.components.matrix import Flagged, Matrix, Undefined
from pico_analyze.metrics.similarity import cka, mutual_knn, procrustes, rsa

e1 = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64) / 2
e2 = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64) / 2
e3 = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64) / 2


def columns(*features):
    return torch.stack(features, 1)


Y4 = columns(e1, 0.5 * e2 + 0.75**0.5 * e3)


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


class TestCKA:
    def test_plug_in_by_hand(self):
        x = columns(3 * e1, e2)
        assert cka(x, Y4, "plug_in") == pytest.approx(9.25 / math.sqrt(164), rel=1e-14)
        assert cka(x + 7, 2 * Y4 - 3, "plug_in") == pytest.approx(9.25 / math.sqrt(164), rel=1e-14)

    def test_debiased_by_hand(self):
        # Of 4 samples unbiased HSIC sees three numbers, one for each way to split them into two pairs:
        # x_1 x_2 + x_3 x_4, less the mean of the three such sums.
        x, y = torch.tensor([[0.0], [1.0], [2.0], [6.0]]), torch.tensor([[0.0], [3.0], [1.0], [2.0]])

        def split_sums(z):
            a, b, c, d = z.flatten().tolist()
            sums = np.array([a * b + c * d, a * c + b * d, a * d + b * c])
            return sums - sums.mean()

        s, t = split_sums(x), split_sums(y)
        assert cka(x, y) == pytest.approx(s @ t / math.sqrt((s @ s) * (t @ t)), rel=1e-12)

    @pytest.mark.parametrize(("n", "p", "q"), [(4, 2, 3), (6, 3, 2), (7, 10, 12)])
    def test_debiased_by_loops(self, n, p, q):
        x, y = related(n, p, q)
        k, l = (x @ x.T).numpy(), (y @ y.T).numpy()  # noqa: E741
        expected = unbiased_hsic_by_loops(k, l) / math.sqrt(unbiased_hsic_by_loops(k, k) * unbiased_hsic_by_loops(l, l))
        assert cka(x, y) == pytest.approx(expected, rel=1e-9)

    @pytest.mark.parametrize("estimator", ["debiased", "plug_in"])
    @settings(max_examples=30, deadline=None)
    @given(n=st.integers(5, 12), p=st.integers(2, 20), q=st.integers(2, 20), seed=st.integers(0, 99))
    def test_features_or_samples_give_the_printed_formula(self, estimator, n, p, q, seed):
        x, y = related(n, p, q, seed=seed)
        assert cka(x, y, estimator) == pytest.approx(cka_by_matrices(x, y)[estimator], rel=1e-9, abs=1e-10)

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
        value = cka(x, y, estimator)
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
            assert cka(x2, y2, estimator) == pytest.approx(value, rel=1e-9, abs=1e-10)
        same = cka(x, scale * x @ orthogonal(p, seed), estimator)
        assert 1 - 1e-9 < same <= 1

    def test_few_samples_of_unrelated_features(self):
        pairs = [(normal(32, 512, seed=2 * i), normal(32, 512, seed=2 * i + 1)) for i in range(20)]
        for x, y in pairs:
            plug_in = cka(x, y, "plug_in")
            assert plug_in > 0.9
            assert isinstance(plug_in, Flagged)
            assert "32 samples of 512 features" in plug_in.reason
        debiased = [cka(x, y) for x, y in pairs]
        assert abs(np.mean(debiased)) < 0.03  # each scatters by 1 / sqrt(n (n - 3) / 2) = 0.05
        assert max(map(abs, debiased)) < 0.2
        assert not any(isinstance(value, Flagged) for value in debiased)

    def test_debiased_is_right_on_average_and_may_be_negative(self):
        values = [cka(normal(8, 20, seed=i), normal(8, 20, seed=1000 + i)) for i in range(300)]
        assert min(values) < 0
        assert abs(np.mean(values)) < 0.05

    @pytest.mark.parametrize("n", [2, 3])
    def test_fewer_than_four_samples(self, n):
        with pytest.raises(Undefined, match=f"{n} samples; unbiased HSIC needs 4"):
            cka(normal(n, 5), normal(n, 5, seed=1))
        assert 0 < cka(normal(n, 5), normal(n, 5, seed=1), "plug_in") <= 1

    def test_samples_equally_far_apart(self):
        for seed in range(10):  # rounding leaves the HSIC a little above or below 0
            simplex = orthogonal(5, seed) + 2
            with pytest.raises(Undefined, match="unbiased HSIC of y with itself is 0"):
                cka(normal(5, 3), simplex)
        with pytest.raises(Undefined, match="unbiased HSIC of x with itself is 0"):
            cka(torch.eye(7)[:, :1], normal(7, 3))
        assert cka(normal(5, 3), torch.eye(5), "plug_in") > 0

    def test_products_are_never_formed(self, monkeypatch):
        x, y = Matrix.product(normal(9, 4), normal(4, 50)), Matrix.product(normal(9, 6, seed=1), normal(2, 3, 40))
        dense = cka(x.entries(), y.entries())
        monkeypatch.setattr(Matrix, "entries", None)
        assert cka(x, y) == pytest.approx(dense, rel=1e-10)

    def test_unknown_estimator(self):
        with pytest.raises(ValueError, match="estimator: 'biased' is not allowed"):
            cka(normal(5, 2), normal(5, 2), "biased")

    def test_unknown_kernel(self):
        with pytest.raises(ValueError, match="kernel: 'cosine' is not allowed; choose one of linear, rbf"):
            cka(normal(5, 2), normal(5, 2), kernel="cosine")


class TestMinibatch:
    @pytest.mark.parametrize("kernel", ["linear", "rbf"])
    @pytest.mark.parametrize("n", [8, 64, 67])
    def test_identical_features_give_1(self, n, kernel):
        x = normal(n, 30)
        assert cka(x, 3 * x @ orthogonal(30, 1) + 2, "minibatch", kernel, batch=8) == pytest.approx(1, abs=1e-6)

    @pytest.mark.parametrize("kernel", ["linear", "rbf"])
    def test_one_batch_is_the_debiased_estimate(self, kernel):
        x, y = related(15, 4, 6)
        assert cka(x, y, "minibatch", kernel, batch=8) == cka(x, y, "debiased", kernel)

    def test_by_hand(self):
        """17 samples in random batches of at least 8: one of 9 and one of 8; HSIC of each by the definition, then the mean."""
        x, y = related(17, 3, 2)
        value = cka(x, y, "minibatch", batch=8)
        x, y = (z[np.random.default_rng(0).permutation(17)] for z in (x, y))

        def hsic(a, b):
            parts = (slice(0, 9), slice(9, 17))
            return np.mean([unbiased_hsic_by_loops(*((z[part] @ z[part].T).numpy() for z in (a, b))) for part in parts])

        expected = hsic(x, y) / math.sqrt(hsic(x, x) * hsic(y, y))
        assert value == pytest.approx(expected, rel=1e-9)

    def test_neighbours_that_are_alike_do_not_raise_it(self):
        """Groups of 16 nearly equal rows, as the tokens of a sequence are: batches of neighbours would hold few groups."""
        x, y = (
            normal(64, 20, seed=seed).repeat_interleave(16, dim=0) + 0.1 * normal(1024, 20, seed=seed + 2)
            for seed in (0, 1)
        )
        assert cka(x, y, "minibatch", batch=64) == pytest.approx(cka(x, y), abs=0.03)

    def test_many_batches_come_to_the_whole(self):
        x, y = related(4000, 5, 6)
        assert cka(x, y, "minibatch", batch=40) == pytest.approx(cka(x, y), abs=0.02)

    def test_few_samples(self):
        with pytest.raises(Undefined, match="3 samples; unbiased HSIC needs 4"):
            cka(normal(3, 2), normal(3, 2, seed=1), "minibatch", batch=8)


def rbf_by_scipy(x):
    distances = scipy.spatial.distance.pdist(x.double().numpy())
    return np.exp(-(scipy.spatial.distance.squareform(distances) ** 2) / (2 * np.median(distances) ** 2))


class TestRBF:
    def test_debiased_by_hand(self):
        """As for the linear kernel: of 4 samples HSIC sees the three ways to split them into two pairs."""
        x, y = (torch.tensor(z, dtype=torch.float64).unsqueeze(1) for z in ([0, 1, 3, 7], [0, 3, 1, 2]))

        def split_sums(z, median):
            k = lambda i, j: math.exp(-((z[i, 0] - z[j, 0]) ** 2) / (2 * median**2))  # noqa: E731
            sums = np.array([k(0, 1) + k(2, 3), k(0, 2) + k(1, 3), k(0, 3) + k(1, 2)])
            return sums - sums.mean()

        s, t = split_sums(x, 3.5), split_sums(y, 1.5)  # distances 1 2 3 4 6 7, and 1 1 1 2 2 3
        assert cka(x, y, kernel="rbf") == pytest.approx(s @ t / math.sqrt((s @ s) * (t @ t)), rel=1e-9)

    @pytest.mark.parametrize(("n", "p", "q"), [(5, 2, 3), (7, 10, 12)])
    def test_debiased_by_loops(self, n, p, q):
        x, y = related(n, p, q)
        k, l = rbf_by_scipy(x), rbf_by_scipy(y)  # noqa: E741
        expected = unbiased_hsic_by_loops(k, l) / math.sqrt(unbiased_hsic_by_loops(k, k) * unbiased_hsic_by_loops(l, l))
        assert cka(x, y, kernel="rbf") == pytest.approx(expected, rel=1e-8)

    @settings(max_examples=20, deadline=None)
    @given(n=st.integers(4, 20), p=st.integers(1, 8), q=st.integers(1, 8), seed=st.integers(0, 99))
    def test_plug_in_by_matrices(self, n, p, q, seed):
        x, y = related(n, p, q, seed=seed)
        h = np.eye(n) - 1 / n
        k, l = h @ rbf_by_scipy(x) @ h, h @ rbf_by_scipy(y) @ h  # noqa: E741
        expected = (k * l).sum() / math.sqrt((k * k).sum() * (l * l).sum())
        assert cka(x, y, "plug_in", "rbf") == pytest.approx(expected, rel=1e-9)

    @settings(max_examples=20, deadline=None)
    @given(p=st.integers(1, 6), q=st.integers(1, 6), seed=st.integers(0, 99), scale=st.floats(1e-20, 1e20))
    def test_invariances(self, p, q, seed, scale):
        x, y = related(15, p, q, seed=seed)
        value = cka(x, y, kernel="rbf")
        assert -1 <= value <= 1
        for x2, y2 in ((y, x), (-scale * x, y), (x, y @ orthogonal(q, seed)), (x + 3, y), (x.flip(0), y.flip(0))):
            assert cka(x2, y2, kernel="rbf") == pytest.approx(value, rel=1e-8, abs=1e-9)
        assert cka(x, scale * x @ orthogonal(p, seed), kernel="rbf") == pytest.approx(1, abs=1e-9)

    def test_sees_what_is_not_linear(self):
        t = torch.linspace(-1, 1, 200, dtype=torch.float64).unsqueeze(1)
        assert abs(cka(t, t**2)) < 0.02
        assert cka(t, t**2, kernel="rbf") > 0.2

    def test_unrelated_features_are_near_zero(self):
        values = [cka(normal(32, 64, seed=2 * i), normal(32, 64, seed=2 * i + 1), kernel="rbf") for i in range(40)]
        assert abs(np.mean(values)) < 0.03
        assert min(values) < 0

    def test_undefined(self):
        with pytest.raises(Undefined, match="3 samples; unbiased HSIC needs 4"):
            cka(normal(3, 2), normal(3, 2, seed=1), kernel="rbf")
        with pytest.raises(Undefined, match="unbiased HSIC of y with itself is 0"):
            cka(normal(5, 3), torch.eye(5), kernel="rbf")
        mostly_equal = torch.zeros(9, 2)
        mostly_equal[0] = 1.0
        with pytest.raises(Undefined, match="most samples of y are equal: the median distance is 0"):
            cka(normal(9, 2), mostly_equal, kernel="rbf")


class TestProcrustes:
    def test_by_hand(self):
        assert procrustes(columns(3 * e1, e2), columns(e1)) == pytest.approx(3 / math.sqrt(10), rel=1e-12)
        # x^T y = [[3, 0], [0, .5]], |x|_F^2 = 10, |y|_F^2 = 2.
        assert procrustes(columns(3 * e1, e2), Y4) == pytest.approx(3.5 / math.sqrt(20), rel=1e-12)

    @settings(max_examples=30, deadline=None)
    @given(n=st.integers(2, 12), p=st.integers(1, 20), seed=st.integers(0, 99))
    def test_equals_scipy(self, n, p, seed):
        x, y = related(n, p, p, seed=seed)
        a, b = ((z - z.mean(0)).numpy() for z in (x, y))
        _, largest = scipy.linalg.orthogonal_procrustes(a, b)
        assert procrustes(x, y) == pytest.approx(largest / np.linalg.norm(a) / np.linalg.norm(b), rel=1e-9)
        _, _, disparity = scipy.spatial.procrustes(x.numpy(), y.numpy())  # of the best scale: 1 - v^2
        assert procrustes(x, y) == pytest.approx(math.sqrt(max(1 - disparity, 0)), rel=1e-6)

    @settings(max_examples=20, deadline=None)
    @given(n=st.integers(4, 12), p=st.integers(1, 20), q=st.integers(1, 20), seed=st.integers(0, 99))
    def test_invariances(self, n, p, q, seed):
        x, y = related(n, p, q, seed=seed)
        value = procrustes(x, y)
        assert 0 <= value <= 1
        padded = torch.cat([y, torch.full((n, 3), 2.0)], 1)
        for x2, y2 in ((y, x), (-1e9 * x, y), (x @ orthogonal(p, seed), y), (x, padded), (x.flip(0) + 1, y.flip(0))):
            assert procrustes(x2, y2) == pytest.approx(value, rel=1e-9)
        assert procrustes(x, 5 * x @ orthogonal(p, seed) - 1) == pytest.approx(1, rel=1e-12)

    def test_the_best_rotation_is_the_best_of_many(self):
        x, y = related(20, 3, 3)
        a, b = ((z - z.mean(0)) / (z - z.mean(0)).norm() for z in (x, y))
        cosines = [float(((a @ orthogonal(3, seed)) * b).sum()) for seed in range(500)]
        assert max(cosines) <= procrustes(x, y) <= max(cosines) + 0.1

    def test_few_samples_are_flagged(self):
        assert procrustes(normal(6, 9), normal(6, 2)).reason == "too high for few samples: 6 samples of 9 features"
        assert not isinstance(procrustes(normal(10, 9), normal(10, 2)), Flagged)


class TestRSA:
    def test_by_hand(self):
        x, y = torch.tensor([[0.0], [1.0], [3.0]]), torch.tensor([[0.0], [4.0], [1.0]])
        # Distances 1, 3, 2 and 4, 1, 3: correlation of (-1, 1, 0) and (4, -5, 1)/3.
        assert rsa(x, y, "pearson") == pytest.approx(-9 / math.sqrt(2 * 42), rel=1e-12)
        assert rsa(x, y, "spearman") == pytest.approx(-1, rel=1e-12)

    @pytest.mark.parametrize("correlation", ["spearman", "pearson"])
    @settings(max_examples=30, deadline=None)
    @given(n=st.integers(4, 15), p=st.integers(1, 20), q=st.integers(1, 20), seed=st.integers(0, 99))
    def test_equals_scipy(self, correlation, n, p, q, seed):
        x, y = related(n, p, q, seed=seed)
        s, t = (scipy.spatial.distance.pdist(z.numpy()) for z in (x, y))
        expected = {"spearman": scipy.stats.spearmanr, "pearson": scipy.stats.pearsonr}[correlation](s, t).statistic
        assert rsa(x, y, correlation) == pytest.approx(expected, abs=1e-9)

    @pytest.mark.parametrize("correlation", ["spearman", "pearson"])
    @settings(max_examples=20, deadline=None)
    @given(n=st.integers(4, 12), p=st.integers(1, 9), q=st.integers(1, 9), seed=st.integers(0, 99))
    def test_invariances(self, correlation, n, p, q, seed):
        x, y = related(n, p, q, seed=seed)
        value = rsa(x, y, correlation)
        assert -1 <= value <= 1
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
        for x2, y2 in ((y, x), (-1e9 * x, y), (x @ orthogonal(p, seed), y - 3), (x[order], y[order])):
            assert rsa(x2, y2, correlation) == pytest.approx(value, abs=1e-9)
        assert rsa(x, 2 * x @ orthogonal(p, seed), correlation) == pytest.approx(1, abs=1e-9)

    def test_ties_share_their_ranks_whatever_the_rounding(self):
        grid = torch.cartesian_prod(torch.arange(4), torch.arange(4)).double()  # hardly any two distances differ
        y = grid @ torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
        s, t = (scipy.spatial.distance.pdist(z.numpy(), "sqeuclidean") for z in (grid, y))  # of integers: exact
        expected = scipy.stats.spearmanr(s, t).statistic
        assert rsa(grid, y) == pytest.approx(expected, rel=1e-12)
        assert rsa(grid @ orthogonal(2, 3), y / 7 + 0.1) == pytest.approx(expected, rel=1e-12)

    def test_undefined(self):
        with pytest.raises(Undefined, match="2 samples; a correlation of distances needs 3"):
            rsa(normal(2, 3), normal(2, 3, seed=1))
        for correlation in ("spearman", "pearson"):
            with pytest.raises(Undefined, match="all samples of y are equally far apart"):
                rsa(normal(5, 3), orthogonal(5, 1), correlation)
        with pytest.raises(ValueError, match="correlation: 'kendall' is not allowed"):
            rsa(normal(5, 3), normal(5, 3), "kendall")


def mutual_knn_by_loops(x, y, k, distance):
    """Sets of neighbours, one sample at a time; no ties."""
    metric = {"cosine": "cosine", "euclidean": "euclidean"}[distance]
    shared = 0
    for i in range(len(x)):
        sets = []
        for z in (x, y):
            d = scipy.spatial.distance.cdist(z[i : i + 1].numpy(), z.numpy(), metric)[0]
            sets.append(set(sorted(set(range(len(x))) - {i}, key=lambda j, d=d: d[j])[:k]))
        shared += len(sets[0] & sets[1])
    return shared / len(x) / k


class TestMutualKNN:
    def test_by_hand(self):
        # Angles 0, 10, 30, 100 degrees: nearest 1, 0, 1, 2; against 0, 40, 50, 60: nearest 1, 2, 1 or 3, 2.
        def at(*degrees):
            angles = torch.tensor(degrees, dtype=torch.float64).deg2rad()
            return torch.stack([angles.cos(), angles.sin()], 1) * torch.tensor([[1.0], [5.0], [2.0], [3.0]])

        assert mutual_knn(at(0, 10, 30, 100), at(0, 40, 50, 61), k=1) == pytest.approx(3 / 4)
        # At 60 degrees the third has two nearest, each of them half.
        assert mutual_knn(at(0, 10, 30, 100), at(0, 40, 50, 60), k=1) == pytest.approx(2.5 / 4)
        assert mutual_knn(at(0, 40, 50, 60), at(0, 40, 50, 60), k=1) == 1.0

    @pytest.mark.parametrize("distance", ["cosine", "euclidean"])
    @settings(max_examples=25, deadline=None)
    @given(n=st.integers(5, 14), p=st.integers(2, 9), q=st.integers(2, 9), k=st.integers(1, 3), seed=st.integers(0, 99))
    def test_equals_sets(self, distance, n, p, q, k, seed):
        x, y = related(n, p, q, seed=seed)
        assert mutual_knn(x, y, k, distance) == pytest.approx(mutual_knn_by_loops(x, y, k, distance), abs=1e-12)

    @pytest.mark.parametrize("distance", ["cosine", "euclidean"])
    @settings(max_examples=20, deadline=None)
    @given(n=st.integers(6, 12), p=st.integers(2, 9), q=st.integers(2, 9), seed=st.integers(0, 99))
    def test_invariances(self, distance, n, p, q, seed):
        x, y = related(n, p, q, seed=seed)
        value = mutual_knn(x, y, 3, distance)
        assert 0 <= value <= 1
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
        for x2, y2 in ((y, x), (-1e9 * x, y), (x @ orthogonal(p, seed), y), (x[order], y[order])):
            assert mutual_knn(x2, y2, 3, distance) == pytest.approx(value, abs=1e-12)
        assert mutual_knn(x, 2 * x @ orthogonal(p, seed), 3, distance) == pytest.approx(1, abs=1e-12)
        if distance == "euclidean":
            assert mutual_knn(x + 3, y - 1, 3, distance) == pytest.approx(value, abs=1e-12)

    def test_unrelated_features_are_at_chance(self):
        values = [mutual_knn(normal(100, 20, seed=2 * i), normal(100, 20, seed=2 * i + 1)) for i in range(20)]
        assert np.mean(values) == pytest.approx(10 / 99, abs=0.01)

    def test_order_of_samples_never_breaks_a_tie(self):
        grid = torch.cartesian_prod(torch.arange(1, 5), torch.arange(1, 5)).double()
        y = normal(16, 3)
        values = []
        for seed in range(10):
            order = torch.randperm(16, generator=torch.Generator().manual_seed(seed))
            values.append(mutual_knn(grid[order], y[order], 3, "euclidean"))
        assert values == pytest.approx([values[0]] * 10, rel=1e-12)

    def test_undefined(self):
        x, y = normal(11, 3), normal(11, 4, seed=1)
        with pytest.raises(Undefined, match="11 samples have no more than 10 neighbours each; k is 10"):
            mutual_knn(x, y)
        assert 0 <= mutual_knn(x, y, 9) <= 1
        with pytest.raises(Undefined, match="1 rows of x are zero and have no direction"):
            mutual_knn(torch.cat([x, torch.zeros(1, 3)]), normal(12, 3), 2)
        with pytest.raises(Undefined, match="all rows of y point the same way"):
            mutual_knn(x, torch.arange(1, 12).double().unsqueeze(1) @ normal(1, 3), 2)
        with pytest.raises(Undefined, match="every feature of y is constant"):
            mutual_knn(x, torch.ones(11, 3), 2, "euclidean")
        with pytest.raises(ValueError, match="distance: 'taxicab' is not allowed"):
            mutual_knn(x, y, 2, "taxicab")


@pytest.mark.parametrize(
    ("measure", "expected"), [(procrustes, abs), (partial(cka, estimator="plug_in"), lambda r: r**2)]
)
def test_single_feature(measure, expected):
    x, y = related(40, 1, 1)
    correlation = float(np.corrcoef(x.flatten(), y.flatten())[0, 1])
    assert measure(x, y) == pytest.approx(expected(correlation), rel=1e-12)
