"""The state of a run: all that resuming needs, and nothing that can be computed from the configuration and the step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pico_train.model.decoder import PicoDecoder


@dataclass
class TrainState:
    """Changed in place by the loop. ``model`` is the plain module; ``scaler`` exists under fp16 only.
    ``micro_batch_size`` is that of the passes so far: the configuration may leave it to the free memory. ``compiled`` is what
    ``training.compile: auto`` has come to, None where the configuration says it.

    No random state: the randomness of a pass is a function of the dropout seed, the step and the micro-batch.
    """

    step: int
    skipped_updates: int
    model: PicoDecoder
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    micro_batch_size: int | None = None
    compiled: bool | None = None


def scaler_state(scaler: torch.amp.GradScaler | None) -> dict[str, Any] | None:
    """The part of an fp16 loss scaler that moves: its scale, and the finite passes since the scale last changed."""
    if scaler is None:
        return None
    state = scaler.state_dict()
    return {"scale": state["scale"], "growth_tracker": state["_growth_tracker"]}


def load_scaler_state(scaler: torch.amp.GradScaler, stored: Mapping[str, Any]) -> None:
    """Put back what ``scaler_state`` returned."""
    moved = {"scale": stored["scale"], "_growth_tracker": stored["growth_tracker"]}
    scaler.load_state_dict(scaler.state_dict() | moved)
