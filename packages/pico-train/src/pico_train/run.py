"""The composition root of pico-train: a configuration becomes objects, the objects go into the loop."""

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pico_train.capture import CaptureRule, modules_to_capture
from pico_train.checkpoint.contents import probe_hash
from pico_train.checkpoint.folder import RunFolder, RunFolderError, make_run_folder, open_run_folder, read_identity
from pico_train.checkpoint.format import CheckpointError, MadeBy, Manifest, read_manifest, step_folders
from pico_train.checkpoint.lock import locked
from pico_train.checkpoint.resume import load_state, newest_intact
from pico_train.checkpoint.retention import RestartSchedule, remove_unfinished
from pico_train.checkpoint.save import Saver, git_commit, versions
from pico_train.compile import Trial, compiled, takes_compiled
from pico_train.config import RunConfig, load_config, not_built_yet
from pico_train.data.batches import Batch, Batches, Sample, probe
from pico_train.data.cache import TokenCache, open_cache
from pico_train.errors import PicoError, UserError
from pico_train.estimate import check_disk
from pico_train.evaluation import Evaluator
from pico_train.flops import flops_per_token, peak_flops
from pico_train.hardware import Hardware, choose_hardware, start_fabric
from pico_train.heap import give_back_freed_memory, keep_freed_memory
from pico_train.kernels import Kernels, kernels_of
from pico_train.launch import place, processes_to_start
from pico_train.logs import log_to
from pico_train.loop import Engine, Passes, micro_batches
from pico_train.loop import train as train_loop
from pico_train.memory import free_memory, memory, micro_batch_size
from pico_train.metrics_log import Row, last_row
from pico_train.model.decoder import PicoDecoder
from pico_train.objectives import next_token
from pico_train.optim import optimizer_of
from pico_train.ranks import LostContact, Ranks, gathered
from pico_train.record import Record, trackers_of
from pico_train.schedule import schedule_of
from pico_train.state import TrainState
from pico_train.stopping import Stopped, StopRequest
from pico_train.strict_yaml import ConfigError, flattened, shown
from pico_train.suite import Suite
from pico_train.trackers import check_trackers, unsent
from pico_train.words import counted

log = logging.getLogger(__name__)

COMPUTED_BY = {  # what the manifest says of how passes are computed
    "device",
    "precision",
    "n_threads",
    "world_size",
    "strategy",
    "micro_batch_size",
    "attention_kernel",
    "head_tokens",
    "compiled",
}


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


def train_suite(suite: Suite, command: Sequence[str], stop: StopRequest) -> list[RunResult]:
    """Train every run of a suite, one after the other; a finished one is left as it is. ``stop`` is given the time limit of the first.

    Where several processes were started, each of them calls this, and all train every run together.

    Raises:
        ConfigError: a run asks for what this version cannot do; nothing was started.
        UserError: more processes are asked for than there are.
    """
    problems = list(dict.fromkeys(problem for config in suite.runs for problem in not_built_yet(config)))
    if problems:
        raise ConfigError(str(suite.path), problems)
    here = place()
    if (n := processes_to_start(suite.runs, here)) > 1:
        raise UserError(
            f"training.fabric.num_devices: {n}: `pico-train run` or torchrun starts the processes; from Python this is one"
        )
    section, max_minutes = suite.runs[0].training.fabric, suite.runs[0].training.max_minutes
    if here.rank > 0:
        logging.getLogger("pico_train").setLevel(logging.ERROR)  # rank 0 says the rest
    if max_minutes is not None and here.rank == 0:
        stop.limit(max_minutes)
    on_cuda = choose_hardware(section, here).accelerator == "cuda"
    with _told(stop), gathered(here, on_cuda=on_cuda, timeout_minutes=section.timeout_minutes) as ranks:
        settings = {
            f"{c.checkpointing.run_name}: {k}": shown(v)
            for c in suite.runs
            for k, v in flattened(c.model_dump()).items()
        }
        ranks.check_same(settings | versions(), "has another configuration than rank 0")
        ranks.lead(partial(_check_first, suite, ranks.size))
        return [train_run(config, suite=suite.name, command=command, stop=stop, ranks=ranks) for config in suite.runs]


def _check_first(suite: Suite, n_devices: int) -> None:
    """Refuse before anything is done a tracker that cannot be used, and a batch that does not divide over the devices that there are."""
    for config in suite.runs:
        check_trackers(config.monitoring.tracker_names, config.monitoring.tracker_project)
        if message := config.batch_problem(n_devices):
            line = f"data.dataloader.batch_size: {config.data.dataloader.batch_size} {message}"
            raise ConfigError(str(suite.path), [line])


@contextmanager
def _told(stop: StopRequest) -> Iterator[None]:
    """Name the signal, not the ranks that are lost by it, where one ends the processes before there is anything to save."""
    try:
        yield
    except LostContact:
        stop.raise_early()
        raise


