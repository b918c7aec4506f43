"""Restart points: when they are due, and which of them are kept. Milestones are never touched."""

import logging
import shutil
import time
from pathlib import Path

from pico_train.checkpoint.format import step_folders

log = logging.getLogger(__name__)


class RestartSchedule:
    """Says before which passes a restart point is due: every ``every_n_steps`` steps, and ``every_minutes`` after the last save.

    Never at the steps ``saved_anyway``, the milestones that a run can go on from. Time is that of a clock that never goes back.
    """

    def __init__(self, *, every_n_steps: int, every_minutes: float | None, saved_anyway: frozenset[int]) -> None:
        self._every_n_steps, self._every_minutes, self._saved_anyway = every_n_steps, every_minutes, saved_anyway
        self._saved_at = time.monotonic()

    def due(self, step: int) -> bool:
        """Whether the state of ``step`` is to be saved now."""
        if step in self._saved_anyway or step == 0:
            return False
        by_steps = self._every_n_steps > 0 and step % self._every_n_steps == 0
        late = self._every_minutes is not None and time.monotonic() - self._saved_at >= 60 * self._every_minutes
        return by_steps or late

    def saved(self) -> None:
        """Begin to count minutes anew."""
        self._saved_at = time.monotonic()


def remove_unfinished(parent: Path) -> None:
    """Delete what a kill has left below ``parent``: every ``step_<N>.tmp`` that was being written or deleted."""
    for folder in parent.glob("step_*.tmp"):
        shutil.rmtree(folder, ignore_errors=True)


def prune(restart: Path, keep: int) -> None:
    """Delete all but the ``keep`` newest restart points, counted by step as a number.

    Each is renamed before it is deleted, so that a kill leaves no half of one that looks whole.
    """
    folders = list(step_folders(restart).values())
    for folder in folders[: max(0, len(folders) - keep)]:
        doomed = folder.with_name(f"{folder.name}.tmp")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
