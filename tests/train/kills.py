"""Kill real ``pico-train run`` processes, start them again, and compare what they leave with a run that nobody stopped.

A process that has imported torch and lightning, and done nothing else, forks one trainer per start; each runs the command line as typed.
A trainer is killed with SIGKILL from outside after a delay, or kills itself at a named moment of ``MOMENTS``: the function that stands
for the moment is wrapped, and its n-th call ends the process before it, after it, or with a part of what it writes in the file. To add
a moment is to add a row. Used by ``test_kills.py`` and by ``benchmarks/kill_runs.py``.
"""

import faulthandler
import importlib
import itertools
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

from pico_train.checkpoint.format import CheckpointError, Manifest, read_manifest, step_folders
from pico_train.checkpoint.resume import check_file
from pico_train.checkpoint.verify import verify_run
from pico_train.metrics_log import read_rows

TIMEOUT_S = 60  # a start takes about half a second; one that takes this long hangs
TIMINGS = ("seconds", "data_seconds", "save_seconds", "tokens_per_s", "memory_bytes")
MAX_STEPS = 14

RUN = f"""
data:
  dataset: {{name: text, path: STORY, document_bytes: 400, held_out_fraction: 0.1}}
  tokenizer: {{name: byte-level-bpe, vocab_size: 300}}
  dataloader: {{batch_size: 8}}
model:
  d_model: 16
  n_layers: 2
  vocab_size: 300
  max_seq_len: 16
  attention_n_heads: 4
  attention_n_kv_heads: 2
  activation_hidden_dim: 32
  dropout: 0.1
training:
  max_steps: {MAX_STEPS}
  optimization: {{lr: 0.01, lr_scheduler: cosine, lr_warmup_steps: 2, gradient_accumulation_steps: 2}}
  fabric: {{accelerator: cpu, precision: 32-true, num_threads: 1}}
evaluation:
  metrics: [held_out]
  held_out: {{max_windows: 8}}
checkpointing:
  save_every_n_steps: 3
  schedule: {{log2_until: 4}}
  restart: {{every_n_steps: 5, keep: 1}}
  learning_dynamics: {{eval_data: held_out, probe_windows: 4, batch_size: 2}}
"""
# Saved are 0, 1, 2, 3, 4, (5), 6, 9, (10), 12, 14; in brackets the restart points. A milestone has 8 files of tensors, a restart
# point 2; both have 5 other files and the manifest. A pass has two micro-batches, and one that is saved two more in the probe.


# ---- the moments


def _first(*arguments: Any, **_: Any) -> Path:
    return Path(arguments[0])


def _second(*arguments: Any, **_: Any) -> Path:
    return Path(arguments[1])


def _log(*arguments: Any, **_: Any) -> Path:
    return Path(arguments[0]._file.name)


@dataclass(frozen=True)
class Moment:
    """Where a trainer kills itself.

    Attributes:
        function: ``module:attribute``, in the module that looks it up.
        part: how much of the call is done: 0 nothing, 1 all, between the two that share of the bytes it writes.
        nth: which call of the process, among those on a file that ``file`` matches.
        file: pattern for the name of the file or folder that the call is about; None for any call.
        path_of: finds that file in the arguments of the call.
        late_s: how long the call is held up before the kill, for other threads to go on meanwhile.
        after: the moment at which the start before this one is killed; None where this is the first start.
    """

    function: str
    part: float
    nth: int = 1
    file: str | None = None
    path_of: Callable[..., Path] = _first
    late_s: float = 0
    after: str | None = None


ROW = "pico_train.metrics_log:MetricsLog.append"
SAVE_FILE = "pico_train.checkpoint.write:save_file"
WRITE, REPLACE, RENAME = "pathlib:Path.write_text", "pathlib:Path.replace", "pathlib:Path.rename"

