"""Trackers, each with its real library: what they show against ``metrics.jsonl``, over stops, kills, and faults of their own."""

import csv
import json
import logging
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.fabric.loggers import Logger

from pico_train import trackers
from pico_train.errors import UserError
from pico_train.metrics_log import MetricsLog, Row, read_rows
from pico_train.tracker_loggers import (
    TRACKERS,
    WANDB_BLOCK,
    Opened,
    TrackedRun,
    open_wandb,
    wandb_last_step,
    wandb_records,
)
from pico_train.trackers import POINTS, Trackers, unsent

PROJECT = "pico"
LAST = 20
TIMINGS = ("tokens_per_s",)  # the numbers that a repeated pass does not repeat
Show = Callable[[Path], list[dict[str, float]]]


# ---- a run


def row(step: int, life: int) -> Row:
    return Row(
        step=step,
        tokens=step * 128,
        loss=None if step == 5 else 6.0 / (step + 1),
        val_loss=5.5 - step / 10 if step % 4 == 0 else None,
        lr=None if step == LAST else 1e-3 * (step + 1),
        grad_norm=1.0 + step / 3,
        grad_norms=None,
        noise_scale=None,
        updated=True,
        seconds=0.1,
        data_seconds=0.0,
        save_seconds=0.0,
        tokens_per_s=1000.0 * life + step,
        mfu=None,
        memory_bytes=3 * 2**30 + step,
    )


def follow(run: Path, names: list[str], step: int, **more: Any) -> Trackers:
    return Trackers(
        names,
        run_folder=run,
        run=run.name,
        run_id=run.name,
        project=PROJECT,
        entity=None,
        config={"model": {"d_model": 16}},
        step=step,
        **more,
    )


def live(run: Path, names: list[str], steps: range, life: int = 1, **more: Any) -> None:
    """The passes ``steps`` of a run, as ``run.py`` makes them."""
    with MetricsLog(run / "metrics.jsonl", steps.start) as metrics, follow(run, names, steps.start, **more):
        for step in steps:
            metrics.append(row(step, life))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / tmp_path.name  # the name is also its id, and trackio keeps the runs of all tests in one folder
    folder.mkdir()
    return folder


# ---- what each tracker shows, read with its own library or an independent one


def shown_by_csv(run: Path) -> list[dict[str, float]]:
    with (run / "trackers/csv/metrics.csv").open(newline="") as file:
        return [{key: float(value) for key, value in line.items() if value} for line in csv.DictReader(file)]


def shown_by_tensorboard(run: Path) -> list[dict[str, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "trackers/tensorboard"), size_guidance={"scalars": 0}).Reload()
    points = [(event.step, tag, event.value) for tag in events.Tags()["scalars"] for event in events.Scalars(tag)]
    return rows_of(points)


def shown_by_wandb(run: Path) -> list[dict[str, float]]:
    histories = [record.history for file in wandb_files(run) for record in wandb_records(file) if record.history.item]
    rows = [{item.nested_key[0]: json.loads(item.value_json) for item in history.item} for history in histories]
    return [{key: value for key, value in entry.items() if not key.startswith("_")} for entry in rows]


def wandb_files(run: Path) -> list[Path]:
    return sorted((run / "trackers/wandb/wandb").glob(f"offline-run-*-{run.name}/run-{run.name}.wandb"))


def shown_by_trackio(run: Path) -> list[dict[str, float]]:
    with closing(sqlite3.connect(Path(os.environ["TRACKIO_DIR"]) / f"{PROJECT}.db")) as database:
        query = "SELECT step, metrics FROM metrics WHERE run_id = ? AND run_name = ? ORDER BY step, id"
        found = database.execute(query, (run.name, run.name)).fetchall()
    return [{"step": step, **json.loads(metrics)} for step, metrics in found]


def rows_of(points: list[tuple[int, str, float]]) -> list[dict[str, float]]:
    """Points, put together by step; a second point of a step and tag makes a second row of that step."""
    rows: list[dict[str, float]] = []
    for step, tag, value in sorted(points):
        home = next((entry for entry in rows if entry["step"] == step and tag not in entry), None)
        if home is None:
            rows.append(home := {"step": step})
        home[tag] = value
    return rows


@pytest.fixture(scope="module", autouse=True)
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The libraries' own folders and modes, which they read once per process."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        for name in ("TRACKIO_DIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
            patch.setenv(name, str(home / name.lower()))
        yield


REAL = {
    "csv": ("lightning", shown_by_csv),
    "tensorboard": ("tensorboard", shown_by_tensorboard),
    "trackio": ("trackio", shown_by_trackio),
    "wandb": ("wandb", shown_by_wandb),
}


