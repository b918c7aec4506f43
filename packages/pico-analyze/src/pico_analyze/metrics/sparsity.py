"""How unevenly the entries of a tensor are spread: Gini, Hoyer and kurtosis.

All take a tensor of any shape and dtype; the first two depend on the magnitudes of its entries alone. Sums run in
float64, in pieces that fit a cache.
"""

import math

import numpy as np
import torch
from torch import Tensor

from pico_analyze.components.matrix import Undefined, largest_magnitude

_EPSILON = torch.finfo(torch.float64).eps

_CHUNK = 1 << 16

_EXACT_IN_FLOAT32 = {
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
}


def gini(x: Tensor) -> float:
    """Inequality of the magnitudes of the entries of ``x``, whatever its shape.

    sum_i (2 i - n - 1) a_i / (n sum_i a_i), with a_1 <= ... <= a_n the n magnitudes in order. The same number
    is the mean of |a_i - a_j| over all n^2 pairs, over twice the mean of a.

    In [0, 1): 0 when every entry has the same magnitude (a single entry too), 1 - 1/n when exactly one of n
    is non-zero. Unchanged by scaling, signs and order. Undefined for all zeros.

    Source: Hurley and Rickard, "Comparing measures of sparsity", IEEE Transactions on Information Theory
    55:4723, 2009; here with its subtraction from 1 carried out.

    >>> gini(torch.tensor([[0, 0], [0, 3]]))
    0.75
    >>> gini(torch.tensor([2.0, -2.0, 2.0, 2.0]))
    0.0
    """
    scale = largest_magnitude(x)
    if scale == 0:
        raise Undefined("all entries are zero")
    x = x.detach()
    sortable = x.float() if x.dtype in _EXACT_IN_FLOAT32 else x.double()
    magnitudes = sortable.abs().flatten().cpu().numpy()  # our own: abs has copied
    magnitudes.sort()
    n = magnitudes.size
    weights = 2.0 * np.arange(1, min(n, _CHUNK) + 1) - n - 1
    weighted = total = 0.0
    for start in range(0, n, _CHUNK):
        chunk = magnitudes[start : start + _CHUNK].astype(np.float64) / scale
        chunk_sum = chunk.sum()
        weighted += weights[: chunk.size] @ chunk + 2.0 * start * chunk_sum
        total += chunk_sum
    return max(float(weighted / (n * total)), 0.0)  # rounding leaves the range by 1e-16


def hoyer(x: Tensor) -> float:
    """How concentrated the entries of ``x`` are, whatever its shape.

    (sqrt(n) - |x|_1 / |x|_2) / (sqrt(n) - 1), over all n entries.

    In [0, 1]: 0 when every entry has the same magnitude, 1 when exactly one is non-zero. Unchanged by
    scaling, signs and order. Undefined for all zeros and for a single entry.

    Source: Hoyer, "Non-negative matrix factorization with sparseness constraints", JMLR 5:1457, 2004.

    >>> hoyer(torch.tensor([[0.0, 3.0], [0.0, 0.0]]))
    1.0
    >>> hoyer(torch.tensor([2.0, -2.0, 2.0, 2.0]))
    0.0
    """
    scale = largest_magnitude(x)
    if x.numel() == 1:
        raise Undefined("a single entry")
    if scale == 0:
        raise Undefined("all entries are zero")
    l1 = squares = 0.0
    for chunk in torch.split(x.detach().flatten(), _CHUNK):
        relative = chunk.double() / scale
        l1 += relative.abs().sum().item()
        squares += relative.dot(relative).item()
    root = math.sqrt(x.numel())
    return min(max((root - l1 / math.sqrt(squares)) / (root - 1), 0.0), 1.0)  # as above


def kurtosis(x: Tensor) -> float:
    """How heavy the tails of the distribution of the entries of ``x`` are, whatever its shape.

    m_4 / m_2^2 - 3, with m_k the mean of (x_i - mean)^k over all n entries.

    At least -2, which is two values equally often; -1.2 for a uniform, 0 for a normal, 3 for a Laplace distribution;
    at most n - 2 + 1/(n - 1) - 3, when one entry differs from all others. Unchanged by scaling, shifts, sign and
    order. Undefined when all entries are equal.

    Source: Joanes and Gill, "Comparing measures of sample skewness and kurtosis", The Statistician 47:183, 1998, g_2.

    >>> kurtosis(torch.tensor([1.0, -1.0, 1.0, -1.0]))
    -2.0
    >>> round(kurtosis(torch.tensor([0, 1, 0, 0, 0])), 12)  # m_2 = 4/25, m_4 = 52/625
    0.25
    """
    scale = largest_magnitude(x)
    n, chunks = x.numel(), torch.split(x.detach().flatten(), _CHUNK)
    scale = scale or 1.0
    mean = sum((chunk.double() / scale).sum().item() for chunk in chunks) / n
    second = fourth = 0.0
    for chunk in chunks:
        squares = (chunk.double() / scale - mean).square()
        second += squares.sum().item() / n
        fourth += squares.dot(squares).item() / n
    if math.sqrt(second) <= _EPSILON * math.sqrt(n):
        raise Undefined("all entries are equal")
    return max(fourth / second**2 - 3, -2.0)  # as above
