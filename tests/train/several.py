"""Start ``pico-train run`` as several ranks that find each other over gloo, without paying for imports: see ``kills.py``.

Each rank is a process forked from one that has imported torch and lightning, with the variables that torchrun would set.
"""

import faulthandler
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import kills

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
