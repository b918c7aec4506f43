"""What the singular values of a matrix say: effective rank, conditioning and norms.

``singular_values`` is a tensor with one number per singular value of the matrix, zeros included, in any
order: what `Matrix.spectrum` computes once for all of these, or `torch.linalg.svdvals`.
"""

import math

import torch
from torch import Tensor

from pico_analyze.components.matrix import Matrix, Undefined, as_matrix, centred, largest_magnitude

_EPSILON = torch.finfo(torch.float64).eps


def per(singular_values: Tensor) -> float:
    """Proportional effective rank: the share of the singular values that the matrix effectively uses.

    exp(H) / n, with H = - sum_i p_i log p_i, p_i = sigma_i / sum_j sigma_j, 0 log 0 = 0, and n the number of
    singular values: min(rows, columns) of a matrix, head_dim for the OV circuit of a head, whose other values
    are zero by construction.

    In (0, 1]: 1 when all singular values are equal, k/n when k equal ones are not zero, 1/n for rank one.
    Unchanged by scaling and by orthogonal maps of rows or columns. Undefined for a zero matrix; 1 for a
    single value.

    Source: Roy and Vetterli, "The effective rank", EUSIPCO 2007, for exp(H); its division by n is that of Diehl
    Martinez, Lesci and Buttery, "Tending towards stability: Convergence challenges in small language models",
    Findings of EMNLP 2024.

    >>> per(torch.tensor([2.0, 2.0, 0.0, 0.0]))
    0.5
    >>> round(per(torch.tensor([3.0, 1.0, 0.0])), 7)
    0.5849218
    """
    sigma = _relative(singular_values)
    return min(_effective_rank(sigma) / len(sigma), 1.0)  # rounding passes it by 1e-16


def effective_rank(singular_values: Tensor) -> float:
    """The number of equal singular values that would have the same entropy as those there are.

    exp(H) with H = - sum_i p_i log p_i, p_i = sigma_i / sum_j sigma_j and 0 log 0 = 0.

    At least 1, which is rank one; k when k equal values are not zero; at most the rank. Unchanged by scaling and by
    orthogonal maps of rows or columns. Undefined for a zero matrix.

    Source: Roy and Vetterli, "The effective rank", EUSIPCO 2007.

    >>> round(effective_rank(torch.tensor([2.0, 2.0, 0.0, 0.0])), 12)
    2.0
    """
    sigma = _relative(singular_values)
    return min(max(_effective_rank(sigma), 1.0), float(len(sigma)))  # as above


def stable_rank(singular_values: Tensor) -> float:
    """How many directions of the largest stretch the energy of a matrix would fill.

    |A|_F^2 / |A|_2^2 = sum_i sigma_i^2 / sigma_max^2.

    At least 1, which is rank one; k when k equal values are not zero; at most the rank. Unchanged by scaling and by
    orthogonal maps of rows or columns. Undefined for a zero matrix.

    Source: Rudelson and Vershynin, "Sampling from large matrices", Journal of the ACM 54:21, 2007,
    who call it the numerical rank.

    >>> stable_rank(torch.tensor([2.0, 1.0, 1.0]))
    1.5
    """
    return float(_relative(singular_values).square().sum())


def participation_ratio(x: Tensor | Matrix, centre: str = "none") -> float:
    """How many directions share the energy of a matrix.

    (sum_i sigma_i^2)^2 / sum_i sigma_i^4, of ``x`` as it is (``centre`` none) or with the mean of each column taken
    away (``columns``). The latter is (tr C)^2 / tr C^2 of the covariance C of the columns over the rows: the
    participation ratio of activations.

    At least 1, which is rank one; k when k equal values are not zero; at most the rank. Unchanged by scaling and by
    orthogonal maps of columns, without centring also of rows. Undefined for a zero matrix and, with centring, when
    every column is constant.

    Source: Gao et al., "A theory of multineuronal dimensionality, dynamics and measurement", bioRxiv 214262, 2017,
    for the covariance.

    >>> participation_ratio(torch.tensor([[2.0, 0.0], [0.0, 1.0]]))  # (4 + 1)^2 / (16 + 1)
    1.4705882352941178
    >>> participation_ratio(torch.tensor([[5.0, 1.0], [5.0, 3.0]]), centre="columns")
    1.0
    """
    if centre not in ("none", "columns"):
        raise ValueError(f"centre: {centre!r} is not allowed; choose one of none, columns")
    matrix = as_matrix(x)
    if centre == "none":
        squares = _relative(matrix.spectrum().values).square()
        value = float(squares.sum() ** 2 / squares.square().sum())
    else:
        rows = centred(matrix, "x")
        gram = rows.mT @ rows if rows.shape[1] <= len(rows) else rows @ rows.mT
        value = float(gram.trace() ** 2 / gram.square().sum())  # sum of sigma^4 = |A^T A|_F^2
    return max(value, 1.0)  # as above