def train_run(
    config: RunConfig, *, suite: str | None, command: Sequence[str], stop: StopRequest, ranks: Ranks
) -> RunResult:
    """Train one run to its end, from wherever it stands.

    Raises:
        Stopped: a signal or the time limit came first; a restart point is saved.
    """
    began = time.perf_counter()
    name = config.checkpointing.run_name
    assert name is not None, "the loader names every run"
    with ExitStack() as held:

        def enter() -> RunFolder:
            path = Path(config.checkpointing.runs_dir) / name
            make_run_folder(path)
            held.enter_context(locked(path))
            held.enter_context(log_to(path / "train.log", config.monitoring.logging.log_level))
            return open_run_folder(path, config, name=name, suite=suite)

        folder = ranks.decided(enter)
        if ranks.decided(lambda: _finished(folder, config)):
            ranks.lead(lambda: _tell_finished(folder, config))
        else:
            ranks.lead(lambda: check_disk(config, folder.path))
            cache = _cache(config, ranks)
            with torch.random.fork_rng():  # the loop seeds every pass; the caller's random state is left alone
                _train(folder, config, cache, tuple(command), stop, ranks)
    return ranks.decided(lambda: _result(folder, config, time.perf_counter() - began))


def _tell_finished(folder: RunFolder, config: RunConfig) -> None:
    """Say that a run is finished, and send its trackers what a stop had left behind."""
    max_steps = config.training.max_steps
    log.info("%s is finished: %s, in %s", folder.name, counted(max_steps, "step"), folder.path)
    if owed := unsent(folder.path, config.monitoring.tracker_names, max_steps):
        with trackers_of(folder, config, owed, max_steps + 1):
            pass  # leaving sends it


def _cache(config: RunConfig, ranks: Ranks) -> TokenCache:
    """The token cache of a run, built by rank 0 where it is not there yet; the same on all ranks."""
    open_it = partial(open_cache, config.data, model_vocab_size=config.model.vocab_size)
    built = ranks.lead(open_it, patiently=True)
    cache = built or open_it()
    found = {"fingerprint of the tokens": cache.fingerprint, "hash of the tokenizer": cache.tokenizer_hash}
    ranks.check_same(found, "reads other data than rank 0")
    return cache


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
    folder: RunFolder,
    config: RunConfig,
    cache: TokenCache,
    command: tuple[str, ...],
    stop: StopRequest,
    ranks: Ranks,
) -> None:
    """Build what a run needs, put the newest checkpoint back, and hand over to the loop."""
    hardware = choose_hardware(config.training.fabric, place())
    fitting = _fitting(config, hardware, ranks)
    at_a_time = fitting(None)  # refused before anything is allocated
    if config.training.activation_checkpointing:
        give_back_freed_memory()
    else:
        keep_freed_memory(memory(config, at_a_time, hardware.precision).total)
    state, engine = _built(config, hardware, ranks)
    batches = _batches(config, cache)
    rule = _capture_rule(config, state.model)
    probe_batch = _probe(config, cache) if rule else None
    before = _go_on(folder, config, cache, state, ranks)
    state.micro_batch_size = fitting(state.micro_batch_size)
    n_tokens = state.micro_batch_size * batches.seq_len
    kernels = kernels_of(config.model, hardware.precision, engine.fabric.device, n_tokens)
    _tell_what_comes(folder.name, config, hardware, kernels, state, batches)
    if config.training.compile:
        part = micro_batches(batches.at(state.step), state.micro_batch_size, ranks)[0].to(engine.fabric.device)
        kernels = replace(kernels, compiled=_takes_compiled(config, hardware, state, engine, part))
        if not kernels.compiled:
            engine = replace(engine, forward=engine.fabric.setup_module(state.model))
    passes = _passes(config, hardware, state.micro_batch_size, kernels, rule, probe_batch)
    _warn_of_the_schedule(config, passes, batches)
    restart, max_steps = config.checkpointing.restart, passes.max_steps
    restart_schedule = RestartSchedule(
        every_n_steps=restart.every_n_steps,
        every_minutes=restart.every_minutes,
        saved_anyway=frozenset(s for s in passes.save_at if config.checkpointing.holds_optimizer(s, max_steps)),
    )
    stop.defer()
    record = Record(folder, config, state.step)
    saver = Saver(
        folder=folder,
        config=config,
        ranks=ranks,
        cache=cache,
        hardware=hardware,
        kernels=kernels,
        rule=rule,
        probe_hash=probe_hash(probe_batch.input_ids) if probe_batch else None,
        command=command,
        versions=versions(),
        git_commit=git_commit(),
        background=record.background,
        restart_schedule=restart_schedule,
        before_publishing=record.sync,
    )
    if before:
        _tell_what_changed(before, saver.made_by(state), state.step, dropout=config.model.dropout)
    if not _looped(state, passes, engine, batches, saver, record, stop):
        reason = stop.reason or "a signal to another rank"
        raise Stopped(f"{folder.name} stopped by {reason} at step {state.step:,}; the same command goes on there")


