"""The processes that train one run together: which of them this one is, and starting them where nobody else has.

torchrun and srun of Slurm start the processes themselves and say in the environment which each is. Without them ``pico-train run``
starts those of one machine, in the same words as torchrun, and looks after them. No torch here.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from pico_train.errors import UserError

if TYPE_CHECKING:
    from pico_train.config import RunConfig

OURS = "PICO_TRAIN_STARTED_BY"  # set for the processes that start() has started: the id of the process that did
COMMAND = (sys.executable, "-P", "-m", "pico_train.cli")
GRACE_S = 30.0  # after one process has ended with an error, the others have this long to end as well
LOOK_EVERY_S = 0.05


@dataclass(frozen=True)
class Place:
    """Which of ``size`` processes this one is: ``rank`` of all, ``local_rank`` of the ``local_size`` on its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def place() -> Place:
    """The place of this process, by the variables of torchrun; those of a step of Slurm are translated into them first."""
    env = os.environ
    size = int(env.get("SLURM_STEP_NUM_TASKS", 1))
    if size > 1 and "RANK" not in env:
        n_nodes = int(env["SLURM_STEP_NUM_NODES"])
        if size % n_nodes:
            raise UserError(
                f"Slurm has started {size} tasks on {n_nodes} nodes; ask for the same number on each (--ntasks-per-node)"
            )
        env.update(
            RANK=env["SLURM_PROCID"],
            WORLD_SIZE=str(size),
            LOCAL_RANK=env["SLURM_LOCALID"],
            LOCAL_WORLD_SIZE=str(size // n_nodes),
            GROUP_RANK=env["SLURM_NODEID"],
        )
        env.setdefault("MASTER_ADDR", first_host(env["SLURM_STEP_NODELIST"]))
        env.setdefault("MASTER_PORT", str(20_000 + int(env["SLURM_JOB_ID"]) % 20_000))  # the same on all nodes
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= env.keys():
        return Place()
    size = int(env["WORLD_SIZE"])
    return Place(int(env["RANK"]), size, int(env["LOCAL_RANK"]), int(env.get("LOCAL_WORLD_SIZE", size)))


def first_host(nodes: str) -> str:
    """The first of the hosts that Slurm lists.

    >>> first_host("gpu[03-05,9],login1"), first_host("a1,a2")
    ('gpu03', 'a1')
    """
    match = re.match(r"([^,\[]*)(?:\[([^\],-]+))?", nodes)
    assert match
    return match[1] + (match[2] or "")


def processes_to_start(runs: "Sequence[RunConfig]", here: Place) -> int:
    """How many processes ``runs``, those of a suite, need to be started on this machine: 1 where they are there already.

    Raises:
        UserError: that many cannot be started, or another number was started.
    """
    wanted = {(run.training.fabric.num_nodes, run.training.fabric.num_devices) for run in runs}
    if len(wanted) > 1:
        raise UserError(
            "training.fabric.num_nodes, num_devices: the runs of a suite are trained by the same processes, so they cannot differ in them"
        )
    [(n_nodes, n_devices)] = wanted
    if here.size > 1:
        if n_devices != "auto" and n_nodes * n_devices != here.size:
            raise UserError(
                f"training.fabric.num_nodes, num_devices: {n_nodes} times {n_devices} are asked for, and {here.size} were started; "
                "start as many, or set num_devices to auto, which takes as many as there are"
            )
        return 1
    if n_nodes > 1:
        raise UserError(
            f"training.fabric.num_nodes: {n_nodes}: on more than one machine srun or torchrun starts the processes "
            "(docs/cluster.md); use it, or training.fabric.num_nodes=1"
        )
    return 1 if n_devices == "auto" else n_devices


def start(n: int, words: Sequence[str]) -> int:
    """Run ``pico-train`` with ``words`` as ``n`` processes on this machine, and return the exit code: that of the first that fails.

    Signals are passed on, and ignored once all have ended, for the caller exits with that code. When a process fails, those that do not
    end by themselves within ``GRACE_S`` are killed, for they may wait for it for ever.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // n))),
        OURS: str(os.getpid()),
    }
    processes: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in processes:
            process.send_signal(number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT") if hasattr(signal, name)]
    for number in numbers:
        signal.signal(number, pass_on)
    try:
        for rank in range(n):
            env = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            # in a group of its own, so that Ctrl-C comes once, from here
            group: dict[str, Any] = {"process_group": 0} if os.name == "posix" else {}
            processes.append(subprocess.Popen([*COMMAND, *words], env=env, stdin=subprocess.PIPE, **group))
        return _wait(processes)
    finally:
        for process in processes:
            process.kill()
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait until all have ended, or ``GRACE_S`` longer than the first that fails; its exit code, 1 where a signal ended it."""
    code, deadline = 0, float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        failed = next((process for process in processes if process.poll()), None)
        if failed and code == 0:
            code = failed.returncode
            deadline = time.monotonic() + GRACE_S
        time.sleep(LOOK_EVERY_S)
    codes = [process.poll() for process in processes]
    code = code or next((code for code in codes if code), 0)
    for rank, ended in enumerate(codes):
        if ended is None:
            print(f"rank {rank} does not end after another has failed, and is killed", file=sys.stderr)
        elif ended < 0:
            print(f"rank {rank} was ended by {signal.Signals(-ended).name}", file=sys.stderr)
    return max(code, 1) if code else 0


def stop_with_the_starter() -> None:
    """In a process that ``start`` has started: stop, as by SIGTERM, when the one that started it is gone, however that ended."""
    if os.environ.get(OURS) != str(os.getppid()):
        return

    def wait() -> None:
        os.read(
            sys.stdin.fileno(), 1
        )  # nothing comes; its other end is closed when the process that started this one is gone
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True, name="starter").start()
