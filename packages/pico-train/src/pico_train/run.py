"""The composition root of pico-train: a configuration becomes objects, the objects go into the loop."""

import json
import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pico_train.capture import CaptureRule, modules_to_capture
from pico_train.checkpoint.background import Background
from pico_train.checkpoint.contents import probe_hash
from pico_train.checkpoint.folder import RunFolder, RunFolderError, open_run_folder, read_identity
from pico_train.checkpoint.format import CheckpointError, Manifest, read_manifest, step_folders
from pico_train.checkpoint.lock import locked
from pico_train.checkpoint.resume import resume
from pico_train.checkpoint.retention import RestartSchedule, remove_unfinished
from pico_train.checkpoint.save import Saver, git_commit, versions
from pico_train.config import RunConfig, load_config, not_built_yet
from pico_train.data.batches import Batch, Batches, Sample, probe
from pico_train.data.cache import TokenCache, open_cache
from pico_train.errors import UserError
from pico_train.estimate import check_disk
from pico_train.evaluation import Evaluator
from pico_train.hardware import choose_hardware, start_fabric
from pico_train.heap import keep_freed_memory
from pico_train.logs import Progress, log_to
from pico_train.loop import Passes
from pico_train.loop import train as train_loop
from pico_train.metrics_log import MetricsLog, Row, last_row
from pico_train.model.decoder import PicoDecoder
from pico_train.model.head import head_chunk
from pico_train.objectives import next_token
from pico_train.optim import adamw
from pico_train.schedule import schedule_of
from pico_train.state import TrainState
from pico_train.stopping import Stopped, StopRequest
from pico_train.strict_yaml import ConfigError
from pico_train.suite import Suite
from pico_train.trackers import Trackers, unsent

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunResult:
    """Where a finished run is and how it ended: losses in nats per token at the final weights, None where not evaluated."""

    run: str
    path: Path
    n_parameters: int
    steps: int
    tokens: int
    loss: float | None
    val_loss: float | None
    unigram_entropy: float | None
    sample: str | None
    seconds: float


def train_suite(suite: Suite, command: Sequence[str]) -> list[RunResult]:
    """Train every run of a suite, one after the other; a finished one is left as it is.

    Raises:
        ConfigError: a run asks for what this version cannot do; nothing was started.
    """
    problems = list(dict.fromkeys(problem for config in suite.runs for problem in not_built_yet(config)))
    if problems:
        raise ConfigError(str(suite.path), problems)
    results = []
    with StopRequest(suite.runs[0].training.max_minutes) as stop:
        for config in suite.runs:
            results.append(train_run(config, suite=suite.name, command=command, stop=stop))
    return results


def train_run(config: RunConfig, *, suite: str | None, command: Sequence[str], stop: StopRequest) -> RunResult:
    """Train one run to its end, from wherever it stands.

    Raises:
        Stopped: a signal or the time limit came first; a restart point is saved.
    """
    began = time.perf_counter()
    name = config.checkpointing.run_name
    assert name is not None, "the loader names every run"
    folder = open_run_folder(Path(config.checkpointing.runs_dir) / name, config, name=name, suite=suite)
    with locked(folder.path), log_to(folder.path / "train.log", config.monitoring.logging.log_level):
        if _finished(folder, config):
            log.info("%s is finished: %d steps, in %s", name, config.training.max_steps, folder.path)
            if owed := unsent(folder.path, config.monitoring.tracker_names, config.training.max_steps):
                with _trackers(folder, config, owed, config.training.max_steps + 1):
                    pass  # leaving sends what a stop had left behind
        else:
            check_disk(config, folder.path)
            cache = open_cache(config.data, model_vocab_size=config.model.vocab_size)
            with torch.random.fork_rng():  # the loop seeds every pass; the caller's random state is left alone
                _train(folder, config, cache, tuple(command), stop)
    return _result(folder, config, time.perf_counter() - began)


def _finished(folder: RunFolder, config: RunConfig) -> bool:
    """Whether the log holds the last pass and the last milestone is whole."""
    max_steps = config.training.max_steps
    last, _ = last_row(folder.metrics)
    if last is None or last["step"] != max_steps:
        return False
    try:
        return (
            not config.checkpointing.schedule.last
            or read_manifest(folder.checkpoints / f"step_{max_steps}").step == max_steps
        )
    except CheckpointError as error:
        log.warning("%s; it is made again", error)
        return False


