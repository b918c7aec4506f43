import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pico_analyze.components.matrix import Matrix, Undefined
from pico_analyze.metrics.eigenvalues import eigenvalue_positivity


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_numpy(x):
    eigenvalues = np.linalg.eigvals(x.double().numpy())
    return float(eigenvalues.real.sum() / np.abs(eigenvalues).sum())


@pytest.mark.parametrize(
    ("x", "value"),
    [
        (torch.eye(4), 1.0),
        (-torch.eye(4), -1.0),
        (torch.diag(torch.tensor([3.0, 0.0, -1.0])), 0.5),
        (torch.tensor([[2.0, 100.0], [0.0, 1.0]]), 1.0),  # of a triangle: its diagonal
        (torch.tensor([[1.0, -1.0], [1.0, 1.0]]), math.sqrt(0.5)),  # 1 +- i
        (torch.tensor([[5.0]]), 1.0),
    ],
)
def test_by_hand(x, value):
    assert eigenvalue_positivity(x) == pytest.approx(value, abs=1e-14)


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 10), seed=st.integers(0, 99), scale=st.floats(1e-150, 1e150))
def test_invariances_and_second_formula(n, seed, scale):
    x = normal(n, n, seed=seed)
    value = eigenvalue_positivity(x)
    assert value == pytest.approx(by_numpy(x), abs=1e-12)
    assert -1 <= value <= 1
    basis = torch.linalg.qr(normal(n, n, seed=seed + 1)).Q * torch.linspace(1, 2, n, dtype=torch.float64)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    for other in (x * scale, x.T, torch.linalg.solve(basis, x @ basis), x[order][:, order]):
        assert eigenvalue_positivity(other) == pytest.approx(value, abs=1e-9)
    assert eigenvalue_positivity(-x) == pytest.approx(-value, abs=1e-9)


@settings(max_examples=20, deadline=None)
@given(n=st.integers(2, 12), r=st.integers(1, 12), seed=st.integers(0, 99))
def test_of_a_product(n, r, seed):
    """The eigenvalues of A B but for zeros are those of B A, whichever is larger."""
    product = Matrix.product(normal(n, r, seed=seed) * 1e-20, normal(r, n, seed=seed + 1))
    assert eigenvalue_positivity(product) == pytest.approx(by_numpy(product.entries() * 1e20), abs=1e-7)


def test_products_are_never_formed(monkeypatch):
    monkeypatch.setattr(Matrix, "entries", None)
    assert -1 < eigenvalue_positivity(Matrix.product(normal(50, 3), normal(3, 50, seed=1))) < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int16])
def test_storage_dtype(dtype):
    x = (10 * normal(8, 8)).to(dtype)
    assert eigenvalue_positivity(x) == pytest.approx(by_numpy(x), rel=1e-9)
    product = Matrix.product(x[:, :3], x[:3])
    assert eigenvalue_positivity(product) == pytest.approx(by_numpy(product.entries()), abs=1e-9)


def test_undefined():
    for x in (torch.ones(2, 3), torch.ones(4), torch.ones(2, 2, 2), Matrix.product(normal(4, 6), normal(2, 3, 4))):
        with pytest.raises(Undefined, match="not a square matrix but of shape"):
            eigenvalue_positivity(x)
    nilpotent = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    for x in (torch.zeros(3, 3), nilpotent, Matrix.product(torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0, 1.0]]))):
        with pytest.raises(Undefined, match="all eigenvalues are zero"):
            eigenvalue_positivity(x)
    for bad in (math.nan, math.inf):
        x = torch.eye(3)
        x[0, 1] = bad
        for matrix in (x, Matrix.product(x, torch.eye(3)), Matrix.product(torch.eye(3), x)):
            with pytest.raises(Undefined, match="1 of 9 entries are not finite"):
                eigenvalue_positivity(matrix)
