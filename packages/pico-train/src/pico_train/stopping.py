"""When to stop before the end: a signal or the time limit. Asked between micro-batches, so that a stop never cuts one in two."""

import logging
import signal
import threading
import time
from types import FrameType

from pico_train.errors import PicoError

log = logging.getLogger(__name__)

SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1")  # Ctrl-C; the scheduler's end; the scheduler's warning before it


class Stopped(PicoError):
    """The run was asked to stop and can go on from what it saved."""

    exit_code = 75
    alike_on_all_ranks = True


class StopRequest:
    """Turns signals and the time limit into a reason to stop.

    Before ``defer`` there is nothing to save, and a signal raises ``Stopped`` at once. Afterwards it is only noted, and ``reason`` tells;
    a second signal changes nothing. When the block is left, signals do again what they did before it; but where that ``ends_process``, for
    its caller goes on to exit, and it is left by a stop, they are ignored from then on, so that none changes the exit code.
    """

    def __init__(self, *, ends_process: bool = False) -> None:
        self._ends_process = ends_process
        self._deadline: float | None = None
        self._max_minutes: float | None = None
        self._signal: str | None = None
        self._deferred = self._made_a_pass = False
        self._handlers: dict[signal.Signals, object] = {}

    def limit(self, max_minutes: float) -> None:
        """Set the time limit, counted from now."""
        self._deadline, self._max_minutes = time.monotonic() + 60 * max_minutes, max_minutes

    @property
    def reason(self) -> str | None:
        """Why to stop, None to go on."""
        if self._signal is not None:
            return self._signal
        if self._made_a_pass and self._deadline is not None and time.monotonic() >= self._deadline:
            return f"the time limit of {self._max_minutes:g} minutes"
        return None

    def defer(self) -> None:
        """From now on a signal waits until it is asked for."""
        self._deferred = True

    def made_a_pass(self) -> None:
        """From now on the time limit counts: a start that is slower than it must not go on for ever without one pass."""
        self._made_a_pass = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        first = self._signal is None
        self._signal = (
            self._signal or signal.Signals(number).name
        )  # kept: code that is interrupted may swallow what is raised
        if not self._deferred:
            self.raise_early()
        if first:
            log.warning("%s: stopping after this micro-batch", self._signal)

    def raise_early(self) -> None:
        """Raise ``Stopped`` if a signal has come before there is anything to save."""
        if self._signal is not None:
            raise Stopped(
                f"stopped by {self._signal} before the first pass; the same command starts again, or goes on from what is saved"
            )

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # nowhere else may handlers be set
            for name in SIGNALS:
                if number := getattr(signal, name, None):  # SIGUSR1 is not on Windows
                    self._handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        stopped = isinstance(error, PicoError) and error.exit_code == Stopped.exit_code  # here, or as rank 0 tells
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_IGN if stopped and self._ends_process else handler)  # type: ignore[arg-type]