MOMENTS = {
    # the folder of the run, at its very first start and at a later one
    "run folder made, empty": Moment("pico_train.checkpoint.folder:to_yaml", 0),
    "first of the run's own files half staged": Moment(WRITE, 0.5, file="*.tmp"),
    "first of the run's own files in place": Moment(REPLACE, 1, file="*.tmp"),
    "second of the run's own files half staged": Moment(WRITE, 0.5, 2, file="*.tmp"),
    "second of the run's own files in place": Moment(REPLACE, 1, 2, file="*.tmp"),
    "restart, before config.yaml is replaced": Moment(REPLACE, 0, file="config.yaml.tmp", after="row logged"),
    # the token cache
    "tokens written, ledger not": Moment("pico_train.data.cache:_SplitWriter.write", 1, 2),
    "ledger half written": Moment(WRITE, 0.5, file="ledger.json"),
    "token cache staged": Moment(RENAME, 0, file="*.tmp-*"),
    "token cache in place": Moment(RENAME, 1, file="*.tmp-*"),
    # resuming
    "weights put back, optimizer not": Moment(
        "pico_train.checkpoint.resume:load_llama_state_dict", 1, after="between two micro-batches"
    ),
    "optimizer put back": Moment("pico_train.checkpoint.resume:load_state_by_name", 1, after="update done"),
    "rows to be repeated dropped, next save not begun": Moment(
        "pico_train.metrics_log:MetricsLog.sync", 0, after="row logged"
    ),
    "log open at its step": Moment("pico_train.metrics_log:MetricsLog.__init__", 1, after="row half logged"),
    # the loop
    "before forward and backward": Moment("pico_train.loop:forward_backward", 0, 15),
    "between two micro-batches": Moment("pico_train.loop:pass_seed", 0, 24),
    "forward and backward done": Moment("pico_train.loop:forward_backward", 1, 11),
    "clipped, weights as before": Moment("torch.nn.utils:clip_grads_with_norm_", 1, 4),
    "update done": Moment("pico_train.loop:update", 1, 10),
    # capture and probe
    "activations captured, gradients not": Moment("pico_train.loop:weight_gradients", 0, 6),
    "gradients captured": Moment("pico_train.loop:weight_gradients", 1, 2),
    "before the probe": Moment("pico_train.loop:probe_pass", 0, 7),
    "in the probe, training gradients aside": Moment("pico_train.loop:unscaled_pass", 1, 8),
    # a checkpoint, written beside training: without and with time for training to run on
    "before the snapshot": Moment("pico_train.checkpoint.save:Saver.milestone", 0, 4),
    "snapshot taken, nothing written": Moment("pico_train.checkpoint.save:Saver._publish", 0, 7),
    "before the log is synced for a save": Moment("pico_train.metrics_log:MetricsLog.sync", 0, 5),
    "first checkpoint, no file yet": Moment(SAVE_FILE, 0),
    "tensor file half written": Moment(SAVE_FILE, 0.5, 44, file="*.safetensors", path_of=_second),
    "state.json half written": Moment("pathlib:Path.write_bytes", 0.5, 8, file="state.json"),
    "files written, some hashed": Moment("pico_train.checkpoint.write:_file_row", 1, 5 * 13 + 7 + 5),
    "before the manifest": Moment("pico_train.checkpoint.write:manifest_text", 0, 7),
    "manifest half written": Moment(WRITE, 0.5, 10, file="manifest.json", late_s=0.2),
    "first checkpoint staged": Moment(RENAME, 0, 1, file="step_*.tmp", late_s=0.2),
    "checkpoint staged": Moment(RENAME, 0, 8, file="step_*.tmp"),
    "checkpoint renamed": Moment(RENAME, 1, 7, file="step_*.tmp"),
    "renamed and parent synced": Moment("pico_train.checkpoint.write:flush", 1, 7, file="checkpoints", late_s=0.2),
    "leftover staging removed": Moment("shutil:rmtree", 1, file="step_*.tmp", after="tensor file half written"),
    "last checkpoint staged": Moment(RENAME, 0, 11, file="step_*.tmp", late_s=0.3),
    "last checkpoint renamed": Moment(RENAME, 1, 11, file="step_*.tmp"),
    # a restart point: 5, and 10, after which 5 is deleted
    "restart point half written": Moment(SAVE_FILE, 0.5, 42, file="*.safetensors", path_of=_second),
    "restart point staged": Moment(RENAME, 0, 9, file="step_*.tmp", late_s=0.2),
    "old restart point renamed to be deleted": Moment(RENAME, 1, file="step_5"),
    "old restart point half deleted": Moment("os:unlink", 1, file="model.safetensors", late_s=0.2),
    # the log
    "row half logged": Moment(ROW, 0.5, 9, file="metrics.jsonl", path_of=_log),
    "row logged but for its newline": Moment(ROW, 0.999, 11, file="metrics.jsonl", path_of=_log),
    "row logged": Moment(ROW, 1, 8),
    "last row half logged": Moment(ROW, 0.5, MAX_STEPS + 1, file="metrics.jsonl", path_of=_log),
    "last row logged but for its newline": Moment(ROW, 0.999, MAX_STEPS + 1, file="metrics.jsonl", path_of=_log),
    "last row logged": Moment(ROW, 1, MAX_STEPS + 1),
    # an evaluation
    "before an evaluation": Moment("pico_train.evaluation:held_out_loss", 0, 6),
    "evaluation half staged": Moment(WRITE, 0.5, 7, file="held_out.json.tmp"),
    "last evaluation stored": Moment(REPLACE, 1, 9, file="held_out.json.tmp"),
}


