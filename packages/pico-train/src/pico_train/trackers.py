"""Trackers: what ``metrics.jsonl`` holds, shown by TensorBoard, wandb, trackio or as CSV.

Each tracker has a thread of its own that follows ``metrics.jsonl`` as it grows. The loop never meets a tracker, so none can slow or
stop it; a slow one lags behind, and what it has not taken waits in the file, not in memory. ``trackers/sent.json`` says how far each
has got: the next start of the same command goes on there.
"""

import difflib
import importlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from pico_train.errors import UserError
from pico_train.metrics_log import last_row, read_rows
from pico_train.words import counted

if TYPE_CHECKING:
    from pico_train.tracker_loggers import Opener, TrackedRun

log = logging.getLogger(__name__)

POINTS = ("loss", "val_loss", "lr", "grad_norm", "tokens", "tokens_per_s", "memory_bytes")
LOOK_EVERY_S = 1.0
ROWS_AT_ONCE = 1000
CLOSE_SECONDS = 30.0
AGAIN = "metrics.jsonl has every row, and the next start of the same command sends what is missing"
SECRETS = ("WANDB_API_KEY", "HF_TOKEN")


class Trackers:
    """The trackers of one run, at work inside ``with``, which begins after ``metrics.jsonl`` is opened.

    Args:
        names: which; a name that comes twice counts once.
        step: the step that the run goes on from; rows of that step and later are made again.
        close_seconds: how long the end of ``with`` waits for them, all together; may be changed until then.

    Raises:
        UserError: a tracker is not known, or its library is not installed.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        run_folder: Path,
        run: str,
        run_id: str,
        project: str,
        entity: str | None,
        config: Mapping[str, Any],
        step: int,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        openers = {name: opener_of(name) for name in names}
        from pico_train.tracker_loggers import TrackedRun

        self.close_seconds = close_seconds
        self._metrics = run_folder / "metrics.jsonl"
        self._closing = threading.Event()
        tracked = TrackedRun(run, run_id, project, entity, config, folder=run_folder / "trackers")
        sent = Sent(run_folder)
        self._threads = [
            _Follower(name, opener, tracked, self._metrics, step, sent, self._closing)
            for name, opener in openers.items()
        ]

    def __enter__(self) -> "Trackers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        for thread in self._threads:
            thread.status = "success" if error[0] is None else "failed"
        self._closing.set()
        deadline = time.monotonic() + self.close_seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                n_left = sum(row["step"] > thread.taken for row in read_rows(self._metrics))
                log.warning(
                    "%s is not done after %g s, %s left: %s",
                    thread.name,
                    self.close_seconds,
                    counted(n_left, "row"),
                    AGAIN,
                )


class Sent:
    """``trackers/sent.json``: the last step that each tracker has surely taken, -1 for none."""

    def __init__(self, run_folder: Path) -> None:
        self._path = run_folder / "trackers" / "sent.json"
        self._lock = threading.Lock()
        try:
            self._steps: dict[str, int] = json.loads(self._path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):  # a power cut can leave it empty; the trackers then get every row again
            self._steps = {}

    def __getitem__(self, name: str) -> int:
        return self._steps.get(name, -1)

    def __setitem__(self, name: str, step: int) -> None:
        with self._lock:
            self._steps[name] = step
            staging = self._path.with_name("sent.json.tmp")
            staging.write_text(json.dumps(self._steps), encoding="utf-8")
            staging.replace(self._path)


def opener_of(name: str) -> "Opener":
    """What opens the tracker ``name``; its library is imported.

    Raises:
        UserError: there is no such tracker, or its library cannot be imported.
    """
    from pico_train.tracker_loggers import TRACKERS  # on use, as it imports lightning

    if name not in TRACKERS:
        near = difflib.get_close_matches(name, TRACKERS, n=1)
        raise UserError(
            f"monitoring.trackers: {name!r} is not a tracker; there are {', '.join(TRACKERS)}"
            + (f"; did you mean {near[0]}?" if near else "")
        )
    library, opener = TRACKERS[name]
    try:
        importlib.import_module(library)  # here and not in the tracker's thread: imports from two threads can deadlock
    except ImportError as error:
        raise UserError(
            f"monitoring.trackers: {name} cannot be used ({error}): run `pip install 'pico-train[trackers]'`, "
            f"or take {name} out of monitoring.trackers"
        ) from error
    return opener


def check_trackers(names: Sequence[str], project: str) -> None:
    """Refuse trackers that cannot work on this machine.

    Raises:
        UserError: one is not known, its library cannot be imported, or it takes no project of that name.
    """
    for name in names:
        opener_of(name)
        if name == "trackio":
            from trackio.sqlite_storage import SQLiteStorage

            try:
                SQLiteStorage.validate_project_name(project)
            except ValueError as error:
                raise UserError(f"monitoring.wandb.project: {project!r} is no project for trackio: {error}") from None


def unsent(run_folder: Path, names: Sequence[str], last_step: int) -> list[str]:
    """Those of the trackers that lack rows of a run which ended with ``last_step``."""
    sent = Sent(run_folder)
    return [name for name in dict.fromkeys(names) if sent[name] < last_step]


class _Follower(threading.Thread):
    """One tracker at work, until ``closing`` is set and it has taken every row; ``taken`` is the last one."""

    def __init__(
        self,
        name: str,
        opener: "Opener",
        run: "TrackedRun",
        metrics: Path,
        step: int,
        sent: Sent,
        closing: threading.Event,
    ) -> None:
        super().__init__(name=name, daemon=True)  # a process never waits for it
        self.taken = -1
        self.status = "success"
        self._opener, self._run = opener, replace(run, folder=run.folder / name)
        self._metrics, self._step, self._sent, self._closing = metrics, step, sent, closing

    def run(self) -> None:
        try:
            self._follow()
        except Exception as error:  # of whatever kind: it is the tracker's, and training goes on
            text = f"{type(error).__name__}: {error}"
            for secret in filter(None, map(os.environ.get, SECRETS)):
                text = text.replace(secret, "***")
            log.warning("%s is off for the rest of this run (%s): %s", self.name, text, AGAIN)

    def _follow(self) -> None:
        self._run.folder.mkdir(parents=True, exist_ok=True)
        opened = self._opener(self._run, self._sent[self.name], self._step)
        self._sent[self.name] = self.taken = opened.first - 1  # what it held from there on is going to be replaced
        log.info("%s: %s", self.name, opened.look)
        with self._metrics.open("rb") as file:
            _, begin = last_row(self._metrics, below=opened.first)
            file.seek(begin)
            while True:
                closing = self._closing.is_set()  # asked first: what was written until then is read below
                rows = list(islice(_new_rows(file), ROWS_AT_ONCE))
                for row in rows:
                    if row["step"] >= opened.first:
                        points = {key: row[key] for key in POINTS if row.get(key) is not None}
                        opened.logger.log_metrics(points, row["step"])
                        self.taken = row["step"]
                if rows:
                    opened.logger.save()
                    if opened.saves:
                        self._sent[self.name] = self.taken
                if len(rows) < ROWS_AT_ONCE:
                    if closing:
                        break
                    self._closing.wait(LOOK_EVERY_S)
        opened.logger.finalize(self.status)
        self._sent[self.name] = self.taken


def _new_rows(file: BinaryIO) -> Iterator[dict[str, Any]]:
    """The rows that have come since the last look; one that is half written waits for the next."""
    while True:
        at = file.tell()
        line = file.readline()
        if not line.endswith(b"\n"):
            file.seek(at)
            return
        yield json.loads(line)
