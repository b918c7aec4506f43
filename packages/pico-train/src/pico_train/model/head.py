"""The vocabulary head with its loss, a few tokens at a time, so that the logits of all tokens never exist at once.

In: the hidden states of N tokens, the weight of the unembedding, the labels. Out: the mean cross-entropy. The gradients of hidden states
and weight are made beside the loss, while the logits of a chunk of tokens are at hand; backward only scales them.

Letters of the shape comments: N tokens, C tokens of a chunk, V vocabulary, D d_model
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

DOWN = 2.0**-4
"""Factor of the hidden states where the weight's gradient is summed over a chunk: exact, and keeps that sum in the range of fp16."""


def head_chunk(vocab_size: int, device: str) -> int:
    """How many tokens ``head_loss`` takes at a time.

    On a CPU the fewest at which the products run at full speed, and more while their logits stay below 8 MB. The three products and the
    softmax, timed one by one on one core with a second-level cache of 2 MB: 1,024 tokens with V = 50,304, D = 96 take 0.35 s by 64 and
    0.60 s all at once; 2,048 tokens with V = 4,096, D = 256 take 0.10 s by 512, as all at once, and 0.11 s by 64. On other devices, where
    nothing was measured, it bounds the memory: 256 MB of fp32 logits.
    """
    return max(64, 2**21 // vocab_size) if device == "cpu" else max(1024, 2**26 // vocab_size)


def head_loss(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """Mean over the scored tokens of -log softmax(hidden @ weight.T)[label], in nats.

    ``hidden`` is (N, D), ``weight`` (V, D), ``labels`` (N,); a negative label is not scored, and without a scored one the loss is NaN.
    ``chunk`` tokens go through at a time, which changes the result by rounding only. Under autocast the products are taken in its dtype;
    softmax and loss are fp32 at least. It cannot be differentiated twice.
    """
    loss: Tensor = _HeadLoss.apply(hidden, weight, labels, chunk, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return loss


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, with_gradients: bool) -> Tensor:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        wide = torch.promote_types(dtype, torch.float32)
        with torch.autocast(device, enabled=False):
            h, w = hidden.to(dtype), weight.to(dtype)
            unscored = (labels < 0).unsqueeze(1)  # (N, 1)
            columns = labels.clamp(min=0).unsqueeze(1)  # (N, 1)
            losses = torch.empty(columns.shape, dtype=wide, device=h.device)
            if with_gradients:
                h_scored = (h * DOWN).masked_fill_(unscored, 0)  # (N, D)
                d_hidden = torch.empty_like(h)
                d_weight = torch.zeros(w.shape, dtype=wide, device=w.device)
            buffer = torch.empty(min(chunk, len(h)), len(w), dtype=dtype, device=h.device)
            for begin in range(0, len(h), chunk):
                part = slice(begin, begin + chunk)
                logits = torch.mm(h[part], w.T, out=buffer[: len(h) - begin]).to(wide)  # (C, V)
                log_p = torch.log_softmax(logits, dim=1, out=logits)
                torch.gather(log_p, 1, columns[part], out=losses[part])
                if with_gradients:
                    d_logits = log_p.exp_().scatter_add_(1, columns[part], losses.new_full(columns[part].shape, -1))
                    d_logits = d_logits.to(dtype)
                    torch.mm(d_logits, w, out=d_hidden[part])
                    if dtype == wide:
                        d_weight.addmm_(d_logits.T, h_scored[part])
                    else:
                        d_weight += d_logits.T @ h_scored[part]
            n_scored = len(labels) - unscored.sum()
            if with_gradients:
                d_hidden.masked_fill_(unscored, 0)
                ctx.made = d_hidden, d_weight, n_scored, hidden.dtype, weight.dtype
        return -losses.masked_fill_(unscored, 0).sum() / n_scored

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight, n_scored, hidden_dtype, weight_dtype = ctx.made
        del ctx.made  # as large as the weight itself: scaled in place, and given away
        share = d_loss / n_scored
        return (d_hidden * share).to(hidden_dtype), d_weight.mul_(share / DOWN).to(weight_dtype), None, None, None
