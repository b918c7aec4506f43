"""Normalisation and rotation with a backward of their own, for a CPU, where a pass over memory costs more than its arithmetic.

Autograd makes of the plain formulas a pass and a new buffer per operation, forward and backward: twice the time of these. ``torch.compile``
and a GPU do better with the plain formulas, and get them; so do mixed dtypes. Neither can be differentiated twice.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, the mean square in fp32 at least and the weight applied after rounding."""
    if _plain(x, weight):
        return weight * F.rms_norm(x, weight.shape, eps=eps)
    y: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + E/2) of ``x`` (B, T, heads, E) by the angles of the tables (T, 1, E)."""
    if _plain(x, cos):
        return x * cos.to(x.dtype) + x.roll(x.shape[-1] // 2, dims=-1) * sin.to(x.dtype)
    y: Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return y


def _plain(x: Tensor, other: Tensor) -> bool:
    """Whether the plain formulas are taken."""
    wide = x.dtype in (torch.float32, torch.float64)  # the plain formulas take a mean square in fp32 whatever the dtype
    return x.device.type != "cpu" or x.dtype != other.dtype or not wide or torch.compiler.is_compiling()


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = x.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        products = normed * dy
        d_weight = products.flatten(0, -2).sum(dim=0)
        with torch.autocast("cpu", enabled=False):
            slope = (products @ weight).div_(x.shape[-1]).unsqueeze(-1)
        dx = torch.mul(dy, weight, out=products).addcmul_(normed, slope, value=-1).mul_(scale)
        return dx, d_weight, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turned(dy, cos, sin, -1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """``x`` turned by the angles of the tables, or back by them in direction -1: a new contiguous tensor, whatever the strides of ``x``."""
    y = torch.empty(x.shape, dtype=x.dtype)
    torch.mul(x, cos, out=y)
    half = x.shape[-1] // 2
    y[..., :half].addcmul_(x[..., half:], sin[..., :half], value=direction)
    y[..., half:].addcmul_(x[..., :half], sin[..., half:], value=direction)
    return y
