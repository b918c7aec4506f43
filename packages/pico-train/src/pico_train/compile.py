"""``training.compile``: the training pass through torch.compile, tried before step 0 and compared with the plain one.

Saves, probe, evaluation and capture go through the plain module, whose parameters the compiled one shares; so the names in a
checkpoint are the same in both modes.
"""

import logging
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from pico_train.data.batches import Batch
from pico_train.errors import UserError
from pico_train.model.decoder import PicoDecoder
from pico_train.objectives import Objective
from pico_train.sharding import is_sharded, own_part

if TYPE_CHECKING:
    from lightning.fabric import Fabric

log = logging.getLogger(__name__)


def compiled(model: PicoDecoder, *, dropout: float, sharded: bool = False) -> nn.Module:
    """``model`` with a forward that is compiled when it is first called. Dropout draws what the plain forward would draw."""
    # Tracing a backward of our own reads the gradient of what has none, and torch warns of itself.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
    options: dict[str, Any] | None = {"fallback_random": True} if dropout else None
    if sharded:
        return CompiledBlocks(model, [torch.compile(block, dynamic=False, options=options) for block in model.layers])
    return cast(nn.Module, torch.compile(model, dynamic=False, options=options))


class CompiledBlocks(nn.Module):
    """A sharded model whose blocks are compiled one by one.

    Its hooks put each block together around its forward, and no graph goes through them: compiled as one, the model would be cut there,
    and compiled anew for each block.
    """

    def __init__(self, model: PicoDecoder, blocks: Sequence[Callable[..., Tensor]]) -> None:
        super().__init__()
        self.model = model
        self._blocks = blocks  # in a list, so that the parameters are there once

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """As that of the model."""
        out: Tensor = self.model(input_ids, labels=labels, blocks=self._blocks)
        return out


def try_compiled(
    fabric: "Fabric", forward: nn.Module, model: nn.Module, objective: Objective, batch: Batch, step: int
) -> None:
    """Send ``batch``, a micro-batch, forward and backward through ``forward``, and log how its gradient differs from that of ``model``.

    ``forward`` is the compiled ``model`` as Fabric has set it up. Compiling takes place here. No gradient is left.

    Raises:
        UserError: it cannot be compiled here; the message says why.
    """

    def gradients(module: nn.Module) -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(0)
        # Of a sharded model a gradient that is not averaged stays where zero_grad does not reach, and would be added to the first pass.
        averaged = fabric.world_size == 1 or module is model or is_sharded(next(model.parameters()))
        apart = nullcontext() if averaged else fabric.no_backward_sync(module)  # type: ignore[arg-type]
        with fabric.autocast(), apart:
            fabric.backward(objective(module, batch, step))
        found = [own_part(parameter.grad.detach()) for parameter in model.parameters() if parameter.grad is not None]
        return [gradient for gradient in found if gradient.numel()]  # a rank may hold no row of a norm

    plain = gradients(model)
    began = time.perf_counter()
    try:
        fast = gradients(forward)
    except Exception as error:  # of any kind: the compiler's, the C++ compiler's, the system's
        raise UserError(
            f"training.compile: true cannot be done here: {reason(error)}; use training.compile=false"
        ) from error
    model.zero_grad()
    log.info(
        "compiled the pass in %.0f s; its gradient differs by %.1e of the largest entry",
        time.perf_counter() - began,
        largest_error(fast, plain),
    )


def reason(error: Exception) -> str:
    """The line of a long error that says what is wrong: the last of its kind, or the first line.

    >>> reason(RuntimeError("backend='inductor' raised:\\nInvalidCxxCompiler: no compiler\\n\\nSet TORCHDYNAMO_VERBOSE=1"))
    'InvalidCxxCompiler: no compiler'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "rror:" in line or "Compiler:" in line]
    return (telling or lines or [type(error).__name__])[0]


def largest_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference of two lists of tensors, over the largest magnitude of ``expected``."""
    scale = max(float(tensor.abs().max()) for tensor in expected)
    return max(float((a - b).abs().max()) for a, b in zip(actual, expected, strict=True)) / scale
