"""How heavy the tail of a spectrum is: a power law fitted to the largest eigenvalues."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pico_analyze.components.matrix import Flagged, Undefined, largest_magnitude

_FEWEST = 10
"""A shorter tail is not fitted: almost any ten numbers are near some power law."""

_RELIABLE = 50
"""The source's rule of thumb for a tail that gives a reliable exponent (its section 3.1)."""


def alpha(singular_values: Tensor, report: str = "alpha") -> float:
    """The exponent of the power law that the largest eigenvalues lambda_i = sigma_i^2 follow.

    The density is p(lambda) ~ lambda^-alpha for lambda >= x. For a given x with n eigenvalues at or above it the
    likelihood is largest at

        alpha = 1 + n / sum_i log(lambda_i / x),

    and x is the eigenvalue for which the Kolmogorov-Smirnov distance between the n eigenvalues and the fitted law,
    max |S(lambda) - P(lambda)|, is smallest. ``report`` says which number is returned: ``alpha``, or
    ``ks_distance``, that smallest distance, which says how good the fit is.

    At least 1 (alpha, exclusive), unbounded; in [0, 1] (ks_distance), 0 for a perfect fit. Unchanged by scaling and
    by orthogonal maps of rows or columns. Eigenvalues that are 0 belong to no tail. Undefined for fewer than 10
    positive eigenvalues and when the largest 10 are equal; flagged when the tail that was chosen holds fewer than
    50.

    Source: Clauset, Shalizi and Newman, "Power-law distributions in empirical data", SIAM Review 51:661, 2009,
    the continuous case; of weight spectra Martin and Mahoney, "Implicit self-regularization in deep neural networks:
    Evidence from random matrix theory and implications for learning", JMLR 22:165, 2021. Theirs compares S(lambda) at one
    side of each step; here the supremum is exact.

    >>> import torch
    >>> quantiles = (torch.arange(200, dtype=torch.float64) + 0.5) / 200
    >>> eigenvalues = (1 - quantiles) ** (-1 / (3 - 1))  # of a power law of exponent 3
    >>> round(alpha(eigenvalues.sqrt()), 2)
    3.01
    """
    if report not in ("alpha", "ks_distance"):
        raise ValueError(f"report: {report!r} is not allowed; choose one of alpha, ks_distance")
    scale = largest_magnitude(singular_values)
    sigma = singular_values.detach().double().numpy()
    logs = np.sort(2 * np.log(sigma[sigma > 0] / scale))[::-1]  # of eigenvalues, descending from 0
    if logs.size < _FEWEST:
        raise Undefined(f"{logs.size} positive eigenvalues; the tail of a distribution needs {_FEWEST}")
    fits = [_fit(logs[:n]) for n in range(_FEWEST, logs.size + 1) if n == logs.size or logs[n] < logs[n - 1]]
    distance, exponent, n = min(fits)
    if not np.isfinite(exponent):
        raise Undefined(f"the {n} eigenvalues of the tail are equal")
    value = exponent if report == "alpha" else distance
    return value if n >= _RELIABLE else Flagged(value, f"only {n} eigenvalues in the tail")


def _fit(tail: NDArray[np.float64]) -> tuple[float, float, int]:
    """Kolmogorov-Smirnov distance, exponent and size of a tail of logarithms, descending to its cut-off."""
    n, above = tail.size, tail - tail[-1]
    total = float(above.sum())
    if total == 0:
        return 1.0, np.inf, n
    survival = np.exp(-above * n / total)  # of the fitted law; that of the data is i / n, then (i + 1) / n
    steps = np.arange(n + 1) / n
    distance = max(np.abs(survival - steps[:-1]).max(), np.abs(survival - steps[1:]).max())
    return float(distance), 1 + n / total, n
