"""An analysis from Python: runs and a configuration -> the table.

A process holds one checkpoint at a time (besides the matrices that others are compared with), and nothing is
computed that an earlier table holds for the same content. What has no value becomes a row that says why.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from pico_analyze.checkpoint.integrity import StandingStill, out_of_place, repeated
from pico_analyze.checkpoint.reader import Run, find_runs, open_run
from pico_analyze.cluster import spread_on_cluster
from pico_analyze.components import Selection
from pico_analyze.config import AnalysisConfig, load_config
from pico_analyze.device import check
from pico_analyze.measure import FAILED, Key, Measured, Row, Work, missing
from pico_analyze.plan import AnalysisError, Cell, describe, plan, steps_of
from pico_analyze.results import ADDED, CONTENT, IDENTITY, table
from pico_analyze.spread import spread
from pico_analyze.strict_yaml import validated

__all__ = ["AnalysisError", "analyze", "describe", "open_runs", "plan"]

logger = logging.getLogger(__name__)

TRAINING = {"train_loss": "loss", "val_loss": "val_loss"}  # metric: its key in the training log
SAME_AS = "the same content as step "
NEARER_TO = "its weights are nearer to step "
OF_REFERENCE = "its reference: "
# How what a step casts on its values begins.
NOTES = (SAME_AS, NEARER_TO, OF_REFERENCE)


def analyze(
    runs: str | Path | Run | Sequence[str | Path | Run],
    config: AnalysisConfig | Mapping[str, Any] | str | Path,
    previous: pd.DataFrame | None = None,
    on_checkpoint: Callable[[str, int, int, Sequence[Row]], None] | None = None,
    jobs: int = 1,
    dask: str | None = None,
    device: str = "cpu",
) -> pd.DataFrame:
    """Measure what ``config`` asks for on ``runs``; the table has the columns of ``results.COLUMNS``.

    Rows are ordered by run (smallest first), then by step: its losses, then metrics as configured, by layer
    and head. ``attrs`` of the table counts the values that were ``computed``, ``kept`` and ``missing``.

    Args:
        runs: Runs that are open, or patterns as `find_runs` takes them.
        config: A configuration, a mapping of the same content, or the path of its file. Its own ``runs`` are not looked at.
        previous: An earlier table, from which values of the same content are taken; missing ones are retried. Only values
            that the metrics and components of now would give again belong into it.
        on_checkpoint: Called after each checkpoint with its name, how many are done, how many there are, and its rows:
            those that need no computing first, the others as they are finished.
        jobs: How many processes share the checkpoints; the table does not depend on it.
        dask: Address or file of a Dask scheduler whose workers share the checkpoints, in the place of ``jobs``.
        device: Where the linear algebra is done, ``cpu`` or ``cuda``; on another device the last digits may differ.

    Raises:
        DeviceError: the device cannot be used.
        ClusterError: the Dask cluster cannot be used.
        ConfigError: the configuration is not valid.
        CheckpointError: a pattern names no run, or a run cannot be opened.
        AnalysisError: something that is asked for cannot be had.
    """
    if isinstance(config, str | Path):
        config = load_config(config)
    if not isinstance(config, AnalysisConfig):
        config = validated(AnalysisConfig, dict(config), "config")
    if dask is None:  # otherwise the workers are asked
        check(device)
    opened = open_runs(runs)
    checkpoints = _asked(opened, config, {} if previous is None else _by_content(previous))
    losses = {run.identity.run_id: _losses(run) for run in opened}
    rows: dict[int, list[Row]] = {}

    def finish(place: int, measured: Measured) -> None:
        checkpoint = checkpoints[place]
        run_losses = losses[checkpoint.run.identity.run_id].get(checkpoint.step, ())
        rows[place] = list(_rows(checkpoint, checkpoint.given | measured, run_losses))
        if on_checkpoint is not None:
            on_checkpoint(f"{checkpoint.run.name} step {checkpoint.step}", len(rows), len(checkpoints), rows[place])

    works = {place: checkpoint.work(device) for place, checkpoint in enumerate(checkpoints)}
    for place in [place for place, work in works.items() if not work.cells]:
        finish(place, {})
        del works[place]
    places = list(works)
    waiting = list(works.values())
    spreading = (
        spread(waiting, jobs, config.plugins)
        if dask is None
        else spread_on_cluster(waiting, dask, config.plugins, device)
    )
    for index, measured in spreading:
        finish(places[index], measured)

    frame = table(row for place in sorted(rows) for row in rows[place])
    frame.attrs = counts = _counts(frame, checkpoints)
    logger.info("%(computed)d values computed, %(kept)d kept from before, %(missing)d missing", counts)
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


@dataclass(frozen=True)
class Asked:
    """What is asked for at one step of a run; ``given`` holds what need not be computed, ``far`` the doubtful weights."""

    run: Run
    step: int
    cells: Sequence[Cell]
    given: Measured
    far: Mapping[str, Mapping[tuple[int, str], int]]  # by run id

    def work(self, device: str) -> Work:
        """The rest."""
        return Work(self.run, self.step, [cell for cell in self.cells if cell.key not in self.given], device)


def _asked(runs: Sequence[Run], config: AnalysisConfig, earlier: Mapping[Key, Row]) -> list[Asked]:
    """The checkpoints of the plan, by run and step, with what ``earlier`` results spare."""
    cells: dict[tuple[str, int], list[Cell]] = defaultdict(list)
    for cell in plan(runs, config):
        cells[cell.run.identity.run_id, cell.step].append(cell)
    far = {run.identity.run_id: out_of_place(run, repeated(run, StandingStill.of(run))) for run in runs}
    return [
        Asked(run, step, here := cells[run.identity.run_id, step], _given(here, earlier), far)
        for run in runs
        for step in steps_of(run, config)
    ]


def _counts(frame: pd.DataFrame, checkpoints: Sequence[Asked]) -> dict[Any, int]:
    """How many values of the table were computed, kept and missing."""
    given = [rows for checkpoint in checkpoints for rows in checkpoint.given.values()]
    kept = sum(len(rows) for rows in given if rows[0]["status"] != "missing")
    missing_values = int(frame["status"].eq("missing").sum())
    measured = int(frame["kind"].ne("training").sum())
    return {"computed": measured - kept - missing_values, "kept": kept, "missing": missing_values}


def _rows(checkpoint: Asked, measured: Measured, losses: Iterable[Row]) -> Iterator[Row]:
    """The rows of one checkpoint: its losses, then its cells; a doubtful content marks the values that it gave."""
    about = _checkpoint_columns(checkpoint.run, checkpoint.step)
    for loss in losses:
        yield about | loss
    for cell in checkpoint.cells:
        about_cell = about | dict(zip(IDENTITY, cell.key, strict=True)) | cell.content
        for heads, row in zip(_heads(cell), measured[cell.key], strict=True):
            whole = about_cell | heads | row
            if row["status"] in ("ok", "flagged") and (note := "; ".join(_notes(cell, checkpoint.far))):
                whole |= {"status": "flagged", "reason": f"{note}; {row['reason']}" if row["reason"] else note}
            yield whole


def _heads(cell: Cell) -> list[Row]:
    """The head of each row of a cell, and the one of another layer that it is taken together with."""
    others = cell.selection.reference_heads or (None,) * len(cell.heads)
    return [{"head": head, "reference_head": other} for head, other in zip(cell.heads, others, strict=True)]


def _notes(cell: Cell, far: Mapping[str, Mapping[tuple[int, str], int]]) -> Iterator[str]:
    """What makes even a good value of the cell doubtful: a step that holds the content of another, or seems to."""
    if note := _note(cell.run, cell.step, cell.selection, cell.same_as, far):
        yield note
    other = cell.reference
    itself = other is not None and other.run is cell.run and other.step == cell.step
    if other is None or other.selection is None or itself:
        return
    if note := _note(other.run, other.step, other.selection, other.same_as, far):
        yield OF_REFERENCE + note


def _note(
    run: Run, step: int, selection: Selection, same_as: int | None, far: Mapping[str, Mapping[tuple[int, str], int]]
) -> str | None:
    if same_as is not None:
        return f"{SAME_AS}{same_as}"
    doubtful = far[run.identity.run_id]
    modules = [row.module for row in selection.rows if row.kind == "weights"]
    other = next((doubtful[step, module] for module in modules if (step, module) in doubtful), None)
    return None if other is None else f"{NEARER_TO}{other} than to the steps beside it"


# ---- what need not be computed


def _by_content(previous: pd.DataFrame) -> dict[Key, Row]:
    """What an earlier table says of each matrix, by `results.IDENTITY`, head and content; without notes on steps."""
    rows: dict[Key, Row] = {}
    measured = previous[previous["kind"].ne("training") & previous["status"].isin(["ok", "flagged", "undefined"])]
    for record in measured.astype(object).where(measured.notna(), None).to_dict("records"):
        row = {str(name): value for name, value in record.items()}
        reason = row["reason"] or ""
        if reason.startswith(FAILED):
            continue
        own = "; ".join(part for part in reason.split("; ") if not part.startswith(NOTES)) or None
        status = row["status"] if row["status"] == "undefined" else "flagged" if own else "ok"
        said = {name: row[name] for name in ("value", *ADDED, "n", "d")} | {"status": status, "reason": own}
        rows[tuple(row[name] for name in (*IDENTITY, "head", "reference_head", *CONTENT))] = said
    return rows


def _given(cells: Iterable[Cell], earlier: Mapping[Key, Row]) -> Measured:
    """The cells that are missing, and those of which the earlier table holds every head, with the same content."""
    given: Measured = {}
    for cell in cells:
        if cell.missing is not None:
            given[cell.key] = missing(cell, cell.missing)
            continue
        content = tuple(cell.content[name] for name in CONTENT)
        rows = [earlier.get((*cell.key, *heads.values(), *content)) for heads in _heads(cell)]
        if None not in rows:
            given[cell.key] = [row for row in rows if row is not None]
    return given
