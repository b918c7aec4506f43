"""What a run leaves beside its checkpoints while it trains: its log, its progress, its trackers. Kept by rank 0 alone."""

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType

from pico_train.checkpoint.background import Background
from pico_train.checkpoint.folder import RunFolder
from pico_train.config import RunConfig
from pico_train.logs import Progress
from pico_train.metrics_log import MetricsLog, Row
from pico_train.trackers import Trackers

STOP_SECONDS = 5.0  # how long a run that is asked to stop waits for its trackers; the next start sends the rest


class Record:
    """The record of a run that goes on from ``step``, open inside ``with``; a rank that does not enter it records nothing.

    ``background`` publishes its checkpoints. It ends before the trackers, so that those are safe before anything is waited for.

    Raises:
        UserError: rows before ``step`` are missing.
    """

    def __init__(self, folder: RunFolder, config: RunConfig, step: int) -> None:
        self.background = Background()
        self._folder, self._config, self._step = folder, config, step
        self._open = ExitStack()
        self._metrics: MetricsLog | None = None
        self._trackers: Trackers | None = None

    def __enter__(self) -> "Record":
        folder, config, step = self._folder, self._config, self._step
        names = config.monitoring.tracker_names
        self._trackers = trackers_of(folder, config, names, step) if names else None
        self._progress = Progress(
            folder.name,
            begin=step,
            max_steps=config.training.max_steps,
            every=config.monitoring.logging.log_every_n_steps,
        )
        self._metrics = self._open.enter_context(MetricsLog(folder.metrics, step))
        for part in (self._progress, self._trackers, self.background):
            if part is not None:
                self._open.enter_context(part)
        return self

    def row(self, row: Row) -> None:
        """Log and show the row of a pass."""
        if self._metrics is None:
            return
        if row.step == self._config.training.max_steps:
            self.background.wait()  # the last row says that the run is finished, so nothing may be missing by then
        self._metrics.append(row)
        self._progress.show(row)

    def sync(self) -> None:
        """Bring the log to the disk: before a checkpoint that follows it is published."""
        assert self._metrics is not None
        self._metrics.sync()

    def hurry(self) -> None:
        """End soon: the run is asked to stop, and has a grace time."""
        if self._trackers:
            self._trackers.close_seconds = STOP_SECONDS

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)


def trackers_of(folder: RunFolder, config: RunConfig, names: Sequence[str], step: int) -> Trackers:
    """The trackers ``names`` of a run that goes on from ``step``."""
    return Trackers(
        names,
        run_folder=folder.path,
        run=folder.name,
        run_id=folder.run_id,
        project=config.monitoring.tracker_project,
        entity=config.monitoring.wandb.entity or None,
        config=config.model_dump(mode="json"),
        step=step,
    )
