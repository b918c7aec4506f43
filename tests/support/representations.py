"""Random representations for the tests of measures that compare two."""

import torch


def normal(*shape, seed=0):
    """Entries of a standard normal distribution, in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def related(n, p, q, seed=0):
    """Two representations that share some of what they hold."""
    shared = normal(n, 2, seed=seed)
    x = shared @ normal(2, p, seed=seed + 1) + normal(n, p, seed=seed + 2)
    y = shared @ normal(2, q, seed=seed + 3) + normal(n, q, seed=seed + 4)
    return x, y
