"""What the eigenvalues of a square matrix say: whether it keeps the direction of what it is given."""

import torch
from torch import Tensor

from pico_analyze.components.matrix import Matrix, Undefined, as_matrix, largest_magnitude

_EPSILON = torch.finfo(torch.float64).eps


def eigenvalue_positivity(x: Tensor | Matrix) -> float:
    """The balance of positive and negative eigenvalues of a square matrix.

    sum_i Re(lambda_i) / sum_i |lambda_i| over all eigenvalues; those that are 0 do not count, so of a product of thin
    factors A B the few of B A are enough.

    In [-1, 1]: 1 when all eigenvalues are positive, -1 when all are negative, 0 when they cancel or are imaginary, as
    for a rotation by a right angle. Of the full OV circuit of a head, W_U W_O W_V W_E, it is the copying score: near 1
    where seeing a token raises the logits of the same and like tokens. Unchanged by a positive scale and by a change of
    basis T^-1 x T; x and -x have opposite values. Undefined unless the matrix is square, and when all eigenvalues are 0
    within rounding.

    Source: Elhage et al., "A mathematical framework for transformer circuits", 2021, where it sums up copying heads.

    >>> round(eigenvalue_positivity(torch.tensor([[3.0, 1.0], [0.0, -1.0]])), 12)
    0.5
    >>> eigenvalue_positivity(torch.tensor([[0.0, -1.0], [1.0, 0.0]]))
    0.0
    """
    matrix = as_matrix(x)
    m, n = (*matrix.shape, 0)[:2]
    if m != n or len(matrix.shape) != 2:
        raise Undefined(f"not a square matrix but of shape {' x '.join(map(str, matrix.shape))}")
    left = _relative(matrix.left)
    core = left
    if matrix.right is not None:
        (right,) = matrix.right  # side by side a product would not be square, but for an inner dimension of 0
        core = _relative(right) @ left
    eigenvalues = torch.linalg.eigvals(core)
    size = float(eigenvalues.abs().sum())
    if size <= n * _EPSILON * float(core.norm()):
        raise Undefined("all eigenvalues are zero")
    return min(max(float(eigenvalues.real.sum()) / size, -1.0), 1.0)  # rounding passes it by 1e-16


def _relative(x: Tensor) -> Tensor:
    """In float64, over the largest magnitude."""
    return x.double() / (largest_magnitude(x) or 1.0)
