"""The optimizer: which parameters it moves how, and its state by parameter name."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pico_train.config import ModelConfig, OptimizationConfig
from pico_train.muon import Muon
from pico_train.sharding import part_like

ADAMW_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
MUON_MOMENTS = ("momentum_buffer",)


def optimizer_of(model: nn.Module, section: OptimizationConfig, *, fused: bool) -> torch.optim.Optimizer:
    """The optimizer that ``section`` asks for, over the parameters of ``model``."""
    options: dict[str, Any] = {
        "betas": section.betas,
        "eps": section.eps,
        "weight_decay": section.weight_decay,
        "decay_on": section.weight_decay_on,
        "fused": fused,
    }
    if section.optimizer == "adamw":
        return adamw(model, **options)
    return muon(
        model,
        lr_ratio=section.muon.lr / section.lr,
        momentum=section.muon.momentum,
        adjust_lr=section.muon.adjust_lr,
        **options,
    )


def adamw(
    model: nn.Module,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decay_on: Literal["matrices", "all"],
    fused: bool,
    only: Callable[[str, nn.Parameter], bool] = lambda name, parameter: True,
) -> torch.optim.AdamW:
    """AdamW over the parameters of ``model`` that are ``only`` to be moved, in two groups: those that decay and those that do not.

    ``decay_on="matrices"`` decays the weight matrices of the blocks and leaves norms and embeddings alone; ``"all"`` decays every
    parameter, as the published code does. The learning rate is set before each update.
    """
    decays: list[nn.Parameter] = []
    rests: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if only(name, parameter):
            (decays if decay_on == "all" or is_block_matrix(name, parameter) else rests).append(parameter)
    groups = [{"params": decays, "weight_decay": weight_decay}, {"params": rests, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=betas, eps=eps, fused=fused)


def muon(
    model: nn.Module,
    *,
    lr_ratio: float,
    momentum: float,
    adjust_lr: Literal["original", "match_rms_adamw"],
    weight_decay: float,
    **adamw_options: Any,
) -> "ByRole":
    """Muon for the matrices of the blocks, AdamW as in ``adamw`` for the rest.

    Muon moves a matrix along the nearest orthogonal one to its momentum (five Newton-Schulz steps in bf16), at ``lr_ratio`` times the
    learning rate of the others.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; ``adjust_lr="match_rms_adamw"``: Liu et
    al., "Muon is Scalable for LLM Training", 2025, section 2.2.
    """
    matrices = [parameter for name, parameter in model.named_parameters() if is_block_matrix(name, parameter)]
    first = Muon(
        [{"params": matrices, "lr_ratio": lr_ratio}],
        lr=0.0,
        momentum=momentum,
        weight_decay=weight_decay,
        adjust_lr_fn=adjust_lr,
    )
    rest = adamw(model, weight_decay=weight_decay, only=lambda name, p: not is_block_matrix(name, p), **adamw_options)
    return ByRole(first, rest)


def is_block_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a matrix inside a block: no norm, no embedding, not the head."""
    return parameter.ndim >= 2 and "embedding" not in name


class ByRole(torch.optim.Optimizer):
    """Several optimizers, each over its own parameters, as one: it shares their parameter groups and holds the state of all."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts
        for part in parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update by each of them."""
        for part in self.parts:
            part.step()


def moments_of(optimizer: torch.optim.Optimizer) -> dict[Tensor, tuple[str, ...]]:
    """The names of the tensors that ``optimizer`` keeps for each parameter."""
    return {
        parameter: ADAMW_MOMENTS if "betas" in group else MUON_MOMENTS
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def n_moments(model: ModelConfig, optimizer: Literal["adamw", "muon"]) -> int:
    """How many numbers the optimizer keeps: two per parameter, under Muon one per parameter of the blocks' matrices."""
    return 2 * model.n_parameters - (model.n_parameters_in_matrices if optimizer == "muon" else 0)


def state_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors as ``<parameter name>.<moment>`` in the model's order; empty before the first update."""
    moments = moments_of(optimizer)
    return {
        f"{name}.{moment}": optimizer.state[parameter][moment]
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
        for moment in moments[parameter]
    }


def load_state_by_name(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put what ``state_by_name`` returned back into ``optimizer``, whose parameters must be exactly those of the stored state.

    Raises:
        ValueError: a tensor is missing, left over, or of another shape; the message lists the names.
    """
    if not tensors:  # stored before the first update
        return
    moments = moments_of(optimizer)
    parameters = dict(model.named_parameters())
    expected = {
        f"{name}.{moment}": torch.Size() if moment == "step" else parameter.shape
        for name, parameter in parameters.items()
        for moment in moments[parameter]
    }
    problems = [f"missing: {name}" for name in sorted(expected.keys() - tensors.keys())]
    problems += [f"not of this model: {name}" for name in sorted(tensors.keys() - expected.keys())]
    problems += [
        f"{name} has shape {tuple(tensors[name].shape)}, not {tuple(shape)}"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if problems:
        raise ValueError("the stored optimizer state does not fit the model:\n  " + "\n  ".join(problems))
    for name, parameter in parameters.items():
        stored = {moment: tensors[f"{name}.{moment}"] for moment in moments[parameter]}
        optimizer.state[parameter] = {
            # fused AdamW keeps its step count on the parameter's device too
            moment: (part_like(t, parameter) if t.shape == parameter.shape else t.to(parameter.device)).clone()
            for moment, t in stored.items()
        }
