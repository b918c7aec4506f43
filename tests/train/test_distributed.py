"""Two ranks on one machine over gloo: what they compute, store and say is what one process does, and none hangs when one is lost.

The ranks are real processes that run the command line. Losses and tensors agree to the rounding of fp32: sums over the batch are taken in
another order, and AdamW divides by the root of small second moments.
"""

import json
import os
import re
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import kills
import pytest
import several
import torch
from kills import MAX_STEPS, History
from safetensors.torch import load_file
from several import ACCUMULATION, assert_same_checkpoints, assert_same_rows, killed_at, trained

from pico_train.checkpoint.format import read_manifest, step_folders
from pico_train.checkpoint.verify import verify_run
from pico_train.metrics_log import read_rows

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="ranks are forked from a process that has imported torch"
)

STRATEGIES = ("ddp", "fsdp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of this module are, each in a folder of its own."""
    kills.preload()
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def one(folder: Path) -> History:
    """The run of a single process."""
    return trained(folder, "one", 1, "monitoring.gradient_norms=layers", "monitoring.gradient_noise_scale=true")


@pytest.fixture(scope="module", params=STRATEGIES)
def two(folder: Path, request: pytest.FixtureRequest) -> History:
    """The same run as two ranks."""
    looks = ("monitoring.gradient_norms=layers", "monitoring.gradient_noise_scale=true")
    return trained(folder, request.param, 2, f"training.fabric.strategy={request.param}", *looks)


def test_two_ranks_train_capture_and_store_what_one_does(one: History, two: History) -> None:
    assert_same_checkpoints(one, two)
    assert_same_rows(one, two)


@pytest.mark.parametrize("two", ["ddp"], indirect=True)
def test_the_noise_scale_is_that_of_all_micro_batches(one: History, two: History) -> None:
    noise = [[row["noise_scale"] for row in read_rows(history.run / "metrics.jsonl")] for history in (one, two)]
    for a, b in zip(*noise, strict=True):
        assert b == (None if a is None else pytest.approx(a, rel=1e-3))  # a difference of nearly equal numbers


def test_ranks_and_strategy_are_said_and_stored(two: History) -> None:
    name = two.folder.name
    assert f"2 ranks by {name}, each" in (two.run / "train.log").read_text()
    made_by = read_manifest(two.run / "checkpoints" / "step_3").made_by
    assert (made_by.world_size, made_by.strategy) == (2, name)


def test_rank_0_alone_writes_and_speaks(two: History) -> None:
    assert several.said(two.folder, 1) == ""
    assert kills.leftovers(two.run) == []
    assert f"process {os.getpid()}" not in (two.run / "run.lock").read_text()


def test_tied_embeddings_are_one_tensor_under_sharding(folder: Path) -> None:
    whole, sharded = (
        trained(folder, f"tied-{n}", n, "model.tie_embeddings=true", "training.fabric.strategy=fsdp") for n in (1, 2)
    )
    assert "lm_head.weight" not in load_file(sharded.run / "checkpoints" / "step_14" / "model.safetensors")
    assert_same_checkpoints(whole, sharded)


# ---- going on with another number of ranks


@pytest.mark.parametrize(
    "ways",
    [[(1, "auto"), (2, "ddp"), (1, "auto")], [(2, "fsdp"), (1, "auto"), (2, "ddp")], [(2, "ddp"), (2, "fsdp")]],
    ids=["1-2-1", "sharded-1-2", "ddp-sharded"],
)
def test_a_run_goes_on_with_another_number_of_ranks(one: History, folder: Path, ways: list[tuple[int, str]]) -> None:
    """Each start but the last is ended by the loss of a rank, without a hang, and the next goes on from the last restart point."""
    name = "-".join(f"{n}{strategy}" for n, strategy in ways)
    stood = []
    for number, (n, strategy) in enumerate(ways):
        overrides = (f"{ACCUMULATION}={4 // n}", f"training.fabric.strategy={strategy}")
        history = History(folder / name, (*overrides, "monitoring.gradient_norms=layers"))
        stood.append(kills.stands_at(history.run))
        last = number == len(ways) - 1
        prepare = None if last else killed_at(5 + number, rank=n - 1)
        ranks = several.run(history.words(), history.folder, n, prepare)
        printed = ranks.printed(0)
        assert all(code == 0 for code in ranks.codes) == last, printed
        if not last:
            assert ranks.codes[n - 1] == -signal.SIGKILL
            assert n == 1 or "rank 0 has lost the other ranks" in printed
    assert [int(step) for step in re.findall(r"from step (\d+);", printed)] == stood
    assert stood == sorted(set(stood))
    assert_same_checkpoints(one, history)
    assert_same_rows(one, history)


# ---- rank 0 decides


def _slow_save(rank: int) -> None:
    if rank == 0:
        from pico_train.checkpoint.save import Saver

        real = Saver._publish

        def slow(self: Saver, *args: Any) -> None:
            time.sleep(0.3)
            real(self, *args)

        Saver._publish = slow  # type: ignore[method-assign]


def test_ranks_wait_for_a_slow_save_and_agree_on_what_exists(folder: Path) -> None:
    history = History(
        folder / "slow",
        (f"{ACCUMULATION}=2", "checkpointing.restart.every_n_steps=4", "checkpointing.save_every_n_steps=7"),
    )
    ranks = several.run(history.words(), history.folder, prepare=_slow_save)
    assert ranks.codes == [0, 0], ranks.printed(0)
    assert verify_run(history.run)[1] == []
    assert list(step_folders(history.run / "checkpoints")) == [0, 1, 2, 4, 7, 14]
    assert list(step_folders(history.run / "restart")) == [12]  # 8 before it; one is kept


def test_a_finished_run_says_so_on_rank_0(one: History, two: History) -> None:
    overrides = (f"{ACCUMULATION}=2", f"training.fabric.strategy={two.folder.name}")
    ranks = several.run(History(two.folder, overrides).words(), two.folder)
    assert ranks.codes == [0, 0]
    assert "run is finished: 14 steps" in ranks.printed(0)
    assert ranks.printed(1) == ""


def wait_for_row(run: Path, step: int) -> None:
    """Return once the log has the row of ``step``."""
    deadline = time.monotonic() + kills.TIMEOUT_S
    while len(read_rows(run / "metrics.jsonl")) <= step:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(("who", "strategy"), [((0, 1), "ddp"), ((1,), "fsdp")], ids=["all", "rank 1"])
def test_a_signal_stops_all_ranks_with_a_restart_point(
    one: History, folder: Path, who: tuple[int, ...], strategy: str
) -> None:
    history = History(folder / f"signal-{strategy}", (f"{ACCUMULATION}=2", f"training.fabric.strategy={strategy}"))
    ranks = several.start([history.words()] * 2, history.folder, _slow_passes)
    wait_for_row(history.run, 6)
    for rank in who:
        os.kill(int(ranks.processes[rank].pid or 0), signal.SIGTERM)
    assert ranks.wait() == [75, 75], ranks.printed(0)
    [stopped] = re.findall(r"stopped by .* at step (\d+); the same command goes on there", ranks.printed(0))
    assert int(stopped) == kills.stands_at(history.run)
    assert several.run(history.words(), history.folder).codes == [0, 0]
    assert_same_checkpoints(one, history)


def _slow_passes(rank: int) -> None:
    from pico_train import loop

    real = loop.update

    def slow(*args: Any) -> None:
        time.sleep(0.05)
        real(*args)

    loop.update = slow


# ---- what is refused, and what fails


def test_ranks_with_different_settings_are_refused(folder: Path) -> None:
    history = History(folder / "settings")
    words = history.words()
    ranks = several.start([words, [*words, "seeds.data=1", "model.d_model=32"]], history.folder)
    assert ranks.wait() == [2, 2]
    assert ranks.printed(0).splitlines() == [
        "error: rank 1 has another configuration than rank 0:",
        "  run: model.d_model: 16 on rank 0, 32 on rank 1",
        "  run: seeds.data: 0 on rank 0, 1 on rank 1",
    ]
    assert ranks.printed(1) == ""
    assert not history.run.exists()


def _elsewhere(folder: Path, rank: int) -> None:
    os.chdir(folder / str(rank))


def test_ranks_with_different_data_are_refused(folder: Path) -> None:
    history = History(folder / "data")
    words = [*history.words(), "data.dataset.path=story.txt", "data.cache_dir=caches"]
    story = (folder / "story.txt").read_text()
    for rank, text in enumerate((story, story.replace("a", "b", 1))):
        (history.folder / str(rank)).mkdir()
        (history.folder / str(rank) / "story.txt").write_text(text)
    ranks = several.run(words, history.folder, prepare=partial(_elsewhere, history.folder))
    assert ranks.codes == [2, 2]
    assert "error: rank 1 reads other data than rank 0:\n  fingerprint of the tokens: " in ranks.printed(0)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["training.fabric.num_devices=3"],
            "training.fabric.num_nodes, num_devices: 1 times 3 are asked for, and 2 were started",
        ),
        (
            [f"{ACCUMULATION}=1", "data.dataloader.batch_size=7"],
            "data.dataloader.batch_size: 7 does not divide into 2 equal parts (2 devices * 1 accumulation step); "
            "nearest sizes: 6 or 8",
        ),
    ],
    ids=["number", "batch"],
)
def test_what_several_ranks_cannot_do_is_refused(folder: Path, overrides: list[str], message: str) -> None:
    history = History(folder / re.sub(r"\W+", "-", message[:60]))
    batch = [] if "data.dataloader.batch_size=7" in overrides else ["data.dataloader.batch_size=12"]
    ranks = several.run([*history.words(), *batch, *overrides], history.folder)
    assert ranks.codes == [2, 2]
    assert message in ranks.printed(0)
    assert not history.run.exists()