def _train(
    folder: RunFolder, config: RunConfig, cache: TokenCache, command: tuple[str, ...], stop: StopRequest
) -> None:
    """Build what a run needs, put the newest checkpoint back, and hand over to the loop."""
    optimization, dynamics = config.training.optimization, config.checkpointing.learning_dynamics
    seq_len, max_steps = config.model.max_seq_len, config.training.max_steps
    keep_freed_memory()
    hardware = choose_hardware(config.training.fabric)
    if hardware.precision == "bf16-true":
        log.warning(
            "training.fabric.precision: bf16-true keeps the weights themselves in bf16, so updates below 1/256 of a weight are lost; "
            "bf16-mixed keeps them in fp32"
        )
    fabric = start_fabric(hardware)
    scaler: torch.amp.GradScaler | None = getattr(fabric.strategy.precision, "scaler", None)

    model = PicoDecoder(config.model)
    model.initialize(config.seeds.weights)
    optimizer = adamw(
        model,
        betas=optimization.betas,
        eps=optimization.eps,
        weight_decay=optimization.weight_decay,
        decay_on=optimization.weight_decay_on,
        fused=hardware.accelerator != "mps" and scaler is None,  # fused AdamW would unscale a second time
    )
    forward, fabric_optimizer = fabric.setup(model, optimizer)
    batches = _batches(config, cache)
    rule = _capture_rule(config, model)
    probe_batch = probe(cache, dynamics.probe_windows, seq_len) if rule and dynamics.eval_data else None
    if probe_batch and len(probe_batch.input_ids) < dynamics.probe_windows:
        log.warning(
            "the probe has %d windows, not the %d of checkpointing.learning_dynamics.probe_windows: that is all the held-out text "
            "(a larger data.dataset.held_out_fraction gives more)",
            len(probe_batch.input_ids),
            dynamics.probe_windows,
        )

    state = TrainState(step=0, skipped_updates=0, model=model, optimizer=optimizer, scaler=scaler)
    if not config.checkpointing.training.auto_resume and any(folder.checkpoints.glob("step_*")):
        raise RunFolderError(
            f"{folder.path} has checkpoints and checkpointing.training.auto_resume is false: "
            "set it to true to go on from them, or give this run another checkpointing.run_name"
        )
    manifest = resume((folder.checkpoints, folder.restart), state, folder.run_id)
    if manifest:
        _check_data(folder.path, manifest, cache)

    for parent in (folder.checkpoints, folder.restart):
        remove_unfinished(parent)

    passes = _passes(config, rule, probe_batch)
    batch_tokens = batches.batch_size * seq_len
    log.info(
        f"{folder.name}: {config.model.n_parameters:,} parameters; {batches.batch_size} sequences x {seq_len} tokens = "
        f"{batch_tokens:,} tokens a step, {passes.micro_batch_size} sequences at a time; "
        f"{max_steps:,} steps = {max_steps * batch_tokens:,} tokens, from step {state.step:,}; {hardware}; "
        f"the head takes {head_chunk(config.model.vocab_size, fabric.device.type):,} tokens at a time"
    )
    progress = Progress(
        folder.name, begin=state.step, max_steps=max_steps, every=config.monitoring.logging.log_every_n_steps
    )
    restart = config.checkpointing.restart
    restart_schedule = RestartSchedule(
        every_n_steps=restart.every_n_steps,
        every_minutes=restart.every_minutes,
        saved_anyway=frozenset(s for s in passes.save_at if config.checkpointing.holds_optimizer(s, max_steps)),
    )
    names = config.monitoring.tracker_names
    trackers = _trackers(folder, config, names, state.step) if names else None
    stop.defer()
    with (
        MetricsLog(folder.metrics, state.step) as metrics,
        progress,
        trackers or nullcontext(),
        Background() as background,  # ends before the trackers, so checkpoints are safe before anything is waited for
    ):

        def log_row(row: Row) -> None:
            if row.step == max_steps:
                background.wait()  # the last row says that the run is finished, so nothing may be missing by then
            metrics.append(row)
            progress.show(row)

        saver = Saver(
            folder=folder,
            config=config,
            cache=cache,
            hardware=hardware,
            rule=rule,
            probe_hash=probe_hash(probe_batch.input_ids) if probe_batch else None,
            command=command,
            versions=versions(),
            git_commit=git_commit(),
            background=background,
            restart_schedule=restart_schedule,
            before_publishing=metrics.sync,
        )
        done = train_loop(
            state,
            passes,
            fabric=fabric,
            forward=forward,
            optimizer=fabric_optimizer,
            batches=batches,
            objective=next_token,
            save=saver.milestone,
            save_restart_point=saver.restart_point,
            restart_due=restart_schedule.due,
            stopping=lambda: stop.reason is not None,
            evaluate=Evaluator(folder.path, config.evaluation, cache, fabric.device, fabric.autocast),
            log=log_row,
        )
        if not done and trackers:
            trackers.close_seconds = 5.0  # a stop has a grace time; the next start sends the rest
    if not done:
        raise Stopped(f"{folder.name} stopped by {stop.reason} at step {state.step:,}; the same command goes on there")


