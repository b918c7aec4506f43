"""What a pass did inside the model: activations by hooks, gradients, and the batch. Hooks live here and nowhere else.

The loop opens ``recording`` around a pass that is saved; nothing here changes a number of that pass.
``probe_pass`` is a pass of its own over
the held-out batch, and leaves no trace. Rules and row order: ``packages/CHECKPOINT_FORMAT.md``, section 5.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pico_train.data.batches import Batch
from pico_train.data.order import token_positions
from pico_train.errors import PicoError, UserError
from pico_train.ranks import ALONE, Ranks
from pico_train.sharding import whole


@dataclass(frozen=True)
class CaptureRule:
    """Which input positions of a sequence give an activation row, and of which modules."""

    rule: Literal["last", "position", "mean", "all", "sample"]
    modules: tuple[str, ...]
    position: int | None = None
    tokens_per_sequence: int | None = None

    def positions(self, batch: Batch, seed: int) -> Tensor | None:
        """The positions (B, k) of rule ``sample``, a function of ``seed`` and the sample ids; None under the other rules."""
        if self.rule != "sample":
            return None
        assert self.tokens_per_sequence is not None
        seq_len = batch.inputs.shape[1]
        k = min(self.tokens_per_sequence, seq_len)
        ids = batch.sample_ids.cpu().numpy()
        return torch.from_numpy(token_positions(ids, seed=seed, seq_len=seq_len, k=k))

    def rows(self, activation: Tensor, positions: Tensor | None) -> Tensor:
        """The rows (R, F) that the rule takes from ``activation`` (B, T, F); ``positions`` (B, k) under ``sample``."""
        match self.rule:
            case "last":
                return activation[:, -1]
            case "position":
                assert self.position is not None
                return activation[:, self.position]
            case "mean":
                return activation.float().mean(dim=1).to(activation.dtype)
            case "all":
                return activation.flatten(0, 1)
            case "sample":
                assert positions is not None
                index = positions.long().to(activation.device).unsqueeze(-1)  # (B, k, 1)
                return activation.take_along_dim(index, dim=1).flatten(0, 1)  # (B k, F)


@dataclass(frozen=True)
class Captured:
    """One pass as it is stored: the batch, and on the CPU activations (R, F) and gradients by module name."""

    batch: Batch
    positions: Tensor | None
    activations: dict[str, Tensor]
    gradients: dict[str, Tensor]


def modules_to_capture(model: nn.Module, suffixes: Sequence[str]) -> tuple[str, ...]:
    """The names of the modules that end in one of ``suffixes`` at a dot, in the model's order.

    Raises:
        UserError: a suffix matches no module with a weight; the message lists the suffixes that would.
    """
    names = [name for name, module in model.named_modules() if getattr(module, "weight", None) is not None]
    chosen: set[str] = set()
    for suffix in suffixes:
        matches = {name for name in names if f".{name}".endswith(f".{suffix}")}
        if not matches:
            known = sorted({name.split(".", 2)[2] if name.startswith("layers.") else name for name in names})
            raise UserError(
                f"checkpointing.learning_dynamics.layer_suffixes: {suffix!r} matches no module; there are: {', '.join(known)}"
            )
        chosen |= matches
    return tuple(name for name in names if name in chosen)


@contextmanager
def recording(model: nn.Module, rule: CaptureRule | None, positions: Tensor | None) -> Iterator[dict[str, Tensor]]:
    """Record the activations of one pass over the plain (unwrapped) ``model``, whatever the micro-batches it comes in.

    Yields a dict that holds, once the block is left, the rows (R, F) of each module in global sample order, on the CPU.
    Without a rule nothing is recorded.
    """
    recorded: dict[str, Tensor] = {}
    if rule is None:
        yield recorded
        return
    parts: dict[str, list[Tensor]] = {name: [] for name in rule.modules}
    sequences = dict.fromkeys(rule.modules, 0)

    def hook_of(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            if torch._C._current_graph_task_id() != -1:  # inside a backward: activation checkpointing repeats a forward
                return
            begin = sequences[name]
            sequences[name] = end = begin + len(output)
            mine = None if positions is None else positions[begin:end]
            parts[name].append(rule.rows(output.detach(), mine).to("cpu", copy=True))

        return hook

    handles = [model.get_submodule(name).register_forward_hook(hook_of(name)) for name in rule.modules]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()
    for name, rows in parts.items():
        if not rows:
            raise PicoError(f"{name} was never called in the pass: its activations cannot be captured")
        recorded[name] = torch.cat(rows)


def weight_gradients(model: nn.Module, rule: CaptureRule, ranks: Ranks = ALONE) -> dict[str, Tensor]:
    """A copy on the CPU of the gradient of each captured module's weight, by module name; nothing on ranks other than the first."""
    gradients = {}
    for name in rule.modules:
        gradient = model.get_submodule(name).weight.grad
        assert isinstance(gradient, Tensor), f"{name} has no gradient"
        together = whole(gradient.detach())
        if ranks.first:
            gradients[name] = together.to("cpu", copy=True)
    return gradients


def rows_of_all(activations: dict[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """The activations of the whole batch, in global sample order, from those of the ranks; nothing on ranks other than the first."""
    joined = {name: ranks.joined_on_first(rows) for name, rows in activations.items()}
    return {name: rows for name, rows in joined.items() if rows is not None}


def probe_pass(
    model: nn.Module, batch: Batch, rule: CaptureRule, forward_backward: Callable[[], None], ranks: Ranks = ALONE
) -> Captured:
    """One pass over the held-out ``batch`` in evaluation mode (no dropout), with the training gradients set aside.

    ``forward_backward()`` runs the batch through ``model`` and leaves the gradient of its mean loss in ``.grad``. Afterwards gradients,
    mode and random state are as they were. Every rank runs the whole batch; the first keeps the gradients.
    """
    positions = rule.positions(batch, seed=0)  # of the sample ids alone: the same for every run
    aside = [parameter.grad for parameter in model.parameters()]
    was_training = model.training
    try:
        model.zero_grad(set_to_none=True)
        model.eval()
        with torch.random.fork_rng(), recording(model, rule, positions) as activations:
            forward_backward()
        return Captured(batch, positions, activations, weight_gradients(model, rule, ranks))
    finally:
        model.train(was_training)
        for parameter, gradient in zip(model.parameters(), aside, strict=True):
            parameter.grad = gradient
