"""A metric of one's own: the share of entries that are close to zero. examples/near_zero.yaml uses it."""

from torch import Tensor

from pico_analyze.components.matrix import Undefined
from pico_analyze.metrics import Metric, Parameter


def near_zero(x: Tensor, below: str = "0.01") -> float:
    """The share of the entries of ``x`` that are small against their root mean square.

    #{i : |x_i| < below rms(x)} / n, over all n entries.

    In [0, 1]: 0 when all magnitudes are equal, 1 - 1/n when one of n entries is not zero. Unchanged by scaling, signs
    and order. Undefined for all zeros.

    >>> import torch
    >>> near_zero(torch.tensor([[0.0, 3.0], [0.0, 4.0]]))
    0.5
    """
    x = x.detach().double().flatten()
    rms = float(x.square().mean().sqrt())
    if rms == 0:
        raise Undefined("all entries are zero")  # becomes a row without a value, with this reason
    return float((x.abs() < float(below) * rms).double().mean())


METRICS = {
    "near_zero": Metric(
        function=f"{__name__}:near_zero",
        consumes="entries",  # what the function is called with: entries, spectrum, matrix, or pair
        summary="share of the entries below a fraction of the root mean square",
        range="[0, 1]",
        meaning="0 when all magnitudes are equal; 0.008 for a normal distribution and below = 0.01. It counts, so it "
        "says nothing about how large the other entries are.",
        parameters={"below": Parameter(("0.01", "0.1"), default="0.01")},
    ),
}