def plan(name: str) -> list[Moment]:
    """The moments at which one start after the other is killed, the one called ``name`` the last of them."""
    moment = MOMENTS[name]
    return [*(plan(moment.after) if moment.after else ()), moment]


def arm(moment: Moment) -> None:
    """Make this process kill itself at ``moment``."""
    module, dotted = moment.function.split(":")
    owner: Any = importlib.import_module(module)
    *outer, name = dotted.split(".")
    for part in outer:
        owner = getattr(owner, part)
    real, calls = getattr(owner, name), itertools.count(1)

    def armed(*args: Any, **kwargs: Any) -> Any:
        path = moment.path_of(*args, **kwargs) if moment.file else None
        if (path and not fnmatch(path.name, str(moment.file))) or next(calls) != moment.nth:
            return real(*args, **kwargs)
        before = path.stat().st_size if path and path.is_file() else 0
        result = real(*args, **kwargs) if moment.part > 0 else None
        if path and 0 < moment.part < 1:
            after = path.stat().st_size
            begin = before if before < after else 0  # appended to, or written anew
            os.truncate(path, begin + int(moment.part * (after - begin)))
        time.sleep(moment.late_s)
        os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, armed)


# ---- processes


@dataclass(frozen=True)
class Ended:
    """How one start ended: the exit code (-9 after SIGKILL), and the seconds from the fork to the end."""

    code: int
    seconds: float


def preload() -> None:
    """Start the process that forks the trainers: one thread, so that forking is safe and rounding the same everywhere."""
    multiprocessing.set_forkserver_preload(["lightning.fabric", "torch.distributed.fsdp", "pico_train.run"])
    # A killed trainer leaves the semaphores of its progress bars to multiprocessing, which removes them and says so.
    silent = "ignore::UserWarning:multiprocessing.resource_tracker"
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1", PYTHONWARNINGS=silent):
        forkserver.ensure_running()


def start(
    words: Sequence[str],
    output: Path,
    *,
    moment: Moment | None = None,
    kill_after_s: float | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Ended:
    """Run ``pico-train WORDS`` in a process of its own to its end, or until ``moment``, or until it is killed from here.

    Raises:
        AssertionError: it hangs; the message has what it printed and the stack of each of its threads.
    """
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=pico_train, args=(list(words), output, moment, timeout_s))
    began = time.perf_counter()
    process.start()
    if kill_after_s is not None:
        process.join(kill_after_s)
        process.kill()
    process.join(timeout_s + 1)
    seconds = time.perf_counter() - began
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError(f"pico-train {' '.join(words)} hangs:\n{output.read_text(encoding='utf-8')}")
    return Ended(process.exitcode, seconds)


