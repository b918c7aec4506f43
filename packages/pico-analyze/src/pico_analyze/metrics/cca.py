"""How alike two representations of the same samples are up to linear maps: the CCA family.

``x`` and ``y`` hold one sample in each row, the same samples in the same order, and one feature in each
column; they may differ in their number of features. A tensor of any dtype, or a `Matrix`: products of factors
are never multiplied out. The first thing every measure does is to centre each feature over the samples.

Legend: n samples, p and q features of x and y, k and l their numerical ranks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pico_analyze.components.matrix import Flagged, Matrix, Undefined, as_matrix, centred, n_samples, singular_values
from pico_analyze.metrics.null import Scores

_RANK_TOLERANCE = 1e-6
"""Singular values at or below this share of the largest count as zero: storage in float32 leaves 6e-8."""


class CanonicalCorrelations(NamedTuple):
    """What canonical correlation analysis finds; every measure of the family is a mean over it."""

    correlations: Tensor
    """Descending, in [0, 1], (min(k, l),)."""
    x_variates: Tensor
    """The directions in sample space that correlate, as x sees them: orthonormal columns, (n, min(k, l))."""
    y_variates: Tensor
    """As y sees them."""
    warning: str | None
    """Why some correlations are 1 whatever the data; None when they are not."""


def pwcca(x: Tensor | Matrix, y: Tensor | Matrix, weights_from: str = "x") -> float:
    """Projection-weighted canonical correlation: how much of what one side expresses does the other contain?

    sum_i alpha_i rho_i / sum_i alpha_i, with rho_i the canonical correlations and h_i the canonical variates
    of the side that ``weights_from`` names; alpha_i = sum_j |<h_i, x_j>| over its centred feature columns
    x_j.

    In [0, 1]: 1 when the directions of the weighting side lie in the span of the other, 0 when the sides are
    uncorrelated. Unchanged by shifts, by a common scale of the weighting side and by any invertible linear
    map of the other side. Not symmetric: with ``weights_from`` x and y exchanged it is the value of (y, x).
    When the weighting side has the larger rank, only its min(k, l) canonical directions have weights.

    Undefined and flagged as `canonical_correlations` says.

    Source: Morcos, Raghu and Bengio, "Insights on representational similarity in neural networks with
    canonical correlation", NeurIPS 2018, the section on projection weighted CCA. Their code weighs by the
    variates of the smaller side whichever that is; here the caller chooses.

    >>> x = torch.tensor([[1, 0, 2], [0, 1, 1], [3, 1, 0], [1, 2, 2], [0, 0, 1]])
    >>> y = torch.tensor([[1, 0], [0, 1], [1, 1], [2, 1], [0, 3]])
    >>> round(pwcca(x, y), 7)
    0.7196231
    """
    if weights_from not in ("x", "y"):
        raise ValueError(f"weights_from: {weights_from!r} is not allowed; choose one of x, y")
    x, y = as_matrix(x), as_matrix(y)
    rho, x_variates, y_variates, warning = canonical_correlations(x, y)
    weighting, variates = (x, x_variates) if weights_from == "x" else (y, y_variates)
    alpha = weighting.project(variates).abs().sum(1)  # h_i is centred, so the means of the columns drop out
    value = min(float(alpha @ rho / alpha.sum()), 1.0)
    return value if warning is None else Flagged(value, warning)


def pwcca_over_orders(x: Tensor | Matrix, y: Tensor | Matrix, weights_from: str = "x") -> Scores:
    """`pwcca` of x and of y in another order: a product of the bases and its singular vectors each."""
    if weights_from not in ("x", "y"):
        raise ValueError(f"weights_from: {weights_from!r} is not allowed; choose one of x, y")
    x, y = as_matrix(x), as_matrix(y)
    basis_x, basis_y, _ = _bases(x, y)
    # In another order the samples of y and its basis move together, so this does not change.
    expressed = x.project(basis_x) if weights_from == "x" else y.project(basis_y)  # (k or l, features)

    def score(order: Tensor) -> float:
        u, rho, vt = torch.linalg.svd(basis_x.mT @ basis_y[order], full_matrices=False)
        alpha = ((u.mT if weights_from == "x" else vt) @ expressed).abs().sum(1)
        return min(float(alpha @ rho.clamp(max=1.0) / alpha.sum()), 1.0)

    return score


def mean_cca(x: Tensor | Matrix, y: Tensor | Matrix) -> float:
    """The mean canonical correlation: how much of the smaller side is a linear function of the other?

    mean_i rho_i over the min(k, l) canonical correlations.

    In [0, 1]: 1 when the smaller span lies in the larger, 0 when the sides are uncorrelated. Symmetric; unchanged
    by shifts and by any invertible linear map of either side, so a direction of tiny variance counts like any
    other. Undefined and flagged as `canonical_correlations` says.

    Source: Raghu et al., "SVCCA: Singular vector canonical correlation analysis for deep learning dynamics and
    interpretability", NeurIPS 2017, whose similarity this is without their first step.

    >>> x = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    >>> round(mean_cca(x, torch.tensor([[1.0], [3.0], [2.0], [4.0]])), 12)
    0.8
    """
    found = canonical_correlations(x, y)
    value = float(found.correlations.mean())
    return value if found.warning is None else Flagged(value, found.warning)


def mean_cca_over_orders(x: Tensor | Matrix, y: Tensor | Matrix) -> Scores:
    """`mean_cca` of x and of y in another order: the singular values of a product of the bases each."""
    return _mean_over_orders(x, y, None)


def svcca_over_orders(x: Tensor | Matrix, y: Tensor | Matrix, variance: float = 0.99) -> Scores:
    """`svcca` of x and of y in another order, likewise."""
    return _mean_over_orders(x, y, variance)


def _mean_over_orders(x: Tensor | Matrix, y: Tensor | Matrix, variance: float | None) -> Scores:
    basis_x, basis_y, _ = _bases(x, y, variance)
    return lambda order: float(singular_values(basis_x.mT @ basis_y[order]).clamp(max=1.0).mean())


def svcca(x: Tensor | Matrix, y: Tensor | Matrix, variance: float = 0.99) -> float:
    """The mean canonical correlation of the directions that hold most of the variance of each side.

    Of each side only the first principal directions are kept, as few as hold the share ``variance`` of its
    variance (sum of squared singular values of the centred features), at least one; then `mean_cca`.

    In [0, 1]: 1 when the kept directions of the smaller side lie in the span of those of the other. Symmetric;
    unchanged by shifts, scaling and orthogonal maps of the features; not by other linear maps, which change the
    directions that are kept. Undefined and flagged as `canonical_correlations` says, with the number of kept
    directions in the place of the rank.

    Source: Raghu et al., "SVCCA: Singular vector canonical correlation analysis for deep learning dynamics and
    interpretability", NeurIPS 2017. Their code takes the share of the sum of singular values, not of their
    squares; here it is the variance that their text names.

    >>> x = torch.tensor([[1.0, 0.01], [2.0, -0.01], [3.0, -0.01], [4.0, 0.01]])
    >>> round(svcca(x, torch.tensor([[1.0], [3.0], [2.0], [4.0]])), 12)
    0.8
    """
    found = canonical_correlations(x, y, variance)
    value = float(found.correlations.mean())
    return value if found.warning is None else Flagged(value, found.warning)


def canonical_correlations(
    x: Tensor | Matrix, y: Tensor | Matrix, variance: float | None = None
) -> CanonicalCorrelations:
    """The cosines of the principal angles between the spans of the centred features of ``x`` and of ``y``.

    With orthonormal bases Q_x (n, k) and Q_y (n, l) of the two spans, Q_x^T Q_y = U diag(rho) V^T; the
    variates are Q_x U and Q_y V. k and l are numerical ranks: directions with singular values at or below
    1e-6 of the largest are left out, where they would be rounding noise amplified to unit length. With
    ``variance`` only the first principal directions are kept that hold this share of a side's variance.

    Symmetric; the correlations are unchanged by shifts and invertible linear maps of either side. Undefined
    when k or l is n - 1, where a side spans every centred vector, and when all features of a side are
    constant. With a warning when k + l >= n - 1, where the two spans fill the space of centred vectors: at
    least k + l - (n - 1) correlations are then 1 whatever the data.

    Source: Björck and Golub, "Numerical methods for computing angles between linear subspaces", Mathematics
    of Computation 27:579, 1973.

    >>> x = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    >>> y = torch.tensor([[1.0], [3.0], [2.0], [4.0]])
    >>> round(float(canonical_correlations(x, y).correlations), 12)
    0.8
    """
    basis_x, basis_y, warning = _bases(x, y, variance)
    u, rho, vt = torch.linalg.svd(basis_x.mT @ basis_y, full_matrices=False)
    return CanonicalCorrelations(rho.clamp(max=1.0), basis_x @ u, basis_y @ vt.mT, warning)


def _bases(x: Tensor | Matrix, y: Tensor | Matrix, variance: float | None = None) -> tuple[Tensor, Tensor, str | None]:
    """Orthonormal bases of the two spans, and the warning of `canonical_correlations`."""
    a, b = centred(x, "x"), centred(y, "y")
    n = n_samples(a, b)
    basis_x, basis_y = _basis(a, variance), _basis(b, variance)
    k, l = basis_x.shape[1], basis_y.shape[1]  # noqa: E741
    if max(k, l) >= n - 1:
        raise Undefined(f"{n} samples are too few for features of rank {max(k, l)}: they span everything")
    warning = f"too few samples: {n} for ranks {k} and {l}, which fill the space" if k + l >= n - 1 else None
    return basis_x, basis_y, warning


def _basis(a: Tensor, variance: float | None) -> Tensor:
    """Orthonormal columns that span those of ``a``, or its principal directions that hold the share ``variance``.

    One per singular value above the rank tolerance.
    """
    q: Tensor | None = None
    if a.shape[1] < len(a):
        q, a = torch.linalg.qr(a)  # the rest on a small square matrix
        if variance is None:
            sigma = singular_values(a)
            if sigma[-1] > _RANK_TOLERANCE * sigma[0]:  # full rank: no need for singular vectors
                return q
    u: Tensor
    u, sigma, _ = torch.linalg.svd(a, full_matrices=False)
    kept = sigma > _RANK_TOLERANCE * sigma[0]
    if variance is not None:
        before = sigma.square().cumsum(0) - sigma.square()  # what the directions before this one hold
        kept &= before < (variance - 1e-12) * sigma.square().sum()
        kept[0] = True
    return u[:, kept] if q is None else q @ u[:, kept]
