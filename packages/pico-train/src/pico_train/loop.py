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

from pico_train.capture import Captured, CaptureRule, probe_pass, recording, rows_of_all, weight_gradients
from pico_train.checkpoint.format import Split
from pico_train.data.batches import Batch, Batches
from pico_train.errors import PicoError
from pico_train.hardware import peak_memory
from pico_train.metrics_log import Row
from pico_train.noise_scale import MicroBatchNorms, gradient_noise_scale
from pico_train.objectives import Objective
from pico_train.ranks import ALONE, Ranks
from pico_train.sharding import is_finite, is_sharded, together, whole
from pico_train.state import TrainState
from pico_train.words import counted

if TYPE_CHECKING:
    from lightning.fabric import Fabric

MAX_RESCALES = 16  # how often one fp16 pass is repeated at half the loss scale before its gradient counts as not finite


class _Interrupted(Exception):
    """A pass was given up between two micro-batches or evaluated batches; it has changed nothing, and is made again from its beginning."""


class NonFiniteError(PicoError):
    """The loss or a gradient is NaN or infinite; nothing was saved or updated in that pass."""

    alike_on_all_ranks = True


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


@dataclass(frozen=True)
class Engine:
    """What computes the passes of a run: the same for all of them.

    ``forward`` and ``optimizer`` are the model and the optimizer of a ``TrainState`` as Fabric has set them up.
    """

    fabric: "Fabric"
    forward: nn.Module
    optimizer: torch.optim.Optimizer
    objective: Objective
    ranks: Ranks = ALONE


