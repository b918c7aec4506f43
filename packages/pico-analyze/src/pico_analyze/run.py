"""Where everything meets: configuration -> runs -> rows -> files.

Comes in: a configuration that names runs. Goes out: ``<output_dir>/<analysis_name>/`` with the table of results and
the table of runs (Parquet and CSV), the configuration, a log, and on request the published JSON files. What an
earlier start has computed there is taken over.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from pico_analyze import results
from pico_analyze.analysis import analyze, describe, open_runs, plan
from pico_analyze.checkpoint.reader import Run
from pico_analyze.config import AnalysisConfig, ConfigError, not_built_yet
from pico_analyze.device import check
from pico_analyze.metrics import load_metrics
from pico_analyze.plan import code_hashes
from pico_analyze.progress import progress

log = logging.getLogger("pico_analyze")

LOG_FILE = "analysis.log"
STORE = "computed"
WRITE_EVERY_S = 60.0  # so much work is lost at most when the process is killed


@dataclass(frozen=True)
class Outcome:
    """What an analysis has left: the folder, the table in it, and how many of its values were new."""

    folder: Path
    table: pd.DataFrame
    n_computed: int
    n_kept: int

    @property
    def n_missing(self) -> int:
        """The values that could not be measured because something is not there."""
        return int(self.table["status"].eq("missing").sum())

    def statuses(self) -> dict[str, int]:
        """How many measured values have each status, the losses of training left out."""
        measured = self.table[self.table["kind"] != "training"]
        counts = measured["status"].value_counts()
        return {status: int(counts.get(status, 0)) for status in ("ok", "flagged", "undefined", "missing")}

    def reasons(self) -> list[tuple[str, str, int]]:
        """Each (status, reason) of the values that are not ok, as `results.alike`, with how often, the most frequent first."""
        doubtful = self.table[self.table["status"] != "ok"].groupby("status")["reason"]
        counts = [(str(status), reason, n) for status, reasons in doubtful for reason, n in results.alike(reasons)]
        return sorted(counts, key=lambda one: -one[2])


def run_analysis(config: AnalysisConfig, jobs: int = 1, dask: str | None = None, device: str = "cpu") -> Outcome:
    """Measure what ``config`` asks for on its runs, and write it; an interrupted or finished analysis is continued.

    The table holds what ``config`` asks for now. Whatever was ever computed into the folder stays in ``computed.parquet``,
    from which later starts take what still holds. On Ctrl-C, or any failure, what was computed until then is written before
    the error goes on. ``jobs`` processes, or the workers of the Dask scheduler ``dask``, share the checkpoints; the table does
    not depend on their number. The linear algebra is done on ``device``.

    Raises:
        ConfigError: the configuration asks for nothing, for what is not built yet, or for a folder that holds
            something else.
        CheckpointError: there is no such run, or it cannot be opened.
        PluginError: a plugin cannot be used.
        AnalysisError: something that is asked for cannot be had.
        DeviceError, ClusterError: the device or the Dask cluster cannot be used.
        ResultsError: the earlier table cannot be read.
    """
    if dask is None:
        check(device)
    runs = runs_of(config)
    folder = folder_of(config, runs)
    cells = plan(runs, config)  # refuses before anything is written
    code = code_hashes(cells)
    store = results.read(folder, STORE) if (folder / f"{STORE}.parquet").is_file() else None
    folder.mkdir(parents=True, exist_ok=True)
    with _logging_to(folder / LOG_FILE):
        (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
        n_values = sum(len(cell.heads) for cell in cells)
        names = ", ".join(run.name for run in runs)
        log.info("pico-analyze %s: %s values of %s, into %s", version("pico-analyze"), f"{n_values:,}", names, folder)
        table = _measure(runs, config, store, code, folder, {"jobs": jobs, "dask": dask, "device": device})
        if n_more := 0 if store is None else len(store) - table.attrs["kept"]:
            log.info(
                "%s earlier values are not asked for now, or no longer hold; they stay in %s.parquet", n_more, STORE
            )
        results.write(table, folder)
        results.write(results.runs_table(runs), folder, "runs")
        if config.write_json is not None:
            results.write_pico_v0(table, folder, config.metrics, load_metrics(config.plugins))
    return Outcome(folder, table, n_computed=table.attrs["computed"], n_kept=table.attrs["kept"])


def dry_run(config: AnalysisConfig) -> list[str]:
    """What `run_analysis` would measure, and where it would go, in lines; nothing is computed or written.

    Raises:
        As `run_analysis`.
    """
    runs = runs_of(config)
    folder = folder_of(config, runs)
    cells = plan(runs, config)
    return [
        *(f"run {run.name}: {len(run.steps)} checkpoints in {run.path}" for run in runs),
        *describe(cells),
        f"{sum(len(cell.heads) for cell in cells):,} values, into {folder}",
    ]


def runs_of(config: AnalysisConfig) -> list[Run]:
    """The runs that ``config`` names, open.

    Raises:
        ConfigError: it names no run, measures nothing, or asks for what is not built yet.
        CheckpointError: there is no such run, or it cannot be opened.
    """
    problems = not_built_yet(config)
    if not config.runs:
        problems.append("runs: none is named; list run folders or a suite, or give --run-path")
    if not config.metrics:
        problems.append("metrics: the list is empty, so there is nothing to measure")
    if config.steps == ():
        problems.append("steps: [] selects no checkpoint; use all, a list, or {start, end, step}")
    if problems:
        raise ConfigError(config.analysis_name or "this analysis", problems)
    return open_runs(config.runs)


def folder_of(config: AnalysisConfig, runs: Sequence[Run]) -> Path:
    """Where the results of an analysis go: ``<output_dir>/<analysis_name>``, by default ``<run or suite>_analysis``.

    Raises:
        ConfigError: there is no obvious name, or the folder holds something else.
    """
    name = config.analysis_name
    if not name:
        suites = {run.identity.suite for run in runs}
        owner = runs[0].name if len(runs) == 1 else next(iter(suites)) if len(suites) == 1 else None
        if owner is None:
            names = ", ".join(run.name for run in runs)
            raise ConfigError(
                "this analysis",
                [f"analysis_name: null takes the name of the run or suite, but these are several: {names}; give one"],
            )
        name = f"{owner}_analysis"
    folder = Path(config.monitoring.output_dir).expanduser() / name
    if folder.exists() and not folder.is_dir():
        raise ConfigError(name, [f"{folder} is a file; choose another analysis_name or monitoring.output_dir"])
    if folder.is_dir() and any(folder.iterdir()) and not (folder / LOG_FILE).is_file():
        raise ConfigError(
            name,
            [f"{folder} holds files that are no analysis; choose another analysis_name or monitoring.output_dir"],
        )
    return folder


def _measure(
    runs: Sequence[Run],
    config: AnalysisConfig,
    store: pd.DataFrame | None,
    code: Mapping[tuple[str, str], str],
    folder: Path,
    means: Mapping[str, Any],
) -> pd.DataFrame:
    """The table, with a sign of life for each checkpoint; until it is complete, what there is of it is written.

    ``means`` are the arguments of `analyze` that say where to compute.
    """
    order = {run.identity.run_id: place for place, run in enumerate(runs)}
    done: list[Sequence[Mapping[str, Any]]] = []
    written_at = time.monotonic()

    def write_partial() -> None:
        done.sort(key=lambda rows: (order[rows[0]["run_id"]], rows[0]["step"]))
        partial = results.table(row for rows in done for row in rows)
        results.write(results.extended(store, partial, code), folder, STORE)
        results.write(partial, folder)

    with progress("checkpoint") as show:

        def on_checkpoint(name: str, n_done: int, n_all: int, rows: Sequence[Mapping[str, Any]]) -> None:
            nonlocal written_at
            done.append(rows)  # first: whoever stops at what is shown shall find it in the table
            show(name, n_done, n_all)
            if time.monotonic() - written_at > WRITE_EVERY_S:
                write_partial()
                written_at = time.monotonic()

        previous = None if store is None else results.still_valid(store, code)
        try:
            table = analyze(runs, config, previous, on_checkpoint, **means)
            results.write(results.extended(store, table, code), folder, STORE)
            return table
        except BaseException:  # Ctrl-C too
            if done:
                write_partial()
                log.warning("stopped: %s rows are kept in %s", f"{sum(map(len, done)):,}", folder)
            raise


@contextmanager
def _logging_to(file: Path) -> Iterator[None]:
    """Send what the package logs to ``file`` as well."""
    handler = logging.FileHandler(file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
        handler.close()
