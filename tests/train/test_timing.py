"""Times that are compared: taken in turns, the middle one of each."""

import time
from collections.abc import Callable

import pytest
import torch

from pico_train.timing import ROUNDS, in_turns


class Clock:
    """A clock that stands still, but for what a run takes."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ran: list[str] = []

    def run(self, name: str, *seconds: float) -> Callable[[], None]:
        """Takes ``seconds``, one after the other, and from then on the last of them."""
        left = list(seconds)

        def act() -> None:
            self.ran.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return act


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


def test_the_median_of_rounds_in_turns(clock: Clock) -> None:
    times = in_turns([clock.run("a", 9.0, 1.0, 2.0), clock.run("b", 3.0)], torch.device("cpu"))
    assert clock.ran == ["a", "b"] * ROUNDS
    assert times == [2.0, 3.0]  # of 9, 1, 2, 2, 2


@pytest.mark.parametrize(("limit_s", "n_rounds"), [(0.0, 1), (5.0, 2), (8.5, 3)])
def test_rounds_end_with_the_time_they_may_take(clock: Clock, limit_s: float, n_rounds: int) -> None:
    in_turns([clock.run("a", 1.0), clock.run("b", 3.0)], torch.device("cpu"), limit_s=limit_s)
    assert clock.ran == ["a", "b"] * n_rounds


def test_a_gpu_has_finished_before_the_clock_is_read(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", clock.run("wait", 1.0))
    assert in_turns([clock.run("a", 0.25)], torch.device("cuda")) == [1.25]
    assert clock.ran == ["wait", "a", "wait"] * ROUNDS
