"""How long a start takes until its first row is logged, from step 10 and from step 100,000.

    python benchmarks/resume_time.py [--repeats 5] [--late 100000]

A tiny run is killed in step 10. A copy of its folder then claims to stand at the late step: checkpoint, log with a row for each step
before it, and a milestone at every thousandth. Both are started in turn, as a user starts them and as a fork of a process that has its
imports behind it, and killed once a row is there. Time is that of the process from its start to that row; the median is printed.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "train"))

import kills

from pico_train.checkpoint.format import MANIFEST, FileRow, file_hash, read_manifest, seal
from pico_train.checkpoint.write import manifest_text
from pico_train.metrics_log import read_rows

EARLY = 10
STATE = "training_state/state.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5, help="starts of each kind from each step (default: 5)")
    parser.add_argument("--late", type=int, default=100_000, help="the late step (default: 100000)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kills.preload()
        runs = {EARLY: killed_early(Path(folder), arguments.late)}
        runs[arguments.late] = claiming(runs[EARLY], arguments.late)
        for name, measure in (("pico-train run", as_user), ("the same, imports done", forked)):
            seconds: dict[int, list[float]] = {step: [] for step in runs}
            for repeat in range(arguments.repeats + 1):
                for step, history in runs.items():
                    taken = measure(history, step)
                    assert read_rows(history.run / "metrics.jsonl")[step]["step"] == step, "it began somewhere else"
                    if repeat:  # the first reads the files and libraries from the disk
                        seconds[step].append(taken)
            early, late = (statistics.median(taken) for taken in seconds.values())
            print(
                f"{name}: first row after {early:.3f} s from step {EARLY}, {late:.3f} s from step {arguments.late:,}: "
                f"ratio {late / early:.2f} ({arguments.repeats} starts each)"
            )


def killed_early(folder: Path, late: int) -> kills.History:
    """A run of more than ``late`` steps, killed in step ``EARLY`` once its checkpoint was published."""
    history = kills.History(
        folder / "early",
        (
            f"training.max_steps={late + 1000}",
            "evaluation.metrics=null",
            "checkpointing.save_every_n_steps=1000",
            f"checkpointing.schedule={{log2_until: 0, also: [{EARLY}]}}",
            "checkpointing.restart.every_n_steps=0",
            "checkpointing.ignore_disk_space=true",
        ),
    )
    history.kill(kills.Moment(kills.RENAME, 1, file=f"step_{EARLY}.tmp"))
    return history


def claiming(history: kills.History, late: int) -> kills.History:
    """A copy of ``history`` that says it has come to step ``late``."""
    copy = kills.History(history.folder.with_name("late"), history.overrides)
    shutil.copytree(history.folder, copy.folder)
    checkpoints = copy.run / "checkpoints"
    for step in range(1000, late + 1, 1000):
        claim(checkpoints / f"step_{EARLY}", checkpoints / f"step_{step}", step)
    if late % 1000:
        claim(checkpoints / f"step_{EARLY}", checkpoints / f"step_{late}", late)
    row = read_rows(copy.run / "metrics.jsonl")[5]
    with (copy.run / "metrics.jsonl").open("w", encoding="utf-8") as log:
        log.writelines(json.dumps(row | {"step": step, "tokens": step * 128}) + "\n" for step in range(late))
    return copy


def claim(source: Path, folder: Path, step: int) -> None:
    """A checkpoint like ``source`` that says it is of ``step``."""
    shutil.copytree(source, folder, copy_function=os.link)
    state = json.loads((source / STATE).read_text(encoding="utf-8")) | {"step": step, "tokens": step * 128}
    (folder / STATE).unlink()
    (folder / STATE).write_text(json.dumps(state), encoding="utf-8")
    manifest = read_manifest(source)
    row = FileRow(path=STATE, bytes=(folder / STATE).stat().st_size, sha256=file_hash(folder / STATE))
    files = [row if old.path == STATE else old for old in manifest.files]
    (folder / MANIFEST).unlink()
    claimed = manifest.model_copy(update={"step": step, "files": files})
    (folder / MANIFEST).write_text(manifest_text(claimed.model_copy(update={"sha256": seal(claimed.model_dump())})))


def as_user(history: kills.History, step: int) -> float:
    """Seconds from the start of an interpreter to a row for ``step`` in the log."""
    log = history.run / "metrics.jsonl"
    kept = next_row(log, step)
    os.truncate(log, kept)
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "pico_train.cli", *history.words()],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while log.stat().st_size <= kept:
        assert process.poll() is None, "the trainer ended before its first row"
        time.sleep(0.001)
    seconds = time.perf_counter() - began
    process.kill()
    process.wait()
    return seconds


def next_row(log: Path, step: int) -> int:
    """Where in ``log`` the row of ``step`` begins, or would begin."""
    content = log.read_bytes()
    found = content.find(f'{{"step": {step},'.encode())
    return len(content) if found < 0 else found


def forked(history: kills.History, step: int) -> float:
    """The same from the fork of a process that has imported torch and lightning."""
    return kills.start(history.words(), history.output, moment=kills.Moment(kills.ROW, 1)).seconds


if __name__ == "__main__":
    main()