def _hangs(rank: int) -> None:
    if rank == 1:
        from pico_train import loop

        loop.update = lambda *args: time.sleep(60)  # type: ignore[assignment]


def test_a_rank_that_hangs_ends_the_run_after_the_time_limit(folder: Path) -> None:
    history = History(folder / "hangs", (f"{ACCUMULATION}=2", "training.fabric.timeout_minutes=0.03"))
    ranks = several.start([history.words()] * 2, history.folder, _hangs)
    ranks.processes[0].join(20)
    assert ranks.processes[0].exitcode == 1
    ranks.processes[1].kill()
    assert "did not answer within training.fabric.timeout_minutes=0.03 (Timed out waiting" in ranks.printed(0)
    assert "The same command goes on from the last checkpoint" in ranks.printed(0)


def _full_disk(rank: int) -> None:
    from pico_train.checkpoint import write

    if rank == 0:

        def refuse(*args: Any, **kwargs: Any) -> None:
            raise OSError(28, "No space left on device")

        write.save_file = refuse


def test_a_full_disk_on_rank_0_ends_all_ranks_with_one_message(folder: Path) -> None:
    history = History(folder / "full", (f"{ACCUMULATION}=2",))
    ranks = several.run(history.words(), history.folder, prepare=_full_disk)
    assert ranks.codes == [1, 1]
    assert "step_0 could not be written: No space left on device" in ranks.printed(0)
    assert ranks.printed(1) == ""


