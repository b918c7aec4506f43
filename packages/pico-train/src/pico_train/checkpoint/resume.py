"""Finding where a run stands, and putting a stored state back."""

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file

from pico_train.checkpoint.contents import OPTIMIZER, STATE, WEIGHTS
from pico_train.checkpoint.folder import RunFolderError
from pico_train.checkpoint.format import (
    MANIFEST,
    CheckpointError,
    Manifest,
    file_hash,
    read_manifest,
    step_folders,
)
from pico_train.checkpoint.write import set_aside
from pico_train.model.huggingface import load_llama_state_dict
from pico_train.optim import load_state_by_name
from pico_train.state import TrainState, load_scaler_state

log = logging.getLogger(__name__)


def newest_complete(checkpoints: Path, *, below: int) -> tuple[Path, Manifest] | None:
    """The complete checkpoint with the greatest step smaller than ``below``, None if there is none."""
    for step, folder in reversed(step_folders(checkpoints).items()):
        if step < below:
            try:
                return folder, read_manifest(folder)
            except CheckpointError:
                continue
    return None


def newest_intact(parents: Sequence[Path], run_id: str) -> tuple[Path, Manifest] | None:
    """The newest checkpoint below ``parents`` whose weights and training state are what was written, None if there is none.

    A newer folder that is not complete, or not what was written, is renamed to ``<name>.damaged`` with a note that names the file.
    A milestone without the optimizer's moments is passed over; where one before it is set aside, so is it, for the manifest that it
    names as its parent will be another.

    Raises:
        RunFolderError: a checkpoint there is of another run than ``run_id``.
    """
    passed_over: list[Path] = []
    found = [(step, folder) for parent in parents for step, folder in step_folders(parent).items()]
    for step, folder in sorted(found, key=lambda item: item[0], reverse=True):
        try:
            manifest = read_manifest(folder)
            if manifest.step != step:
                raise CheckpointError(f"{folder} holds step {manifest.step} by its {MANIFEST}")
            if manifest.run.id != run_id:
                raise RunFolderError(
                    f"{folder} belongs to another run ({manifest.run.name}, id {manifest.run.id}): move it out of this run"
                )
            if not _lists_training_state(manifest):
                passed_over.append(folder)
                continue
            for path in (WEIGHTS, OPTIMIZER, STATE):
                check_file(folder, manifest, path)
        except CheckpointError as error:
            log.warning("%s. The folder is set aside as %s", error, set_aside(folder).name)
            for after in [after for after in passed_over if after.parent == folder.parent]:
                log.warning("%s follows it and is set aside as %s", after, set_aside(after).name)
                passed_over.remove(after)
            continue
        return folder, manifest
    return None


def load_state(folder: Path, state: TrainState) -> None:
    """Put the checkpoint at ``folder`` into ``state``. The files are mapped, not read: a rank takes only its part of a tensor."""
    load_llama_state_dict(state.model, load_file(folder / WEIGHTS))
    load_state_by_name(state.model, state.optimizer, load_file(folder / OPTIMIZER))
    counters = json.loads((folder / STATE).read_text(encoding="utf-8"))
    state.step, state.skipped_updates = counters["step"], counters["skipped_updates"]
    state.micro_batch_size = counters.get("micro_batch_size")  # absent from what earlier versions wrote, as is the next
    state.compiled = counters.get("compiled")
    if state.scaler and counters["gradient_scaler"]:
        load_scaler_state(state.scaler, counters["gradient_scaler"])


def holds_training_state(folder: Path) -> bool:
    """Whether ``folder`` is a complete checkpoint that a run can go on from."""
    try:
        return _lists_training_state(read_manifest(folder))
    except CheckpointError:
        return False


def _lists_training_state(manifest: Manifest) -> bool:
    return OPTIMIZER in {row.path for row in manifest.files}


def check_file(folder: Path, manifest: Manifest, path: str) -> None:
    """Compare a file of a checkpoint with the hash in its manifest; raise CheckpointError where they differ."""
    expected = {row.path: row.sha256 for row in manifest.files}
    if path not in expected:
        raise CheckpointError(f"{folder / MANIFEST} does not list {path}")
    if file_hash(folder / path) != expected[path]:
        raise CheckpointError(f"{folder / path} is not what was written: its SHA-256 differs from {MANIFEST}")


def parent_hash(folder: Path) -> str:
    """SHA-256 of the manifest at ``folder``: what the next checkpoint stores as its parent."""
    return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
