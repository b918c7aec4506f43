"""Muon for matrices that may be spread over the ranks: the momentum stays where its rows are, the direction is found of whole matrices."""

import math

import torch
from torch import Tensor

from pico_train.sharding import part_like, whole


class Muon(torch.optim.Muon):
    """``torch.optim.Muon``, bit for bit, on one rank and on any number of them.

    Given sharded matrices, torch's own would let each of the fifteen products speak to the other ranks (eleven to sixteen times a
    matrix), round otherwise than on one rank, and fail where a rank holds no row. Here a matrix is gathered once an update, in bf16, and
    every rank finds the direction of the whole and keeps its own rows of it: beyond its rows a rank holds one matrix at a time.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update: of the momentum, then of the matrix along the orthogonal one nearest to it, looking ahead as Nesterov does."""
        for group in self.param_groups:
            lr, momentum, weight_decay = group["lr"], group["momentum"], group["weight_decay"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                average = state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
                ahead = whole(parameter.grad.lerp(average, momentum).bfloat16())  # every rank has all of it
                direction = orthogonal(ahead, group["ns_coefficients"], group["ns_steps"], group["eps"])
                parameter.mul_(1 - lr * weight_decay)
                parameter.add_(
                    part_like(direction, parameter), alpha=-lr * rate(parameter.shape, group["adjust_lr_fn"])
                )


def orthogonal(matrix: Tensor, coefficients: tuple[float, float, float], n_steps: int, eps: float) -> Tensor:
    """``matrix`` (m, n) with singular values brought to about 1 (0.7 to 1.2 after five steps), singular vectors kept; in its own dtype.

    Newton-Schulz with an odd quintic: sigma <- a sigma + b sigma^3 + c sigma^5, from sigma / |matrix|_F on. A matrix smaller than ``eps``
    stays small.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
    """
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix  # the products are of the shorter side
    x = x / x.norm().clamp(min=eps)
    for _ in range(n_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def rate(shape: torch.Size, adjust_lr: str) -> float:
    """The factor of the learning rate for a matrix of ``shape`` (rows, columns).

    ``original``: an update has the spectral norm that suits its fan-out and fan-in; ``match_rms_adamw``: the root mean square of an
    update of AdamW, about 0.2 (Liu et al., "Muon is Scalable for LLM Training", 2025, section 2.2).
    """
    rows, columns = shape
    return 0.2 * math.sqrt(max(rows, columns)) if adjust_lr == "match_rms_adamw" else math.sqrt(max(1, rows / columns))
