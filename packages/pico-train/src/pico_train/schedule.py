"""How the learning rate moves, as a function of the step alone. No torch."""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

from pico_train.config import TrainingConfig

Schedule = Literal["linear_with_warmup", "linear", "cosine", "wsd", "constant"]


def schedule_of(training: TrainingConfig) -> Callable[[int], float]:
    """The learning rate of each update of a run, by its step."""
    section = training.optimization
    return partial(
        learning_rate,
        schedule=section.lr_scheduler,
        peak=section.lr,
        warmup_steps=section.lr_warmup_steps,
        max_steps=training.max_steps,
        min_ratio=section.min_lr_ratio,
        decay_fraction=section.decay_fraction,
    )


def learning_rate(
    step: int,
    *,
    schedule: Schedule,
    peak: float,
    warmup_steps: int,
    max_steps: int,
    min_ratio: float,
    decay_fraction: float,
) -> float:
    """The learning rate of update ``step`` (0-based).

    ``linear_with_warmup`` is the published curve: ``peak * step / warmup``, so the first update has rate 0, then straight down to
    0 at ``max_steps``. The others warm up as ``peak * (step + 1) / warmup`` and then go from ``peak`` to ``min_ratio * peak`` at
    ``max_steps``: ``linear`` straight, ``cosine`` along half a cosine, ``wsd`` flat and straight down over the last
    ``decay_fraction`` of all steps; ``constant`` stays at ``peak``.
    """
    if schedule == "linear_with_warmup":
        if step < warmup_steps:
            return peak * step / max(1, warmup_steps)
        return peak * max(0.0, (max_steps - step) / max(1, max_steps - warmup_steps))
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    begin = warmup_steps if schedule != "wsd" else max(warmup_steps, round(max_steps * (1 - decay_fraction)))
    done = min(1.0, max(0.0, (step - begin) / max(1, max_steps - begin)))
    left = (1 + math.cos(math.pi * done)) / 2 if schedule == "cosine" else 1 - done
    return peak * (min_ratio + (1 - min_ratio) * left)
