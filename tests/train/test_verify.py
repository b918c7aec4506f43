"""``pico-train verify``: what does not belong together is named, and what a run goes through in its life is no fault."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

import pico_train
from pico_train.config import RunConfig, config_hash, load_config
from pico_train.metrics_log import MetricsLog, Row
from pico_train.strict_yaml import read_mapping

Pico = Callable[..., Result]
Tiny = Callable[..., RunConfig]
CONSTANT = "training.optimization.lr_scheduler=constant"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_yaml_in: Callable[[Path], Path]) -> Path:
    """A finished run with evaluations at each checkpoint, for copies to be changed."""
    yaml = tiny_yaml_in(tmp_path_factory.mktemp("made"))
    words = ("evaluation.metrics=[held_out, sample]", "evaluation.sample.max_new_tokens=2", "training.max_steps=4")
    [result] = pico_train.train(yaml, *words)
    return result.path


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def faults(pico: Pico, run: Path) -> list[str]:
    """What the command says; its last line and its exit code agree with that."""
    result = pico("verify", run)
    found = result.stderr.splitlines()
    n = "1 fault" if len(found) == 1 else f"{len(found)} faults"
    assert result.stdout.endswith(f", {n}\n"), result.output
    assert result.exit_code == bool(found)
    assert "Traceback" not in result.output
    return [line.replace(f"{run}/", "") for line in found]


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_row(run: Path, step: int, **values: Any) -> None:
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[step] |= values
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---- what is no fault


def test_a_copy_under_another_name(pico: Pico, copy: Path) -> None:
    assert faults(pico, copy) == []


def test_a_copy_without_the_newest_checkpoint(pico: Pico, copy: Path) -> None:
    shutil.rmtree(copy / "checkpoints" / "step_4")  # not copied yet, say: its evaluation has none
    assert faults(pico, copy) == []


def test_a_life_of_stops_other_settings_and_more_steps(pico: Pico, tiny: Tiny, tiny_yaml: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "tiny"
    first = (CONSTANT, "training.max_minutes=1e-6")  # one pass for each start
    lives = [
        (*first,),
        (*first, "training.optimization.gradient_accumulation_steps=4"),
        (*first, "evaluation.held_out.max_windows=4"),
        (CONSTANT, "training.max_steps=5"),
        (*first, "training.max_steps=7"),
        (CONSTANT, "training.max_steps=7"),
    ]
    for life in lives:
        assert pico("run", tiny_yaml, *life).exit_code in (0, 75)
        assert faults(pico, run) == []
    shutil.rmtree(run / "checkpoints" / "step_7")
    assert faults(pico, run) == []


def test_a_start_that_changed_the_settings_and_made_no_checkpoint(
    pico: Pico, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pico_train.train(tiny(CONSTANT))
    with monkeypatch.context() as patch:
        patch.setattr(MetricsLog, "sync", lambda self: os.kill(os.getpid(), signal.SIGINT))  # when the log is opened
        with pytest.raises(pico_train.errors.PicoError):
            pico_train.train(tiny(CONSTANT, "training.max_steps=8"))
    assert load_config(tmp_path / "runs" / "tiny" / "config.yaml").training.max_steps == 8
    assert faults(pico, tmp_path / "runs" / "tiny") == []


def test_an_evaluation_whose_checkpoint_a_kill_has_prevented(
    pico: Pico, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = MetricsLog.append

    def append_or_stop(self: MetricsLog, row: Row) -> None:
        if row.step == 4:
            raise KeyboardInterrupt
        append(self, row)

    monkeypatch.setattr(MetricsLog, "append", append_or_stop)
    with pytest.raises(KeyboardInterrupt):
        pico_train.train(tiny())
    run = tmp_path / "runs" / "tiny"
    shutil.rmtree(run / "checkpoints" / "step_4")
    assert (run / "evaluations" / "step_4" / "held_out.json").exists()
    assert faults(pico, run) == []


def test_the_hash_of_a_stored_configuration_is_that_of_the_settings(made: Path) -> None:
    assert config_hash(read_mapping(made / "config.yaml")) == config_hash(load_config(made / "config.yaml"))


# ---- the log


def test_a_line_that_is_no_row(pico: Pico, copy: Path) -> None:
    with (copy / "metrics.jsonl").open("a") as file:
        file.write("step 5 done\n")
    [fault] = faults(pico, copy)
    assert fault.startswith("metrics.jsonl has a line that is no row: b'step 5 done'")


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"tokens": 999}, "the row of step 3 has 999 tokens, by config.yaml there are 384"),
        ({"lr": 0.5}, "the row of step 3 has the learning rate 0.5, by config.yaml it is 0.00"),
        ({"loss": float("nan")}, "the row of step 3 holds what is no number: loss"),
        ({"updated": False}, "has 1 skipped update before step 4, checkpoints/step_4 has 0"),
    ],
)
def test_a_row_that_is_not_of_this_run(pico: Pico, copy: Path, values: dict[str, Any], fault: str) -> None:
    change_row(copy, 3, **values)
    [found] = faults(pico, copy)
    assert found.startswith("metrics.jsonl")
    assert fault in found


def test_a_row_without_its_numbers(pico: Pico, copy: Path) -> None:
    path = copy / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(5)))
    assert faults(pico, copy) == [
        "metrics.jsonl, the row of step 0 lacks tokens, loss, val_loss, lr, updated",
    ]


# ---- the configuration


def test_a_configuration_that_was_edited(pico: Pico, copy: Path) -> None:
    path = copy / "config.yaml"
    path.write_text(path.read_text().replace("norm_eps: 1.0e-06", "norm_eps: 1.0e-05"))
    [fault] = faults(pico, copy)
    assert fault.startswith("config.yaml was changed: its hash ")
    path.write_text(path.read_text().replace("norm_eps: 1.0e-05", "norm_eps: 1.0e-06") + "\n# a remark\n")
    assert faults(pico, copy) == []
    path.unlink()
    [fault] = faults(pico, copy)
    assert "no such file" in fault


# ---- evaluations


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"step": 1}, "is of step 1"),
        ({"weights_sha256": "0" * 64}, "was computed from other weights than those of checkpoints/step_2"),
        ({"loss": 1.5}, "has the loss 1.5, the row of step 2 in metrics.jsonl 5."),
    ],
)
def test_an_evaluation_of_something_else(pico: Pico, copy: Path, values: dict[str, Any], fault: str) -> None:
    change(copy / "evaluations" / "step_2" / "held_out.json", **values)
    [found] = faults(pico, copy)
    assert found.startswith(f"evaluations/step_2/held_out.json {fault}")


@pytest.mark.parametrize(
    ("text", "fault"), [("", "cannot be read: "), ('{"loss": 1', "cannot be read: "), ("[]", "is no evaluation")]
)
def test_an_evaluation_that_cannot_be_read(pico: Pico, copy: Path, text: str, fault: str) -> None:
    (copy / "evaluations" / "step_2" / "sample.json").write_text(text)
    [found] = faults(pico, copy)
    assert found.startswith(f"evaluations/step_2/sample.json {fault}")


def test_an_evaluation_of_a_step_that_there_is_not(pico: Pico, copy: Path) -> None:
    (copy / "evaluations" / "step_2").rename(copy / "evaluations" / "step_3")
    for path in (copy / "evaluations" / "step_3").iterdir():
        change(path, step=3)
    assert faults(pico, copy) == [
        "evaluations/step_3/held_out.json is of a step that has no checkpoint",
        "evaluations/step_3/sample.json is of a step that has no checkpoint",
    ]
