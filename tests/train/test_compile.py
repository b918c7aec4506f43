"""``training.compile``: the same names on disk, activations from the plain module, and a clear end where nothing can be compiled."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file
from tracing import traced_only

import pico_train
from pico_train.checkpoint.format import read_manifest
from pico_train.cli import main
from pico_train.compile import largest_error, reason
from pico_train.config import RunConfig
from pico_train.metrics_log import read_rows

Tiny = Callable[..., RunConfig]
ON, OFF = "training.compile=true", "training.compile=false"
CONSTANT = "training.optimization.lr_scheduler=constant"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler runs."""
    import lightning.fabric  # noqa: F401  (notes what torch.compile is called with, for what is compiled after its import)

    monkeypatch.setattr(torch, "compile", traced_only(torch.compile))


def run(tiny_yaml: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pico_train.cli", "run", str(tiny_yaml), *words]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


STORED = ("model", "training_state/optimizer", "learning_dynamics/train_gradients", "learning_dynamics/val_activations")


def assert_alike(one: Path, other: Path, steps: Sequence[int]) -> None:
    """Two runs have stored the same tensors under the same names, equal up to rounding."""
    for step in steps:
        folders = [run / "checkpoints" / f"step_{step}" for run in (one, other)]
        places = [
            [(row.kind, row.split, row.module, row.role, row.key, row.shape) for row in read_manifest(folder).tensors]
            for folder in folders
        ]
        assert places[0] == places[1]
        for file in STORED:
            a, b = (load_file(folder / f"{file}.safetensors") for folder in folders)
            assert a.keys() == b.keys()
            assert step == 0 or largest_error(list(a.values()), [b[key] for key in a]) < 1e-3
    losses = [[row["loss"] for row in read_rows(run / "metrics.jsonl")] for run in (one, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_the_real_compiler(tiny_yaml: Path, tmp_path: Path) -> None:
    """A process of its own; what it stores has the names and, up to rounding, the numbers of a run without it."""
    small = ("model.n_layers=1", "training.max_steps=2")
    done = run(tiny_yaml, *small, ON)
    assert done.returncode == 0, done.stderr
    [said] = [line for line in done.stderr.splitlines() if line.startswith("compiled the pass in ")]
    assert 0 < float(said.split(" differs by ")[1].split()[0]) < 1e-4
    assert run(tiny_yaml, *small, OFF, "checkpointing.run_name=plain").returncode == 0
    assert_alike(tmp_path / "runs" / "tiny", tmp_path / "runs" / "plain", [0, 1, 2])


def test_compile_on_and_off_read_each_others_checkpoints(tiny_yaml: Path, tmp_path: Path, quick: None) -> None:
    """On, then off from there, then on again, through the command line."""

    def start(*words: str) -> Result:
        return CliRunner().invoke(main, ["run", str(tiny_yaml), CONSTANT, *words])

    for steps, mode in (("2", ON), ("4", OFF), ("6", ON)):
        done = start(f"training.max_steps={steps}", mode)
        assert done.exit_code == 0, done.output
        assert ("compiled the pass in " in done.stderr) == (mode == ON)
    assert "training.compile: false before, true now" in done.stderr
    assert start(OFF, "checkpointing.run_name=plain").exit_code == 0
    assert_alike(tmp_path / "runs" / "tiny", tmp_path / "runs" / "plain", [0, 1, 2, 4, 6])


@pytest.mark.parametrize("recomputed", ["false", "true"])
def test_captured_under_compile(tiny: Tiny, quick: None, recomputed: str) -> None:
    """The traced pass computes the very numbers of the plain one here, dropout included: so must be all that is stored of it."""
    ends = []
    for name, mode in (("compiled", ON), ("plain", OFF)):
        dynamics = "checkpointing.learning_dynamics.rule=all"
        checkpointing = f"training.activation_checkpointing={recomputed}"
        config = tiny(mode, f"checkpointing.run_name={name}", "model.dropout=0.2", dynamics, checkpointing)
        [result] = pico_train.train(config)
        ends.append(result.path)
    for folder in sorted((ends[0] / "checkpoints").iterdir()):
        for split in ("train", "val"):
            for kind in ("activations", "gradients"):
                file = f"learning_dynamics/{split}_{kind}.safetensors"
                ours, plain = load_file(folder / file), load_file(ends[1] / "checkpoints" / folder.name / file)
                assert ours.keys() == plain.keys()
                assert len(ours) == 6
                assert largest_error([ours[k] for k in ours], [plain[k] for k in ours]) < 1e-4


def test_looking_does_not_disturb_a_compiled_run(tiny: Tiny, quick: None) -> None:
    ends = []
    for name, suffixes in (("looked", "[v_proj, w_2]"), ("blind", "null")):
        layers = f"checkpointing.learning_dynamics.layer_suffixes={suffixes}"
        [result] = pico_train.train(tiny(ON, f"checkpointing.run_name={name}", layers, "model.dropout=0.1"))
        ends.append(load_file(result.path / "checkpoints" / "step_6" / "model.safetensors"))
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


def test_where_nothing_can_be_compiled_it_is_said_before_step_0(tiny_yaml: Path, tmp_path: Path) -> None:
    done = run(tiny_yaml, ON, "model.n_layers=1", CXX="/nowhere/c++", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 2, done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: training.compile: true cannot be done here: ")
    assert "/nowhere/c++" in line
    assert line.endswith("; use training.compile=false")
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "runs").rglob("step_*"))
    started = CliRunner().invoke(main, ["run", str(tiny_yaml), OFF, "training.max_steps=1"])
    assert started.exit_code == 0  # nothing stands in the way


def test_the_reason_is_the_telling_line() -> None:
    assert reason(ValueError("one line")) == "one line"
    assert reason(ValueError("backend='x' raised:\n  ImportError: no y\n\nSet Z=1 for more")) == "ImportError: no y"
    assert reason(ValueError()) == "ValueError"
