"""The command line ``pico-analyze``: a thin layer over the functions of this package.

Nothing slow is imported before it is needed.
"""

import json
import logging
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pico_analyze.words import counted

if TYPE_CHECKING:
    from pico_analyze.config import AnalysisConfig
    from pico_analyze.run import Outcome

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")

Command = Callable[..., None]


def reports_errors(command: Command) -> Command:
    """End a command with one message and its exit code; with ``--debug`` the traceback comes first."""

    @click.option("--debug", is_flag=True, help="Show the traceback of an error.")
    @wraps(command)
    def run(*args: Any, debug: bool, **kwargs: Any) -> None:
        handler = ConsoleHandler(logging.INFO)
        logger = logging.getLogger("pico_analyze")
        logger.addHandler(handler)
        level = logger.level
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt:
            click.echo("interrupted: the same command computes what is missing", err=True)
            sys.exit(130)
        except BrokenPipeError:
            raise  # `pico-analyze ls ... | head`: click ends quietly
        except Exception as error:
            if debug:
                traceback.print_exc()
            # Our own ValueErrors are about what the user wrote or pointed at; anything else is a failure.
            if type(error).__module__.startswith("pico_analyze."):
                click.echo(f"error: {error}", err=True)
                sys.exit(2 if isinstance(error, ValueError) else 1)
            if isinstance(error, OSError) and error.filename:
                click.echo(f"error: {error.filename}: {error.strerror}", err=True)
            else:
                click.echo(f"error: {type(error).__name__}: {error} (--debug shows where)", err=True)
            sys.exit(1)
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)

    return run


class ConsoleHandler(logging.Handler):
    """Messages for a person: the text alone, warnings marked, printed above a progress bar rather than through it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record to standard error."""
        from tqdm import tqdm

        mark = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        tqdm.write(mark + self.format(record), file=sys.stderr)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pico-analyze")
def main() -> None:
    """Measure and draw how language models change over training and across scales."""


@main.command()
@click.argument("words", nargs=-1, metavar="CONFIG [KEY.SUB=VALUE]...")
@click.option("--config", "--config_path", "config_path", type=click.Path(path_type=Path), help="YAML of an analysis.")
@click.option(
    "--run-path",
    "--run_path",
    "run_paths",
    multiple=True,
    help="Run folder, glob or suite, instead of those that the file names; may be given more than once.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be measured; compute nothing.")
@click.option("--strict", is_flag=True, help="Exit with 3 when values are missing.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Processes that share the checkpoints; each uses one core and holds one checkpoint. The table is the same.",
)
@click.option(
    "--dask",
    metavar="SCHEDULER",
    help="Send the checkpoints to the workers of a Dask cluster instead: the address of its scheduler, or its scheduler "
    "file (*.json). The table is the same.",
)
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    help="Where the linear algebra is done: cpu, or cuda (in float64; the last digits may differ).",
)
@reports_errors
def run(
    words: tuple[str, ...],
    config_path: Path | None,
    run_paths: tuple[str, ...],
    dry_run: bool,
    strict: bool,
    jobs: int,
    dask: str | None,
    device: str,
) -> None:
    """Measure what the YAML file CONFIG asks for, and write one table; computes only what is missing.

    KEY.SUB=VALUE replaces a setting of the file, e.g. metrics.0.target_checkpoint=100. Exit codes: 0 done, 2 what
    was asked for is wrong, 3 values are missing under --strict, 1 any other failure.
    """
    from pico_analyze.config import ConfigError

    if dask is not None and jobs > 1:
        raise ConfigError("command line", ["--jobs and --dask are two ways to share the checkpoints; give one of them"])
    config = _load(words, config_path, run_paths)
    if "torch" not in sys.modules:  # libraries read it once: the numbers shall not depend on the number of cores
        os.environ |= dict.fromkeys(ONE_THREAD, "1")
    from pico_analyze import run as composition  # torch and pandas take seconds

    if dry_run:
        click.echo("\n".join(composition.dry_run(config)))
        return
    outcome = composition.run_analysis(config, jobs, dask, device)
    _print_outcome(outcome)
    if strict and outcome.n_missing:
        sys.exit(3)


