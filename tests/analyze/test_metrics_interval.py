"""Intervals from halves of the samples: by hand, and how often they hold what they should."""

import numpy as np
import pytest
import torch

from pico_analyze.components.matrix import Matrix, Undefined
from pico_analyze.metrics import METRICS
from pico_analyze.metrics.interval import interval, rows_of


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mean_of(x):
    return lambda rows: float(x[rows].mean())


def test_the_interval_of_a_mean_is_the_textbook_one():
    """For a mean: value -+ 1.96 s / sqrt(n), for even and for odd n."""
    for n in (200, 201):
        x = normal(n)
        value, error = float(x.mean()), float(x.std()) / n**0.5
        low, high = interval(value, mean_of(x), n, resamples=4000)
        assert low == pytest.approx(value - 1.96 * error, abs=0.1 * error)
        assert high == pytest.approx(value + 1.96 * error, abs=0.1 * error)
        narrow = interval(value, mean_of(x), n, resamples=4000, level=0.5)
        assert narrow[1] - narrow[0] == pytest.approx(2 * 0.674 * error, rel=0.1)


def test_an_odd_number_by_hand():
    """Of 9 samples halves have 4: the deviations are stretched by sqrt(4 / 5)."""
    x = normal(9)
    generator = np.random.default_rng(3)
    means = [float(x[torch.from_numpy(np.sort(generator.permutation(9)[:4]))].mean()) for _ in range(50)]
    expected = 0.7 + (4 / 5) ** 0.5 * (np.quantile(means, [0.05, 0.95]) - np.mean(means))
    assert interval(0.7, mean_of(x), 9, resamples=50, level=0.9, seed=3) == pytest.approx(tuple(expected))


def test_what_depends_on_the_number_of_samples_alone_moves_nothing():
    assert interval(3.0, lambda rows: 1 / len(rows), 20) == pytest.approx((3.0, 3.0))


def test_sequences_stay_together():
    seen = []
    interval(0.0, lambda rows: float(seen.append(rows.tolist()) or 0), 40, unit=4, resamples=5)
    for rows in seen:
        assert len(rows) == 20
        assert rows == sorted(rows)
        assert all(start % 4 == 0 for start in rows[::4])


def test_too_few_sequences():
    with pytest.raises(Undefined, match="7 sequences are too few to leave half of them out; it takes 8"):
        interval(0.0, len, 14, unit=2)


def related(n, share, seed):
    x = normal(n, 5, seed=2 * seed) * torch.linspace(1, 0.3, 5, dtype=torch.float64)
    return x, share * x + normal(n, 5, seed=2 * seed + 1)


@pytest.mark.parametrize(
    ("name", "chosen"),
    [("cka", {}), ("procrustes", {}), ("mean_cca", {}), ("mutual_knn", {"k": 3}), ("anisotropy", {})],
    ids=lambda one: one if isinstance(one, str) else "",
)
@pytest.mark.parametrize("share", [1.5, 0.0], ids=["related", "unrelated"])
def test_coverage(name, chosen, share):
    """Of repetitions of an experiment nine in ten intervals of level 0.9 hold the mean value, or a few more."""
    metric, n = METRICS[name], 32
    sides = 2 if metric.consumes == "pair" else 1

    def value(*matrices):
        return metric.compute(*map(Matrix.dense, matrices[-sides:]), **chosen)

    truth = np.mean([value(*related(n, share, 10_000 + seed)) for seed in range(150)])
    held, repetitions = 0, 50
    for seed in range(repetitions):
        x, y = related(n, share, seed)
        low, high = interval(value(x, y), lambda rows, x=x, y=y: value(x[rows], y[rows]), n, resamples=40, level=0.9)
        held += low <= truth <= high
    assert held >= 0.78 * repetitions


def test_drawing_with_replacement_would_not_do():
    """Why halves: a sample that is drawn twice is nearest to itself, so unrelated sides look alike."""
    n, k = 32, METRICS["mutual_knn"]
    generator = np.random.default_rng(0)
    x, y = related(n, 0.0, 5)
    value = k.compute(Matrix.dense(x), Matrix.dense(y), k=3)
    drawn = [torch.from_numpy(generator.integers(0, n, n)) for _ in range(40)]
    values = [k.compute(Matrix.dense(x[rows]), Matrix.dense(y[rows]), k=3) for rows in drawn]
    assert np.quantile(values, 0.025) > value
    low, high = interval(value, lambda rows: k.compute(Matrix.dense(x[rows]), Matrix.dense(y[rows]), k=3), n)
    assert low < value < high


def test_rows_of_a_product():
    left, right = normal(9, 2), normal(2, 7)
    rows = torch.tensor([0, 3, 8])
    part = rows_of(Matrix.product(left, right), rows)
    torch.testing.assert_close(part.entries(), left[rows] @ right)
    assert part.shape == (3, 7)
    assert rows_of(Matrix.dense(left.bfloat16()), rows).dtype == "bfloat16"