def _looped(
    state: TrainState,
    passes: Passes,
    engine: Engine,
    batches: Batches,
    saver: Saver,
    record: Record,
    stop: StopRequest,
) -> bool:
    """Go through the loop with the record open on rank 0; whether the end was reached. What was saved is published afterwards."""
    ranks, config = engine.ranks, saver.config

    def logged(row: Row) -> None:
        record.row(row)
        stop.made_a_pass()

    with ExitStack() as held:
        ranks.lead(lambda: held.enter_context(record))
        try:
            done = train_loop(
                state,
                passes,
                engine,
                batches=batches,
                save=saver.milestone,
                save_restart_point=saver.restart_point,
                restart_due=saver.restart_schedule.due,
                stopping=lambda: stop.reason is not None,
                evaluate=Evaluator(
                    saver.folder.path,
                    config.evaluation,
                    saver.cache,
                    engine.fabric.device,
                    engine.fabric.autocast,
                    ranks,
                ),
                log=logged,
            )
            if not done:
                record.hurry()
        except PicoError as error:
            if error.alike_on_all_ranks:
                ranks.lead(held.close, patiently=True)
            raise
        ranks.lead(held.close, patiently=True)  # no rank ends before what was saved is published
    return done


def _tell_what_comes(
    name: str, config: RunConfig, hardware: Hardware, kernels: Kernels, state: TrainState, batches: Batches
) -> None:
    """Say in the log what is about to be trained, on what, and how."""
    if hardware.precision == "bf16-true":
        log.warning(
            "training.fabric.precision: bf16-true keeps the weights themselves in bf16, so updates below 1/256 of a weight are lost; "
            "bf16-mixed keeps them in fp32"
        )
    at_a_time, max_steps = state.micro_batch_size, config.training.max_steps
    assert at_a_time is not None, "chosen before"
    if config.training.optimization.gradient_accumulation_steps == "auto":
        n_parts = batches.batch_size // (hardware.world_size * at_a_time)
        log.info("gradient_accumulation_steps: auto is %d, by the memory that is free", n_parts)
    batch_tokens = batches.batch_size * batches.seq_len
    log.info(
        f"{name}: {config.model.n_parameters:,} parameters; "
        f"{counted(batches.batch_size, 'sequence')} x {counted(batches.seq_len, 'token')} = "
        f"{batch_tokens:,} tokens a step, {counted(at_a_time, 'sequence')} at a time; "
        f"{counted(max_steps, 'step')} = {max_steps * batch_tokens:,} tokens, from step {state.step:,}; {hardware}; {kernels}"
    )


def _warn_of_the_schedule(config: RunConfig, passes: Passes, batches: Batches) -> None:
    """Say what is allowed and seldom meant."""
    warmup, restart = config.training.optimization.lr_warmup_steps, config.checkpointing.restart
    if warmup >= passes.max_steps > 0:
        log.warning(
            "training.optimization.lr_warmup_steps: %d: the run of %s ends within its warm-up, at a part of lr",
            warmup,
            counted(passes.max_steps, "step"),
        )
    if batches.batch_size > batches.n_windows:
        log.warning(
            "data.dataloader.batch_size: %d: the training text has %s of %d tokens only, so that a batch holds some of them more than "
            "once; use more text, a smaller batch_size or a smaller model.max_seq_len",
            batches.batch_size,
            counted(batches.n_windows, "window"),
            batches.seq_len,
        )
    if not passes.save_at and not restart.every_n_steps and restart.every_minutes is None:
        log.warning("the run keeps nothing: checkpointing.schedule, save_every_n_steps and restart are all off")


def _fitting(config: RunConfig, hardware: Hardware, ranks: Ranks) -> Callable[[int | None], int]:
    """How many sequences go through the model of each rank at a time, given how many did so far: what rank 0 finds to fit."""
    free = free_memory(torch.device(hardware.accelerator))
    return lambda before: ranks.decided(lambda: micro_batch_size(config, hardware, free, before))