def pico_train(words: list[str], output: Path, moment: Moment | None, timeout_s: float) -> None:
    """The forked process: the command line, with a session, an output and a moment of its own."""
    from pico_train.cli import main

    os.setsid()
    with output.open("a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.dump_traceback_later(timeout_s)
    sys.argv = ["pico-train", *words]
    if moment is not None:
        arm(moment)
    main(words)


# ---- histories


@dataclass(frozen=True)
class History:
    """One run in a folder of its own, with its own token cache: the same command from the first start to the last."""

    folder: Path
    overrides: tuple[str, ...] = ()

    @property
    def run(self) -> Path:
        """The run folder."""
        return self.folder / "runs" / "run"

    @property
    def output(self) -> Path:
        """What all starts have printed."""
        return self.folder / "output.txt"

    def words(self) -> list[str]:
        """The command after ``pico-train``. The text stands beside the folder: the same file, so the same cache, for all."""
        config, story = self.folder / "run.yaml", self.folder.parent / "story.txt"
        self.folder.mkdir(parents=True, exist_ok=True)
        if not story.exists():
            story.write_text(_story(), encoding="utf-8")
        if not config.exists():
            config.write_text(RUN.replace("STORY", str(story)), encoding="utf-8")
        places = (
            f"checkpointing.runs_dir={self.run.parent}",
            f"data.cache_dir={self.folder / 'token_caches'}",
        )
        return ["run", str(config), *places, *self.overrides]

    def kill(self, when: Moment | float) -> str | None:
        """Start, kill at a moment or after a delay in seconds, and say where the run then stands; None where a delay was too long.

        Raises:
            AssertionError: the start fails, hangs, or never comes to its moment.
        """
        if isinstance(when, Moment):
            code, printed = self._start(moment=when)
        else:
            code, printed = self._start(kill_after_s=when)
            if code == 0:
                return None
        assert code != 0, f"ended without ever coming to {when}:\n{printed}"
        assert code == -signal.SIGKILL, f"exit code {code}:\n{printed}"
        return standing(self.run)

    def finish(self) -> None:
        """Start and let it come to its end."""
        code, printed = self._start()
        assert code == 0, f"exit code {code}:\n{printed}"

    def survive(self, kills: Sequence[Moment | float]) -> list[str]:
        """Start until the run is finished, the n-th start killed at the n-th of ``kills``; where it stood after each kill."""
        stood = []
        for when in kills:
            where = self.kill(when)
            if where is None:
                return stood
            stood.append(where)
        self.finish()
        return stood

    def _start(self, **kill: Any) -> tuple[int, str]:
        """Exit code and output of one start, which must go on from where the run stands, not from somewhere before."""
        words = self.words()
        self.output.touch()  # a kill may come before the process has opened it
        expected, begin = stands_at(self.run), self.output.stat().st_size
        ended = start(words, self.output, **kill)
        printed = self.output.read_bytes()[begin:].decode()
        begun = re.findall(r"from step ([\d,]+);", printed)
        assert begun in ([], [f"{expected:,}"]), f"went on from step {begun[0]}, not {expected}:\n{printed}"
        return ended.code, printed


def delays(n: int, whole_s: float, seed: int) -> list[float]:
    """When ``n`` starts are killed: uniform over the length of a whole run, the same for the same seed."""
    draw = random.Random(seed)
    return [draw.uniform(0, whole_s) for _ in range(n)]


def standing(run: Path) -> str:
    """Where a killed run stands: rows of the log, checkpoints, and what was being written."""
    checkpoints = step_folders(run / "checkpoints")
    parts = [f"{len(read_rows(run / 'metrics.jsonl'))} rows", f"{len(checkpoints)} checkpoints"]
    return ", ".join([*parts, *leftovers(run)]) if run.exists() else "no folder"


def leftovers(run: Path) -> list[str]:
    """What is in a run folder that a run which nobody stopped does not leave there."""
    names = sorted(path.relative_to(run).as_posix() for path in run.rglob("*"))
    return [name for name in names if re.search(r"\.(tmp|damaged)[^/]*$", name) and not re.search(r"\.tmp/", name)]


def stands_at(run: Path) -> int:
    """The step the next start is to go on from: the newest with weights and moments that are what was written."""
    folders = [*step_folders(run / "checkpoints").items(), *step_folders(run / "restart").items()]
    for step, folder in sorted(folders, reverse=True):
        with suppress(CheckpointError):
            manifest = read_manifest(folder)
            for row in manifest.files:
                check_file(folder, manifest, row.path)
            if (folder / "training_state" / "optimizer.safetensors").exists():
                return step
    return 0


def differences(whole: History, killed: History) -> list[str]:
    """What differs between a run that nobody stopped and one that was killed; timings, run id and circumstances set aside."""
    found = [f"left over: {name}" for name in leftovers(killed.run)]
    found += _differing("row", _rows(whole.run), _rows(killed.run))
    found += _differing("checkpoint", _checkpoints(whole.run / "checkpoints"), _checkpoints(killed.run / "checkpoints"))
    kept, killed_kept = _checkpoints(whole.run / "restart"), _checkpoints(killed.run / "restart")
    # A kill after a new restart point leaves the old one until the next is written: one more is no fault.
    found += _differing("restart point", kept, {step: killed_kept[step] for step in killed_kept if step in kept})
    found += _differing("evaluation", _evaluations(whole.run), _evaluations(killed.run))
    found += verify_run(killed.run)[1]
    caches = [path.name for path in (killed.folder / "token_caches").iterdir() if ".tmp-" not in path.name]
    return found if len(caches) == 1 else [*found, f"token caches: {caches}"]


def _differing(what: str, whole: dict[Any, Any], killed: dict[Any, Any]) -> list[str]:
    """One line per key, in order, at which two mappings differ, with the first field that does."""
    lines = [] if list(whole) == list(killed) else [f"{what}: {list(killed)} where there should be {list(whole)}"]
    for key in [key for key in whole if key in killed]:
        a, b = whole[key], killed[key]
        if field := next((field for field in a | b if a.get(field) != b.get(field)), None):
            lines.append(f"{what} {key}: {field} is {b.get(field)} where it should be {a.get(field)}")
    return lines


def _rows(run: Path) -> dict[int, dict[str, Any]]:
    """The log without timings by line number, so that one row too many shows."""
    rows = read_rows(run / "metrics.jsonl")
    return {number: {k: v for k, v in row.items() if k not in TIMINGS} for number, row in enumerate(rows)}


def _checkpoints(parent: Path) -> dict[int, dict[str, Any]]:
    """Of each checkpoint what must not depend on kills: all but the run's id, the circumstances, and the parent's hash."""
    return {step: _lasting(folder) for step, folder in step_folders(parent).items()}


def _lasting(folder: Path) -> dict[str, Any]:
    try:
        manifest: Manifest = read_manifest(folder)
    except CheckpointError as error:
        return {"error": str(error)}
    content = manifest.model_dump(
        exclude={"run": {"id"}, "made_by": True, "parent": {"manifest_sha256"}, "sha256": True}
    )
    tensors = {f"sha256 of {row.file} {row.key}": row.sha256 for row in manifest.tensors}
    files = {f"sha256 of {row.path}": row.sha256 for row in manifest.files}
    return tensors | files | content


def _evaluations(run: Path) -> dict[str, dict[str, Any]]:
    files = sorted((run / "evaluations").rglob("*.json"))
    return {str(path.relative_to(run)): json.loads(path.read_text(encoding="utf-8")) for path in files}


def _story() -> str:
    """About 24 kB of made-up sentences."""
    draw = random.Random(0)
    vocabulary = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 7))) for _ in range(200)]
    return "\n".join(" ".join(draw.choices(vocabulary, k=10)) + "." for _ in range(450))
