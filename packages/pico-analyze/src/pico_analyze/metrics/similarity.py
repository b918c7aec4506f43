"""How alike two representations of the same samples are by the geometry of the samples.

CKA, Procrustes, representational similarity and mutual nearest neighbours. ``x`` and ``y`` hold one sample in each
row, the same samples in the same order, and one feature in each column; they may differ in their number of
features. A tensor of any dtype, or a `Matrix`: products of factors are never multiplied out.

Legend: n samples, p and q features of x and y.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import scipy.stats
import torch
from torch import Tensor

from pico_analyze.components.matrix import (
    Flagged,
    Matrix,
    Undefined,
    as_matrix,
    centred,
    gram,
    n_samples,
    singular_values,
)
from pico_analyze.metrics.null import Scores

_EPSILON = torch.finfo(torch.float64).eps

_TIE = 1e-12
"""Squared distances that agree to this share of the largest are equal: they are known to rounding of it."""

_FEW_FEATURES = 40
"""Up to p q = 40 n a product of features is faster than a kernel in another order: a multiplication costs about 1/40 of
moving a number."""


def cka(
    x: Tensor | Matrix, y: Tensor | Matrix, estimator: str = "debiased", kernel: str = "linear", batch: int = 256
) -> float:
    """Centred kernel alignment: do ``x`` and ``y`` find the same samples similar?

    HSIC(x, y) / sqrt(HSIC(x, x) HSIC(y, y)). ``kernel`` says what K, the similarity of samples, is (L likewise,
    of y):

    * ``linear``: K = x x^T of the centred features;
    * ``rbf``: K_ij = exp(-|x_i - x_j|^2 / (2 m^2)), with m the median distance between two different samples.

    ``estimator`` says how HSIC is estimated:

    * ``plug_in``: HSIC = tr(K H L H), with H = 1 - 1/n the centring; |x^T y|_F^2 for linear; in [0, 1];
    * ``debiased``: HSIC = [tr(K' L') + sum(K') sum(L') / ((n - 1) (n - 2)) - 2/(n - 2) sum(K' L')]
      / (n (n - 3)), where K' and L' are K and L with zeros on the diagonal. This HSIC is right on average
      however few the samples, so the value is about 0 for unrelated features, also below; in [-1, 1];
    * ``minibatch``: HSIC is the mean of the debiased one over minibatches: n // ``batch`` random parts of the
      samples, as equal as they can be, at least one; parts of neighbours, such as the tokens of a sequence, would
      raise it. On average it is the debiased HSIC, at a cost of n batch instead of n^2 similarities.

    1 when K and L agree up to scale, 0 (plug-in, linear) when no feature of x correlates with one of y. Symmetric;
    unchanged by scaling, shifts and orthogonal maps of the features and by one order of samples for both (minibatch: in
    one batch). Undefined when n < 4 (but for plug-in), when all features of a side are constant, where HSIC(x, x) is 0, as
    for samples that are all equally far apart (debiased), and when half of the samples are equal (rbf). The plug-in
    estimate grows towards 1 as n falls and is flagged when n is not above the number of features.

    Source: Kornblith et al., "Similarity of neural network representations revisited", ICML 2019, for the
    plug-in and the kernels; Song et al., "Feature selection via dependence maximization", JMLR
    13:1393, 2012, the estimator HSIC_1, for the linear kernel without the n x n matrices where the features are
    fewer; Nguyen, Raghu and Kornblith, "Do wide and deep networks learn the same things?", ICLR 2021, eq. 2 and 3, for
    minibatches.

    >>> x = torch.tensor([[0.0, 1.0], [2.0, 1.0], [4.0, 0.0], [1.0, 5.0], [3.0, 3.0]])
    >>> round(cka(x, 3 * x.flip(1) + 7), 12), round(cka(x, 3 * x.flip(1) + 7, kernel="rbf"), 12)
    (1.0, 1.0)
    """
    a, b = _sides(x, y, estimator, kernel)
    n, features = len(a), max(a.shape[1], b.shape[1])
    xs, ys = (_batches(side, name, estimator, kernel, batch) for name, side in (("x", a), ("y", b)))
    hsic = _HSIC["plug_in" if estimator == "plug_in" else "debiased", kernel]
    root = math.sqrt(_own_hsic(xs, "x", estimator, kernel) * _own_hsic(ys, "y", estimator, kernel))
    value = min(sum(map(hsic, xs, ys)) / len(xs) / root, 1.0)  # rounding passes it by 1e-16
    if estimator == "plug_in" and n <= features:
        return Flagged(value, f"the plug-in estimate is too high: {n} samples of {features} features")
    return value


def cka_over_orders(
    x: Tensor | Matrix, y: Tensor | Matrix, estimator: str = "debiased", kernel: str = "linear", batch: int = 256
) -> Scores:
    """`cka` of x and of y in another order, at n^2 or n p q each once both sides are prepared."""
    a, b = _sides(x, y, estimator, kernel)
    hsic = _HSIC["plug_in" if estimator == "plug_in" else "debiased", kernel]
    xs = _batches(a, "x", estimator, kernel, batch)
    own = _own_hsic(xs, "x", estimator, kernel)
    if estimator == "minibatch":  # which samples of y share a batch depends on the order

        def of_batches(order: Tensor) -> float:
            ys = _batches(b[order], "y", estimator, kernel, batch)
            root = math.sqrt(own * _own_hsic(ys, "y", estimator, kernel))
            return min(sum(map(hsic, xs, ys)) / len(xs) / root, 1.0)

        return of_batches
    [k], [l] = xs, _batches(b, "y", estimator, kernel, batch)  # noqa: E741
    root = math.sqrt(own * _own_hsic([l], "y", estimator, kernel))
    if kernel == "linear" and a.shape[1] * b.shape[1] <= _FEW_FEATURES * len(a):
        return lambda order: min(hsic(k, l[order]) / root, 1.0)
    if kernel == "linear":
        k, l = k @ k.mT, l @ l.mT  # noqa: E741
    if estimator == "plug_in":
        k = k - k.mean(0) - k.mean(1, keepdim=True) + k.mean()
        return lambda order: min(_sum_of_products(k, l, order) / root, 1.0)
    k, l = (side - torch.diag(side.diagonal()) for side in (k, l))  # noqa: E741
    n, sums_k, sums_l = len(k), k.sum(0), l.sum(0)
    in_any_order = float(sums_k.sum() * sums_l.sum()) / ((n - 1) * (n - 2))

    def of_kernels(order: Tensor) -> float:
        between = 2 / (n - 2) * float(sums_k @ sums_l[order])
        return min((_sum_of_products(k, l, order) + in_any_order - between) / (n * (n - 3)) / root, 1.0)

    return of_kernels


def procrustes(x: Tensor | Matrix, y: Tensor | Matrix) -> float:
    """How well the samples of ``x``, rotated and scaled, fall on those of ``y``.

    |x^T y|_* / (|x|_F |y|_F) of the centred features, with |.|_* the sum of the singular values. It is the largest
    cosine between x Q and y over all orthogonal Q.

    In [0, 1]: 1 when one side is the other, shifted, scaled and rotated or reflected; 0 when no feature of x
    correlates with one of y. Symmetric; unchanged by shifts, scaling and orthogonal maps of the features and by one
    order of samples for both. Of unrelated features it rises as samples become few against features, and is
    flagged when n is not above their number. Undefined when all features of a side are constant.

    The value v gives both distances of the literature: arccos(v) is the angular one of Williams et al., 2 - 2 v
    that of Ding et al. for sides of unit norm.

    Source: Williams et al., "Generalized shape metrics on neural representations", NeurIPS 2021, with
    centring and unit norm; Ding, Denain and Steinhardt, "Grounding representation similarity with
    statistical testing", NeurIPS 2021.

    >>> x = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 2.0], [0.0, -2.0]])
    >>> round(procrustes(x, 3 * x.flip(1) + 7), 12)
    1.0
    >>> round(procrustes(x, x * torch.tensor([1.0, 0.0])), 12)  # 2 / sqrt(10 * 2)
    0.4472135955
    """
    a, b = centred(x, "x"), centred(y, "y")
    n, features = n_samples(a, b), max(a.shape[1], b.shape[1])
    value = _procrustes(a, b)(torch.arange(n))
    if n <= features:
        return Flagged(value, f"too high for few samples: {n} samples of {features} features")
    return value


def procrustes_over_orders(x: Tensor | Matrix, y: Tensor | Matrix) -> Scores:
    """`procrustes` of x and of y in another order: a product and its singular values each."""
    a, b = centred(x, "x"), centred(y, "y")
    n_samples(a, b)
    return _procrustes(a, b)


def _procrustes(a: Tensor, b: Tensor) -> Scores:
    n = len(a)
    # With a^T = Q R (thin QR) a is R^T in other coordinates, of at most n features.
    a, b = (torch.linalg.qr(side.mT, mode="r").R.mT if side.shape[1] > n else side for side in (a, b))
    norms = float(a.norm() * b.norm())
    return lambda order: min(float(singular_values(a.mT @ b[order]).sum()) / norms, 1.0)  # as above


def rsa(x: Tensor | Matrix, y: Tensor | Matrix, correlation: str = "spearman") -> float:
    """Representational similarity analysis: are the same pairs of samples far apart in ``x`` and in ``y``?

    The correlation, over all n (n - 1) / 2 pairs of samples, between their Euclidean distances in x and in y:
    ``spearman`` of the ranks of the distances (ties share the mean of their ranks), ``pearson`` of the distances.

    In [-1, 1]: 1 when the order of the distances (pearson: the distances up to scale) is the same, about 0 for
    unrelated features. Symmetric; unchanged by shifts, scaling and orthogonal maps of the features and by one order
    of samples for both. Undefined for fewer than 3 samples, when all features of a side are constant and when all
    distances of a side are equal.

    Source: Kriegeskorte, Mur and Bandettini, "Representational similarity analysis - connecting the branches of
    systems neuroscience", Frontiers in Systems Neuroscience 2:4, 2008. Their dissimilarity is 1 less the
    correlation of two samples over the features, which changes when the features are rotated.

    >>> x = torch.tensor([[0.0], [1.0], [3.0]])  # distances 1, 3, 2
    >>> round(rsa(x, torch.tensor([[0.0], [2.0], [5.0]])), 12)  # distances 2, 5, 3
    1.0
    >>> round(rsa(x, torch.tensor([[0.0], [4.0], [1.0]])), 12)  # distances 4, 1, 3: ranks 3, 1, 2
    -1.0
    """
    return rsa_over_orders(x, y, correlation)(torch.arange(as_matrix(x).shape[0]))


def rsa_over_orders(x: Tensor | Matrix, y: Tensor | Matrix, correlation: str = "spearman") -> Scores:
    """`rsa` of x and of y in another order: n^2 each, once the distances are known and ranked."""
    if correlation not in ("spearman", "pearson"):
        raise ValueError(f"correlation: {correlation!r} is not allowed; choose one of spearman, pearson")
    a, b = centred(x, "x"), centred(y, "y")
    n = n_samples(a, b)
    if n < 3:
        raise Undefined(f"{n} samples; a correlation of distances needs 3")
    over, under = torch.triu_indices(n, n, offset=1)
    sides = []
    for name, side in (("x", a), ("y", b)):
        squares = _squared_distances(side)[over, under].cpu().numpy()
        along = scipy.stats.rankdata(squares) if correlation == "spearman" else np.sqrt(squares)
        along = along - along.mean()
        if np.abs(along).max() <= _TIE * len(along):
            raise Undefined(f"all samples of {name} are equally far apart")
        whole = torch.zeros(n, n, dtype=torch.float64)
        whole[over, under] = torch.from_numpy(along / np.linalg.norm(along))
        sides.append(whole + whole.mT)
    return lambda order: min(max(_sum_of_products(sides[0], sides[1], order) / 2, -1.0), 1.0)  # as above


def mutual_knn(x: Tensor | Matrix, y: Tensor | Matrix, k: int = 10, distance: str = "cosine") -> float:
    """The share of the k nearest neighbours of a sample that it has in ``x`` as well as in ``y``.

    mean_i |N_x(i) and N_y(i)| / k, with N(i) the k samples nearest to sample i, itself left out: by the angle
    between rows (``cosine``), or by their Euclidean distance (``euclidean``). Samples that are equally far at the
    edge of N share the places that are left, each belonging to N in part, so that the order of samples never
    decides.

    In [0, 1]: 1 when all neighbourhoods agree; k / (n - 1) on average for unrelated features. Symmetric; unchanged by
    scaling and orthogonal maps of the features and by one order of samples for both; by shifts only when
    euclidean. Undefined unless k < n - 1, since otherwise all samples are neighbours; when all samples of a side are
    equal, or point the same way; when a row is zero and so has no direction (cosine).

    Source: Huh et al., "The platonic representation hypothesis", ICML 2024, for cosine; they break ties
    by the order of samples.

    >>> x = torch.tensor([[0.0], [1.0], [2.1], [3.3]])  # nearest: 1, 0, 1, 2
    >>> mutual_knn(x, torch.tensor([[0.0], [1.0], [5.0], [2.2]]), k=1, distance="euclidean")  # nearest: 1, 0, 3, 1
    0.5
    """
    return mutual_knn_over_orders(x, y, k, distance)(torch.arange(as_matrix(x).shape[0]))


def mutual_knn_over_orders(x: Tensor | Matrix, y: Tensor | Matrix, k: int = 10, distance: str = "cosine") -> Scores:
    """`mutual_knn` of x and of y in another order: n^2 each, once the neighbours are found."""
    if distance not in ("cosine", "euclidean"):
        raise ValueError(f"distance: {distance!r} is not allowed; choose one of cosine, euclidean")
    place = centred if distance == "euclidean" else _directions
    a, b = place(x, "x"), place(y, "y")
    n = n_samples(a, b)
    if k >= n - 1:
        raise Undefined(f"{n} samples have no more than {n - 1} neighbours each; k is {k}")
    near_x, near_y = _neighbourhoods(a, k), _neighbourhoods(b, k)
    return lambda order: min(float(torch.minimum(near_x, _reordered(near_y, order)).sum()) / (n * k), 1.0)  # as above


def _sides(x: Tensor | Matrix, y: Tensor | Matrix, estimator: str, kernel: str) -> tuple[Tensor, Tensor]:
    """The centred sides of `cka`, where it takes them."""
    if estimator not in ("debiased", "plug_in", "minibatch"):
        raise ValueError(f"estimator: {estimator!r} is not allowed; choose one of debiased, plug_in, minibatch")
    if kernel not in ("linear", "rbf"):
        raise ValueError(f"kernel: {kernel!r} is not allowed; choose one of linear, rbf")
    a, b = centred(x, "x"), centred(y, "y")
    n = n_samples(a, b)
    if estimator != "plug_in" and n < 4:
        raise Undefined(f"{n} samples; unbiased HSIC needs 4")
    return a, b


def _batches(a: Tensor, name: str, estimator: str, kernel: str, batch: int) -> list[Tensor]:
    """What HSIC takes of each batch: the centred features (linear) or the kernel (rbf); without minibatches of all."""
    batches: Sequence[Tensor] = [a]
    if estimator == "minibatch" and len(a) >= 2 * batch:
        order = torch.from_numpy(np.random.default_rng(0).permutation(len(a)))  # of n alone: the same for both sides
        batches = [part - part.mean(0) for part in torch.tensor_split(a[order], len(a) // batch)]
    return [_rbf(part, name) if kernel == "rbf" else part for part in batches]


def _own_hsic(batches: Sequence[Tensor], name: str, estimator: str, kernel: str) -> float:
    """The HSIC of a side with itself; Undefined where it is 0 but for rounding."""
    debiased = estimator != "plug_in"
    hsic = _HSIC["debiased" if debiased else "plug_in", kernel]
    own = rounding = 0.0
    for side in batches:
        n = len(side)
        value = hsic(side, side)
        largest = float(side.square().sum()) if kernel == "rbf" else _cross(side, side) if debiased else value
        own += value / len(batches)
        rounding += n * _EPSILON * largest / (n * (n - 3) if debiased else 1) / len(batches)
    if own <= rounding:
        raise Undefined(f"the {'unbiased ' if debiased else ''}HSIC of {name} with itself is 0")
    return own


def _sum_of_products(kernel: Tensor, other: Tensor, order: Tensor) -> float:
    """sum_ij kernel_ij other'_ij of (n, n) matrices, the rows and columns of the other one in another order."""
    return float(kernel.flatten() @ _reordered(other, order).flatten())


