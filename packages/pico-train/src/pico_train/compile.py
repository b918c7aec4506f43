"""``training.compile``: the training pass through torch.compile, tried before step 0, compared with the plain one and timed beside it.

Saves, probe, evaluation and capture go through the plain module, whose parameters the compiled one shares; so the names in a
checkpoint are the same in both modes.
"""

import logging
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from pico_train.data.batches import Batch
from pico_train.errors import UserError
from pico_train.model.decoder import PicoDecoder
from pico_train.objectives import Objective
from pico_train.ranks import Ranks
from pico_train.sharding import is_sharded, own_part
from pico_train.timing import in_turns

if TYPE_CHECKING:
    from lightning.fabric import Fabric

log = logging.getLogger(__name__)

# How far the gradient of a compiled pass may be from the plain one's, as a share of the largest entry: well above rounding (5e-7 in fp32
# and 4e-3 in bf16 were seen with 1M to 5M parameters), well below what a wrong kernel would give.
LARGEST_ERROR_FP32 = 1e-3
LARGEST_ERROR_16_BIT = 5e-2


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


@dataclass(frozen=True)
class Trial:
    """Forward and backward of ``batch``, a micro-batch, through the plain ``model`` or through ``forward``, the compiled one as Fabric
    has set it up. No weight is changed, and no gradient is left.
    """

    fabric: "Fabric"
    forward: nn.Module
    model: nn.Module
    objective: Objective
    batch: Batch
    step: int
    scaler: torch.amp.GradScaler | None = None

    def gradients(self, module: nn.Module) -> list[Tensor]:
        """The gradient of this rank's loss through ``module``, or its part of a sharded one, always with the same dropout."""
        torch.manual_seed(0)
        # Of a sharded model a gradient that is not averaged stays where zero_grad does not reach, and would be added to the first pass.
        averaged = self.fabric.world_size == 1 or module is self.model or is_sharded(next(self.model.parameters()))
        apart = nullcontext() if averaged else self.fabric.no_backward_sync(module)  # type: ignore[arg-type]
        with self.fabric.autocast(), apart:
            loss = self.objective(module, self.batch, self.step)
            # a loss scale that is still too large would make both infinite, and a comparison of them none
            self.fabric.backward(loss / self.scaler.get_scale() if self.scaler else loss)
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        self.model.zero_grad()
        parts = [own_part(gradient) for gradient in gradients]
        return [part for part in parts if part.numel()]  # a rank may hold no row of a norm

    def fault(self, most: float) -> str | None:
        """Compile ``forward``, and log how its gradient differs from the plain one: why it cannot be used, None where it can.

        ``most`` is the largest difference that may be, as a share of the largest entry.
        """
        plain = self.gradients(self.model)
        began = time.perf_counter()
        try:
            error = largest_error(self.gradients(self.forward), plain)
        except Exception as failure:  # of any kind: the compiler's, the C++ compiler's, the system's
            self.model.zero_grad()
            return reason(failure)
        if error <= most:  # not so for NaN
            seconds = time.perf_counter() - began
            log.info("compiled the pass in %.0f s; its gradient differs by %.1e of the largest entry", seconds, error)
            return None
        return f"its gradient differs from the plain one by {error:.1e} of the largest entry, and at most {most:g} is rounding"

    def seconds(self) -> tuple[float, float]:
        """How long the plain and the compiled pass take, side by side."""
        runs = [partial(self.gradients, module) for module in (self.model, self.forward)]
        plain, fast = in_turns(runs, self.batch.input_ids.device)
        return plain, fast


def takes_compiled(
    trial: Trial, asked: Literal[True, "auto"], before: bool | None, precision: str, ranks: Ranks
) -> bool:
    """Whether the passes of a run go through the compiled model, which is compiled here; all ranks come to the same.

    ``asked`` is ``training.compile``. Under auto the faster pass is taken, and the plain one where the compiled one fails; a run that
    has been trained so far with the one ``before`` stays with it.

    Raises:
        UserError: under true, where it cannot be compiled or computes another gradient; the message says why.
    """
    if before is False:
        log.info("training.compile: auto stays with the plain pass, which this run was trained with so far")
        return False
    fault = trial.fault(LARGEST_ERROR_FP32 if precision == "32-true" else LARGEST_ERROR_16_BIT)
    if ranks.any(fault is not None)[0]:
        fault = fault or "it fails on another rank, which says why"
        if asked is True:
            raise UserError(f"training.compile: true cannot be done here: {fault}; use training.compile=false")
        log.warning("training.compile: auto takes the plain pass, for the compiled one cannot be used here: %s", fault)
        return False
    if asked is True or before:
        return True
    plain, fast = trial.seconds()
    taken = ranks.decided(lambda: fast < plain)
    log.info(
        "training.compile: auto takes the %s pass: %.3g s compiled, %.3g s plain for %d sequences, forward and backward",
        "compiled" if taken else "plain",
        fast,
        plain,
        len(trial.batch.input_ids),
    )
    return taken


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