@main.command()
@click.argument("results", type=click.Path(path_type=Path))
@click.option("--x", type=click.Choice(["step", "tokens"]), default="step", help="The horizontal axis.")
@click.option("--format", "formats", default="png,svg,pdf", show_default=True, help="Formats, joined by commas.")
@click.option("--output", type=click.Path(path_type=Path), help="Folder of the pictures; default RESULTS/plots.")
@click.option("--metric", "metrics", multiple=True, help="Only this metric; may be given more than once.")
@click.option("--jobs", type=click.IntRange(1), help="Processes that share the figures; default: the CPUs there are.")
@reports_errors
def plot(results: Path, x: Any, formats: str, output: Path | None, metrics: tuple[str, ...], jobs: int | None) -> None:
    """Draw the table in the folder RESULTS, which `pico-analyze run` has printed."""
    from pico_analyze.plots import draw
    from pico_analyze.progress import progress

    def shown(figures: Sequence[Any]) -> Iterator[Any]:
        with progress("figure", every=20) as show:
            for n_done, figure in enumerate(figures, 1):
                yield figure
                show(figure[0], n_done, len(figures))

    logging.getLogger("pico_analyze").setLevel(logging.INFO)
    written = draw(
        results,
        output,
        x=x,
        formats=tuple(name.strip() for name in formats.split(",")),
        metrics=metrics or None,
        progress=shown,
        n_jobs=jobs,
    )
    click.echo(f"{counted(len(written), 'file')} in {written[0].parent}, {written[0].name} first")


@main.command()
@click.argument("run_paths", metavar="RUN...", nargs=-1, required=True)
@reports_errors
def verify(run_paths: tuple[str, ...]) -> None:
    """Check that the checkpoints of runs (folders, globs or suites) are whole, in place, and each its own.

    Names each fault with its file: truncated, changed, mislabelled, missing, or with weights that belong to another
    step. Exit codes: 0 no fault, 1 faults, 2 there is no such run.
    """
    from pico_analyze.checkpoint import integrity
    from pico_analyze.checkpoint.reader import find_runs, open_run

    logging.getLogger("pico_analyze").setLevel(logging.ERROR)  # what is skipped is a fault, and said once
    n_faults = 0
    for folder in find_runs(run_paths):
        run = open_run(folder)
        faults = integrity.verify(run)
        n_faults += len(faults)
        for fault in faults:
            click.echo(str(fault))
        said = counted(len(faults), "fault") if faults else "no fault"
        click.echo(f"run {run.name}: {counted(len(run.steps), 'checkpoint')}, {said}")
    if n_faults:
        sys.exit(1)


@main.group()
def ls() -> None:
    """List what there is: metrics, components, plugins, runs, tensors."""


with_plugins = click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help="YAML of an analysis, whose plugins are listed too.",
)


@ls.command("metrics")
@with_plugins
@reports_errors
def ls_metrics(config_path: Path | None) -> None:
    """List the metrics, with range and meaning."""
    from pico_analyze.metrics import load_metrics

    for name, metric in load_metrics(_plugins(config_path)).items():
        click.echo(f"{name}: {metric.summary}")
        click.echo(f"  range    {metric.range}")
        if metric.consumes == "pair":
            click.echo("  compares each step with target_checkpoint, on activations of the split val")
        for key, parameter in metric.parameters.items():
            default = "required" if parameter.default is None else f"default {parameter.default}"
            default += f", with {' '.join(only)}" if (only := getattr(parameter, "only", None)) else ""
            click.echo(f"  {key}: {', '.join(parameter.allowed)} ({default})")
        _print_wrapped(metric.meaning)


@ls.command("components")
@with_plugins
@reports_errors
def ls_components(config_path: Path | None) -> None:
    """List the components that a metric can be measured on."""
    from pico_analyze.components import load_components

    for name, component in load_components(_plugins(config_path)).items():
        suffixes = f"{{{', '.join(f'{key}: ...' for key in component.suffixes)}}}" if component.suffixes else "..."
        click.echo(f"{name}: {component.summary}")
        click.echo(f"  data_type       {', '.join(component.kinds)}")
        click.echo(f"  layer_suffixes  {suffixes}")


@ls.command("plugins")
@reports_errors
def ls_plugins() -> None:
    """List the plugins of installed packages; an analysis uses those that it names under plugins."""
    from pico_analyze.plugins import installed

    rows = [
        (name, entry.value, entry.dist.name if entry.dist else "", entry.dist.version if entry.dist else "")
        for name, entries in installed().items()
        for entry in entries
    ]
    _print_table(("plugin", "module", "package", "version"), rows)