def _built(config: RunConfig, hardware: Hardware, ranks: Ranks) -> tuple[TrainState, Engine]:
    """The state of a run at step 0, and what computes its passes on ``hardware``."""
    training = config.training
    fabric = start_fabric(hardware)
    scaler: torch.amp.GradScaler | None = getattr(fabric.strategy.precision, "scaler", None)
    with torch.device("meta") if hardware.strategy == "fsdp" else nullcontext():  # no rank ever holds the whole of it
        model = PicoDecoder(config.model)
    model.activation_checkpointing = training.activation_checkpointing
    sharded, dropout = hardware.strategy == "fsdp", config.model.dropout
    forward = fabric.setup_module(compiled(model, dropout=dropout, sharded=sharded) if training.compile else model)
    model.initialize(config.seeds.weights)
    # fused AdamW would unscale a second time under a loss scaler
    optimizer = optimizer_of(model, training.optimization, fused=hardware.accelerator != "mps" and scaler is None)
    state = TrainState(step=0, skipped_updates=0, model=model, optimizer=optimizer, scaler=scaler)
    fabric_optimizer: Any = fabric.setup_optimizers(optimizer)
    return state, Engine(fabric, forward, fabric_optimizer, next_token, ranks)


def _takes_compiled(config: RunConfig, hardware: Hardware, state: TrainState, engine: Engine, part: Batch) -> bool:
    """Whether the passes go through the compiled model; under auto ``state`` keeps what was chosen."""
    asked = config.training.compile
    assert asked is not False, "else there is nothing to try"
    trial = Trial(engine.fabric, engine.forward, state.model, next_token, part, state.step, state.scaler)
    taken = takes_compiled(trial, asked, state.compiled, hardware.precision, engine.ranks)
    if asked == "auto":
        state.compiled = taken
    return taken


def _tell_what_changed(before: MadeBy, now: MadeBy, step: int, *, dropout: float) -> None:
    """Warn where the passes from here on are computed in another way than those before; of old checkpoints not all is known."""
    was, is_now = before.model_dump(include=COMPUTED_BY), now.model_dump(include=COMPUTED_BY)
    changed = {key: f"{key} {was[key]} before, {is_now[key]} now" for key in was if was[key] not in (None, is_now[key])}
    if changed:
        effect = "agree with those before up to rounding only"
        if dropout > 0 and "micro_batch_size" in changed:
            effect = "differ from those of the old setting, for each micro-batch draws a dropout of its own"
        log.warning("from step %d on the numbers %s: %s", step, effect, "; ".join(changed.values()))


def _go_on(folder: RunFolder, config: RunConfig, cache: TokenCache, state: TrainState, ranks: Ranks) -> MadeBy | None:
    """Put the newest checkpoint of the run, if there is one, into ``state``, and remove what a kill has left unfinished.

    Returns:
        How that checkpoint was made.
    """

    def newest() -> tuple[Path, MadeBy] | None:
        parents = (folder.checkpoints, folder.restart)
        if not config.checkpointing.training.auto_resume and any(folder.checkpoints.glob("step_*")):
            raise RunFolderError(
                f"{folder.path} has checkpoints and checkpointing.training.auto_resume is false: "
                "set it to true to go on from them, or give this run another checkpointing.run_name"
            )
        found = newest_intact(parents, folder.run_id)
        if found:
            _check_data(folder.path, found[1], cache)
        for parent in parents:
            remove_unfinished(parent)
        last, _ = last_row(folder.metrics)
        if not found and last and last["step"] > 0:
            log.warning("%s has passes up to %d and no checkpoint: it starts again", folder.path, last["step"])
        return (found[0], found[1].made_by) if found else None

    found = ranks.decided(newest)
    if found is None:
        return None
    load_state(found[0], state)
    if config.training.compile != "auto":
        state.compiled = None  # a choice of ours that the configuration has taken back
    return found[1]


def _probe(config: RunConfig, cache: TokenCache) -> Batch | None:
    """The held-out batch that is looked at beside the training batch, None where none is asked for."""
    dynamics = config.checkpointing.learning_dynamics
    if not dynamics.eval_data:
        return None
    batch = probe(cache, dynamics.probe_windows, config.model.max_seq_len)
    if len(batch.input_ids) < dynamics.probe_windows:
        log.warning(
            "the probe has %s, not the %d of checkpointing.learning_dynamics.probe_windows: that is all the held-out text "
            "(a larger data.dataset.held_out_fraction gives more)",
            counted(len(batch.input_ids), "window"),
            dynamics.probe_windows,
        )
    return batch


def _passes(
    config: RunConfig,
    hardware: Hardware,
    micro_batch_size: int,
    kernels: Kernels,
    rule: CaptureRule | None,
    probe_batch: Batch | None,
) -> Passes:
    """How the passes of a run are made."""
    training, optimization = config.training, config.training.optimization
    save_at = frozenset(config.checkpointing.save_steps(training.max_steps))
    peak = peak_flops(hardware.device_name, hardware.precision)
    return Passes(
        max_steps=training.max_steps,
        micro_batch_size=micro_batch_size,
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
        compiled=kernels.compiled,
        flops_per_token=flops_per_token(config.model),
        peak_flops=peak and peak * hardware.world_size,
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
