import math

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pico_analyze.components.matrix import Flagged, Matrix, Undefined
from pico_analyze.metrics.power_law import alpha


def pareto(n, exponent, seed=0):
    """Eigenvalues of a power law above 1, by the inverse of its distribution function."""
    uniform = np.random.default_rng(seed).uniform(size=n)
    return (1 - uniform) ** (-1 / (exponent - 1))


def sigma(eigenvalues):
    return torch.from_numpy(np.sqrt(eigenvalues))


def by_scipy(eigenvalues):
    """Every eigenvalue as a cut-off: the likelihood maximised numerically, the distance by scipy's test."""
    fits = []
    for x in np.unique(eigenvalues):
        tail = eigenvalues[eigenvalues >= x]
        if len(tail) < 10:
            continue

        def minus_likelihood(a, tail=tail, x=x):
            return -np.sum(np.log((a - 1) / x) - a * np.log(tail / x))

        a = scipy.optimize.minimize_scalar(
            minus_likelihood, bounds=(1.001, 50), method="bounded", options={"xatol": 1e-9}
        ).x
        fits.append((scipy.stats.kstest(tail, lambda v, a=a, x=x: 1 - (v / x) ** (1 - a)).statistic, a))
    return min(fits)


@pytest.mark.parametrize("exponent", [1.5, 2.5, 4.0])
def test_finds_the_exponent_of_a_power_law(exponent):
    # The standard error of the likelihood estimate is (alpha - 1) / sqrt(n).
    found = [alpha(sigma(pareto(1500, exponent, seed))) for seed in range(5)]
    assert np.mean(found) == pytest.approx(exponent, abs=4 * (exponent - 1) / math.sqrt(1500))
    assert all(alpha(sigma(pareto(1500, exponent, seed)), "ks_distance") < 0.04 for seed in range(5))


def test_finds_where_the_tail_begins():
    body = np.random.default_rng(3).uniform(0.1, 1, size=1000)  # not a power law
    eigenvalues = np.concatenate([body, pareto(1000, 3.0)])
    assert alpha(sigma(eigenvalues)) == pytest.approx(3.0, abs=0.25)


@settings(max_examples=10, deadline=None)
@given(n=st.integers(10, 40), seed=st.integers(0, 99))
def test_equals_scipy(n, seed):
    eigenvalues = np.random.default_rng(seed).lognormal(size=n)
    distance, exponent = by_scipy(eigenvalues)
    assert alpha(sigma(eigenvalues), "ks_distance") == pytest.approx(distance, rel=1e-5)
    assert alpha(sigma(eigenvalues)) == pytest.approx(exponent, rel=1e-5)


def test_by_hand():
    """Ten eigenvalues, one e times, nine 1: the only tail has sum of logs 1, so alpha = 1 + 10 / 1."""
    eigenvalues = np.array([math.e] + [1.0] * 9)
    assert alpha(sigma(eigenvalues)) == pytest.approx(11.0, rel=1e-12)
    # At 1 the data have a step of 9/10 from 0, where the law is 0.
    assert alpha(sigma(eigenvalues), "ks_distance") == pytest.approx(0.9, rel=1e-12)


def test_short_tails_are_flagged_or_undefined():
    assert isinstance(alpha(sigma(pareto(30, 3.0))), Flagged)
    assert "eigenvalues in the tail" in alpha(sigma(pareto(30, 3.0))).reason
    assert not isinstance(alpha(sigma(pareto(1500, 3.0))), Flagged)
    with pytest.raises(Undefined, match="9 positive eigenvalues"):
        alpha(torch.cat([sigma(pareto(9, 3.0)), torch.zeros(90)]))
    with pytest.raises(Undefined, match="0 positive eigenvalues"):
        alpha(torch.zeros(20))
    with pytest.raises(Undefined, match="the 12 eigenvalues of the tail are equal"):
        alpha(torch.ones(12))
    with pytest.raises(Undefined, match="entries are not finite"):
        alpha(torch.tensor([1.0, math.nan]))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 99), scale=st.floats(1e-100, 1e100))
def test_invariances(seed, scale):
    values = sigma(pareto(60, 2.5, seed))
    moved = values[torch.randperm(60, generator=torch.Generator().manual_seed(seed))] * scale
    for report in ("alpha", "ks_distance"):
        assert alpha(moved, report) == pytest.approx(alpha(values, report), rel=1e-9)
        assert alpha(torch.cat([values, torch.zeros(3)]), report) == alpha(values, report)
    assert alpha(values) > 1
    assert 0 <= alpha(values, "ks_distance") <= 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_of_a_stored_matrix(dtype):
    x = torch.randn(40, 60, generator=torch.Generator().manual_seed(0)).to(dtype)
    distance, exponent = by_scipy(np.linalg.svd(x.double().numpy(), compute_uv=False) ** 2)
    values = Matrix.dense(x).spectrum().values
    assert (alpha(values), alpha(values, "ks_distance")) == pytest.approx((exponent, distance), rel=1e-5)


def test_unknown_report():
    with pytest.raises(ValueError, match="report: 'p' is not allowed; choose one of alpha, ks_distance"):
        alpha(torch.ones(3), "p")
