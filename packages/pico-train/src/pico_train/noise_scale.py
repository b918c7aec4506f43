"""How noisy the gradient is, from the micro-batches that it is made of anyway."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from pico_train.sharding import whole


class MicroBatchNorms:
    """Collects the squared 2-norm of the gradient of each micro-batch of a pass, and leaves the pass as it is.

    A sharded model never has the gradient of one rank's micro-batch in one place, but that of all ranks' together: there it is the norm
    of the micro-batches that go through the model at the same time.
    """

    def __init__(self) -> None:
        self.squared: list[float] = []

    @contextmanager
    def of(self, model: nn.Module, share: float) -> Iterator[None]:
        """Around forward and backward of a micro-batch, whose part of the gradient of the whole batch is ``share`` of it.

        Its gradient is kept apart, measured, and then added to those before it, as backward itself would have added it.
        """
        parameters = list(model.parameters())
        before = [parameter.grad for parameter in parameters]
        model.zero_grad(set_to_none=True)
        yield
        own = [parameter.grad for parameter in parameters if parameter.grad is not None]
        self.squared.append(float(whole(torch.nn.utils.get_total_norm(own))) ** 2 / share**2)
        for parameter, gradient in zip(parameters, before, strict=True):
            if gradient is not None:
                if parameter.grad is not None:
                    gradient += parameter.grad
                parameter.grad = gradient


def gradient_noise_scale(
    squared_small: Sequence[float], squared_big: float, *, n_small: int, n_big: int
) -> float | None:
    """The simple noise scale tr(Sigma) / |G|^2 in sequences: the batch size at which noise and gradient are equally large.

    With the mean squared norm over micro-batches of ``n_small`` sequences and that of the whole batch of ``n_big``,
    |G|^2 = (n_big big - n_small small) / (n_big - n_small) and tr(Sigma) = (small - big) / (1/n_small - 1/n_big), both unbiased.
    A single pass gives a very noisy estimate: average numerator and denominator, or many steps. None with one micro-batch, or where the
    estimate of |G|^2 is not positive.

    Source: McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, appendix A.1.

    >>> gradient_noise_scale([3.0, 5.0], 3.0, n_small=1, n_big=2)  # |G|^2 = 2, tr(Sigma) = 2
    1.0
    """
    if n_small >= n_big:
        return None
    small = sum(squared_small) / len(squared_small)
    signal = (n_big * squared_big - n_small * small) / (n_big - n_small)
    noise = (small - squared_big) / (1 / n_small - 1 / n_big)
    return noise / signal if signal > 0 else None
