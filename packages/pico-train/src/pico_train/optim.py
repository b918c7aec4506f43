"""The optimizer: which parameters decay, and its state by parameter name."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from pico_train.sharding import part_like

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def adamw(
    model: nn.Module,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decay_on: Literal["matrices", "all"],
    fused: bool,
) -> torch.optim.AdamW:
    """AdamW over the parameters of ``model`` in two groups: those that decay and those that do not.

    ``decay_on="matrices"`` decays the weight matrices of the blocks and leaves norms and embeddings alone; ``"all"`` decays every
    parameter, as the published code does. The learning rate is set before each update.
    """
    decays: list[nn.Parameter] = []
    rests: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim >= 2 and "embedding" not in name
        (decays if decay_on == "all" or is_matrix else rests).append(parameter)
    groups = [{"params": decays, "weight_decay": weight_decay}, {"params": rests, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=betas, eps=eps, fused=fused)


def state_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors as ``<parameter name>.<moment>`` in the model's order; empty before the first update."""
    return {
        f"{name}.{moment}": optimizer.state[parameter][moment]
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
        for moment in MOMENTS
    }


def load_state_by_name(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put what ``state_by_name`` returned back into ``optimizer``, whose parameters must be exactly those of the stored state.

    Raises:
        ValueError: a tensor is missing, left over, or of another shape; the message lists the names.
    """
    if not tensors:  # stored before the first update
        return
    parameters = dict(model.named_parameters())
    expected = {f"{name}.{moment}" for name in parameters for moment in MOMENTS}
    problems = [f"missing: {name}" for name in sorted(expected - tensors.keys())]
    problems += [f"not of this model: {name}" for name in sorted(tensors.keys() - expected)]
    problems += [
        f"{name}.{moment} has shape {tuple(tensors[key].shape)}, the parameter {tuple(parameter.shape)}"
        for name, parameter in parameters.items()
        for moment in ("exp_avg", "exp_avg_sq")
        if (key := f"{name}.{moment}") in tensors and tensors[key].shape != parameter.shape
    ]
    if problems:
        raise ValueError("the stored optimizer state does not fit the model:\n  " + "\n  ".join(problems))
    for name, parameter in parameters.items():
        stored = {moment: tensors[f"{name}.{moment}"] for moment in MOMENTS}
        optimizer.state[parameter] = {
            # fused AdamW keeps its step count on the parameter's device too
            moment: (part_like(t, parameter) if t.shape == parameter.shape else t.to(parameter.device)).clone()
            for moment, t in stored.items()
        }
