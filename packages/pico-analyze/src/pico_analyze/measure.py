"""Measuring one checkpoint: the cells of one step -> a row for each head.

Each matrix and its spectrum serve all metrics. What has no value becomes a row that says why; a mistake in the code of a
metric or a component costs its own rows and no others.
"""

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from pico_analyze.checkpoint.format import CheckpointError, TensorError
from pico_analyze.checkpoint.reader import Checkpoint, Run
from pico_analyze.components import Component, Piece, Selection
from pico_analyze.components.matrix import Flagged, Matrix, Undefined
from pico_analyze.components.single import difference
from pico_analyze.metrics import MetricError
from pico_analyze.metrics.interval import interval, rows_of
from pico_analyze.metrics.null import orders as permutations
from pico_analyze.metrics.null import permutation_null
from pico_analyze.plan import Cell

logger = logging.getLogger(__name__)

Row = dict[str, Any]
Key = tuple[Any, ...]
Measured = dict[Key, list[Row]]  # what a cell gives for each head, by the key of the cell
References = dict[Key, tuple[int, list[Piece]]]  # matrices that others are compared with, and their size in bytes

KEPT_BYTES = 256 * 2**20  # of references; each step with each step may ask for more of them than fit into memory
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

    ``references`` holds matrices that others are compared with: those that this checkpoint needs stay for the next one,
    as long as there is room.
    """
    needed = {_reference_key(cell, work.device) for cell in work.cells}
    for key in [key for key in references if key not in needed]:
        del references[key]
    measured: Measured = {}
    by_matrix: dict[Key, list[Cell]] = defaultdict(list)
    for cell in work.cells:
        by_matrix[_matrix_key(cell)].append(cell)
    checkpoint = work.run.checkpoint(work.step, work.device)
    lost: dict[tuple[Path, str], set[str]] = defaultdict(set)  # file, what is wrong with it -> its tensors
    for group in by_matrix.values():
        try:
            pieces = _pieces(group[0].measurement.source.component, checkpoint, group[0].selection)
        except CheckpointError as error:
            if isinstance(error, TensorError):
                rows = group[0].selection.rows
                in_file = {row.key for row in rows if checkpoint.folder / row.file == error.path}
                lost[error.path, error.what] |= in_file if error.key is None else {error.key}
            else:
                logger.warning("%s", error)
            measured |= {cell.key: missing(cell, str(error)) for cell in group}
            continue
        except MeasuringError as error:
            logger.warning("%s of %s step %d: %s", group[0].measurement.source.name, work.run.name, work.step, error)
            measured |= {cell.key: [_failed(error) for _ in cell.heads] for cell in group}
            continue
        by_reference: dict[Key | None, list[Cell]] = defaultdict(list)
        for cell in group:
            by_reference[_reference_key(cell, work.device)].append(cell)
        for cells in by_reference.values():
            measured |= _compared(cells, pieces, references, work.device)
    for (path, what), keys in lost.items():
        which, colon = (min(keys), "") if len(keys) == 1 else (f"{len(keys)} tensors", ":")
        logger.warning("%s: %s (run %s, step %d)%s %s", path, which, work.run.name, work.step, colon, what)
    return measured


def _compared(cells: Sequence[Cell], pieces: Sequence[Piece], references: References, device: str) -> Measured:
    """What the cells give that measure the same matrices against the same reference, or against none."""
    try:
        others = _reference(cells[0], references, device)
    except CheckpointError as error:
        return {cell.key: missing(cell, f"the reference: {error}") for cell in cells}
    except MeasuringError as error:
        return {cell.key: [_failed(error) for _ in cell.heads] for cell in cells}
    if others is None:
        return {cell.key: [_value(cell, piece) for piece in pieces] for cell in cells}
    changes: list[Piece] | None = None  # the matrices less their references, for the metrics of a single matrix
    measured: Measured = {}
    for cell in cells:
        assert cell.reference is not None
        assert cell.reference.selection is not None
        here = dict(zip(cell.selection.heads, pieces, strict=True))
        there = dict(zip(cell.reference.selection.heads, others, strict=True))
        sides = [(here[head], there[head]) for head in cell.heads]
        if cell.measurement.metric.consumes == "pair":
            measured[cell.key] = [_value(cell, *side) for side in sides]
        else:
            changes = changes or [difference(*side) for side in sides]
            measured[cell.key] = [_value(cell, piece) for piece in changes]
    return measured


def _matrix_key(cell: Cell) -> Key:
    """What the cells have in common that measure the same matrices of a checkpoint."""
    source, selection = cell.measurement.source, cell.selection
    place = selection.module, selection.layer, selection.reference_layer
    return source.name, source.kind, source.split, source.order, *place


def _reference_key(cell: Cell, device: str) -> Key | None:
    """What the cells have in common that are compared with the same matrices; None without any."""
    other = cell.reference
    if other is None or other.selection is None:
        return None
    source = cell.measurement.source
    where = other.run.identity.run_id, other.step, other.selection.module, other.layer
    return source.name, source.kind, source.split, source.order, *where, device


def _reference(cell: Cell, references: References, device: str) -> list[Piece] | None:
    """The matrices that those of the cell are compared with; None without any."""
    key, other = _reference_key(cell, device), cell.reference
    if key is None or other is None or other.selection is None:
        return None
    if key in references:
        return references[key][1]
    pieces = _pieces(cell.measurement.source.component, other.run.checkpoint(other.step, device), other.selection)
    tensors = [side for piece in pieces for side in (piece.matrix.left, piece.matrix.right) if side is not None]
    stored = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    size = sum(stored.values())
    if size + sum(n_bytes for n_bytes, _ in references.values()) <= KEPT_BYTES:
        references[key] = size, pieces
    return pieces


def _pieces(component: Component, checkpoint: Checkpoint, selection: Selection) -> list[Piece]:
    """The matrices of a selection, one for each head.

    Raises:
        CheckpointError: a tensor cannot be had.
        MeasuringError: the component fails, or gives something else.
    """
    try:
        pieces = list(component.pieces(checkpoint, selection))
        n_matrices = sum(isinstance(piece.matrix, Matrix) for piece in pieces)
    except CheckpointError:
        raise
    except (Exception, SystemExit) as error:
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
    metric, parameters = cell.measurement.metric, cell.measurement.parameters
    matrices = [piece.matrix for piece in pieces]
    try:
        value = metric.compute(*matrices, **parameters)
    except Undefined as error:
        return row | {"value": None, "status": "undefined", "reason": error.reason}
    except MetricError as error:
        source, where = cell.measurement.source, f"{cell.run.name} step {cell.step}"
        logger.warning("%s of %s, %s: %s", cell.measurement.metric_name, source.name, where, error)
        return row | _failed(error)
    doubts = [value.reason] if isinstance(value, Flagged) else []
    for name, uncertainty in (("null", _null), ("interval", _interval)):
        try:
            row |= uncertainty(cell, float(value), matrices)
        except (Undefined, MetricError) as error:
            doubts.append(f"no {name}: {error}")
    status = "flagged" if doubts else "ok"
    return row | {"value": float(value), "status": status, "reason": "; ".join(doubts) or None}


def _null(cell: Cell, value: float, sides: Sequence[Matrix]) -> Row:
    """The columns of the permutation null, where it is asked for."""
    measurement, null = cell.measurement, cell.measurement.null
    if null is None:
        return {}
    x, y = sides
    n = x.shape[0]
    orders = permutations(n, _unit(cell, n, null.unit), null.permutations, null.seed)
    score = measurement.metric.scores(x, y, **measurement.parameters)
    at_random = [float(score(order)) for order in orders]
    return dict(permutation_null(value, at_random, null.quantile, distance=measurement.metric.distance))


def _interval(cell: Cell, value: float, matrices: Sequence[Matrix]) -> Row:
    """The columns of the interval, where it is asked for."""
    measurement, asked = cell.measurement, cell.measurement.bootstrap
    if asked is None:
        return {}

    def of_rows(rows: Tensor) -> float:
        parts = [rows_of(matrix, rows) for matrix in matrices]
        return measurement.metric.compute(*parts, **measurement.parameters)

    n = matrices[0].shape[0]
    unit = _unit(cell, n, asked.unit)
    low, high = interval(value, of_rows, n, unit, asked.resamples, asked.level, asked.seed)
    return {"low": low, "high": high}


def _unit(cell: Cell, n: int, unit: str) -> int:
    """How many neighbouring rows are one unit; the rows that a component has made of others are their own."""
    per_sequence = cell.rows_per_sequence
    return per_sequence if unit == "sequence" and n % per_sequence == 0 else 1


def _failed(error: ValueError) -> Row:
    """What is left of a mistake in the code of a metric or component: no value, the reason, tried again by a rerun."""
    return {"value": None, "status": "undefined", "reason": str(error)}


def missing(cell: Cell, reason: str) -> list[Row]:
    """The rows of a cell that cannot be measured."""
    nothing = dict.fromkeys(cell.content)
    return [nothing | {"status": "missing", "reason": reason} for _ in cell.heads]
