"""A run that is killed with SIGKILL, again and again, ends where it would have ended."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import kills
import pytest
from kills import MOMENTS, History, Moment

from pico_train.checkpoint.format import step_folders
from pico_train.checkpoint.verify import verify_run

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="trainers are forked from a process that has imported torch"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the histories of this module are, each in a folder of its own."""
    kills.preload()
    return tmp_path_factory.mktemp("kills")


@pytest.fixture(scope="module")
def whole(folder: Path) -> History:
    """The run that nobody stopped."""
    history = History(folder / "whole")
    history.finish()
    return history


@pytest.mark.parametrize("name", MOMENTS)
def test_killed_at_a_named_moment(folder: Path, whole: History, name: str) -> None:
    killed = History(folder / re.sub(r"\W+", "-", name))
    stood = killed.survive(kills.plan(name))
    assert not kills.differences(whole, killed), f"killed with {stood[-1]}"


@pytest.mark.parametrize("overrides", [(), ("checkpointing.optimizer_state=restart",)], ids=["all", "restart only"])
def test_killed_at_random_moments(folder: Path, overrides: tuple[str, ...]) -> None:
    whole = History(folder / f"random-{len(overrides)}-whole", overrides)
    began = time.perf_counter()
    whole.finish()
    whole_s = time.perf_counter() - began
    n_kills = seed = 0
    while n_kills < 6:
        killed = History(folder / f"random-{len(overrides)}-{seed}", overrides)
        stood = killed.survive(kills.delays(6, whole_s, seed))
        assert not kills.differences(whole, killed), f"killed with {stood}"
        n_kills += len(stood)
        seed += 1


def test_killed_as_the_process_that_a_user_starts(folder: Path, whole: History) -> None:
    killed = History(folder / "interpreter")
    command = [sys.executable, "-m", "pico_train.cli", *killed.words()]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + kills.TIMEOUT_S
    while not (killed.run / "checkpoints" / "step_3").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.002)
    process.kill()
    process.wait()
    killed.finish()
    assert not kills.differences(whole, killed)


def damage(folder: Path) -> None:
    """Change one byte of the weights: the size stays, the hash does not."""
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_killed_while_a_damaged_checkpoint_is_set_aside(folder: Path, whole: History) -> None:
    killed = History(folder / "set-aside")
    checkpoints = killed.run / "checkpoints"
    published = Moment(kills.RENAME, 1, file="step_9.tmp")
    killed.kill(published)
    damage(checkpoints / "step_9")
    killed.kill(Moment(kills.RENAME, 0, file="step_9"))
    killed.kill(Moment(kills.RENAME, 1, file="step_9"))
    killed.kill(published)  # once more, from step 6 on
    damage(checkpoints / "step_9")
    damage(checkpoints / "step_6")
    killed.finish()
    aside = [f"left over: checkpoints/step_{name}" for name in ("6.damaged", "9.damaged", "9.damaged-2")]
    assert kills.differences(whole, killed) == aside


def test_what_follows_a_checkpoint_that_is_set_aside_is_made_again(folder: Path) -> None:
    """A milestone without moments is newer than the damaged one, and names its manifest as its parent."""
    overrides = ("checkpointing.optimizer_state=2", "checkpointing.restart.every_n_steps=0")  # 0, 2, 4, 9, 14
    whole, killed = (History(folder / f"every-second-{name}", overrides) for name in ("whole", "killed"))
    whole.finish()
    killed.kill(Moment(kills.RENAME, 1, file="step_12.tmp"))
    damage(killed.run / "checkpoints" / "step_9")
    killed.finish()
    aside = ["left over: checkpoints/step_12.damaged", "left over: checkpoints/step_9.damaged"]
    assert kills.differences(whole, killed) == aside


def test_a_killed_run_may_go_on_with_more_saves(folder: Path) -> None:
    """Between two milestones that are there already, one of which it passes over because it has no moments."""
    killed = History(folder / "sparse", ("checkpointing.optimizer_state=restart",))
    killed.kill(Moment(kills.RENAME, 1, file="step_12.tmp"))  # the restart point is 10
    dense = History(killed.folder, (*killed.overrides, "checkpointing.save_every_n_steps=1"))
    dense.finish()
    assert list(step_folders(dense.run / "checkpoints")) == [0, 1, 2, 3, 4, 6, 9, 10, 11, 12, 13, 14]
    assert verify_run(dense.run) == (12, [])


def test_a_difference_is_found(folder: Path, whole: History) -> None:
    """The comparison itself: each kind of damage has its line."""

    def found(name: str) -> list[str]:
        copy = History(folder / f"tampered-{name}")
        shutil.copytree(whole.folder, copy.folder)
        log, step_6 = copy.run / "metrics.jsonl", copy.run / "checkpoints" / "step_6"
        rows = log.read_text().splitlines(keepends=True)
        match name:
            case "row missing":
                log.write_text("".join(rows[:5] + rows[6:]))
            case "row twice":
                log.write_text("".join([*rows, rows[-1]]))
            case "other loss":
                log.write_text("".join(rows).replace('"loss": 5', '"loss": 4', 1))
            case "checkpoint missing":
                shutil.rmtree(step_6)
            case "weights":
                damage(step_6)
            case "evaluation":
                (copy.run / "evaluations" / "step_6" / "held_out.json").write_text("{}")
            case "staging":
                (copy.run / "restart" / "step_5.tmp").mkdir()
        return kills.differences(whole, copy)

    assert any("row 5: step is 6 where it should be 5" in line for line in found("row missing"))
    assert any(line.startswith("row: [0, 1, ") for line in found("row twice"))
    assert any("row 0: loss is 4." in line for line in found("other loss"))
    assert found("checkpoint missing")[0].startswith("checkpoint: [0, 1, 2, 3, 4, 9, 12, 14] where")
    assert any("model.safetensors is not what was written" in line for line in found("weights"))
    assert any("held_out.json: step is None" in line for line in found("evaluation"))
    assert found("staging") == ["left over: restart/step_5.tmp"]
    other = History(folder / "other-seed", ("seeds.dropout=1",))
    other.finish()
    lines = kills.differences(whole, other)
    assert any(line.startswith("row 0: loss is") for line in lines)
    assert any(line.startswith("checkpoint 6: sha256 of ") for line in lines)


def test_a_moment_that_never_comes_and_a_start_that_hangs_are_told(folder: Path) -> None:
    never = History(folder / "never")
    with pytest.raises(AssertionError, match=r"ended without ever coming to Moment(.|\n)*step 14/14"):
        never.kill(Moment("pico_train.loop:update", 1, nth=1000))
    stuck = Moment("pico_train.loop:update", 1, nth=3, late_s=1000)
    with pytest.raises(AssertionError, match=r"hangs(.|\n)*from step 0(.|\n)*in armed(.|\n)*loop\.py"):
        kills.start(History(folder / "stuck").words(), folder / "stuck.txt", moment=stuck, timeout_s=3)