def installed(name: str) -> Show:
    library, show = REAL[name]
    pytest.importorskip(library, reason=f"{library} comes with pico-train[trackers]")
    return show


@pytest.fixture(params=list(REAL))
def tracker(request: pytest.FixtureRequest) -> tuple[str, Show]:
    return request.param, installed(request.param)


def assert_shows_the_log(name: str, shown: list[dict[str, float]], run: Path, *, also_timings: bool) -> None:
    """One point per step and number, equal to the log's; TensorBoard keeps 32 bits."""
    expected = [
        {"step": entry["step"]} | {key: entry[key] for key in POINTS if entry[key] is not None}
        for entry in read_rows(run / "metrics.jsonl")
    ]
    assert [entry["step"] for entry in shown] == [entry["step"] for entry in expected]
    for left_out in () if also_timings else TIMINGS:
        for entry in (*expected, *shown):
            del entry[left_out]
    tolerance = 1e-7 if name == "tensorboard" else 0.0
    for mine, right in zip(shown, expected, strict=True):
        assert mine == pytest.approx(right, rel=tolerance, abs=0.0)


# ---- stops and kills


def test_shows_every_row_of_an_uninterrupted_run(tracker: tuple[str, Show], run: Path) -> None:
    name, show = tracker
    live(run, [name], range(LAST + 1))
    assert_shows_the_log(name, show(run), run, also_timings=True)
    assert json.loads((run / "trackers/sent.json").read_text()) == {name: LAST}


@pytest.mark.parametrize("known", [10, 6, None], ids=["sent.json is right", "sent.json is behind", "sent.json is gone"])
def test_one_point_per_step_after_a_stop_at_10_and_a_resume_at_8(
    tracker: tuple[str, Show], run: Path, known: int | None
) -> None:
    name, show = tracker
    live(run, [name], range(11))
    if known is None:
        (run / "trackers/sent.json").unlink()
    else:
        (run / "trackers/sent.json").write_text(json.dumps({name: known}))
    live(run, [name], range(8, LAST + 1), life=2)
    # csv and TensorBoard show the passes that count; wandb and trackio keep the first point of a step, whose timings are of the first life
    assert_shows_the_log(name, show(run), run, also_timings=name in ("csv", "tensorboard"))


def test_a_stop_that_comes_before_the_passes_are_made_again_leaves_no_gap(tracker: tuple[str, Show], run: Path) -> None:
    name, show = tracker
    live(run, [name], range(11))
    live(run, [name], range(8, 9), life=2)
    live(run, [name], range(9, LAST + 1), life=3)
    assert_shows_the_log(name, show(run), run, also_timings=name in ("csv", "tensorboard"))


KILLED = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_trackers import MetricsLog, follow, row
from pico_train import trackers
trackers.LOOK_EVERY_S = 0.01
run = Path({run!r})
with MetricsLog(run / "metrics.jsonl", 0) as metrics, follow(run, {names!r}, 0) as following:
    for step in range(11):
        metrics.append(row(step, 1))
        while any(thread.taken < step and thread.is_alive() for thread in following._threads):
            time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_one_point_per_step_after_a_kill(run: Path) -> None:
    names = [name for name, (library, _) in REAL.items() if _is_installed(library)]
    script = KILLED.format(tests=str(Path(__file__).parent), run=str(run), names=names)
    alone = {key: value for key, value in os.environ.items() if key != "WANDB_SERVICE"}  # not this process's wandb
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=alone)
    assert process.returncode == -9, process.stderr
    assert read_rows(run / "metrics.jsonl")[-1]["step"] == 10
    live(run, names, range(8, LAST + 1), life=2)
    for name in names:
        assert_shows_the_log(name, REAL[name][1](run), run, also_timings=False)


def _is_installed(library: str) -> bool:
    try:
        __import__(library)
    except ImportError:
        return False
    return True


def test_a_tracker_that_is_added_later_gets_the_whole_history(tracker: tuple[str, Show], run: Path) -> None:
    name, show = tracker
    live(run, [], range(LAST + 1))
    assert unsent(run, [name], LAST) == [name]
    with follow(run, [name], LAST + 1):
        pass
    assert_shows_the_log(name, show(run), run, also_timings=True)
    assert unsent(run, [name], LAST) == []


