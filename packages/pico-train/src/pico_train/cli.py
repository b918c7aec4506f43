"""The command line ``pico-train``: a thin layer over the functions of this package. Nothing slow is imported before it is needed."""

import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pico_train.errors import PicoError, UserError
from pico_train.launch import Place, place, processes_to_start, start, stop_with_the_starter
from pico_train.words import counted

if TYPE_CHECKING:
    from pico_train.config import RunConfig
    from pico_train.suite import Suite


def reports_errors(command: Callable[..., None]) -> Callable[..., None]:
    """End a command with one message and its exit code where the user or the machine is at fault."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except PicoError as error:
            if place().rank == 0 or not error.alike_on_all_ranks:
                click.echo(str(error) if error.exit_code == 75 else f"error: {error}", err=True)
            sys.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("stopped before the first pass; the same command starts again", err=True)
            sys.exit(75)
        except BrokenPipeError:
            raise  # `pico-train ls | head`: click ends quietly
        except OSError as error:
            where = f": {error.filename}" if error.filename else ""
            click.echo(f"error: {error.strerror or error}{where}", err=True)
            sys.exit(1)

    return run


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pico-train")
def main() -> None:
    """Train suites of small language models and keep the trail of how they learn."""


@main.command()
@click.argument("words", nargs=-1, metavar="CONFIG [KEY.SUB=VALUE]...")
@click.option("--config", "--config_path", "config", type=click.Path(path_type=Path), help="YAML of a run or a suite.")
@click.option("--dry-run", is_flag=True, help="Print runs, steps, parameters, tokens, disk and memory; start nothing.")
@click.option("--only", multiple=True, metavar="NAME", help="Of a suite, this run alone; give it again for more.")
@click.option("--shard", metavar="I/N", help="Of these runs, the I-th and every N-th after it; I from 1 to N.")
@reports_errors
def run(words: tuple[str, ...], config: Path | None, dry_run: bool, only: tuple[str, ...], shard: str | None) -> None:
    """Train the run or the suite that CONFIG describes, or go on where it stopped."""
    from pico_train.suite import selected

    suite = selected(_load(words, config), only, shard)
    if not suite.runs:
        click.echo(f"nothing to do: shard {shard} of {suite.path} holds no run")
        return
    if dry_run:
        _print_plan(suite)
        return
    n_processes = processes_to_start(suite.runs, place())
    if n_processes > 1:
        options = [f"--config={config}"] if config else []
        options += [f"--only={name}" for name in only] + ([f"--shard={shard}"] if shard else [])
        sys.exit(start(n_processes, ["run", *options, *words]))
    _log_to_console(suite.runs[0].monitoring.logging.log_level)
    stop_with_the_starter()
    from pico_train.stopping import StopRequest

    with StopRequest(ends_process=True) as stop:  # before the slow imports: a signal during them ends as one after them
        from pico_train.run import train_suite  # torch and lightning take seconds

        results = train_suite(suite, ["pico-train", *sys.argv[1:]], stop)
    if place().rank > 0:
        return
    for result in results:
        if result.sample is not None:
            click.echo(f"\n{result.run} writes:\n{_indented(result.sample)}")
    click.echo("\nnats per token at the final weights")
    _print_table(
        (
            "run",
            "parameters",
            "tokens",
            "train loss",
            "held-out loss",
            "unigram entropy",
            "seconds",
            "folder",
        ),
        [
            (
                result.run,
                f"{result.n_parameters:,}",
                f"{result.tokens:,}",
                _number(result.loss),
                _number(result.val_loss),
                _number(result.unigram_entropy),
                f"{result.seconds:.0f}",
                str(result.path),
            )
            for result in results
        ],
    )


@main.group()
def data() -> None:
    """Look at the data of a run."""


@data.command()
@click.option("--run", "run_folder", required=True, type=click.Path(path_type=Path), help="Folder of the run.")
@click.option("--step", required=True, type=click.IntRange(min=0), help="Which batch.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per sequence: sample_id, token_ids, text.")
@reports_errors
def at(run_folder: Path, step: int, as_json: bool) -> None:
    """Print the sample ids and the text of the batch of a step; needs the data of the run and no checkpoint, no GPU."""
    from pico_train.run import samples_at

    for sample in samples_at(run_folder, step):
        if as_json:
            click.echo(json.dumps(asdict(sample), ensure_ascii=False))
        else:
            click.echo(f"--- sample {sample.sample_id}\n{sample.text}")


@main.command()
@click.argument("runs_dir", type=click.Path(path_type=Path), default="runs")
@reports_errors
def ls(runs_dir: Path) -> None:
    """List the runs in RUNS_DIR (default: runs) and the steps they have saved."""
    from pico_train.listing import list_runs

    rows = [
        (
            entry.run if entry.run == entry.made_as else f"{entry.run} (made as {entry.made_as})",
            entry.suite or "",
            f"{entry.n_parameters:,}",
            f"{entry.step:,} of {entry.max_steps:,}"
            + (", not finished" if entry.step == entry.max_steps and not entry.finished else ""),
            _number(entry.loss),
            f"{len(entry.saved_steps)}: {_span(entry.saved_steps)}" if entry.saved_steps else "none",
        )
        for entry in list_runs(runs_dir)
    ]
    _print_table(("run", "suite", "parameters", "step", "loss", "checkpoints"), rows)


@main.command()
@click.argument("run_folder", type=click.Path(path_type=Path))
@reports_errors
def verify(run_folder: Path) -> None:
    """Check every file of a run against its hash, and that checkpoints, log, configuration and evaluations belong together."""
    from pico_train.checkpoint.verify import verify_run

    n_checkpoints, faults = verify_run(run_folder)
    for fault in faults:
        click.echo(fault, err=True)
    click.echo(f"{run_folder}: {counted(n_checkpoints, 'checkpoint')}, {counted(len(faults), 'fault')}")
    if faults:
        sys.exit(1)


@main.command()
@click.argument("words", nargs=-1, metavar="[CONFIG [KEY.SUB=VALUE]...]")
@click.option("--compile", "slow", is_flag=True, help="Also try torch.compile and FlexAttention: a minute or two.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object: facts, and a list of paths.")
@reports_errors
def doctor(words: tuple[str, ...], slow: bool, as_json: bool) -> None:
    """Show what this machine has, and compare each optional path with the plain one, in numbers and in speed.

    With CONFIG also what `auto` and the choice of kernels come to for each of its runs.
    """
    runs = _load(words, None).runs if words else ()
    from pico_train.doctor import PLAIN, facts, probes

    if as_json:
        found = list(probes(slow=slow))
        click.echo(json.dumps({"facts": dict(facts(runs)), "paths": [asdict(probe) for probe in found]}, indent=1))
    else:
        found = []
        for name, value in facts(runs):
            click.echo(f"{name:<12}{value}")
        click.echo(f"\n{'path':<28}{'beside':<18}{'largest error':<15}time")
        for probe in probes(slow=slow):
            found.append(probe)
            error = "-" if probe.error is None else f"{probe.error:.1e}"
            ratio = "-" if probe.time is None else f"{probe.time:.2f} x"
            click.echo(f"{probe.path:<28}{probe.against:<18}{error:<15}{ratio:<9}{probe.reason}".rstrip())
    if any(probe.path == PLAIN and probe.error is None for probe in found):
        sys.exit(1)


@main.command()
@click.option("--suite", is_flag=True, help="The schema of a suite's file instead of a run's.")
def schema(suite: bool) -> None:
    """Print the JSON schema of a configuration file."""
    from pico_train import config
    from pico_train import suite as suites

    click.echo(json.dumps(suites.json_schema() if suite else config.json_schema(), indent=1))


def _load(words: tuple[str, ...], config: Path | None) -> "Suite":
    """The suite that the command line names: the first word without ``=`` is the file, unless ``--config`` gives it."""
    from pico_train.suite import load

    overrides = list(words)
    if config is None and words and "=" not in words[0]:
        config = Path(overrides.pop(0))
    if config is None:
        raise UserError("name the YAML of a run or a suite: pico-train run CONFIG [KEY.SUB=VALUE]...")
    return load(config, overrides)


def _print_plan(suite: "Suite") -> None:
    from pico_train.config import not_built_yet
    from pico_train.data.sources import open_source
    from pico_train.estimate import estimate
    from pico_train.memory import memory

    disk = 0
    for config in suite.runs:
        needs = estimate(config)
        disk += needs.disk_bytes
        click.echo(
            f"{config.checkpointing.run_name}: {needs.n_parameters:,} parameters, {counted(config.training.max_steps, 'step')}, "
            f"{needs.tokens:,} tokens, disk {_size(needs.disk_bytes)} and up to {_size(needs.restart_bytes)} of restart points\n"
            f"  {counted(len(needs.save_steps), 'checkpoint')}: {', '.join(map(str, needs.save_steps))}"
        )
        fabric, steps = config.training.fabric, config.training.optimization.gradient_accumulation_steps
        n_devices = fabric.num_nodes * (1 if fabric.num_devices == "auto" else fabric.num_devices)
        batch = config.data.dataloader.batch_size // n_devices
        for size in (1, batch) if steps == "auto" else (batch // steps,):
            parts = memory(config, size)
            listed = ", ".join(f"{name} {_size(n_bytes)}" for name, n_bytes in asdict(parts).items() if n_bytes)
            click.echo(f"  memory with {counted(size, 'sequence')} at a time {_size(parts.total)}: {listed}")
    for dataset in {config.data.dataset.model_dump_json(): config.data.dataset for config in suite.runs}.values():
        if dataset.name in ("python-stdlib", "text"):
            files = open_source(dataset).signature()
            click.echo(f"data: {counted(len(files), 'file')}, {_size(sum(stamp.size_bytes for stamp in files))}")
    click.echo(f"{counted(len(suite.runs), 'run')}, disk {_size(disk)}; nothing was started, and the data was not read")
    for problem in dict.fromkeys(problem for config in suite.runs for problem in not_built_yet(config)):
        click.echo(f"would be refused: {problem}")
    for problem in _refusals_here(suite):
        click.echo(f"would be refused on this machine: {problem}")


def _refusals_here(suite: "Suite") -> dict[str, None]:
    """Why the runs would not start on this machine, each reason once."""
    import torch

    from pico_train.estimate import check_disk
    from pico_train.hardware import choose_hardware
    from pico_train.memory import free_memory, micro_batch_size
    from pico_train.trackers import check_trackers

    here, reasons = place(), dict[str, None]()

    def check(what: Callable[..., object], *of: object) -> None:
        try:
            what(*of)
        except UserError as error:
            reasons[str(error)] = None

    def check_memory(config: "RunConfig", planned: Place) -> None:
        hardware = choose_hardware(config.training.fabric, planned)
        micro_batch_size(config, hardware, free_memory(torch.device(hardware.accelerator)), None)

    check(processes_to_start, suite.runs, here)
    for config in suite.runs:
        fabric = config.training.fabric
        n_devices = 1 if fabric.num_devices == "auto" else fabric.num_devices
        check(check_trackers, config.monitoring.tracker_names, config.monitoring.tracker_project)
        check(check_memory, config, here if here.size > 1 else Place(0, fabric.num_nodes * n_devices, 0, n_devices))
        check(check_disk, config, Path(config.checkpointing.runs_dir) / str(config.checkpointing.run_name))
    return reasons


def _print_table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _size(n_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:,.3g} TB"


def _span(steps: list[int]) -> str:
    """``0, 1, 2 ... 900``: the first three and the last."""
    return ", ".join(map(str, steps)) if len(steps) <= 4 else f"{', '.join(map(str, steps[:3]))} ... {steps[-1]}"


def _indented(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.splitlines())


def _log_to_console(level: str) -> None:
    from pico_train.logs import ConsoleHandler

    logger = logging.getLogger("pico_train")
    logger.setLevel(level)
    logger.addHandler(ConsoleHandler())
    logger.propagate = False


if __name__ == "__main__":
    main()