def spectral_entropy(singular_values: Tensor) -> float:
    """How evenly the energy of a matrix is spread over its directions.

    - sum_i p_i log p_i / log n, with p_i = sigma_i^2 / sum_j sigma_j^2, 0 log 0 = 0, and n the number of singular
    values: min(rows, columns) of a matrix, head_dim for the OV circuit of a head.

    In [0, 1]: 0 for rank one, 1 when all singular values are equal, log k / log n when k equal ones are not zero.
    Unchanged by scaling and by orthogonal maps of rows or columns. Undefined for a zero matrix and for a single
    value.

    Source: Alter, Brown and Botstein, "Singular value decomposition for genome-wide expression data processing and
    modeling", PNAS 97:10101, 2000, on the entropy of a dataset.

    >>> round(spectral_entropy(torch.tensor([2.0, 2.0, 0.0, 0.0])), 12)
    0.5
    """
    squares = _relative(singular_values).square()
    if len(squares) == 1:
        raise Undefined("a single singular value")
    return min(float(torch.special.entr(squares / squares.sum()).sum()) / math.log(len(squares)), 1.0)  # as above


def condition_number(singular_values: Tensor) -> float:
    """How unequally a matrix stretches the directions it acts on.

    sigma_max / sigma_min over all singular values.

    At least 1: 1 for a multiple of an isometry. Unchanged by scaling and by orthogonal maps of rows or
    columns. Undefined ("numerically singular") when sigma_min <= n 2.2e-16 sigma_max, n the number of values,
    which includes zero matrices; `Spectrum` applies the same rule with max(rows, columns) in the place of n,
    by setting to zero what lies below. For the OV circuit of a head sigma_min is value number head_dim.

    Source: Golub and Van Loan, "Matrix Computations", 4th edition, 2013, for the 2-norm.

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

    Source: Horn and Johnson, "Matrix Analysis", 2nd edition, 2013, where ``nuclear`` is the trace norm.

    >>> x = torch.tensor([[1, 2], [3, -4]])
    >>> norm(x, "inf"), norm(x, "inf_operator")
    (4.0, 7.0)
    >>> norm(torch.tensor([[3.0, 0.0], [0.0, -4.0]]), "frobenius")
    5.0
    """
    matrix = as_matrix(x)
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


def composition_score(x: Tensor | Matrix, baseline: str = "none") -> float:
    """How much of what one circuit writes another one reads.

    |x|_F of x = A B / (|A|_F |B|_F), which a component such as ``q_composition`` forms, so that this is the score itself;
    less 1/sqrt(d) with ``baseline`` random, d the columns of x. That is the root mean square of the score when one of the
    two is turned at random: the mean of |A U B|_F^2 over all orthogonal d x d matrices U is |A|_F^2 |B|_F^2 / d.

    In [0, 1], or in [-1, 1] with the baseline: 0 when B writes only what A maps to zero, 1 when both have rank one and A
    reads what B writes. Unchanged by a scale of either circuit. Undefined when one of them is zero, and for a matrix that is
    no composition.

    Source: Elhage et al., "A mathematical framework for transformer circuits", 2021, for the score; the baseline in this
    form is ours.

    >>> x = Matrix.of_core(torch.tensor([[0.6]], dtype=torch.float64), shape=(4, 4))
    >>> composition_score(x), round(composition_score(x, baseline="random"), 12)  # less 1/sqrt(4)
    (0.6, 0.1)
    """
    if baseline not in ("none", "random"):
        raise ValueError(f"baseline: {baseline!r} is not allowed; choose one of none, random")
    matrix = as_matrix(x)
    if matrix.stands_for is None:
        raise Undefined("not the composition of two circuits")
    score = float(matrix.rows().norm())
    return score - (1 / math.sqrt(matrix.shape[1]) if baseline == "random" else 0.0)


def _relative(singular_values: Tensor) -> Tensor:
    """The singular values over the largest one, in float64."""
    sigma = singular_values.detach().double()
    scale = largest_magnitude(sigma)
    if scale == 0:
        raise Undefined("all singular values are zero")
    return sigma / scale


def _effective_rank(sigma: Tensor) -> float:
    return float(torch.special.entr(sigma / sigma.sum()).sum().exp())
