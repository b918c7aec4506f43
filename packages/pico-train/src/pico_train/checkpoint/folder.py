"""The run folder: whose it is, and whether what is asked for now is what it was made for."""

import json
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pico_train.checkpoint.durable import replace_file
from pico_train.checkpoint.format import FORMAT_VERSION, CheckpointError, read_manifest, step_folders
from pico_train.config import MAY_CHANGE, RunConfig, config_hash, differences, load_config, to_yaml
from pico_train.errors import UserError
from pico_train.launch import place
from pico_train.metrics_log import last_row
from pico_train.schedule import schedule_of

RUN_FORMAT = "pico-run"
PRECISION = "training.fabric.precision"
IDENTITY = {"run_id", "run", "suite", "config_hash"}
OURS = {
    "run.json.tmp",
    "run.lock",
    "train.log",
}  # what a kill during the very first start leaves behind without a run.json


class RunFolderError(UserError):
    """The folder of a run belongs to something else; the message names what and the ways out."""


@dataclass(frozen=True)
class RunFolder:
    """A run's folder and the identity stored in it."""

    path: Path
    run_id: str
    name: str
    suite: str | None

    @property
    def checkpoints(self) -> Path:
        """Where the milestones are."""
        return self.path / "checkpoints"

    @property
    def restart(self) -> Path:
        """Where the restart points are."""
        return self.path / "restart"

    @property
    def metrics(self) -> Path:
        """The log of all passes."""
        return self.path / "metrics.jsonl"


def make_run_folder(path: Path) -> None:
    """Make the folder of a run if it is not there, so that it can be locked.

    Raises:
        RunFolderError: it holds something else than a run, or cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not (path / "run.json").exists() and (others := {file.name for file in path.iterdir()} - OURS):
            raise RunFolderError(
                f"{path} exists and holds no run: it has no run.json, but {', '.join(sorted(others))}; "
                "give this run another checkpointing.run_name or runs_dir"
            )
    except OSError as error:
        raise unwritable(path, error) from error


def open_run_folder(path: Path, config: RunConfig, *, name: str, suite: str | None) -> RunFolder:
    """The run in the folder ``path``, which is locked: a new one, or the one there if it was made for the same configuration.

    Keys that no number depends on may have changed, and those of ``config.MAY_CHANGE``; ``config.yaml`` then holds the new ones.

    Raises:
        RunFolderError: the folder holds a run of another configuration; the keys that differ are named.
    """
    if (path / "run.json").exists() and _started(path):
        identity = read_identity(path)
        _check_changes(path, load_config(path / "config.yaml"), config)
    else:  # nothing is lost where an earlier start has left no pass
        identity = {
            "format": RUN_FORMAT,
            "format_version": FORMAT_VERSION,
            "run_id": secrets.token_hex(16),
            "run": name,
            "suite": suite,
            "config_hash": config_hash(config),
        }
    identity["current_config_hash"] = config_hash(config)
    try:
        replace_file(path / "run.json", json.dumps(identity, indent=1) + "\n")
        replace_file(path / "config.yaml", to_yaml(config))
    except OSError as error:
        raise unwritable(path, error) from error
    return RunFolder(path, identity["run_id"], identity["run"], identity["suite"])


def unwritable(path: Path, error: OSError) -> RunFolderError:
    """What to say where the folder of a run cannot be written."""
    return RunFolderError(f"{path} cannot be written: {error.strerror or error}; choose another checkpointing.runs_dir")


def _started(path: Path) -> bool:
    """Whether the run has a pass or a checkpoint."""
    folders = (path / "checkpoints", path / "restart")
    return last_row(path / "metrics.jsonl")[0] is not None or any(step_folders(folder) for folder in folders)


def _check_changes(path: Path, old: RunConfig, new: RunConfig) -> None:
    """Refuse what may not change when a run goes on.

    A precision that was left open and is now written out, or the reverse, counts by what it comes to.
    """
    changed = differences(old.model_dump(mode="json"), new.model_dump(mode="json"))
    if PRECISION in changed and "auto" in (old.training.fabric.precision, new.training.fabric.precision):
        from pico_train.hardware import choose_hardware  # imports torch, and listing runs does without

        if choose_hardware(new.training.fabric, place()).precision == _precision_so_far(path):
            del changed[PRECISION]
    refused = [line for key, line in changed.items() if key not in MAY_CHANGE]
    if old.training.max_steps != new.training.max_steps:
        before, after = schedule_of(old.training), schedule_of(new.training)
        last, _ = last_row(path / "metrics.jsonl")
        reached = last["step"] if last else 0
        n_updates = reached + (reached < old.training.max_steps)  # the last pass makes none
        step = next((step for step in range(n_updates) if before(step) != after(step)), None)
        if new.training.max_steps < reached:
            refused.append(f"{changed['training.max_steps']}; the run is at step {reached}")
        elif step is not None:
            refused.append(
                f"{changed['training.max_steps']}; under lr_scheduler: {new.training.optimization.lr_scheduler} update {step}, "
                "which is made already, would have had another learning rate (constant, or wsd before its decay, can be extended)"
            )
    if refused:
        listed = "\n  ".join(refused)
        raise RunFolderError(
            f"{path} holds a run of another configuration:\n  {listed}\n"
            "Set these keys back to go on with that run, or give this one a name of its own "
            "(checkpointing.run_name; for a suite the key `name`)"
        )


def _precision_so_far(path: Path) -> str | None:
    """With which the newest checkpoint was made; None where there is none."""
    folders = [*step_folders(path / "checkpoints").items(), *step_folders(path / "restart").items()]
    for _, folder in sorted(folders, reverse=True):
        with suppress(CheckpointError):
            return read_manifest(folder).made_by.precision
    return None


def read_identity(path: Path) -> dict[str, Any]:
    """``run.json`` of the run folder ``path``.

    Raises:
        RunFolderError: ``path`` is not a run folder, or its ``run.json`` is not one of ours.
    """
    file = path / "run.json"
    try:
        identity = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunFolderError(f"{path} is not the folder of a run: it has no run.json") from None
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{file} cannot be read: {error}") from None
    if not isinstance(identity, dict) or identity.get("format") != RUN_FORMAT or not identity.keys() >= IDENTITY:
        raise RunFolderError(f"{file} does not describe a run of format {RUN_FORMAT}")
    return identity
