"""Four trackers behind Fabric's logger interface: each is opened where its points go, and asked which of them it has.

In: a run and how far its tracker was known to have got. Out: a logger, and the first step that it still needs. Whatever a kill left
behind, a tracker then shows one point per step; how, differs:

* csv is written anew at each start.
* TensorBoard hides what its older files hold from the first step of the newest one on.
* wandb says what it has: the server where there is one, else the files of the offline run. Points that are there stay as they are.
* trackio keeps one row per key, and the key of a row is run and step.
"""

import logging
import struct
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.loggers.csv_logs import CSVLogger
from lightning.fabric.loggers.logger import Logger
from lightning.fabric.loggers.tensorboard import TensorBoardLogger

if TYPE_CHECKING:
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

log = logging.getLogger(__name__)

FINISH_SECONDS = 30.0  # how long wandb may go on uploading after the last row
WANDB_BLOCK = 32 * 1024  # bytes; the files of wandb are cut into blocks as a LevelDB log is
WANDB_FULL, WANDB_LAST = 1, 4  # the kinds of pieces that a record ends with


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told about a run; ``folder`` is the tracker's own, and exists."""

    name: str
    run_id: str
    project: str
    entity: str | None
    config: Mapping[str, Any]
    folder: Path


@dataclass(frozen=True)
class Opened:
    """A tracker that is ready for rows.

    ``first`` is the first step that it still needs. ``saves`` says whether ``logger.save()`` brings what it was given to a place that
    outlives this process; otherwise only ``logger.finalize()`` does.
    """

    logger: Logger
    first: int
    look: str
    saves: bool = True


Opener = Callable[
    [TrackedRun, int, int], Opened
]  # the run, the last step it is known to have, the step the run goes on from


def open_csv(run: TrackedRun, sent: int, step: int) -> Opened:
    """``metrics.csv``, from its first line on."""
    path = run.folder / "metrics.csv"
    path.unlink(missing_ok=True)
    logger = CSVLogger(run.folder, name="", version="", flush_logs_every_n_steps=10**9)  # written by save() alone
    return Opened(logger, first=0, look=str(path))


def open_tensorboard(run: TrackedRun, sent: int, step: int) -> Opened:
    """An event file more, which hides what the files before it hold from its first step on."""
    files = list(run.folder.glob("events.out.tfevents.*"))
    if any(int(file.name.split(".")[3]) > time.time() for file in files):
        # TensorBoard reads the files in the order of the time in their names: one from before the clock went back comes last.
        for file in files:
            file.unlink()
        files = []
    first = min(sent + 1, step) if files else 0
    logger = TensorBoardLogger(run.folder, name="", version="", purge_step=first)
    return Opened(logger, first, look=f"tensorboard --logdir {run.folder}")


def open_wandb(run: TrackedRun, sent: int, step: int) -> Opened:
    """The run of that id at Weights & Biases, or offline a folder more that ``wandb sync`` adds to it."""
    import wandb

    mode = wandb.setup().settings.mode
    if mode == "disabled":
        raise RuntimeError("WANDB_MODE is disabled")
    offline = mode in ("offline", "dryrun")
    if not offline and not wandb.login(prompt=False, verify=False):
        log.warning(
            "wandb has no API key: %s is tracked offline; `wandb login` makes its next start send rows", run.name
        )
        offline = True
    # What an online run has written beside its upload is in the files too; whether it arrived, the server knows.
    stored = wandb_last_step(run.folder.glob(f"wandb/{'*' if offline else 'offline-'}run-*-{run.run_id}/*.wandb"))
    if any(run.folder.glob("wandb/*run-*")):
        time.sleep(1.0)  # wandb names a folder by the second, and where there is one of that name it drops every row
    experiment = wandb.init(
        dir=run.folder,
        id=run.run_id,
        name=run.name,
        project=run.project,
        entity=run.entity,
        resume="allow",
        reinit="create_new",  # the runs of a suite, and whatever else this process tracks, are left alone
        mode="offline" if offline else None,
        settings=wandb.Settings(silent=True, console="off", finish_timeout=FINISH_SECONDS, finish_timeout_raises=True),
    )
    # wandb's own counter goes on after a resume, and it drops what is logged at a lower one; so rows carry their step themselves.
    experiment.define_metric("step", hidden=True)
    experiment.define_metric("*", step_metric="step")
    logger = WandbLogger(run, experiment)
    logger.log_hyperparams(dict(run.config))
    first = max(sent, stored, experiment.summary.get("step", -1)) + 1
    look = f"offline; `wandb sync {run.folder / 'wandb'}/offline-run-*` sends it" if offline else str(experiment.url)
    return Opened(logger, first, look, saves=False)


