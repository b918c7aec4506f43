"""The training loop: ``max_steps + 1`` passes, each over the batch of its step, at the weights that the passes before it left.

Step counts passes done, 0 is initialisation. The order within a pass: forward and backward, unscale (fp16), non-finite guard, captured
gradients, probe, save, evaluate, clip, update. First, periodic and last save are the same lines; the last pass only looks.
"""

import hashlib
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from pico_train.capture import Captured, CaptureRule, probe_pass, recording, weight_gradients
from pico_train.checkpoint.format import Split
from pico_train.data.batches import Batch, Batches
from pico_train.errors import PicoError
from pico_train.hardware import peak_memory
from pico_train.metrics_log import Row
from pico_train.noise_scale import MicroBatchNorms, gradient_noise_scale
from pico_train.objectives import Objective
from pico_train.state import TrainState

if TYPE_CHECKING:
    from lightning.fabric import Fabric

MAX_RESCALES = 16  # how often one fp16 pass is repeated at half the loss scale before its gradient counts as not finite


class NonFiniteError(PicoError):
    """The loss or a gradient is NaN or infinite; nothing was saved or updated in that pass."""


@dataclass(frozen=True)
class Passes:
    """How the passes of a run are made; every field is a fact of its configuration."""

    max_steps: int
    micro_batch_size: int
    learning_rate: Callable[[int], float]
    max_grad_norm: float | None
    non_finite: Literal["stop", "skip"]
    max_skips: int
    dropout_seed: int
    data_seed: int
    save_at: frozenset[int]
    evaluate_at: frozenset[int]
    rule: CaptureRule | None
    probe: Batch | None
    probe_batch_size: int
    norms_by_layer: bool
    noise_scale: bool
    compiled: bool
    flops_per_token: int
    peak_flops: float | None

    def mfu(self, tokens_per_s: float) -> float | None:
        """The share of the device's peak that the model's own operations take; None where no peak is known."""
        return None if self.peak_flops is None else self.flops_per_token * tokens_per_s / self.peak_flops


def train(
    state: TrainState,
    passes: Passes,
    *,
    fabric: "Fabric",
    forward: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    objective: Objective,
    save: Callable[[TrainState, dict[Split, Captured]], None],
    save_restart_point: Callable[[TrainState], None],
    restart_due: Callable[[int], bool],
    stopping: Callable[[], bool],
    evaluate: Callable[[TrainState], float | None],
    log: Callable[[Row], None],
) -> bool:
    """Run the passes from ``state.step`` to ``passes.max_steps``; whether the end was reached.

    Asked before each pass, ``stopping`` ends the loop with a restart point of the step that was reached.

    Args:
        state: changed in place; its ``model`` is what ``forward`` wraps, its ``optimizer`` what ``optimizer`` wraps.
        forward, optimizer: the model and the optimizer as Fabric has set them up.

    Raises:
        NonFiniteError: a loss or gradient is not finite and the rule is to stop, or has skipped ``max_skips`` updates.
    """
    model, scaler = state.model, state.scaler
    for step in range(state.step, passes.max_steps + 1):
        stop = stopping()
        if stop or restart_due(step):
            save_restart_point(state)
        if stop:
            return False
        began = time.perf_counter()
        batch = batches.at(step).to(fabric.device)
        data_seconds = time.perf_counter() - began
        saving = step in passes.save_at
        rule = passes.rule if saving else None
        positions = rule.positions(batch, passes.data_seed) if rule else None

        for attempt in range(MAX_RESCALES + 1):
            optimizer.zero_grad()
            norms = MicroBatchNorms() if passes.noise_scale else None
            with recording(model, None if passes.compiled else rule, positions) as activations:
                losses = forward_backward(
                    fabric, forward, objective, batch, passes.micro_batch_size, step, passes.dropout_seed, norms
                )
            loss = float(losses.sum())
            scale = scaler.get_scale() if scaler else 1.0
            if scaler:
                scaler.unscale_(state.optimizer)
            grad_norm = gradient_norm(model)
            finite = math.isfinite(loss) and math.isfinite(grad_norm)
            if finite or scaler is None or attempt == MAX_RESCALES:
                break
            scaler.update()  # the same pass again at half the loss scale

        if not finite and (passes.non_finite == "stop" or state.skipped_updates == passes.max_skips):
            raise NonFiniteError(non_finite_message(step, losses, model, passes))
        captured: dict[Split, Captured] = {}
        if rule:
            if passes.compiled:
                activations = plain_activations(fabric, state, passes, objective, batch, positions)
            captured["train"] = Captured(batch, positions, activations, weight_gradients(model, rule))
            if passes.probe is not None:
                probe = passes.probe.to(fabric.device)
                captured["val"] = probe_pass(
                    model,
                    probe,
                    rule,
                    partial(unscaled_pass, fabric, state, objective, probe, passes.probe_batch_size),
                )
        save_began = time.perf_counter()
        if saving:
            save(state, captured)
        save_seconds = time.perf_counter() - save_began
        val_loss = evaluate(state) if step in passes.evaluate_at else None

        norms_by_layer = gradient_norms_by_layer(model) if passes.norms_by_layer else None
        noise = None
        if norms:
            squared = [value / scale**2 for value in norms.squared]
            sizes = {"n_small": passes.micro_batch_size, "n_big": len(batch.input_ids)}
            noise = gradient_noise_scale(squared, grad_norm**2, **sizes)
        last = step == passes.max_steps
        updating = finite and not last
        if updating:
            update(state, optimizer, passes.learning_rate(step), passes.max_grad_norm, grad_norm)
        else:
            state.skipped_updates += not finite
            if scaler:
                scaler.update()  # forget that this pass was unscaled
        seconds = time.perf_counter() - began
        log(
            Row(
                step=step,
                tokens=step * batch.n_scored,
                loss=loss if math.isfinite(loss) else None,
                val_loss=val_loss,
                lr=None if last else passes.learning_rate(step),
                grad_norm=grad_norm if math.isfinite(grad_norm) else None,
                grad_norms=norms_by_layer if finite else None,
                noise_scale=noise if finite else None,
                updated=updating,
                seconds=seconds,
                data_seconds=data_seconds,
                save_seconds=save_seconds,
                tokens_per_s=batch.n_scored / seconds,
                mfu=passes.mfu(batch.n_scored / seconds),
                memory_bytes=peak_memory(fabric.device),
            )
        )
        if not last:
            state.step = step + 1
    return True


