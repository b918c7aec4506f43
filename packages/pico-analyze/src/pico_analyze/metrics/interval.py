"""How much a value would move with other samples: an interval from random halves of them.

Drawing with replacement, as the ordinary bootstrap does, is wrong for what is measured here: a sample that is drawn twice is as
near to itself as can be, which raises similarities and lowers dimensions. Halves are drawn without replacement.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pico_analyze.components.matrix import Matrix, Undefined

LEAST = 8
"""Sequences that it takes: of fewer there are hardly any halves."""


def interval(
    value: float,
    of_rows: Callable[[Tensor], float],
    n: int,
    unit: int = 1,
    resamples: int = 200,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[float, float]:
    """From where to where a value lies with other samples of the same kind, at the same number of samples.

    ``of_rows`` gives the value of some of the n rows; rows that belong together (``unit`` neighbours: those of one sequence) are
    taken together. With N = n / unit, m = N // 2, and v_1 ... v_R the values of R random subsets of m of them, the
    interval is value + sqrt(m / (N - m)) q, q the (1 - level) / 2 and (1 + level) / 2 quantiles of the v_i less their mean.

    A mean over m of N without replacement has the variance s^2 (1/m - 1/N), and one over N samples s^2 / N: the root is their
    ratio, 1 for even N. Taking the v_i less their mean leaves out what is due to half the number of samples alone: most
    values depend on it. The interval is about what the metric gives on average at this number of samples, not about its limit.

    Source: Shao and Wu, "A general theory for jackknife variance estimation", Annals of Statistics 17:1176, 1989 (delete-d
    jackknife); Politis and Romano, "Large sample confidence regions based on subsamples under minimal assumptions", Annals
    of Statistics 22:2031, 1994.

    Raises:
        Undefined: there are too few sequences, or one half has no value.
    """
    assert n % unit == 0, f"{n} samples in groups of {unit}"
    n_units = n // unit
    if n_units < LEAST:
        raise Undefined(f"{n_units} sequences are too few to leave half of them out; it takes {LEAST}")
    half = n_units // 2
    generator, rows = np.random.default_rng(seed), torch.arange(n).view(-1, unit)
    values = []
    for _ in range(resamples):
        kept = np.sort(generator.permutation(n_units)[:half])
        values.append(of_rows(rows[torch.from_numpy(kept)].flatten()))
    quantiles = np.quantile(values, [(1 - level) / 2, (1 + level) / 2]) - np.mean(values)
    low, high = value + math.sqrt(half / (n_units - half)) * quantiles
    return float(low), float(high)


def rows_of(matrix: Matrix, rows: Tensor) -> Matrix:
    """Some rows of a matrix, as a matrix."""
    left = matrix.left[rows]
    return Matrix.dense(left, matrix.dtype) if matrix.right is None else Matrix.product(left, matrix.right)
