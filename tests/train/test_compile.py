"""``training.compile``: the same names on disk, activations from the plain module, and a clear end where nothing can be compiled."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import kills
import pytest
import several
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file
from tracing import traced_only

import pico_train
from pico_train import compile as compile_module
from pico_train.checkpoint.format import read_manifest
from pico_train.cli import main
from pico_train.compile import largest_error, reason
from pico_train.config import RunConfig
from pico_train.memory import memory
from pico_train.metrics_log import read_rows

Tiny = Callable[..., RunConfig]
ON, OFF, AUTO = "training.compile=true", "training.compile=false", "training.compile=auto"
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
    assert (
        "from step 4 on the numbers agree with those before up to rounding only: compiled False before, True now"
        in done.stderr
    )
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


def test_where_nothing_can_be_compiled(tiny_yaml: Path, tmp_path: Path) -> None:
    """Without a compiler on the PATH: true ends before step 0, auto says so in one line and goes on with the plain pass."""
    nowhere = {"PATH": "", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    small = ("model.n_layers=1", "training.max_steps=1")
    done = run(tiny_yaml, ON, *small, **nowhere)
    assert done.returncode == 2, done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: training.compile: true cannot be done here: ")
    assert "No working C++ compiler found" in line
    assert line.endswith("; use training.compile=false")
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "runs").rglob("step_*"))
    done = run(tiny_yaml, AUTO, *small, **nowhere)
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stderr.splitlines() if "training.compile" in line]
    assert "auto takes the plain pass, for the compiled one cannot be used here: " in line
    assert "No working C++ compiler found" in line
    assert "Traceback" not in done.stderr
    assert choice(tmp_path / "runs" / "tiny", 1) == (False, False)


def choice(run: Path, step: int) -> tuple[bool | None, bool | None]:
    """What a checkpoint says: whether its passes were compiled, and what auto has chosen for the run."""
    folder = run / "checkpoints" / f"step_{step}"
    state = json.loads((folder / "training_state" / "state.json").read_text())
    return read_manifest(folder).made_by.compiled, state["compiled"]


def taking(monkeypatch: pytest.MonkeyPatch, plain: float, fast: float) -> None:
    """The clock says that the plain pass takes ``plain`` and the compiled one ``fast`` seconds; both run."""

    def in_turns(runs: Sequence[Callable[[], Any]], device: torch.device) -> list[float]:
        assert [len(run()) for run in runs] == [21, 21]  # gradients of all parameters, of both
        return [plain, fast]

    monkeypatch.setattr(compile_module, "in_turns", in_turns)


def test_auto_takes_the_faster_and_stays_with_it(
    tiny_yaml: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*words: str) -> str:
        done = CliRunner().invoke(main, ["run", str(tiny_yaml), CONSTANT, *words])
        assert done.exit_code == 0, done.output
        return done.stderr

    tiny = tmp_path / "runs" / "tiny"
    taking(monkeypatch, plain=2.0, fast=1.5)
    said = start(AUTO, "training.max_steps=2")
    assert "auto takes the compiled pass: 1.5 s compiled, 2 s plain for 4 sequences, forward and backward" in said
    assert choice(tiny, 2) == (True, True)

    taking(monkeypatch, plain=1.0, fast=9.0)
    said = start(AUTO, "training.max_steps=3")
    assert "compiled the pass in " in said
    assert "auto takes" not in said
    assert "up to rounding only" not in said
    assert choice(tiny, 3) == (True, True)

    with monkeypatch.context() as broken:
        broken.setattr(compile_module, "largest_error", lambda *gradients: 0.5)
        said = start(AUTO, "training.max_steps=4")
    assert (
        "auto takes the plain pass, for the compiled one cannot be used here: its gradient differs from the plain one by 5.0e-01 of "
        "the largest entry, and at most 0.001 is rounding" in said
    )
    assert (
        "from step 3 on the numbers agree with those before up to rounding only: compiled True before, False now"
        in said
    )
    assert choice(tiny, 4) == (False, False)

    taking(monkeypatch, plain=9.0, fast=1.0)
    assert "auto stays with the plain pass" in start(AUTO, "training.max_steps=5")
    assert choice(tiny, 5) == (False, False)

    start(ON, "training.max_steps=6")
    assert choice(tiny, 6) == (True, None)
    taking(monkeypatch, plain=1.0, fast=9.0)
    assert "auto takes the plain pass: 9 s compiled, 1 s plain" in start(AUTO, "training.max_steps=7")
    assert choice(tiny, 7) == (False, False)


def test_trying_leaves_no_trace(tiny: Tiny, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that has tried and timed the compiled pass and takes the plain one is the plain run bit for bit, dropout included."""
    taking(monkeypatch, plain=1.0, fast=2.0)
    ends = []
    for name, mode in (("tried", AUTO), ("plain", OFF)):
        [result] = pico_train.train(tiny(mode, f"checkpointing.run_name={name}", "model.dropout=0.1"))
        ends.append(result.path)
    for path in sorted((ends[1] / "checkpoints").rglob("*.safetensors")):
        tried, plain = load_file(ends[0] / path.relative_to(ends[1])), load_file(path)
        assert tried.keys() == plain.keys()
        assert all(torch.equal(tried[key], plain[key]) for key in plain), path


def test_another_gradient_is_refused_under_true(tiny_yaml: Path, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_module, "largest_error", lambda *gradients: float("nan"))
    done = CliRunner().invoke(main, ["run", str(tiny_yaml), ON])
    assert done.exit_code == 2
    assert "training.compile: true cannot be done here: its gradient differs from the plain one by nan" in done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="ranks are forked from a process that has imported torch")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("fails", [None, 1])
def test_ranks_take_what_rank_0_has_measured(tmp_path: Path, fails: int | None, strategy: str) -> None:
    """Rank 1 would choose otherwise; and where it alone cannot compile, all of them take the plain pass."""
    chosen = f"training.fabric.strategy={strategy}"
    history = kills.History(tmp_path, ("training.optimization.gradient_accumulation_steps=2", AUTO, chosen))
    ranks = several.run(history.words(), history.folder, prepare=partial(_clock, fails))
    assert ranks.codes == [0, 0], ranks.printed(0) + ranks.printed(1)
    said = "compiled one cannot be used here: it fails on another rank" if fails else "auto takes the compiled pass"
    assert said in ranks.printed(0)
    assert choice(history.run, kills.MAX_STEPS) == (not fails, not fails)


def _clock(fails: int | None, rank: int) -> None:
    compile_, seconds = torch.compile, [2.0, 1.0] if rank == 0 else [1.0, 2.0]

    def traced(model: torch.nn.Module, **options: object) -> object:
        return compile_(model, dynamic=False, backend="aot_eager")

    def refused(*tensors: object) -> float:
        raise RuntimeError("no compiler on this rank")

    torch.compile = traced  # type: ignore[assignment]
    if rank == fails:
        compile_module.largest_error = refused
    compile_module.in_turns = lambda runs, device: seconds  # type: ignore[attr-defined]


def test_auto_needs_the_memory_of_both(tiny: Tiny) -> None:
    assert memory(tiny(AUTO), 4) == memory(tiny(ON), 4) != memory(tiny(OFF), 4)


def test_the_reason_is_the_telling_line() -> None:
    assert reason(ValueError("one line")) == "one line"
    assert reason(ValueError("backend='x' raised:\n  ImportError: no y\n\nSet Z=1 for more")) == "ImportError: no y"
    assert reason(ValueError()) == "ValueError"
