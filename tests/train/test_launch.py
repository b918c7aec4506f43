"""Starting several ranks as a user does: by ``pico-train run`` itself, and by torchrun."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import kills
import pytest
from kills import History

import pico_train
from pico_train.checkpoint.format import step_folders
from pico_train.checkpoint.resume import verify_run
from pico_train.errors import UserError
from pico_train.launch import Place, first_host, processes_to_start
from pico_train.metrics_log import read_rows
from pico_train.suite import load

posix = pytest.mark.skipif(os.name != "posix", reason="signals and processes of POSIX")


@contextmanager
def started(history: History, *before: str, after: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """``pico-train`` as a user starts it, below ``before``; killed at the end if it is still there."""
    output = history.folder / "output.txt"
    command = [sys.executable, *before, "-m", "pico_train.cli", *history.words(), *after]
    with output.open("a", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, text=True, start_new_session=True)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def wait_for_row(run: Path, step: int) -> None:
    """Return once the log has the row of ``step``."""
    deadline = time.monotonic() + kills.TIMEOUT_S
    while len(read_rows(run / "metrics.jsonl")) <= step:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    """The processes that ``pid`` has started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def at_work(pid: int) -> bool:
    """Whether a process is there and has not ended; an orphan that has waits for the first process of the system to take note."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


TWO = ("training.fabric.num_devices=2", "monitoring.logging.log_every_n_steps=1")
LONG = (
    "training.max_steps=100000",
    "training.optimization.lr_scheduler=constant",
    "checkpointing.save_every_n_steps=0",
)


@posix
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for child processes as Linux shows them")
def test_the_command_starts_its_ranks_stops_them_and_ends_them(tmp_path: Path) -> None:
    """One start, stopped by SIGUSR1 with exit code 75; one that loses a rank; one whose starter is killed; one to the end."""
    history = History(tmp_path / "one")
    with started(history, after=(*TWO, *LONG)) as process:
        wait_for_row(history.run, 3)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(kills.TIMEOUT_S) == 75, history.output.read_text()
    assert "the same command goes on there" in history.output.read_text()
    reached = kills.stands_at(history.run)

    with started(history, after=(*TWO, *LONG)) as process:
        wait_for_row(history.run, reached + 2)
        ranks = children(process.pid)
        os.kill(ranks[1], signal.SIGKILL)
        assert process.wait(20) == 1
    assert "rank 1 was ended by SIGKILL" in history.output.read_text()
    assert not any(map(at_work, ranks))

    begin = len(read_rows(history.run / "metrics.jsonl"))
    with started(history, after=(*TWO, *LONG)) as process:
        wait_for_row(history.run, begin + 2)
        ranks = children(process.pid)
        process.kill()
        deadline = time.monotonic() + kills.TIMEOUT_S
        while any(map(at_work, ranks)):
            assert time.monotonic() < deadline, "ranks go on without the process that started them"
            time.sleep(0.05)
    rows = read_rows(history.run / "metrics.jsonl")
    assert kills.stands_at(history.run) == len(rows), "a restart point of the step that was reached"

    with started(history, after=(*TWO, *LONG, f"training.max_steps={len(rows) + 1}")) as process:
        assert process.wait(kills.TIMEOUT_S) == 0, history.output.read_text()
    assert verify_run(history.run)[1] == []


@posix
def test_torchrun_starts_the_ranks_of_a_whole_suite(tmp_path: Path) -> None:
    history = History(tmp_path / "suite", ("name=run",))
    history.words()
    config = history.folder / "run.yaml"
    lines = config.read_text().splitlines()
    base = "\n".join(f"  {line}" for line in lines)
    config.write_text(f"base:\n{base}\nvary:\n  - {{name: a, seeds.weights: 1}}\n  - {{name: b, seeds.weights: 2}}\n")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    with started(history, *torchrun, after=("training.max_steps=3",)) as process:
        assert process.wait(kills.TIMEOUT_S) == 0, history.output.read_text()
    for name in ("run-a", "run-b"):
        run = history.run.with_name(name)
        assert len(read_rows(run / "metrics.jsonl")) == 4
        assert list(step_folders(run / "checkpoints")) == [0, 1, 2, 3]
    assert history.output.read_text().count("nats per token at the final weights") == 1


def test_several_devices_need_several_processes(tmp_path: Path) -> None:
    history = History(tmp_path / "run")
    suite = load(history.words()[1], ("training.fabric.num_devices=2",))
    with pytest.raises(UserError, match="`pico-train run` or torchrun starts the processes"):
        pico_train.train(suite)
    assert processes_to_start(suite.runs, Place()) == 2
    assert processes_to_start(suite.runs, Place(1, 2, 1, 2)) == 1
    nodes = load(history.words()[1], ("training.fabric.num_nodes=4",))
    with pytest.raises(UserError, match=r"training\.fabric\.num_nodes: 4: on more than one machine srun or torchrun"):
        processes_to_start(nodes.runs, Place())
    with pytest.raises(UserError, match="the runs of a suite are trained by the same processes"):
        processes_to_start((*suite.runs, *nodes.runs), Place())


@pytest.mark.parametrize(
    ("nodes", "first"), [("n1", "n1"), ("n1,n2", "n1"), ("gpu[007-9,12]", "gpu007"), ("a[3],b", "a3")]
)
def test_the_first_host_of_slurm(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