@ls.command("runs")
@click.argument("path", default="runs")
@reports_errors
def ls_runs(path: str) -> None:
    """List the runs at PATH (a folder of runs, a run, a glob or a suite; default: runs) and their steps."""
    from pico_analyze.checkpoint.reader import find_runs, list_steps, open_run

    rows = []
    for folder in find_runs([path]):
        run = open_run(folder)
        size = "" if run.n_parameters is None else f"{run.n_parameters:,}"
        steps = list_steps(run.steps).removeprefix("the steps ")
        rows.append((run.name, run.identity.suite or "", size, str(len(run.steps)), steps, str(folder)))
    _print_table(("run", "suite", "parameters", "checkpoints", "steps", "folder"), rows)


@ls.command("tensors")
@click.argument("run_path", metavar="RUN")
@click.option("--step", type=click.IntRange(min=0), help="Which checkpoint; default: the last.")
@reports_errors
def ls_tensors(run_path: str, step: int | None) -> None:
    """List the tensors of a checkpoint of the run folder RUN: the names that layer_suffixes can end."""
    from pico_analyze.checkpoint.format import CheckpointError
    from pico_analyze.checkpoint.reader import open_run

    run = open_run(run_path)
    if not run.steps:
        raise CheckpointError(f"run {run.name} has no complete checkpoint")
    checkpoint = run.checkpoint(run.steps[-1] if step is None else step)
    layers: dict[tuple[str, ...], list[int]] = {}  # blocks with the same line share one
    for row in checkpoint.manifest.tensors:
        module = row.module if row.layer is None else row.module.removeprefix(f"layers.{row.layer}.")
        name = f"{module} {row.role}" if row.kind == "optimizer" else module
        line = (row.kind, row.split or "", name, " x ".join(map(str, row.shape)), row.dtype)
        layers.setdefault(line, []).extend([] if row.layer is None else [row.layer])
    click.echo(f"run {run.name}, step {checkpoint.step}, {checkpoint.tokens:,} tokens")
    _print_table(
        ("kind", "split", "module", "shape", "dtype", "layers"),
        [(*line, ", ".join(map(str, numbers))) for line, numbers in layers.items()],
    )


@main.command()
@reports_errors
def schema() -> None:
    """Print the JSON schema of an analysis file."""
    from pico_analyze.config import AnalysisConfig

    click.echo(json.dumps(AnalysisConfig.json_schema(), indent=1))


def _load(words: Sequence[str], config_path: Path | None, run_paths: Sequence[str]) -> "AnalysisConfig":
    """The analysis on the command line: the first word without ``=`` is the file, unless ``--config`` gives it."""
    from pico_analyze.config import ConfigError, load_config

    overrides = list(words)
    if config_path is None and words and "=" not in words[0]:
        config_path = Path(overrides.pop(0))
    if config_path is None:
        raise ConfigError("command line", ["name the YAML of an analysis: pico-analyze run CONFIG [KEY.SUB=VALUE]..."])
    config = load_config(config_path, overrides)
    return config.model_copy(update={"runs": tuple(run_paths)}) if run_paths else config


def _plugins(config_path: Path | None) -> tuple[str, ...]:
    from pico_analyze.config import load_config

    return () if config_path is None else load_config(config_path).plugins


def _print_outcome(outcome: "Outcome") -> None:
    folder = outcome.folder
    click.echo(f"{counted(outcome.n_computed, 'value')} computed, {outcome.n_kept:,} kept from before, in {folder}")
    counts = outcome.statuses()
    click.echo(", ".join(f"{n:,} {status}" for status, n in counts.items()))
    for status, reason, n in outcome.reasons():
        _print_wrapped(f"{n:,} {status}: {reason}")
    click.echo(f"table    {folder / 'results.parquet'}, {folder / 'results.csv'}")
    click.echo(f"runs     {folder / 'runs.parquet'}, {folder / 'runs.csv'}")
    click.echo(f"pictures pico-analyze plot {folder}")


def _print_table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _print_wrapped(text: str) -> None:
    width = max(40, min(110, shutil.get_terminal_size().columns))
    click.echo(textwrap.fill(text, width, initial_indent="  ", subsequent_indent="  "))


if __name__ == "__main__":
    main()