def test_tensorboard_survives_a_clock_that_went_back(run: Path) -> None:
    show = installed("tensorboard")
    live(run, ["tensorboard"], range(11))
    (file,) = (run / "trackers/tensorboard").iterdir()
    file.rename(file.with_name(file.name.replace(file.name.split(".")[3], "9999999999")))
    live(run, ["tensorboard"], range(8, LAST + 1), life=2)
    assert_shows_the_log("tensorboard", show(run), run, also_timings=True)


def test_trackio_on_a_network_drive_writes_to_its_inbox(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    show = installed("trackio")
    monkeypatch.setenv("TRACKIO_STORAGE_MODE", "jsonl")
    from trackio import fragments

    live(run, ["trackio"], range(11))
    (run / "trackers/sent.json").write_text(json.dumps({"trackio": 6}))
    live(run, ["trackio"], range(8, LAST + 1), life=2)
    fragments.import_inbox_dir()  # what `trackio show` begins with
    assert_shows_the_log("trackio", show(run), run, also_timings=False)


def test_wandb_is_told_id_config_and_axis(run: Path) -> None:
    installed("wandb")
    live(run, ["wandb"], range(3))
    (file,) = wandb_files(run)
    records = list(wandb_records(file))
    (told,) = [record.run for record in records if record.HasField("run")]
    assert (told.run_id, told.display_name, told.project, told.resume) == (run.name, run.name, PROJECT, True)
    metrics = [record.metric for record in records if record.HasField("metric")]
    assert [(metric.name, metric.glob_name, metric.step_metric) for metric in metrics] == [
        ("step", "", ""),
        ("", "*", "step"),
    ]
    config = [update for record in records for update in (*record.config.update, *record.run.config.update)]
    assert [json.loads(update.value_json) for update in config if update.key == "model"] == [{"d_model": 16}]


def test_the_files_of_wandb_are_read_across_blocks_and_up_to_a_cut(run: Path) -> None:
    installed("wandb")
    run = run.with_name("many_rows")
    run.mkdir()
    rows = [asdict(row(step % LAST, 1)) | {"step": step} for step in range(400)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in rows))
    with follow(run, ["wandb"], 0):
        pass
    (file,) = wandb_files(run)
    assert file.stat().st_size > 3 * WANDB_BLOCK
    assert [entry["step"] for entry in shown_by_wandb(run)] == list(range(400))
    file.write_bytes(file.read_bytes()[: 2 * WANDB_BLOCK + 1234])  # a kill
    left = [entry["step"] for entry in shown_by_wandb(run)]
    assert left == list(range(len(left)))
    assert 100 < len(left) < 400
    assert wandb_last_step([file]) == left[-1]


