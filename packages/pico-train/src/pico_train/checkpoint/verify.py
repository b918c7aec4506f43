"""Checking a whole trail: the files, and whether checkpoints, log, configuration and evaluations belong together.

Nothing is changed. A run that was stopped, killed, resumed, extended or copied has no fault by that alone.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from pico_train.checkpoint.folder import read_identity
from pico_train.checkpoint.format import CheckpointError, Manifest, read_manifest, step_folders
from pico_train.checkpoint.resume import check_file, parent_hash
from pico_train.config import config_hash, load_config
from pico_train.errors import PicoError
from pico_train.metrics_log import read_rows
from pico_train.schedule import schedule_of
from pico_train.strict_yaml import ConfigError, read_mapping
from pico_train.words import counted

ROW_KEYS = ("step", "tokens", "loss", "val_loss", "lr", "updated")  # that every version has written
Rows = list[dict[str, Any]]


def verify_run(run: Path) -> tuple[int, list[str]]:
    """Check the run folder ``run``: how many checkpoints there are, and the faults, those of the oldest checkpoint first.

    Raises:
        RunFolderError: ``run`` is not the folder of a run.
    """
    identity = read_identity(run)
    intact: dict[Path, Manifest] = {}
    faults = list(_checkpoint_faults(run, identity["run_id"], intact))
    rows: Rows = []
    try:
        rows = read_rows(run / "metrics.jsonl")
    except PicoError as error:
        faults.append(str(error))
    else:
        faults += _log_faults(run, rows, intact)
    faults += _configuration_faults(run, identity, intact)
    faults += _evaluation_faults(run, {row["step"]: row for row in rows}, intact)
    return len(step_folders(run / "checkpoints")), faults


def _checkpoint_faults(run: Path, run_id: str, intact: dict[Path, Manifest]) -> Iterator[str]:
    """Every file hash, and the lineage; what has its files as they were written goes into ``intact``. Restart points are checked too.

    The lineage holds when each checkpoint is of this run and names as its parent the manifest of one before it: the one before when it
    was written, for a run that goes on with another schedule may save between the two.
    """
    hashes: dict[int, str | None] = {}  # of the milestones' manifests so far; None where a fault is told already
    for step, folder in [*step_folders(run / "checkpoints").items(), *step_folders(run / "restart").items()]:
        milestone = folder.parent.name == "checkpoints"
        try:
            manifest = read_manifest(folder)
            for row in manifest.files:
                check_file(folder, manifest, row.path)
        except CheckpointError as error:
            yield str(error)
            if milestone:
                hashes[step] = None
            continue
        intact[folder] = manifest
        if manifest.step != step:
            yield f"{folder} holds step {manifest.step}"
        if manifest.run.id != run_id:
            yield f"{folder} belongs to another run: {manifest.run.name}, id {manifest.run.id}"
        parent = manifest.parent
        if parent is None and any(before < step for before in hashes):
            yield f"{folder} names no parent, and is not the first"
        elif parent and hashes.get(parent.step, "missing") not in (None, parent.manifest_sha256):
            yield f"{folder} does not follow step {parent.step} as it is here"
        if milestone:
            hashes[step] = parent_hash(folder)


def _log_faults(run: Path, rows: Rows, intact: Mapping[Path, Manifest]) -> Iterator[str]:
    """One row per pass, each of this run: with the tokens and the learning rate of its step, and numbers that are numbers."""
    path = run / "metrics.jsonl"
    steps = [row["step"] for row in rows]
    if steps != list(range(len(steps))) or len(steps) < max(step_folders(run / "checkpoints"), default=0):
        last = steps[-1] if steps else "none"
        yield f"{path} has not one row per pass: {counted(len(steps), 'row')}, the last of step {last}"
        return
    for row in rows:
        where = f"{path}, the row of step {row['step']}"
        if lacking := [key for key in ROW_KEYS if key not in row]:
            yield f"{where} lacks {', '.join(lacking)}"
            return
        if odd := [key for key in ROW_KEYS if not _is_number(row[key])]:
            yield f"{where} holds what is no number: {', '.join(odd)}"
            return
    skipped = [0, *accumulate(not row["updated"] for row in rows)]  # before the pass of each step
    for folder, manifest in intact.items():
        if manifest.step < len(skipped) and manifest.skipped_updates != skipped[manifest.step]:
            n = counted(skipped[manifest.step], "skipped update")
            yield f"{path} has {n} before step {manifest.step}, {folder} has {manifest.skipped_updates}"
    try:
        config = load_config(run / "config.yaml")
    except ConfigError:
        return  # told elsewhere
    per_step, lr = config.data.dataloader.batch_size * config.model.max_seq_len, schedule_of(config.training)
    for row in rows:
        step, given = row["step"], row["lr"]
        if row["tokens"] != step * per_step:
            yield f"{path}, the row of step {step} has {row['tokens']} tokens, by config.yaml there are {step * per_step}"
            return
        if given is not None and not math.isclose(given, lr(step), rel_tol=1e-9):
            yield f"{path}, the row of step {step} has the learning rate {given:g}, by config.yaml it is {lr(step):g}"
            return


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and math.isfinite(value))


def _configuration_faults(run: Path, identity: Mapping[str, Any], intact: Mapping[Path, Manifest]) -> Iterator[str]:
    """``config.yaml`` is what the trainer has put there: at its last start, or when it wrote a checkpoint."""
    path = run / "config.yaml"
    try:
        found = config_hash(read_mapping(path))
    except ConfigError as error:
        yield f"{path}: {'; '.join(error.problems)}"
        return
    known = {identity.get("current_config_hash"), identity["config_hash"]} | {
        m.run.config_hash for m in intact.values()
    }
    if found not in known and None not in known:  # None: run.json is of a version that did not say
        yield (
            f"{path} was changed: its hash {found[:16]} is neither that of run.json nor that of a checkpoint; "
            "what the checkpoints were trained with is what their config_hash says"
        )


def _evaluation_faults(
    run: Path, rows: Mapping[int, Mapping[str, Any]], intact: Mapping[Path, Manifest]
) -> Iterator[str]:
    """Each evaluation can be read, and is of the weights of its step, as they are here.

    One of a step after the newest checkpoint is none's yet: it was made before a kill, and is made again.
    """
    saved = step_folders(run / "checkpoints")
    for step, folder in step_folders(run / "evaluations").items():
        manifest = intact.get(saved.get(step, folder))
        for path in sorted(folder.glob("*.json")):
            try:
                result = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                yield f"{path} cannot be read: {error}"
                continue
            if not isinstance(result, dict) or not result.keys() >= {"step", "settings", "weights_sha256"}:
                yield f"{path} is no evaluation: it lacks its step, its settings or the hash of its weights"
            elif result["step"] != step:
                yield f"{path} is of step {result['step']}"
            elif step not in saved and step < max(saved, default=0):
                yield f"{path} is of a step that has no checkpoint"
            elif manifest and result["weights_sha256"] != _weights_hash(manifest):
                yield f"{path} was computed from other weights than those of {saved[step]}"
            elif path.name == "held_out.json" and rows.get(step, {}).get("val_loss") not in (None, result.get("loss")):
                yield f"{path} has the loss {result.get('loss')}, the row of step {step} in metrics.jsonl {rows[step]['val_loss']}"


def _weights_hash(manifest: Manifest) -> str:
    """What ``contents.weights_hash`` says of the model that was stored."""
    lines = "\n".join(row.sha256 for row in manifest.tensors if row.kind == "weights")
    return hashlib.sha256(lines.encode("ascii")).hexdigest()