def forward_backward(
    fabric: "Fabric",
    model: nn.Module,
    objective: Objective,
    batch: Batch,
    micro_batch_size: int,
    step: int,
    dropout_seed: int,
    norms: MicroBatchNorms | None = None,
) -> Tensor:
    """Add the gradient of the mean loss over the scored tokens of ``batch`` to ``.grad``.

    The batch goes through in parts of ``micro_batch_size`` sequences, each weighted by its share of the scored tokens, so that neither
    their size nor masked tokens change what is computed. A part without a scored token is left out.

    Returns:
        What each part adds to the mean loss (parts,): they sum up to it.
    """
    parts = list(batch.split(micro_batch_size))
    losses = torch.zeros(len(parts), device=batch.input_ids.device)
    for number, part in enumerate(parts):
        if part.n_scored == 0:
            continue
        torch.manual_seed(pass_seed(dropout_seed, step, number))
        share = part.n_scored / batch.n_scored
        loss = objective(model, part, step) * share
        with norms.of(model, share) if norms else nullcontext():
            fabric.backward(loss)
        losses[number] = loss.detach()
    return losses


@torch.no_grad()
def plain_activations(
    fabric: "Fabric", state: TrainState, passes: Passes, objective: Objective, batch: Batch, positions: Tensor | None
) -> dict[str, Tensor]:
    """The activations of the pass from one more forward, through the plain module: in a compiled one hooks do not fire."""
    with recording(state.model, passes.rule, positions) as activations, fabric.autocast():
        for number, part in enumerate(batch.split(passes.micro_batch_size)):
            torch.manual_seed(pass_seed(passes.dropout_seed, state.step, number))
            objective(state.model, part, state.step)
    return activations


def unscaled_pass(
    fabric: "Fabric", state: TrainState, objective: Objective, batch: Batch, micro_batch_size: int
) -> None:
    """``forward_backward`` over the plain module, its gradients unscaled under fp16: what the probe runs."""
    with fabric.autocast():
        forward_backward(fabric, state.model, objective, batch, micro_batch_size, state.step, dropout_seed=0)
    if state.scaler:
        scale = state.scaler.get_scale()
        for parameter in state.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(scale)


def update(
    state: TrainState,
    optimizer: torch.optim.Optimizer,
    lr: float,
    max_grad_norm: float | None,
    grad_norm: float,
) -> None:
    """Clip the gradient to ``max_grad_norm`` (its 2-norm is ``grad_norm``) and make one optimizer step at rate ``lr``."""
    if max_grad_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(state.model.parameters(), max_grad_norm, torch.tensor(grad_norm))
    for group in state.optimizer.param_groups:
        group["lr"] = lr * group.get("lr_ratio", 1.0)
    optimizer.step()


def gradient_norm(model: nn.Module) -> float:
    """The 2-norm of the whole gradient."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients))


def gradient_norms_by_layer(model: nn.Module) -> dict[str, float]:
    """The 2-norm of the gradient of each block, and of each module outside the blocks, by name."""
    groups: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            first, second, *_ = name.split(".")
            groups.setdefault(f"{first}.{second}" if first == "layers" else first, []).append(parameter.grad)
    return {name: float(torch.nn.utils.get_total_norm(gradients)) for name, gradients in groups.items()}


def non_finite_message(step: int, losses: Tensor, model: nn.Module, passes: Passes) -> str:
    """What was not finite in pass ``step``, and what can be done."""
    what = []
    broken_parts = (~losses.isfinite()).nonzero().flatten().tolist()
    if broken_parts:
        number = broken_parts[0]
        what.append(f"the loss is {losses[number].item()} in micro-batch {number} of {len(losses)}")
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            what.append(f"the gradient of {name} is not finite")
            break
    if passes.non_finite == "skip":
        rule = f"{passes.max_skips} updates were left out before (training.max_skips)"
    else:
        rule = "training.non_finite=skip leaves such updates out"
    return (
        f"pass {step}: {' and '.join(what)}. Nothing of this pass was saved or updated; the checkpoints before it are whole. "
        f"A lower training.optimization.lr or a longer warm-up usually helps; {rule}"
    )


def pass_seed(dropout_seed: int, step: int, micro: int, rank: int = 0) -> int:
    """The seed of all randomness in one micro-batch of one pass: no random state is ever stored."""
    text = f"{dropout_seed}/{step}/{micro}/{rank}".encode("ascii")
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1
