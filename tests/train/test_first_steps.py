"""What a first try meets: a text that is too short, a tracker that is not installed, settings given from Python."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

import pico_train
from pico_train.config import RunConfig
from pico_train.strict_yaml import ConfigError

Pico = Callable[..., Result]
NOTHING_HELD_OUT = (
    "data.dataset.held_out_fraction=0",
    "evaluation.metrics=null",
    "checkpointing.learning_dynamics.eval_data=null",
)


def refused(result: Result) -> str:
    assert result.exit_code == 2, result.output
    assert result.stderr.count("error: ") == 1
    assert "Traceback" not in result.output
    return result.stderr.partition("error: ")[2]


def test_a_short_text_is_refused_with_what_to_change_until_it_trains(
    pico: Pico, tiny_yaml: Path, tmp_path: Path
) -> None:
    (tmp_path / "short.txt").write_text("abcdefghij klmnopqrst!\n")
    run = ["run", tiny_yaml, f"data.dataset.path={tmp_path / 'short.txt'}", f"data.cache_dir={tmp_path / 'caches'}"]
    run.append("data.tokenizer.vocab_size=257")  # a token for each byte
    message = refused(pico(*run))
    assert "is one document of 23 bytes, so none can be held out of training: use more text, " in message
    assert all(word in message for word in NOTHING_HELD_OUT)
    message = refused(pico(*run, *NOTHING_HELD_OUT, "model.max_seq_len=64"))
    assert "the train text has 24 tokens, and one window needs 65 (model.max_seq_len + 1): use more text, " in message
    assert "or set model.max_seq_len to at most 23\n" in message
    result = pico(*run, *NOTHING_HELD_OUT, "model.max_seq_len=23")
    assert result.exit_code == 0, result.output
    assert "data.dataloader.batch_size: 8: the training text has 1 window of 23 tokens only" in result.stderr


def test_too_little_held_out_text(pico: Pico, tiny_yaml: Path) -> None:
    message = refused(pico("run", tiny_yaml, "model.max_seq_len=2000"))
    assert "the held_out text has " in message
    assert (
        "raise data.dataset.held_out_fraction, or ask for nothing held out (data.dataset.held_out_fraction=0 "
        in message
    )


def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_done(
    pico: Pico, tiny_yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    words = ("run", tiny_yaml, "monitoring.trackers=[wandb]", f"data.cache_dir={tmp_path / 'caches'}")
    message = refused(pico(*words))
    assert message.startswith("monitoring.trackers: wandb cannot be used (")
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.yaml"}
    planned = pico(*words, "--dry-run")
    assert planned.exit_code == 0
    assert "would be refused on this machine: monitoring.trackers: wandb cannot be used (" in planned.stdout


def test_a_project_that_trackio_does_not_take_is_refused_before_anything_is_done(
    pico: Pico, tiny_yaml: Path, tmp_path: Path
) -> None:
    pytest.importorskip("trackio", reason="trackio comes with pico-train[trackers]")
    words = ("monitoring.trackers=[trackio]", "monitoring.wandb.project=model_configs")
    message = refused(pico("run", tiny_yaml, *words, f"data.cache_dir={tmp_path / 'caches'}"))
    assert message.startswith("monitoring.wandb.project: 'model_configs' is no project for trackio: ")
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.yaml"}


def test_overrides_from_python_one_by_one_or_as_a_list(tiny: Callable[..., RunConfig]) -> None:
    words = ["training.max_steps=1", "checkpointing.run_name=b"]
    for result in (*pico_train.train(tiny(), *words), *pico_train.train(tiny(), words)):
        assert (result.run, result.steps) == ("b", 1)
    with pytest.raises(ConfigError, match=r'\{"training\.max_steps": 1\}: must be text that reads key\.sub=value'):
        pico_train.train(tiny(), {"training.max_steps": 1})  # type: ignore[arg-type]


def test_one_of_a_thing_is_said_as_one(pico: Pico, tiny_yaml: Path) -> None:
    words = ("training.max_steps=1", "data.dataloader.batch_size=2", "checkpointing.schedule.first=false")
    planned = pico("run", tiny_yaml, "--dry-run", *words)
    said = planned.stdout + pico("run", tiny_yaml, *words).output
    for one in ("1 step, ", "1 checkpoint: 1", "with 1 sequence at a time", "1 file, ", "1 run, ", "1 step = "):
        assert one in said, one