def _reordered(kernel: Tensor, order: Tensor) -> Tensor:
    """Rows and columns of an (n, n) matrix in another order."""
    order = order.to(kernel.device)
    return kernel.index_select(0, order).index_select(1, order)


def _cross(a: Tensor, b: Tensor) -> float:
    """|a^T b|_F^2 = tr(a a^T b b^T), over features or over samples, whichever costs less."""
    n, p, q = len(a), a.shape[1], b.shape[1]
    if a is b:
        return float(gram(a if p <= n else a.mT).square().sum())
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


def _plug_in_hsic_of_kernels(k: Tensor, l: Tensor) -> float:  # noqa: E741
    """tr(K H L H): K is centred, L need not be."""
    centred_k = k - k.mean(0) - k.mean(1, keepdim=True) + k.mean()
    return float((centred_k * l).sum())


def _unbiased_hsic_of_kernels(k: Tensor, l: Tensor) -> float:  # noqa: E741
    """HSIC_1 of kernels whose diagonal counts as zero."""
    n = len(k)
    k, l = (side - torch.diag(side.diagonal()) for side in (k, l))  # noqa: E741
    sums_k, sums_l = k.sum(0), l.sum(0)
    trace = (k * l).sum() + sums_k.sum() * sums_l.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * (sums_k @ sums_l)
    return float(trace) / (n * (n - 3))