def test_wandb_online_goes_on_from_what_the_server_has(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed("wandb")
    import wandb

    asked: dict[str, Any] = {}

    def init(**settings: Any) -> SimpleNamespace:
        asked.update(settings)
        nothing = SimpleNamespace(update=lambda *a, **k: None)
        return SimpleNamespace(
            summary={"step": 12}, config=nothing, url="https://server/run", define_metric=lambda *a, **k: None
        )

    monkeypatch.setattr(wandb, "setup", lambda: SimpleNamespace(settings=SimpleNamespace(mode="online")))
    monkeypatch.setattr(wandb, "login", lambda **_: True)
    monkeypatch.setattr(wandb, "init", init)
    opened = open_wandb(TrackedRun("demo", "id7", PROJECT, "team", {}, run), sent=3, step=8)
    assert opened.first == 13
    assert (asked["id"], asked["resume"], asked["mode"], asked["entity"]) == ("id7", "allow", None, "team")


def test_wandb_without_a_key_is_offline_and_asks_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    show = installed("wandb")
    import wandb

    monkeypatch.setattr(wandb, "setup", lambda: SimpleNamespace(settings=SimpleNamespace(mode="online")))
    monkeypatch.setattr(wandb, "login", lambda *, prompt, verify: prompt)  # a prompt would be answered with a key
    with caplog.at_level(logging.WARNING, "pico_train"):
        opened = open_wandb(TrackedRun(run.name, run.name, PROJECT, None, {}, run / "trackers/wandb"), sent=-1, step=0)
        opened.logger.log_metrics({"loss": 1.0}, 0)
        opened.logger.finalize("success")
    assert "wandb login" in caplog.text
    assert show(run) == [{"step": 0, "loss": 1.0}]


# ---- trackers at fault


class Fake(Logger):
    """A tracker that may wait or raise before it takes a row."""

    def __init__(self, before: Callable[[int], None]) -> None:
        self.before, self.taken = before, []

    name = version = "fake"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.before(step)
        self.taken.append(step)

    def log_hyperparams(self, params: Any) -> None: ...


def use(monkeypatch: pytest.MonkeyPatch, fake: Fake) -> None:
    """Make ``fake`` the tracker wandb."""
    monkeypatch.setitem(TRACKERS, "wandb", ("json", lambda run, sent, step: Opened(fake, sent + 1, "a fake")))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_tracker_that_raises_is_off_with_one_warning_and_gets_the_rest_at_the_next_start(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123secret")

    def raises(step: int) -> None:
        if step >= 3:
            raise RuntimeError("refused with key 0123secret")

    fake = Fake(raises)
    use(monkeypatch, fake)
    live(run, ["wandb", "csv"], range(11))
    assert [step["step"] for step in read_rows(run / "metrics.jsonl")] == list(range(11))
    assert_shows_the_log("csv", shown_by_csv(run), run, also_timings=True)
    (warning,) = warnings(caplog)
    assert warning.startswith("wandb is off for the rest of this run (RuntimeError: refused with key ***)")
    assert "the next start of the same command sends what is missing" in warning

    fake.before = lambda step: None
    fake.taken.clear()
    live(run, ["wandb"], range(11, LAST + 1))
    assert fake.taken == list(range(LAST + 1))  # no row of the first life was known to have arrived


def test_a_stuck_tracker_holds_up_nothing_and_the_wait_for_it_is_bounded(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go_on, reached = threading.Event(), threading.Event()

    def stuck(step: int) -> None:
        reached.set()
        assert go_on.wait(10)

    fake = Fake(stuck)
    use(monkeypatch, fake)
    with MetricsLog(run / "metrics.jsonl", 0) as metrics:
        with follow(run, ["wandb"], 0, close_seconds=0.05) as following:
            metrics.append(row(0, 1))
            assert reached.wait(10)
            for step in range(1, LAST + 1):  # every row is written while the tracker still holds the first
                metrics.append(row(step, 1))
            assert fake.taken == []
        (warning,) = warnings(caplog)
        assert warning.startswith(f"wandb is not done after 0.05 s, {LAST + 1} rows left")
        assert unsent(run, ["wandb"], LAST) == ["wandb"]
        go_on.set()
        following._threads[0].join(10)
    assert fake.taken == list(range(LAST + 1))
    assert unsent(run, ["wandb"], LAST) == []


def test_a_slow_tracker_is_waited_for_at_the_end(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = threading.Event()
    fake = Fake(lambda step: written.wait(10) and None)
    use(monkeypatch, fake)
    with MetricsLog(run / "metrics.jsonl", 0) as metrics, follow(run, ["wandb"], 0):
        for step in range(LAST + 1):
            metrics.append(row(step, 1))
        written.set()
    assert fake.taken == list(range(LAST + 1))


def test_points_that_are_about_to_be_replaced_no_longer_count_as_sent(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake(lambda step: None)
    use(monkeypatch, fake)
    live(run, ["wandb"], range(11))

    def opens_at_8_and_dies(step: int) -> None:
        raise RuntimeError

    dying = Fake(opens_at_8_and_dies)
    monkeypatch.setitem(TRACKERS, "wandb", ("json", lambda tracked, sent, step: Opened(dying, step, "a fake")))
    live(run, ["wandb"], range(8, 12))
    assert json.loads((run / "trackers/sent.json").read_text()) == {"wandb": 7}


def test_a_row_that_is_half_written_waits(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n{"st')
    with path.open("rb") as file, path.open("ab") as more:
        assert list(trackers._new_rows(file)) == [{"step": 0}]
        more.write(b'ep": 1}\n')
        more.flush()
        assert list(trackers._new_rows(file)) == [{"step": 1}]
        assert list(trackers._new_rows(file)) == []


def test_a_run_that_fails_is_marked_so(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    fake = Fake(lambda step: None)
    fake.finalize = ended.append  # type: ignore[method-assign]
    use(monkeypatch, fake)
    live(run, ["wandb"], range(3))
    with pytest.raises(ZeroDivisionError), follow(run, ["wandb"], 3):
        raise ZeroDivisionError
    assert ended == ["success", "failed"]


# ---- bad input


def test_an_unknown_tracker_is_refused(run: Path) -> None:
    with pytest.raises(
        UserError, match=r"monitoring\.trackers: 'tensorbord' .* csv, tensorboard.*did you mean tensorboard"
    ):
        follow(run, ["tensorbord"], 0)


def test_a_tracker_that_is_not_installed_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        UserError, match=r"monitoring\.trackers: wandb cannot be used .*pip install 'pico-train\[trackers\]'"
    ):
        follow(run, ["csv", "wandb"], 0)
    assert not (run / "trackers").exists()