def _infinite(rank: int) -> None:
    """The loss of the fourth micro-batch of pass 3, which is rank 1's second, is infinite."""
    from pico_train import run

    plain, calls = run.next_token, 0

    def objective(model: torch.nn.Module, batch: Any, step: int) -> torch.Tensor:
        nonlocal calls
        calls = calls + 1 if step == 3 else 0
        loss = plain(model, batch, step)
        return loss * float("inf") if rank == 1 and calls == 2 else loss

    run.next_token = objective


@pytest.mark.parametrize("rule", ["stop", "skip"])
def test_all_ranks_decide_alike_on_a_loss_that_is_not_finite(folder: Path, rule: str) -> None:
    history = History(folder / f"infinite-{rule}", (f"{ACCUMULATION}=2", f"training.non_finite={rule}"))
    ranks = several.run(history.words(), history.folder, prepare=_infinite)
    rows = read_rows(history.run / "metrics.jsonl")
    if rule == "stop":
        assert ranks.codes == [1, 1]
        assert "pass 3: the loss is inf in micro-batch 3 of 4" in ranks.printed(0)
        assert ranks.printed(1) == ""
        assert len(rows) == 3
    else:
        assert ranks.codes == [0, 0]
        assert [row["step"] for row in rows if not row["updated"]] == [3, MAX_STEPS]
        state = history.run / "checkpoints" / "step_4" / "training_state" / "state.json"
        assert json.loads(state.read_text())["skipped_updates"] == 1


def test_the_parts_of_a_step_of_slurm_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from pico_train.launch import Place, place

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # restored afterwards, whatever is set meanwhile
        monkeypatch.delenv(name)
    slurm = {
        "STEP_NUM_TASKS": 8,
        "STEP_NUM_NODES": 2,
        "STEP_NODELIST": "gpu[07-08]",
        "PROCID": 5,
        "LOCALID": 1,
        "NODEID": 1,
        "JOB_ID": 123,
    }
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    assert place() == Place(rank=5, size=8, local_rank=1, local_size=4)
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("gpu07", "20123")
