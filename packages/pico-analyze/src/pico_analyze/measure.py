"""Measuring one checkpoint: the cells of one step -> a row for each head.

Each matrix and its spectrum serve all metrics. What has no value becomes a row that says why; a mistake in the code of a
metric or a component costs its own rows and no others.
"""

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pico_analyze.checkpoint.format import CheckpointError
from pico_analyze.checkpoint.reader import Checkpoint, Run
from pico_analyze.components import Component, Piece, Selection
from pico_analyze.components.matrix import Flagged, Matrix, Undefined
from pico_analyze.components.single import difference
from pico_analyze.metrics import MetricError
from pico_analyze.plan import Cell

logger = logging.getLogger(__name__)

Row = dict[str, Any]
Key = tuple[Any, ...]
Measured = dict[Key, list[Row]]  # what a cell gives for each head, by the key of the cell
References = dict[Key, list[Piece]]

FAILED = ("the metric failed: ", "the component failed: ")


class MeasuringError(ValueError):
    """A component failed, or gave something else than matrices."""


@dataclass(frozen=True)
class Work:
    """The cells of one checkpoint that have to be computed."""

    run: Run
    step: int
    cells: Sequence[Cell]
    device: str = "cpu"
    """Where the linear algebra is done, as torch names it."""

    @property
    def name(self) -> str:
        """The checkpoint in words."""
        return f"{self.run.name} step {self.step}"


def measure(work: Work, references: References) -> Measured:
    """What the cells of one checkpoint give.

    ``references`` holds the matrices of the run that others are compared with; it is filled as needed, and emptied when
    another run comes.
    """
    for key in [key for key in references if key[0] != work.run.identity.run_id]:
        del references[key]
    measured: Measured = {}
    by_matrix: dict[Key, list[Cell]] = defaultdict(list)
    for cell in work.cells:
        by_matrix[_matrix_key(cell)].append(cell)
    checkpoint = work.run.checkpoint(work.step, work.device)
    for group in by_matrix.values():
        try:
            pieces = _pieces(group[0].measurement.source.component, checkpoint, group[0].selection)
        except CheckpointError as error:
            logger.warning("%s", error)
            measured |= {cell.key: missing(cell, str(error)) for cell in group}
            continue
        except MeasuringError as error:
            logger.warning("%s of %s step %d: %s", group[0].measurement.source.name, work.run.name, work.step, error)
            measured |= {cell.key: [_failed(error) for _ in cell.selection.heads] for cell in group}
            continue
        changes: dict[int | None, list[Piece]] = {}  # the matrices less those of another step, by that step
        for cell in group:
            try:
                others = _reference(work, cell, references)
            except CheckpointError as error:
                measured[cell.key] = missing(cell, f"the reference: {error}")
                continue
            except MeasuringError as error:
                measured[cell.key] = [_failed(error) for _ in cell.selection.heads]
                continue
            if others and cell.measurement.metric.consumes != "pair":
                step = cell.measurement.reference_step(work.run)
                if step not in changes:
                    changes[step] = [difference(*sides) for sides in zip(pieces, *others, strict=True)]
                measured[cell.key] = [_value(cell, piece) for piece in changes[step]]
            else:
                measured[cell.key] = [_value(cell, *matrices) for matrices in zip(pieces, *others, strict=True)]
    return measured


def _matrix_key(cell: Cell) -> Key:
    """What the cells have in common that measure the same matrices of a checkpoint."""
    source, selection = cell.measurement.source, cell.selection
    place = selection.module, selection.layer, selection.reference_layer
    return source.name, source.kind, source.split, source.order, *place


def _reference(work: Work, cell: Cell, references: References) -> list[list[Piece]]:
    """The matrices that those of the cell are compared with, as the one element; empty without any."""
    step = cell.measurement.reference_step(work.run)
    if step is None or cell.reference is None:
        return []
    key = (work.run.identity.run_id, *_matrix_key(cell), step, work.device)
    if key not in references:
        checkpoint = work.run.checkpoint(step, work.device)
        references[key] = _pieces(cell.measurement.source.component, checkpoint, cell.reference)
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
    doubt = value.reason if isinstance(value, Flagged) else None
    return row | {"value": float(value), "status": "flagged" if doubt else "ok", "reason": doubt}


def _failed(error: ValueError) -> Row:
    """What is left of a mistake in the code of a metric or component: no value, the reason, tried again by a rerun."""
    return {"value": None, "status": "undefined", "reason": str(error)}


def missing(cell: Cell, reason: str) -> list[Row]:
    """The rows of a cell that cannot be measured."""
    nothing = dict.fromkeys(cell.content)
    return [nothing | {"status": "missing", "reason": reason} for _ in cell.selection.heads]