@dataclass(frozen=True)
class Outcome:
    """What forward and backward of one pass came to; its gradient, unscaled, is in ``.grad``.

    Attributes:
        losses: what each micro-batch of the global batch adds to the mean loss (parts,); ``loss`` is their sum.
        activations: the rows of the captured modules over the global batch; empty without capture, and on ranks other than the first.
        noise_scale: None where it was not asked for or has no value.
    """

    losses: Tensor
    loss: float
    grad_norm: float
    activations: dict[str, Tensor]
    noise_scale: float | None

    @property
    def finite(self) -> bool:
        """Whether an update may follow."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def train(
    state: TrainState,
    passes: Passes,
    engine: Engine,
    *,
    batches: Batches,
    save: Callable[[TrainState, dict[Split, Captured]], None],
    save_restart_point: Callable[[TrainState], None],
    restart_due: Callable[[int], bool],
    stopping: Callable[[], bool],
    evaluate: Callable[[TrainState, Callable[[], None]], float | None],
    log: Callable[[Row], None],
) -> bool:
    """Run the passes from ``state.step`` to ``passes.max_steps``; whether the end was reached.

    Asked before each pass, and within it between the micro-batches of training, of the probe and of an evaluation, ``stopping`` ends
    the loop with a restart point of the step that was reached; ``evaluate`` is given what to call between its batches. ``state`` is
    changed in place. Every rank runs this loop; ``log`` is given what holds for all of them, and ``captured`` is empty on ranks other
    than the first.

    Raises:
        NonFiniteError: a loss or gradient is not finite and the rule is to stop, or has skipped ``max_skips`` updates.
    """
    model, device = state.model, engine.fabric.device

    def heed_stop() -> None:
        if engine.ranks.any(stopping())[0]:
            raise _Interrupted

    for step in range(state.step, passes.max_steps + 1):
        stop, due = engine.ranks.any(stopping(), engine.ranks.first and restart_due(step))
        if stop or due:
            save_restart_point(state)
        if stop:
            return False
        began = time.perf_counter()
        batch = batches.at(step).to(device)
        data_seconds = time.perf_counter() - began
        saving, last = step in passes.save_at, step == passes.max_steps
        rule = passes.rule if saving else None
        positions = rule.positions(batch, passes.data_seed) if rule else None

        try:
            outcome = computed(state, passes, engine, batch, rule, positions, heed_stop)
            if not outcome.finite and (passes.non_finite == "stop" or state.skipped_updates == passes.max_skips):
                raise NonFiniteError(non_finite_message(step, outcome.losses, model, passes))
            captured = looked_at(state, passes, engine, batch, rule, positions, outcome, heed_stop) if rule else {}
            save_began = time.perf_counter()
            if saving:
                save(state, captured if engine.ranks.first else {})
            save_seconds = time.perf_counter() - save_began
            val_loss = evaluate(state, heed_stop) if step in passes.evaluate_at else None
        except _Interrupted:
            save_restart_point(state)
            return False

        norms_by_layer = gradient_norms_by_layer(model) if passes.norms_by_layer else None
        updating = outcome.finite and not last
        if updating:
            update(state, engine.optimizer, passes.learning_rate(step), passes.max_grad_norm, outcome.grad_norm)
        else:
            state.skipped_updates += not outcome.finite
            if state.scaler:
                state.scaler.update()  # forget that this pass was unscaled
        seconds = time.perf_counter() - began
        log(
            Row(
                step=step,
                tokens=step * batch.n_scored,
                loss=outcome.loss if math.isfinite(outcome.loss) else None,
                val_loss=val_loss,
                lr=None if last else passes.learning_rate(step),
                grad_norm=outcome.grad_norm if math.isfinite(outcome.grad_norm) else None,
                grad_norms=norms_by_layer if outcome.finite else None,
                noise_scale=outcome.noise_scale if outcome.finite else None,
                updated=updating,
                seconds=seconds,
                data_seconds=data_seconds,
                save_seconds=save_seconds,
                tokens_per_s=batch.n_scored / seconds,
                mfu=passes.mfu(batch.n_scored / seconds),
                memory_bytes=peak_memory(device),
            )
        )
        if not last:
            state.step = step + 1
    return True


def computed(
    state: TrainState,
    passes: Passes,
    engine: Engine,
    batch: Batch,
    rule: CaptureRule | None,
    positions: Tensor | None,
    heed_stop: Callable[[], None],
) -> Outcome:
    """Forward and backward over the global ``batch``; under fp16 again at half the loss scale until the gradient is finite."""
    model, scaler, ranks = state.model, state.scaler, engine.ranks
    for attempt in range(MAX_RESCALES + 1):
        engine.optimizer.zero_grad()
        norms = MicroBatchNorms() if passes.noise_scale else None
        own_positions = None if positions is None else ranks.share(positions)
        with recording(model, None if passes.compiled else rule, own_positions) as activations:
            losses = forward_backward(
                engine.fabric,
                engine.forward,
                engine.objective,
                batch,
                passes.micro_batch_size,
                state.step,
                passes.dropout_seed,
                norms,
                ranks,
                heed_stop,
            )
        scale = scaler.get_scale() if scaler else 1.0
        if scaler:
            scaler.unscale_(state.optimizer)
        noise = None
        grad_norm = gradient_norm(model)
        if norms:
            squared = ranks.joined(torch.tensor(norms.squared, dtype=torch.float64)) / scale**2
            n_small = passes.micro_batch_size * (ranks.size if is_sharded(next(model.parameters())) else 1)
            noise = gradient_noise_scale(squared.tolist(), grad_norm**2, n_small=n_small, n_big=len(batch.input_ids))
        outcome = Outcome(losses, float(losses.sum()), grad_norm, rows_of_all(activations, ranks), noise)
        if outcome.finite or scaler is None or attempt == MAX_RESCALES:
            break
        scaler.update()  # the same pass again at half the loss scale
    return outcome


def micro_batches(batch: Batch, micro_batch_size: int, ranks: Ranks) -> list[Batch]:
    """What this rank sends through the model, one after the other: its share of the global ``batch`` in equal parts."""
    mine = list(batch.split(len(batch.input_ids) // ranks.size))[ranks.rank]
    return list(mine.split(micro_batch_size))


def forward_backward(
    fabric: "Fabric",
    model: nn.Module,
    objective: Objective,
    batch: Batch,
    micro_batch_size: int,
    step: int,
    dropout_seed: int,
    norms: MicroBatchNorms | None = None,
    ranks: Ranks = ALONE,
    heed_stop: Callable[[], None] = lambda: None,
) -> Tensor:
    """Add the gradient of the mean loss over the scored tokens of the global ``batch`` to ``.grad``.

    Each rank takes its share of the sequences, in parts of ``micro_batch_size``, each weighted by its part of all scored tokens, so that
    neither their size nor masked tokens change what is computed. A part without a scored token is left out. ``heed_stop``, called
    between two parts, may raise.

    Returns:
        What each part of all ranks adds to the mean loss (parts,), in the order of the batch: they sum up to it.
    """
    parts, parts_of_all = micro_batches(batch, micro_batch_size, ranks), list(batch.split(micro_batch_size))
    sharded = is_sharded(next(model.parameters()))
    losses = torch.zeros(len(parts), device=batch.input_ids.device)
    for number, part in enumerate(parts):
        if number:
            heed_stop()
        # Gradients are averaged over the ranks in the backward of the last part, so that one goes through it even if none of it counts.
        # For the norms those of a sharded model are averaged in each backward, others once each rank has measured its own.
        averaging = ranks.size > 1 and (sharded if norms else number == len(parts) - 1)
        measured = parts_of_all[number :: len(parts)] if sharded and norms else [part]
        n_scored = sum(one.n_scored for one in measured)
        if n_scored == 0 and (norms or not averaging):
            continue
        torch.manual_seed(pass_seed(dropout_seed, step, ranks.rank * len(parts) + number))
        share = part.n_scored / batch.n_scored
        apart = nullcontext() if averaging or ranks.size == 1 else fabric.no_backward_sync(model)  # type: ignore[arg-type]
        weight = n_scored / batch.n_scored * (1 if averaging else ranks.size)  # averaging divides by their number
        with apart, norms.of(model, weight) if norms else nullcontext():
            loss = objective(model, part, step) * share if share else model(part.inputs).sum() * 0
            fabric.backward(loss * ranks.size if ranks.size > 1 else loss)
        losses[number] = loss.detach()
    if norms and not sharded:
        ranks.average([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    return ranks.joined(losses)


def looked_at(
    state: TrainState,
    passes: Passes,
    engine: Engine,
    batch: Batch,
    rule: CaptureRule,
    positions: Tensor | None,
    outcome: Outcome,
    heed_stop: Callable[[], None],
) -> dict[Split, Captured]:
    """What is kept of a pass that is saved: of its own batch, and of the probe if there is one."""
    model, ranks = state.model, engine.ranks
    activations = outcome.activations
    if passes.compiled:
        activations = plain_activations(state, passes, engine, batch, positions)
    captured: dict[Split, Captured] = {
        "train": Captured(batch, positions, activations, weight_gradients(model, rule, ranks))
    }
    if passes.probe is not None:
        probe = passes.probe.to(engine.fabric.device)
        look = partial(unscaled_pass, state, engine, probe, passes.probe_batch_size, heed_stop)
        captured["val"] = probe_pass(model, probe, rule, look, ranks)
    return captured


@torch.no_grad()
def plain_activations(
    state: TrainState, passes: Passes, engine: Engine, batch: Batch, positions: Tensor | None
) -> dict[str, Tensor]:
    """The activations of the pass from one more forward, through the plain module: in a compiled one hooks do not fire."""
    ranks = engine.ranks
    own_positions = None if positions is None else ranks.share(positions)
    parts = micro_batches(batch, passes.micro_batch_size, ranks)
    recorder = recording(state.model, passes.rule, own_positions)
    with recorder as activations, together(state.model), engine.fabric.autocast():
        for number, part in enumerate(parts):
            torch.manual_seed(pass_seed(passes.dropout_seed, state.step, ranks.rank * len(parts) + number))
            engine.objective(state.model, part, state.step)
    return rows_of_all(activations, ranks)


def unscaled_pass(
    state: TrainState, engine: Engine, batch: Batch, micro_batch_size: int, heed_stop: Callable[[], None]
) -> None:
    """``forward_backward`` over the plain module, its gradients unscaled under fp16: what the probe runs."""
    fabric, step = engine.fabric, state.step
    with fabric.autocast():
        forward_backward(
            fabric, state.model, engine.objective, batch, micro_batch_size, step, dropout_seed=0, heed_stop=heed_stop
        )
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
    return float(whole(torch.nn.utils.get_total_norm(gradients)))


def gradient_norms_by_layer(model: nn.Module) -> dict[str, float]:
    """The 2-norm of the gradient of each block, and of each module outside the blocks, by name."""
    groups: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            first, second, *_ = name.split(".")
            groups.setdefault(f"{first}.{second}" if first == "layers" else first, []).append(parameter.grad)
    return {name: float(whole(torch.nn.utils.get_total_norm(gradients))) for name, gradients in groups.items()}


def non_finite_message(step: int, losses: Tensor, model: nn.Module, passes: Passes) -> str:
    """What was not finite in pass ``step``, and what can be done."""
    what = []
    broken_parts = (~losses.isfinite()).nonzero().flatten().tolist()
    if broken_parts:
        number = broken_parts[0]
        what.append(f"the loss is {losses[number].item()} in micro-batch {number} of {len(losses)}")
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not is_finite(parameter.grad):
            what.append(f"the gradient of {name} is not finite")
            break
    if passes.non_finite == "skip":
        rule = f"{counted(passes.max_skips, 'update')} left out before (training.max_skips)"
    else:
        rule = "training.non_finite=skip leaves such updates out"
    return (
        f"pass {step}: {' and '.join(what)}. Nothing of this pass was saved or updated; the checkpoints before it are whole. "
        f"A lower training.optimization.lr or a longer warm-up usually helps; {rule}"
    )


def pass_seed(dropout_seed: int, step: int, micro: int) -> int:
    """The seed of all randomness in one micro-batch of one pass: no random state is ever stored.

    ``micro`` counts through the global batch, so that two ranks of two micro-batches draw what one rank of four would.
    """
    text = f"{dropout_seed}/{step}/{micro}/0".encode("ascii")
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1
