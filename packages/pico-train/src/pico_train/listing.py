"""What runs there are: read from their folders, without torch."""

import logging
from dataclasses import dataclass
from pathlib import Path

from pico_train.checkpoint.folder import read_identity
from pico_train.checkpoint.format import CheckpointError, read_manifest, step_folders
from pico_train.config import load_config
from pico_train.errors import PicoError, UserError
from pico_train.metrics_log import last_row

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunEntry:
    """One run, by the name of its folder; ``made_as`` is the name that it was trained under, another one in a copy.

    ``step`` counts the passes done, as everywhere: the step that the run stands at. ``loss`` is that of its last pass in nats;
    ``saved_steps`` are those whose checkpoints are complete.
    """

    run: str
    made_as: str
    suite: str | None
    n_parameters: int
    step: int
    max_steps: int
    finished: bool
    loss: float | None
    saved_steps: list[int]


def list_runs(runs_dir: Path) -> list[RunEntry]:
    """The runs below ``runs_dir``, by parameters and then name.

    Raises:
        UserError: there is no such folder, or no run in it.
    """
    if not runs_dir.is_dir():
        raise UserError(f"{runs_dir} is not a folder; name the folder that holds the runs (checkpointing.runs_dir)")
    entries = []
    for file in sorted(runs_dir.glob("*/run.json")):
        try:
            entries.append(_entry(file.parent))
        except PicoError as error:
            log.warning("%s is left out: %s", file.parent, error)
    if not entries:
        raise UserError(f"{runs_dir} holds no run (no folder in it has a run.json)")
    return sorted(entries, key=lambda entry: (entry.n_parameters, entry.run))


def _entry(run: Path) -> RunEntry:
    identity, config = read_identity(run), load_config(run / "config.yaml")
    last, _ = last_row(run / "metrics.jsonl")
    saved = []
    for step, folder in step_folders(run / "checkpoints").items():
        try:
            read_manifest(folder)
        except CheckpointError:
            continue
        saved.append(step)
    max_steps = config.training.max_steps
    return RunEntry(
        run=run.name,
        made_as=identity["run"],
        suite=identity["suite"],
        n_parameters=config.model.n_parameters,
        step=min(last["step"] + 1, max_steps) if last else 0,
        max_steps=max_steps,
        finished=last is not None and last["step"] == max_steps,
        loss=last["loss"] if last else None,
        saved_steps=saved,
    )
