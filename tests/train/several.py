"""Start ``pico-train run`` as several ranks that find each other over gloo, without paying for imports (see ``kills.py``).

Each rank is a process forked from one that has imported torch and lightning, with the variables that torchrun would set. What such
runs leave is compared by ``assert_same_checkpoints`` and ``assert_same_rows``.
"""

import faulthandler
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import kills
import pytest
from kills import MAX_STEPS, History
from safetensors.torch import load_file

from pico_train.checkpoint.format import step_folders
from pico_train.checkpoint.verify import verify_run
from pico_train.metrics_log import read_rows

ACCUMULATION = "training.optimization.gradient_accumulation_steps"
TOLERANCE = 1e-5  # of a tensor's largest entry: what sums in another order leave of fp32
Prepare = Callable[[int], None]  # called with its rank in each process before the command line runs


@dataclass
class Started:
    """Ranks at work; their output is in ``<folder>/rank_<r>.txt``, which is appended to."""

    processes: list[multiprocessing.process.BaseProcess]
    folder: Path
    codes: list[int] = field(default_factory=list)

    def wait(self, timeout_s: float = kills.TIMEOUT_S) -> list[int]:
        """Their exit codes; a rank that hangs fails, with what it printed and where it stands."""
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        hanging = [process for process in self.processes if process.exitcode is None]
        for process in hanging:
            process.kill()
            process.join()
        assert not hanging, "".join(self.printed(rank) for rank in range(len(self.processes)))
        return [process.exitcode for process in self.processes if process.exitcode is not None]

    def printed(self, rank: int) -> str:
        """What a rank has printed, in all starts."""
        return said(self.folder, rank)


def said(folder: Path, rank: int) -> str:
    """What rank ``rank`` of the ranks in ``folder`` has printed, without what gloo of torch 2.10 tells of every connection."""
    lines = (folder / f"rank_{rank}.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("[Gloo] Rank "))


def start(words: Sequence[Sequence[str]], folder: Path, prepare: Prepare | None = None) -> Started:
    """Start a rank for each of ``words``, the command lines after ``pico-train``."""
    kills.preload()
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    processes = []
    for rank, line in enumerate(words):
        env = {"RANK": rank, "WORLD_SIZE": len(words), "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": len(words)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # type: ignore[dict-item]
        output = folder / f"rank_{rank}.txt"
        output.touch()
        one = context.Process(target=_rank, args=(list(line), output, {k: str(v) for k, v in env.items()}, prepare))
        one.start()
        processes.append(one)
    return Started(processes, folder)


def run(words: Sequence[str], folder: Path, n: int = 2, prepare: Prepare | None = None) -> Started:
    """The same command as ``n`` ranks, to their end."""
    started = start([words] * n, folder, prepare)
    started.codes = started.wait()
    return started


def _rank(words: list[str], output: Path, env: dict[str, str], prepare: Prepare | None) -> None:
    from pico_train.cli import main

    os.setsid()
    with output.open("a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.dump_traceback_later(kills.TIMEOUT_S - 5)
    os.environ.update(env)
    sys.argv = ["pico-train", *words]
    if prepare:
        prepare(int(env["RANK"]))
    main(words)


def trained(
    folder: Path, name: str, n: int, *overrides: str, parts: int = 4, prepare: Prepare | None = None
) -> History:
    """A run as ``n`` ranks, to its end, of ``parts`` micro-batches in all; with dropout, which the ranks draw alike."""
    history = History(folder / name, (f"{ACCUMULATION}={parts // n}", *overrides))
    ranks = run(history.words(), history.folder, n, prepare)
    assert ranks.codes == [0] * n, "".join(ranks.printed(rank) for rank in range(n))
    return history


def killed_at(step: int, rank: int) -> Prepare:
    """Make rank ``rank`` kill itself once update ``step`` of its process is done."""
    return partial(_arm, kills.Moment("pico_train.loop:update", 1, step), rank)


def _arm(moment: kills.Moment, which: int, rank: int) -> None:
    if rank == which:
        kills.arm(moment)


def assert_same_checkpoints(whole: History, other: History, tolerance: float = TOLERANCE) -> None:
    """The same checkpoints with the same tensors: integers exactly, numbers to a share of the largest entry.

    Of a moment the largest entry over all parameters counts: backward through a softmax cancels, and what is left of a small gradient has
    the rounding of what went into it.
    """
    folders = step_folders(whole.run / "checkpoints")
    assert list(step_folders(other.run / "checkpoints")) == list(folders)
    for step, folder in folders.items():
        for path in folder.rglob("*.safetensors"):
            stored = load_file(other.run / "checkpoints" / folder.name / path.relative_to(folder))
            expected = load_file(path)
            assert list(stored) == list(expected)
            largest = {key: tensor.abs().max() for key, tensor in expected.items()}
            if path.name == "optimizer.safetensors":
                moments = {key: key.rpartition(".")[2] for key in expected}
                largest = {key: max(largest[k] for k in largest if moments[k] == moments[key]) for key in largest}
            for key, tensor in expected.items():
                assert (stored[key].dtype, stored[key].shape) == (tensor.dtype, tensor.shape)
                error = (stored[key] - tensor).abs().max()
                limit = tolerance * largest[key] if tensor.is_floating_point() else 0
                assert error <= limit, f"step {step}, {path.name}, {key}: {error} above {limit}"
    assert verify_run(other.run) == (len(folders), [])


def assert_same_rows(whole: History, other: History, tolerance: float = TOLERANCE) -> None:
    """One row per pass, with the same numbers."""
    expected, rows = read_rows(whole.run / "metrics.jsonl"), read_rows(other.run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [row["step"] for row in expected] == list(range(MAX_STEPS + 1))
    for row, like in zip(rows, expected, strict=True):
        for key in ("tokens", "lr", "updated"):
            assert row[key] == like[key]
        for key in ("loss", "val_loss", "grad_norm", "grad_norms"):
            assert row[key] == (None if like[key] is None else pytest.approx(like[key], rel=tolerance))
