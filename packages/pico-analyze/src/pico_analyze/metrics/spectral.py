"""What the singular values of a matrix say: effective rank, conditioning and norms.

``singular_values`` is a tensor with one number per singular value of the matrix, zeros included, in any
order: what `Matrix.spectrum` computes once for all of these, or `torch.linalg.svdvals`.
"""

import torch
from torch import Tensor

from pico_analyze.components.matrix import Matrix, Undefined, largest_magnitude

_EPSILON = torch.finfo(torch.float64).eps


def per(singular_values: Tensor) -> float:
    """Proportional effective rank: the share of the singular values that the matrix effectively uses.

    exp(H) / n, with H = - sum_i p_i log p_i, p_i = sigma_i / sum_j sigma_j, 0 log 0 = 0, and n the number of
    singular values: min(rows, columns) of a matrix, head_dim for the OV circuit of a head, whose other values
    are zero by construction.

    In (0, 1]: 1 when all singular values are equal, k/n when k equal ones are not zero, 1/n for rank one.
    Unchanged by scaling and by orthogonal maps of rows or columns. Undefined for a zero matrix; 1 for a
    single value.

    Source: Roy and Vetterli, "The effective rank", EUSIPCO 2007, definition 1, for exp(H); its division by n
    is that of Diehl Martinez et al., "Tending Towards Stability", 2024.

    >>> per(torch.tensor([2.0, 2.0, 0.0, 0.0]))
    0.5
    >>> round(per(torch.tensor([3.0, 1.0, 0.0])), 7)
    0.5849218
    """
    sigma = singular_values.detach().double()
    scale = largest_magnitude(sigma)
    if scale == 0:
        raise Undefined("all singular values are zero")
    p = sigma / scale
    p = p / p.sum()
    return min(float(torch.special.entr(p).sum().exp()) / len(sigma), 1.0)  # rounding passes it by 1e-16


def condition_number(singular_values: Tensor) -> float:
    """How unequally a matrix stretches the directions it acts on.

    sigma_max / sigma_min over all singular values.

    At least 1: 1 for a multiple of an isometry. Unchanged by scaling and by orthogonal maps of rows or
    columns. Undefined ("numerically singular") when sigma_min <= n 2.2e-16 sigma_max, n the number of values,
    which includes zero matrices; `Spectrum` applies the same rule with max(rows, columns) in the place of n,
    by setting to zero what lies below. For the OV circuit of a head sigma_min is value number head_dim.

    Source: Golub and Van Loan, "Matrix Computations", 4th edition, section 2.6.2.

    >>> condition_number(torch.tensor([4.0, 2.0, 1.0]))
    4.0
    """
    sigma = singular_values.detach().double()
    largest = largest_magnitude(sigma)
    smallest = float(sigma.min())
    if smallest <= len(sigma) * _EPSILON * largest:
        raise Undefined("numerically singular")
    return largest / smallest


def norm(x: Tensor | Matrix, norm_type: str) -> float:
    """The size of a matrix, or of a tensor of any shape for ``frobenius`` and ``inf``.

    * ``frobenius``: sqrt(sum_ij x_ij^2)
    * ``nuclear``: sum of the singular values
    * ``spectral``: the largest singular value
    * ``inf``: max_ij |x_ij|, the largest absolute entry. This is what published Pico analyses call ``inf``.
    * ``inf_operator``: max_i sum_j |x_ij|, the norm of the map on vectors measured by their largest entry

    At least 0, and 0 for zeros alone; proportional to a scale of ``x``. All but the two ``inf`` are unchanged
    by orthogonal maps of rows or columns; those need the entries, so a product of factors is multiplied out
    for them and for them alone. A vector has neither singular values nor rows: ``nuclear``, ``spectral`` and
    ``inf_operator`` are undefined.

    Source: Horn and Johnson, "Matrix Analysis", 2nd edition, section 5.6; section 7.4 for ``nuclear``, the
    trace norm.

    >>> x = torch.tensor([[1, 2], [3, -4]])
    >>> norm(x, "inf"), norm(x, "inf_operator")
    (4.0, 7.0)
    >>> norm(torch.tensor([[3.0, 0.0], [0.0, -4.0]]), "frobenius")
    5.0
    """
    matrix = x if isinstance(x, Matrix) else Matrix.dense(x)
    match norm_type:
        case "frobenius":
            entries = matrix.entries() if matrix.right is None else matrix.rows()
            scale = largest_magnitude(entries)
            return scale * float((entries.double() / scale).norm()) if scale else 0.0
        case "nuclear":
            return float(matrix.spectrum().values.sum())
        case "spectral":
            return float(matrix.spectrum().values[0])
        case "inf":
            return largest_magnitude(matrix.entries())
        case "inf_operator":
            entries = matrix.entries()
            if entries.ndim == 1:
                raise Undefined("a vector, not a matrix")
            largest_magnitude(entries)
            return float(entries.double().abs().sum(1).max())
        case _:
            known = "frobenius, nuclear, spectral, inf, inf_operator"
            raise ValueError(f"norm_type: {norm_type!r} is not allowed; choose one of {known}")