def _passes(config: RunConfig, rule: CaptureRule | None, probe_batch: Batch | None) -> Passes:
    """How the passes of a run are made."""
    training, optimization = config.training, config.training.optimization
    save_at = frozenset(config.checkpointing.save_steps(training.max_steps))
    return Passes(
        max_steps=training.max_steps,
        micro_batch_size=config.data.dataloader.batch_size // optimization.gradient_accumulation_steps,
        learning_rate=schedule_of(training),
        max_grad_norm=optimization.max_grad_norm,
        non_finite=training.non_finite,
        max_skips=training.max_skips,
        dropout_seed=config.seeds.dropout,
        data_seed=config.seeds.data,
        save_at=save_at,
        evaluate_at=save_at if config.evaluation.metrics else frozenset(),
        rule=rule,
        probe=probe_batch,
        probe_batch_size=config.checkpointing.learning_dynamics.batch_size,
        norms_by_layer=config.monitoring.gradient_norms == "layers",
        noise_scale=config.monitoring.gradient_noise_scale,
    )


def _trackers(folder: RunFolder, config: RunConfig, names: Sequence[str], step: int) -> Trackers:
    """The trackers ``names`` of a run that goes on from ``step``."""
    wandb = config.monitoring.wandb
    return Trackers(
        names,
        run_folder=folder.path,
        run=folder.name,
        run_id=folder.run_id,
        project=wandb.project or "pico",
        entity=wandb.entity or None,
        config=config.model_dump(mode="json"),
        step=step,
    )


def _capture_rule(config: RunConfig, model: PicoDecoder) -> CaptureRule | None:
    """The rule of ``checkpointing.learning_dynamics``, None where nothing is captured."""
    section = config.checkpointing.learning_dynamics
    if not section.layer_suffixes:
        return None
    rule = section.effective_rule
    return CaptureRule(
        rule=rule,
        modules=modules_to_capture(model, section.layer_suffixes),
        position=section.sequence_idx if rule == "position" else None,
        tokens_per_sequence=section.tokens_per_sequence if rule == "sample" else None,
    )


def samples_at(run: Path, step: int) -> list[Sample]:
    """The sequences of batch ``step`` of a run, from the token cache and the data seed alone."""
    read_identity(run)
    config = load_config(run / "config.yaml")
    if step > config.training.max_steps:
        raise UserError(f"--step {step}: {run} has the steps 0 to {config.training.max_steps}")
    cache = open_cache(config.data, model_vocab_size=config.model.vocab_size)
    for folder in step_folders(run / "checkpoints").values():
        with suppress(CheckpointError):
            _check_data(run, read_manifest(folder), cache)
    return _batches(config, cache).describe(step)


def _check_data(run: Path, manifest: Manifest, cache: TokenCache) -> None:
    """Refuse a token cache that is not the one a checkpoint of ``run`` was trained on."""
    if manifest.data.fingerprint != cache.fingerprint:
        raise RunFolderError(
            f"{run} was trained on other data: its token cache had the fingerprint {manifest.data.fingerprint[:16]}, "
            f"the text at hand gives {cache.fingerprint[:16]}. Bring that text and tokenizer back, or give this run "
            "another checkpointing.run_name"
        )


def _batches(config: RunConfig, cache: TokenCache) -> Batches:
    return Batches(
        cache,
        batch_size=config.data.dataloader.batch_size,
        seq_len=config.model.max_seq_len,
        seed=config.seeds.data,
        shuffle=config.data.dataloader.shuffle,
    )


def _result(folder: RunFolder, config: RunConfig, seconds: float) -> RunResult:
    """How a run ended, from its files."""
    steps = config.training.max_steps
    last, _ = last_row(folder.metrics)
    assert last is not None, "a finished run has rows"
    evaluations = folder.path / "evaluations" / f"step_{steps}"

    def evaluated(name: str, key: str) -> Any:
        path = evaluations / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8"))[key] if path.exists() else None

    return RunResult(
        run=folder.name,
        path=folder.path,
        n_parameters=config.model.n_parameters,
        steps=steps,
        tokens=last["tokens"],
        loss=last["loss"],
        val_loss=last["val_loss"],
        unigram_entropy=evaluated("held_out", "unigram_entropy"),
        sample=evaluated("sample", "text"),
        seconds=seconds,
    )
