"""What a similarity is when there is nothing to find: the same two sides, their samples paired at random.

A raw similarity grows with the width of the features and as samples become few, whatever the models have learned. Comparing it
with its own permutation null takes this out, so that values of different widths can be compared.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from pico_analyze.components.matrix import Undefined

Scores = Callable[[Tensor], float]
"""The value of a similarity when sample i of x is paired with sample order[i] of y: of what does not depend on the order
everything is done already."""

_TIE = 1e-9
"""Values that agree to this are equal: the same pairing gives them in another order of sums."""


def orders(n: int, unit: int, permutations: int, seed: int) -> list[Tensor]:
    """Random orders of n samples, in which ``unit`` neighbours (the rows of one sequence) stay together.

    >>> [order.tolist() for order in orders(6, 2, 3, seed=0)]
    [[4, 5, 0, 1, 2, 3], [4, 5, 2, 3, 0, 1], [4, 5, 0, 1, 2, 3]]

    Raises:
        Undefined: there is nothing to exchange.
    """
    assert n % unit == 0, f"{n} samples in groups of {unit}"
    if n // unit < 2:
        raise Undefined("there is a single sequence, which cannot be exchanged for another")
    generator, rows = np.random.default_rng(seed), torch.arange(n).view(-1, unit)
    return [rows[torch.from_numpy(generator.permutation(n // unit))].flatten() for _ in range(permutations)]


def permutation_null(
    value: float, at_random: Sequence[float], quantile: float = 0.95, *, distance: bool = False
) -> dict[str, float]:
    """How a similarity compares with the values ``at_random`` that it takes when the samples of y are permuted.

    With s the value, s_1 ... s_P those of P random orders and m their mean:

    * ``null_mean``: m;
    * ``null_quantile``: the ``quantile`` quantile of the s_i, which unrelated sides hardly pass;
    * ``calibrated``: (s - m) / (1 - m): 1 for sides that agree entirely, 0 on average for unrelated ones, negative below;
    * ``p_value``: (1 + #{s_i >= s}) / (1 + P), in [1/(1 + P), 1]: how often unrelated sides come as near. The value itself
      counts as one of the orders, which makes the test exact: P(p <= a) <= a for exchangeable samples.

    Of a ``distance``, 0 for sides that agree entirely, it is (s - m) / (0 - m), #{s_i <= s}, and the 1 - ``quantile`` quantile.

    Undefined where m is what sides have that agree entirely: then s says nothing.

    Source: the correction for chance is that of Hubert and Arabie, "Comparing partitions", Journal of Classification 2:193,
    1985; the p-value that of Phipson and Smyth, "Permutation p-values should never be zero", Statistical Applications in
    Genetics and Molecular Biology 9:39, 2010; for similarities of representations Gröger, Wen and Brbić, "Revisiting the
    Platonic representation hypothesis: an Aristotelian view", ICML 2026.

    >>> permutation_null(0.75, [0.0, 0.25, 0.75, 1.0], quantile=0.5)
    {'null_mean': 0.5, 'null_quantile': 0.5, 'calibrated': 0.5, 'p_value': 0.6}
    """
    scores, best = np.asarray(at_random), 0.0 if distance else 1.0
    mean = float(scores.mean())
    if abs(best - mean) <= _TIE:
        raise Undefined("samples paired at random agree entirely too")
    as_near = scores <= value + _TIE if distance else scores >= value - _TIE
    return {
        "null_mean": mean,
        "null_quantile": float(np.quantile(scores, 1 - quantile if distance else quantile)),
        "calibrated": (value - mean) / (best - mean),
        "p_value": float(1 + as_near.sum()) / (1 + len(scores)),
    }
