"""How samples lie in the space of their features: dead units, anisotropy, intrinsic dimension.

``x`` holds one sample in each row and one feature in each column: a tensor of any dtype, or a `Matrix`.
"""

import math

import torch
from torch import Tensor

from pico_analyze.components.matrix import Flagged, Matrix, Undefined, as_matrix, largest_magnitude

_SAME_PLACE = 1e-12
"""Samples closer than this share of the largest distance are the same: products of factors are rounded."""


def dead_units(x: Tensor | Matrix, tolerance: float = 1e-6) -> float:
    """The share of the columns of ``x`` that do not vary over its rows.

    A column is dead when its largest entry less its smallest is at most ``tolerance`` times the largest magnitude
    in ``x``; for tolerance 0 it has to be constant.

    In [0, 1]: 0 when every unit responds to something, 1 when none does, as for zeros. Unchanged by scaling,
    shifts that leave the largest magnitude, and the order of rows and columns; not by maps that mix the columns.
    Undefined for fewer than 2 samples and for a vector. A product is multiplied out.

    Source: the share of dead units as in Lu et al., "Dying ReLU and initialization: Theory and
    numerical examples", Communications in Computational Physics 28:1671, 2020, where a unit is dead that gives one
    constant for all inputs.

    >>> dead_units(torch.tensor([[1.0, 0.0, 3.0, 7.0], [2.0, 0.0, 3.0, 7.1]]))
    0.5
    """
    entries = as_matrix(x).entries()
    if entries.ndim != 2:
        raise Undefined("a vector, not a matrix")
    scale = largest_magnitude(entries)
    if len(entries) < 2:
        raise Undefined("a single sample")
    low, high = torch.aminmax(entries.detach(), dim=0)
    spread = high.double() / 2 - low.double() / 2  # halves, so that it stays in range
    return float((spread <= tolerance * scale / 2).double().mean())


def anisotropy(x: Tensor | Matrix) -> float:
    """The mean cosine between two different rows of ``x``.

    With u_i = x_i / |x_i| it is (|sum_i u_i|^2 - n) / (n (n - 1)): all n (n - 1) / 2 pairs, without forming them.

    In [-1/(n - 1), 1]: 1 when all rows point the same way, 0 on average for rows of independent directions, the
    lower end when they cancel. Unchanged by a positive scale of each row, orthogonal maps of the columns and the
    order of rows; not by shifts. Rows of zeros have no direction: they are left out and the value is flagged.
    Undefined for fewer than 2 other rows. Products are not multiplied out.

    Source: Ethayarajh, "How contextual are contextualized word representations? Comparing the geometry of BERT, ELMo,
    and GPT-2 embeddings", EMNLP-IJCNLP 2019, where the mean is taken over a sample of the pairs.

    >>> anisotropy(torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]])) * 3
    1.0
    """
    rows = as_matrix(x).rows()
    largest = rows.abs().amax(1, keepdim=True)
    kept = rows[largest[:, 0] > 0] / largest[largest[:, 0] > 0]
    n, n_zero = len(kept), len(rows) - len(kept)
    if n < 2:
        raise Undefined(f"{n} rows that are not zero; a cosine needs 2")
    unit = kept / kept.norm(dim=1, keepdim=True)
    value = (float(unit.sum(0).square().sum()) - n) / (n * (n - 1))
    value = min(max(value, -1 / (n - 1)), 1.0)  # rounding passes it by 1e-16
    return Flagged(value, f"{n_zero} of {n + n_zero} rows are zero and left out") if n_zero else value


def intrinsic_dimension(x: Tensor | Matrix, discard: float = 0.1) -> float:
    """The dimension of the manifold near which the samples lie, from the distances to their two nearest neighbours.

    mu_i = r2_i / r1_i, the distance of sample i to its second nearest other sample over that to its nearest, has
    the distribution F(mu) = 1 - mu^-d wherever the density hardly changes up to the second neighbour. With mu in
    ascending order and F(mu_i) = i / n, d is the slope of the line through the origin that fits the points
    (log mu_i, -log(1 - i / n)) best, sum_i xy / sum_i x^2, over the first (1 - ``discard``) n of them. The last
    one, where F = 1, never counts.

    At least 0 (exclusive), unbounded. Unchanged by scaling, shifts, orthogonal maps of the columns and the order
    of the samples. Too low where the dimension is high for the number of samples. Samples that are equal count
    once, and the value is flagged, because ties are a trace of rounding in storage. Undefined for fewer than 3
    different samples and when all are equally far from their two nearest.

    Source: Facco et al., "Estimating the intrinsic dimension of datasets by a minimal neighborhood information",
    Scientific Reports 7:12140, 2017.

    >>> on_a_line = torch.tensor([[0.0, 0.0], [1.0, 1.0], [3.0, 3.0], [7.0, 7.0]])  # mu = 3, 2, 3/2, 3/2
    >>> x, y = [math.log(3 / 2)] * 2 + [math.log(2)], [math.log(4 / 3), math.log(2), math.log(4)]
    >>> math.isclose(intrinsic_dimension(on_a_line), sum(a * b for a, b in zip(x, y)) / sum(a * a for a in x))
    True
    """
    rows = as_matrix(x).rows()
    scale = float(rows.abs().max())
    rows = rows / (scale or 1.0)
    distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")  # (n, n)
    twin = distances <= _SAME_PLACE * float(distances.max())
    kept = ~twin.tril(-1).any(1)
    distances = distances[kept][:, kept].fill_diagonal_(math.inf)
    n, n_twins = len(distances), len(rows) - len(distances)
    if n < 3:
        raise Undefined(f"{n} different samples; two neighbours need 3")
    nearest = distances.topk(2, dim=1, largest=False).values  # (n, 2)
    log_mu = (nearest[:, 1] / nearest[:, 0]).log().sort().values.cpu()
    n_fitted = min(round((1 - discard) * n), n - 1)
    y = -torch.log1p(-torch.arange(1, n_fitted + 1, dtype=torch.float64) / n)
    fitted = log_mu[:n_fitted]
    if n_fitted == 0 or float(fitted.max()) <= _SAME_PLACE:
        raise Undefined("every sample is equally far from its two nearest neighbours")
    value = float(fitted @ y / fitted.square().sum())
    return Flagged(value, f"{n_twins} of {n + n_twins} samples equal another one") if n_twins else value
