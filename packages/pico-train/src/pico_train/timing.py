"""How long computations take side by side: what is chosen by measurement is measured here."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

ROUNDS = 5


def in_turns(
    runs: Sequence[Callable[[], object]], device: torch.device, *, limit_s: float = float("inf")
) -> list[float]:
    """Median seconds of each of ``runs`` on ``device``, over ``ROUNDS`` rounds or the rounds that fit into ``limit_s``, at least one.

    They take turns, so that a slow moment of the machine meets all of them. Whatever a first call costs is paid before.
    """
    wait = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(device.type, lambda: None)
    seconds: list[list[float]] = [[] for _ in runs]
    end = time.perf_counter() + limit_s
    while len(seconds[0]) < ROUNDS and (not seconds[0] or time.perf_counter() < end):
        for run, taken in zip(runs, seconds, strict=True):
            wait()
            began = time.perf_counter()
            run()
            wait()
            taken.append(time.perf_counter() - began)
    return [statistics.median(taken) for taken in seconds]