_HSIC: dict[tuple[str, str], Callable[[Tensor, Tensor], float]] = {
    ("plug_in", "linear"): _cross,
    ("debiased", "linear"): _unbiased_hsic,
    ("plug_in", "rbf"): _plug_in_hsic_of_kernels,
    ("debiased", "rbf"): _unbiased_hsic_of_kernels,
}


def _rbf(a: Tensor, name: str) -> Tensor:
    """The Gaussian kernel of the samples, (n, n), its width the median of the distances between them."""
    squares = _squared_distances(a)
    over, under = torch.triu_indices(len(a), len(a), offset=1)
    width = float(np.median(np.sqrt(squares[over, under].cpu().numpy()))) if len(a) > 1 else 0.0
    if width == 0:
        raise Undefined(f"most samples of {name} are equal: the median distance is 0")
    return torch.exp(squares / (-2 * width**2))


def _squared_distances(a: Tensor) -> Tensor:
    """(n, n) squared distances between rows over the largest of them, rounded so that ties are equal numbers."""
    gram = a @ a.mT
    norms = gram.diagonal()
    squares = (norms + norms.unsqueeze(1) - 2 * gram).clamp(min=0).fill_diagonal_(0)
    squares = (squares + squares.mT) / (2 * squares.max())
    return (squares / _TIE).round() * _TIE


def _directions(x: Tensor | Matrix, name: str) -> Tensor:
    """The rows at unit length, (n, k) float64."""
    rows = as_matrix(x).rows()
    largest = rows.abs().amax(1, keepdim=True)
    if not bool((largest > 0).all()):
        raise Undefined(f"{int((largest == 0).sum())} rows of {name} are zero and have no direction")
    rows = rows / largest
    unit: Tensor = rows / rows.norm(dim=1, keepdim=True)
    if float((unit - unit[0]).abs().max()) <= max(unit.shape) * _EPSILON:
        raise Undefined(f"all rows of {name} point the same way")
    return unit


def _neighbourhoods(a: Tensor, k: int) -> Tensor:
    """(n, n): how far sample j belongs to the k nearest neighbours of sample i; each row sums to k."""
    distances = _squared_distances(a).fill_diagonal_(math.inf)
    edge = distances.kthvalue(k, dim=1, keepdim=True).values
    inside, at_edge = (distances < edge).double(), (distances == edge).double()
    left = k - inside.sum(1, keepdim=True)
    return inside + at_edge * left / at_edge.sum(1, keepdim=True)
