"""Measuring what was planned: cells -> rows.

One checkpoint is in memory at a time (besides the matrices that others are compared with), each matrix and
its spectrum serve all metrics, and nothing is computed that an earlier table holds for the same content. What
has no value becomes a row that says why.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from pico_analyze.checkpoint.format import CheckpointError
from pico_analyze.checkpoint.reader import Checkpoint, Run, find_runs, open_run
from pico_analyze.components import Component, Piece, Selection
from pico_analyze.components.matrix import Flagged, Matrix, Undefined
from pico_analyze.config import AnalysisConfig
from pico_analyze.metrics import MetricError
from pico_analyze.plan import AnalysisError, Cell, describe, plan, steps_of
from pico_analyze.results import table
from pico_analyze.strict_yaml import validated

__all__ = ["AnalysisError", "analyze", "describe", "open_runs", "plan"]

logger = logging.getLogger(__name__)

Row = dict[str, Any]
Key = tuple[Any, ...]

FAILED = ("the metric failed: ", "the component failed: ")
TRAINING = {"train_loss": "loss", "val_loss": "val_loss"}  # metric: its key in the training log
SAME_AS = "the same content as step "


class MeasuringError(ValueError):
    """A component failed, or gave something else than matrices."""


def analyze(
    runs: str | Path | Run | Sequence[str | Path | Run],
    config: AnalysisConfig | Mapping[str, Any],
    previous: pd.DataFrame | None = None,
    on_checkpoint: Callable[[str, int, int, Sequence[Row]], None] | None = None,
) -> pd.DataFrame:
    """Measure what ``config`` asks for on ``runs``; the table has the columns of ``results.COLUMNS``.

    Rows are ordered by run (smallest first), then by step: its losses, then metrics as configured, by layer
    and head. ``attrs`` of the table counts the values that were ``computed``, ``kept`` and ``missing``.

    Args:
        runs: Runs that are open, or patterns as `find_runs` takes them.
        config: A configuration, or a mapping of the same content. Its own ``runs`` are not looked at.
        previous: An earlier table, from which values of the same content are taken; missing ones are retried.
        on_checkpoint: Called after each checkpoint with its name, how many are done, how many there are, and its rows.

    Raises:
        ConfigError: the configuration is not valid.
        CheckpointError: a pattern names no run, or a run cannot be opened.
        AnalysisError: something that is asked for cannot be had.
    """
    if not isinstance(config, AnalysisConfig):
        config = validated(AnalysisConfig, dict(config), "config")
    opened = open_runs(runs)
    cells: dict[tuple[str, int], list[Cell]] = defaultdict(list)
    for cell in plan(opened, config):
        cells[cell.run.identity.run_id, cell.step].append(cell)
    earlier = {} if previous is None else _by_key(previous)

    rows: list[Row] = []
    n_kept, n_done, n_checkpoints = 0, 0, sum(len(steps_of(run, config)) for run in opened)
    for run, losses in [(run, _losses(run)) for run in opened]:
        references: dict[Key, list[Piece]] = {}
        for step in steps_of(run, config):
            here = cells[run.identity.run_id, step]
            kept = {cell.key: old for cell in here if (old := _kept(cell, earlier.get(cell.key, {})))}
            new = _measure(run, step, [cell for cell in here if cell.key not in kept], references)
            about = _checkpoint_columns(run, step)
            n_before = len(rows)
            rows += [about | loss for loss in losses.get(step, ())]
            for cell in here:
                measured = kept.get(cell.key) or new[cell.key]
                about_cell = about | dict(zip(Cell.IDENTITY, cell.key, strict=True)) | cell.content
                for head, row in zip(cell.selection.heads, measured, strict=True):
                    rows.append(about_cell | {"head": head} | row)
            n_kept += sum(map(len, kept.values()))
            n_done += 1
            if on_checkpoint is not None:
                on_checkpoint(f"{run.name} step {step}", n_done, n_checkpoints, rows[n_before:])

    frame = table(rows)
    n_missing = int(frame["status"].eq("missing").sum())
    n_computed = int(frame["kind"].ne("training").sum()) - n_kept - n_missing
    frame.attrs = {"computed": n_computed, "kept": n_kept, "missing": n_missing}
    logger.info("%d values computed, %d kept from before, %d missing", n_computed, n_kept, n_missing)
    return frame


def open_runs(runs: str | Path | Run | Sequence[str | Path | Run]) -> list[Run]:
    """The runs that are given or that patterns name, open, ordered by number of parameters and name.

    Raises:
        CheckpointError: a pattern names no run, or a run cannot be opened.
    """
    given = [runs] if isinstance(runs, str | Path | Run) else list(runs)
    opened = [run for run in given if isinstance(run, Run)]
    opened += map(open_run, find_runs(run for run in given if not isinstance(run, Run)))
    return sorted(opened, key=lambda run: (run.n_parameters or math.inf, run.name))


def _checkpoint_columns(run: Run, step: int) -> Row:
    """The columns that say which checkpoint a row is about."""
    first = run.manifests[run.steps[0]]
    return {
        "run": run.name,
        "run_id": run.identity.run_id,
        "suite": run.identity.suite,
        "scale": first.model.n_parameters,
        "weights_seed": first.seeds.weights,
        "data_seed": first.seeds.data,
        "dropout_seed": first.seeds.dropout,
        "step": step,
        "tokens": run.manifests[step].tokens if step in run.manifests else None,
    }


def _losses(run: Run) -> dict[int, list[Row]]:
    """The losses of the training log as rows, by step."""
    losses: dict[int, list[Row]] = defaultdict(list)
    log = run.training_log().set_index("step")
    for metric, column in TRAINING.items():
        for step, value in log[column].dropna().items() if column in log else ():
            row = {"kind": "training", "component": "loss", "metric": metric, "parameters": "{}"}
            losses[int(str(step))].append(row | {"value": value, "status": "ok"})
    return losses


# ---- what an earlier table holds


def _by_key(previous: pd.DataFrame) -> dict[Key, dict[int | None, Row]]:
    """The rows of an earlier table by the key of their cell, then by head."""
    rows: dict[Key, dict[int | None, Row]] = defaultdict(dict)
    for record in previous.astype(object).where(previous.notna(), None).to_dict("records"):
        row = {str(name): value for name, value in record.items()}
        rows[tuple(row[name] for name in Cell.IDENTITY)][row["head"]] = row
    return rows


def _kept(cell: Cell, earlier: Mapping[int | None, Row]) -> list[Row]:
    """What an earlier table says for each head of the cell, if all of it still holds; otherwise nothing."""
    rows = [earlier.get(head, {}) for head in cell.selection.heads]
    if cell.missing is not None or not all(_still_holds(row, cell) for row in rows):
        return []
    return [{name: row[name] for name in ("value", "n", "d", "status", "reason")} for row in rows]


def _still_holds(row: Row, cell: Cell) -> bool:
    if row.get("status") not in ("ok", "flagged", "undefined"):
        return False
    if any(row[name] != value for name, value in cell.content.items()):
        return False
    if (row["reason"] or "").startswith(FAILED):
        return False
    first, _, _ = (row["reason"] or "").partition("; ")
    noted = first if first.startswith(SAME_AS) else None
    return row["status"] == "undefined" or noted == _note(cell)


def _note(cell: Cell) -> str | None:
    """What makes even a good value of the cell doubtful: a step that holds the content of another."""
    return None if cell.same_as is None else f"{SAME_AS}{cell.same_as}"


# ---- what is computed


def _measure(run: Run, step: int, cells: Sequence[Cell], references: dict[Key, list[Piece]]) -> dict[Key, list[Row]]:
    """What the cells of one checkpoint give for each head, by the key of the cell.

    ``references`` holds the matrices of the run that others are compared with; it is filled as needed.
    """
    measured: dict[Key, list[Row]] = {}
    by_matrix: dict[Key, list[Cell]] = defaultdict(list)
    for cell in cells:
        if cell.missing is None:
            by_matrix[_matrix_key(cell)].append(cell)
        else:
            measured[cell.key] = _missing(cell, cell.missing)
    if not by_matrix:
        return measured
    checkpoint = run.checkpoint(step)
    for group in by_matrix.values():
        try:
            pieces = _pieces(group[0].measurement.source.component, checkpoint, group[0].selection)
        except CheckpointError as error:
            logger.warning("%s", error)
            measured |= {cell.key: _missing(cell, str(error)) for cell in group}
            continue
        except MeasuringError as error:
            logger.warning("%s of %s step %d: %s", group[0].measurement.source.name, run.name, step, error)
            measured |= {cell.key: [_failed(error) for _ in cell.selection.heads] for cell in group}
            continue
        for cell in group:
            try:
                others = _reference(run, cell, references)
            except CheckpointError as error:
                measured[cell.key] = _missing(cell, f"the reference: {error}")
            except MeasuringError as error:
                measured[cell.key] = [_failed(error) for _ in cell.selection.heads]
            else:
                measured[cell.key] = [_value(cell, *matrices) for matrices in zip(pieces, *others, strict=True)]
    return measured


def _matrix_key(cell: Cell) -> Key:
    """What the cells have in common that measure the same matrices of a checkpoint."""
    source, selection = cell.measurement.source, cell.selection
    return source.name, source.kind, source.split, source.order, selection.module, selection.layer


def _reference(run: Run, cell: Cell, references: dict[Key, list[Piece]]) -> list[list[Piece]]:
    """The matrices that those of the cell are compared with, as the one element; empty without any."""
    step = cell.measurement.reference_step(run)
    if step is None or cell.reference is None:
        return []
    key = (*_matrix_key(cell), step)
    if key not in references:
        references[key] = _pieces(cell.measurement.source.component, run.checkpoint(step), cell.reference)
    return [references[key]]


def _pieces(component: Component, checkpoint: Checkpoint, selection: Selection) -> list[Piece]:
    """The matrices of a selection, one for each head.

    Raises:
        CheckpointError: a tensor cannot be had.
        MeasuringError: the component fails, or gives something else.
    """
    try:
        pieces = list(component.pieces(checkpoint, selection))
        n_matrices = sum(isinstance(piece.matrix, Matrix) for piece in pieces)
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        raise MeasuringError(f"the component failed: {type(error).__name__}: {error}") from error
    if n_matrices != len(pieces) or n_matrices != len(selection.heads):
        n_heads = len(selection.heads)
        raise MeasuringError(
            f"the component failed: it gave {n_matrices} matrices in {len(pieces)} for {n_heads} heads"
        )
    return pieces


def _value(cell: Cell, *pieces: Piece) -> Row:
    """The metric on one matrix, or on one and its reference."""
    n, d = (*pieces[0].matrix.shape, None)[:2]  # a vector has no columns
    row: Row = {"n": n, "d": d}
    try:
        value = cell.measurement.metric.compute(*(piece.matrix for piece in pieces), **cell.measurement.parameters)
    except Undefined as error:
        return row | {"value": None, "status": "undefined", "reason": error.reason}
    except MetricError as error:
        source, where = cell.measurement.source, f"{cell.run.name} step {cell.step}"
        logger.warning("%s of %s, %s: %s", cell.measurement.metric_name, source.name, where, error)
        return row | _failed(error)
    doubts = [_note(cell), value.reason if isinstance(value, Flagged) else None]
    reason = "; ".join(doubt for doubt in doubts if doubt)
    return row | {"value": float(value), "status": "flagged" if reason else "ok", "reason": reason or None}


def _failed(error: ValueError) -> Row:
    """What is left of a mistake in the code of a metric or component: no value, the reason, tried again by a rerun."""
    return {"value": None, "status": "undefined", "reason": str(error)}


def _missing(cell: Cell, reason: str) -> list[Row]:
    nothing = dict.fromkeys(cell.content)
    return [nothing | {"status": "missing", "reason": reason} for _ in cell.selection.heads]