def open_trackio(run: TrackedRun, sent: int, step: int) -> Opened:
    """The run of that id in trackio's own folder, which all its projects share: ``TRACKIO_DIR``, else the Hugging Face cache."""
    from trackio.sqlite_storage import SQLiteStorage

    logger = TrackioLogger(run)
    if logger.uses_database:
        stored = SQLiteStorage.get_max_step_for_run(run.project, run.name, run_id=run.run_id)
        sent = min(sent, -1 if stored is None else stored)
    return Opened(logger, first=sent + 1, look=f"trackio show --project {run.project}")


# The library whose absence is reported before training starts, and what opens the tracker.
TRACKERS: dict[str, tuple[str, Opener]] = {
    "csv": ("lightning.fabric.loggers", open_csv),
    "tensorboard": ("torch.utils.tensorboard", open_tensorboard),
    "trackio": ("trackio.fragments", open_trackio),
    "wandb": ("wandb", open_wandb),
}


class WandbLogger(Logger):
    """A Weights & Biases run that is there already.

    Lightning's own names the axis ``trainer/global_step``, takes over any run of the process and never finishes one.
    """

    def __init__(self, run: TrackedRun, experiment: "wandb.Run") -> None:
        self._run, self._experiment = run, experiment
        self._last_step = -1

    @property
    def name(self) -> str:
        """The name shown at Weights & Biases."""
        return self._run.name

    @property
    def version(self) -> str:
        """The id of the run."""
        return self._run.run_id

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Add one row; its step is the axis of every metric in it."""
        self._experiment.log({"step": step, **metrics})
        self._last_step = self._last_step if step is None else step

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Set the run's configuration; a key that has another value by now gets the new one."""
        self._experiment.config.update(params, allow_val_change=True)

    def finalize(self, status: str) -> None:
        """Wait for the upload, and until wandb's own process has written every row to its file.

        Raises:
            TimeoutError: either took longer than ``FINISH_SECONDS``.
        """
        self._experiment.finish(exit_code=0 if status == "success" else 1)
        file, deadline = Path(self._experiment.settings.sync_file), time.monotonic() + FINISH_SECONDS
        while wandb_last_step([file]) < self._last_step:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{file} lacks rows")
            time.sleep(0.1)


class TrackioLogger(Logger):
    """A run in the folder of trackio.

    It writes trackio's fragments, records that may come twice: a row is known by its ``log_id``, and ``trackio.Run.log`` would give it
    a random one. They go into the database, or on a network drive, where trackio keeps away from SQLite, into its inbox.
    """

    def __init__(self, run: TrackedRun) -> None:
        from trackio import fragments, utils

        self._run = run
        self._config: dict[str, Any] | None = dict(run.config)
        self._rows: list[dict[str, Any]] = []
        self._inbox = fragments.FragmentWriter()
        self.uses_database = utils.get_storage_mode() == "sqlite"

    @property
    def name(self) -> str:
        """The name shown by trackio."""
        return self._run.name

    @property
    def version(self) -> str:
        """The id of the run."""
        return self._run.run_id

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Keep one row for ``save``."""
        entry = {
            "project": self._run.project,
            "run": self._run.name,
            "run_id": self._run.run_id,
            "metrics": metrics,
            "step": step,
            "timestamp": datetime.now(UTC).isoformat(),
            "config": self._config,
            "log_id": f"{self._run.run_id}/{step}",
        }
        self._rows.append(entry)
        self._config = None  # once is enough

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Set the run's configuration; it goes with the next row."""
        self._config = vars(params) if isinstance(params, Namespace) else params

    def save(self) -> None:
        """Write the rows kept so far."""
        from trackio import fragments

        records = [fragments.metric_record(row) for row in self._rows]
        if self.uses_database:
            fragments.import_records(records)
        else:
            self._inbox.write_local(records)
        self._rows = []


def wandb_last_step(files: Iterable[Path]) -> int:
    """The highest ``step`` of a row in files that wandb has written, -1 where there is none."""
    items = (item for file in files for record in wandb_records(file) for item in record.history.item)
    return max((int(item.value_json) for item in items if list(item.nested_key) == ["step"]), default=-1)


def wandb_records(file: Path) -> Iterator["Record"]:
    """What is in a file that wandb has written, as far as the file is whole.

    A file is a header of 7 bytes and then a LevelDB log: pieces (crc32, size, kind: 4 + 2 + 1 bytes, then the bytes) that never cross
    the border of a block; the pieces of a record, put together, are a protobuf message.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data = file.read_bytes()
    at, record = 7, b""
    while at + 7 <= len(data):
        _, size, kind = struct.unpack_from("<IHB", data, at)
        begin, at = at + 7, at + 7 + size
        if kind == 0 or at > len(data):  # never written: the process was killed
            return
        record += data[begin:at]
        if kind in (WANDB_FULL, WANDB_LAST):
            yield Record.FromString(record)
            record = b""
        if -at % WANDB_BLOCK < 7:  # too little for another piece
            at += -at % WANDB_BLOCK
