"""How alike two representations of the same samples are: linear CKA and the CCA family.

``x`` and ``y`` hold one sample in each row, the same samples in the same order, and one feature in each
column; they may differ in their number of features. A tensor of any dtype, or a `Matrix`: products of factors
are never multiplied out. The first thing every measure does is to centre each feature over the samples.

Legend: n samples, p and q features of x and y, k and l their numerical ranks.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pico_analyze.components.matrix import Flagged, Matrix, Undefined, as_matrix, centred, singular_values

_EPSILON = torch.finfo(torch.float64).eps

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


def linear_cka(x: Tensor | Matrix, y: Tensor | Matrix, estimator: str = "debiased") -> float:
    """Linear centred kernel alignment: do ``x`` and ``y`` find the same samples similar?

    HSIC(x, y) / sqrt(HSIC(x, x) HSIC(y, y)). With K = x x^T and L = y y^T of the centred features,

    * ``plug_in``: HSIC = tr(K L) = |x^T y|_F^2, in [0, 1];
    * ``debiased``: HSIC = [tr(K' L') + sum(K') sum(L') / ((n - 1) (n - 2)) - 2/(n - 2) sum(K' L')]
      / (n (n - 3)), where K' and L' are K and L with zeros on the diagonal. This HSIC is right on average
      however few the samples, so the value is about 0 for unrelated features, also below; in [-1, 1].

    1 when K and L agree up to scale, 0 (plug-in) when no feature of x correlates with one of y. Symmetric;
    unchanged by scaling, shifts and orthogonal maps of the features and by one order of samples for both.
    Undefined when n < 4 (debiased), when all features of a side are constant, and where HSIC(x, x) is 0, as
    for samples that are all equally far apart (debiased). The plug-in estimate grows towards 1 as n falls and
    is flagged when n is not above the number of features.

    Source: Kornblith et al., "Similarity of neural network representations revisited", ICML 2019, eq. 3 and 4
    for the plug-in; Song et al., "Feature selection via dependence maximization", JMLR 13:1393, 2012, the
    estimator HSIC_1, here without the n x n matrices where the features are fewer.

    >>> x = torch.tensor([[0.0, 1.0], [2.0, 1.0], [4.0, 0.0], [1.0, 5.0], [3.0, 3.0]])
    >>> round(linear_cka(x, 3 * x.flip(1) + 7), 12)
    1.0
    """
    if estimator not in ("debiased", "plug_in"):
        raise ValueError(f"estimator: {estimator!r} is not allowed; choose one of debiased, plug_in")
    a, b = centred(x, "x"), centred(y, "y")
    n = _samples(a, b)
    if estimator == "plug_in":
        value = min(_cross(a, b) / math.sqrt(_cross(a, a) * _cross(b, b)), 1.0)  # rounding passes it by 1e-16
        features = max(a.shape[1], b.shape[1])
        if n <= features:
            return Flagged(value, f"the plug-in estimate is too high: {n} samples of {features} features")
        return value
    if n < 4:
        raise Undefined(f"{n} samples; unbiased HSIC needs 4")
    hsic_x, hsic_y = _unbiased_hsic(a, a), _unbiased_hsic(b, b)
    for name, hsic, side in (("x", hsic_x, a), ("y", hsic_y, b)):
        if hsic * n * (n - 3) <= n * _EPSILON * _cross(side, side):
            raise Undefined(f"the unbiased HSIC of {name} with itself is 0")
    return min(_unbiased_hsic(a, b) / math.sqrt(hsic_x * hsic_y), 1.0)


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


def canonical_correlations(x: Tensor | Matrix, y: Tensor | Matrix) -> CanonicalCorrelations:
    """The cosines of the principal angles between the spans of the centred features of ``x`` and of ``y``.

    With orthonormal bases Q_x (n, k) and Q_y (n, l) of the two spans, Q_x^T Q_y = U diag(rho) V^T; the
    variates are Q_x U and Q_y V. k and l are numerical ranks: directions with singular values at or below
    1e-6 of the largest are left out, where they would be rounding noise amplified to unit length.

    Symmetric; the correlations are unchanged by shifts and invertible linear maps of either side. Undefined
    when k or l is n - 1, where a side spans every centred vector, and when all features of a side are
    constant. With a warning when k + l >= n - 1, where the two spans fill the space of centred vectors: at
    least k + l - (n - 1) correlations are then 1 whatever the data.

    Source: Björck and Golub, "Numerical methods for computing angles between linear subspaces", Mathematics
    of Computation 27:579, 1973, section 3.

    >>> x = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    >>> y = torch.tensor([[1.0], [3.0], [2.0], [4.0]])
    >>> round(float(canonical_correlations(x, y).correlations), 12)
    0.8
    """
    a, b = centred(x, "x"), centred(y, "y")
    n = _samples(a, b)
    basis_x, basis_y = _basis(a), _basis(b)
    k, l = basis_x.shape[1], basis_y.shape[1]  # noqa: E741
    if max(k, l) >= n - 1:
        raise Undefined(f"{n} samples are too few for features of rank {max(k, l)}: they span everything")
    u, rho, vt = torch.linalg.svd(basis_x.mT @ basis_y, full_matrices=False)
    warning = f"too few samples: {n} for ranks {k} and {l}, which fill the space" if k + l >= n - 1 else None
    return CanonicalCorrelations(rho.clamp(max=1.0), basis_x @ u, basis_y @ vt.mT, warning)


def _samples(a: Tensor, b: Tensor) -> int:
    if len(a) != len(b):
        raise Undefined(f"{len(a)} samples of x, {len(b)} of y: they are not the same samples")
    return len(a)


def _cross(a: Tensor, b: Tensor) -> float:
    """|a^T b|_F^2 = tr(a a^T b b^T), over features or over samples, whichever costs less."""
    n, p, q = len(a), a.shape[1], b.shape[1]
    if p * q <= n * (p + q):
        return float((a.mT @ b).square().sum())
    return float(((a @ a.mT) * (b @ b.mT)).sum())


def _unbiased_hsic(a: Tensor, b: Tensor) -> float:
    """Unbiased HSIC from centred features: with K 1 = 0 the sums over K' are sums over its missing diagonal.

    sum(K') = -tr(K), sum(K' L') = d_K . d_L and tr(K' L') = tr(K L) - d_K . d_L, with d the diagonals.
    """
    n = len(a)
    d_k, d_l = a.square().sum(1), b.square().sum(1)  # (n,)
    trace = _cross(a, b) - n / (n - 2) * float(d_k @ d_l) + float(d_k.sum() * d_l.sum()) / ((n - 1) * (n - 2))
    return trace / (n * (n - 3))


def _basis(a: Tensor) -> Tensor:
    """Orthonormal columns that span those of ``a``, one per singular value above the rank tolerance."""
    if a.shape[1] < len(a):
        q: Tensor
        q, r = torch.linalg.qr(a)
        sigma = singular_values(r)
        if sigma[-1] > _RANK_TOLERANCE * sigma[0]:  # full rank: no need for singular vectors
            return q
    u: Tensor
    u, sigma, _ = torch.linalg.svd(a, full_matrices=False)
    return u[:, sigma > _RANK_TOLERANCE * sigma[0]]
