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
import torch
from kills import History

import pico_train
from pico_train.checkpoint.format import step_folders
from pico_train.config import FabricConfig
from pico_train.errors import UserError
from pico_train.hardware import choose_hardware
from pico_train.launch import Place, first_host, processes_to_start
from pico_train.metrics_log import read_rows
from pico_train.suite import load

posix = pytest.mark.skipif(os.name != "posix", reason="signals and processes of POSIX")


@contextmanager
def started(history: History, *before: str, after: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """``pico-train`` as a user starts it, below ``before``, or as that does; killed at the end if it is still there."""
    words, output = history.words(), history.folder / "output.txt"
    command = [sys.executable, *before, *(() if "-c" in before else ("-m", "pico_train.cli")), *words, *after]
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


TWO = ("training.fabric.num_devices=2", "monitoring.logging.log_every_n_steps=1")
LONG = (
    "training.max_steps=100000",
    "training.optimization.lr_scheduler=constant",
    "checkpointing.save_every_n_steps=0",
)


@posix
def test_the_command_starts_its_ranks_and_a_signal_stops_them(tmp_path: Path) -> None:
    history = History(tmp_path / "run")
    with started(history, after=(*TWO, *LONG)) as process:
        wait_for_row(history.run, 3)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(kills.TIMEOUT_S) == 75, history.output.read_text()
    assert "2 ranks by ddp" in history.output.read_text()
    assert "run stopped by SIGUSR1 at step " in history.output.read_text()
    assert kills.stands_at(history.run) == len(read_rows(history.run / "metrics.jsonl")) >= 4


SLOW_TO_LEAVE = """
import atexit, os, pathlib, time
from pico_train import launch
from pico_train.cli import main

def leave():
    here = pathlib.Path(os.environ["LEAVING"], os.environ.get("RANK", "starter"))
    here.write_text(f"{os.getpid()} leaves")
    while not here.with_suffix(".signalled").exists():
        time.sleep(0.01)

atexit.register(leave)
launch.COMMAND = (*launch.COMMAND[:1], "-c", os.environ["ENTRY"])
main()
"""


@posix
def test_a_second_signal_while_they_end_does_not_change_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process is signalled again, in every way, once the run is saved and Python is about to leave."""
    history, leaving = History(tmp_path / "run"), tmp_path / "leaving"
    leaving.mkdir()
    monkeypatch.setenv("LEAVING", str(leaving))
    monkeypatch.setenv("ENTRY", SLOW_TO_LEAVE)
    with started(history, "-c", SLOW_TO_LEAVE, after=(*TWO, *LONG)) as process:
        wait_for_row(history.run, 3)
        process.send_signal(signal.SIGTERM)
        for here in (leaving / "0", leaving / "1", leaving / "starter"):
            deadline = time.monotonic() + kills.TIMEOUT_S
            while not (here.exists() and here.read_text()):
                assert time.monotonic() < deadline, history.output.read_text()
                time.sleep(0.01)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                os.kill(int(here.read_text().split()[0]), number)
            here.with_suffix(".signalled").touch()
        assert process.wait(kills.TIMEOUT_S) == 75, history.output.read_text()
    assert "was ended by" not in history.output.read_text()
    assert history.output.read_text().count("run stopped by SIGTERM at step ") == 1


RANK = """
import os, pathlib, signal, sys, time
from pico_train.launch import place, stop_with_the_starter

rank = place().rank
def stop(number, frame):
    os.write(1, f"{rank} {signal.Signals(number).name}\\n".encode())  # at once: the other writes into the same pipe
    sys.exit(75)

signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGUSR1, stop)
stop_with_the_starter()
pathlib.Path(sys.argv[1], str(rank)).write_text(str(os.getpid()))
if sys.argv[2] == "fail" and rank == 1:
    sys.exit(3)
if sys.argv[2] == "end":
    sys.exit(0)
time.sleep(60)
"""
START = """
import sys
from pico_train import launch
launch.COMMAND, launch.GRACE_S = (sys.executable, "-c", sys.argv[1]), 0.3
sys.exit(launch.start(2, sys.argv[2:]))
"""


@contextmanager
def stand_ins(folder: Path, what: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """``launch.start`` with two processes that stand in for ranks and do ``what``; and their ids, once both are ready."""
    command = [sys.executable, "-c", START, RANK, str(folder), what]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        deadline = time.monotonic() + kills.TIMEOUT_S
        while not all((folder / str(rank)).exists() and (folder / str(rank)).read_text() for rank in (0, 1)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield process, [int((folder / str(rank)).read_text()) for rank in (0, 1)]
        process.kill()


@posix
@pytest.mark.parametrize(("what", "code", "said"), [("end", 0, ""), ("fail", 3, "rank 0 does not end")])
def test_the_exit_code_is_that_of_the_first_rank_that_fails(tmp_path: Path, what: str, code: int, said: str) -> None:
    with stand_ins(tmp_path, what) as (process, _):
        output, _ = process.communicate(timeout=20)
    assert process.returncode == code
    assert said in output


@posix
def test_a_rank_that_is_killed_ends_the_others(tmp_path: Path) -> None:
    with stand_ins(tmp_path, "stay") as (process, ranks):
        os.kill(ranks[1], signal.SIGKILL)
        output, _ = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "rank 1 was ended by SIGKILL" in output


@posix
def test_signals_are_passed_on(tmp_path: Path) -> None:
    with stand_ins(tmp_path, "stay") as (process, _):
        process.send_signal(signal.SIGUSR1)
        output, _ = process.communicate(timeout=20)
    assert process.returncode == 75
    assert sorted(output.splitlines()) == ["0 SIGUSR1", "1 SIGUSR1"]


@posix
def test_ranks_stop_when_the_process_that_started_them_is_killed(tmp_path: Path) -> None:
    with stand_ins(tmp_path, "stay") as (process, _):
        process.kill()
        output, _ = process.communicate(timeout=20)  # ends when the last of them has
    assert sorted(output.splitlines()) == ["0 SIGTERM", "1 SIGTERM"]


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


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    fabric = FabricConfig(accelerator="cuda", precision="32-true", num_devices=2)
    with pytest.raises(
        UserError, match=r"num_devices: 2 processes on this machine, and it has 1 cuda device; use as many"
    ):
        choose_hardware(fabric, Place(0, 2, 0, 2))


def test_sharding_with_loss_scaling_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    fabric = FabricConfig(accelerator="cuda", precision="16-mixed", strategy="fsdp")
    with pytest.raises(UserError, match=r"training\.fabric\.strategy: fsdp has no loss scaling for precision 16-mixed"):
        choose_hardware(fabric, Place(0, 2, 0, 2))


@pytest.mark.parametrize(
    ("nodes", "first"), [("n1", "n1"), ("n1,n2", "n1"), ("gpu[007-9,12]", "gpu007"), ("a[3],b", "a3")]
)
def test_the_first_host_of_slurm(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
