"""The loss scaler, on a CPU: fp16 autocast with torch's CPU GradScaler in place of the CUDA one."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

import pico_train
import pico_train.run
from pico_train.checkpoint.format import read_manifest, step_folders
from pico_train.config import RunConfig
from pico_train.loop import NonFiniteError
from pico_train.metrics_log import MetricsLog, Row, read_rows

Tiny = Callable[..., RunConfig]


@pytest.fixture
def scale_from(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """``scale_from(s)``: runs start under fp16 with the loss scale s."""

    def begin(scale: float) -> None:
        def start_fabric(hardware: object) -> Fabric:
            scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=4)
            return Fabric(accelerator="cpu", devices=1, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])

        monkeypatch.setattr(pico_train.run, "start_fabric", start_fabric)

    return begin


def scaler_state(folder: Path) -> dict[str, float]:
    state: dict[str, float] = json.loads((folder / "training_state" / "state.json").read_text())["gradient_scaler"]
    return state


def run_of(config: RunConfig) -> Path:
    return Path(config.checkpointing.runs_dir) / str(config.checkpointing.run_name)


def test_a_pass_is_repeated_at_smaller_scales_until_it_is_finite(tiny: Tiny, scale_from: Callable[[float], None]) -> None:
    scale_from(2.0**22)
    [result] = pico_train.train(tiny())
    folders = step_folders(result.path / "checkpoints")
    first = scaler_state(folders[0])["scale"]
    assert 1 <= first < 2.0**22
    assert all(row["updated"] for row in read_rows(result.path / "metrics.jsonl")[:-1])
    assert read_manifest(folders[6]).skipped_updates == 0
    assert result.loss is not None
    assert result.loss < 5.6


def test_the_scale_grows_after_finite_passes_and_is_stored(tiny: Tiny, scale_from: Callable[[float], None]) -> None:
    scale_from(2.0**10)
    [result] = pico_train.train(tiny("checkpointing.save_every_n_steps=1"))
    states = [scaler_state(folder) for folder in step_folders(result.path / "checkpoints").values()]
    assert [state["scale"] for state in states] == [2.0**10] * 4 + [2.0**11] * 3
    assert [state["growth_tracker"] for state in states] == [0, 1, 2, 3, 0, 1, 2]


def test_captured_gradients_are_unscaled(tiny: Tiny, scale_from: Callable[[float], None]) -> None:
    scale_from(2.0**10)
    [result] = pico_train.train(tiny("training.max_steps=1"))
    folder = step_folders(result.path / "checkpoints")[1]
    for split in ("train", "val"):
        ids = load_file(folder / "learning_dynamics" / f"{split}_batch.safetensors")["input_ids"].long()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        logits = model(ids[:, :-1]).logits
        nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        gradients = load_file(folder / "learning_dynamics" / f"{split}_gradients.safetensors")
        expected = model.model.layers[1].mlp.down_proj.weight.grad
        error = (gradients["layers.1.swiglu.w_2"] - expected).norm() / expected.norm()
        assert error < 0.02  # the rounding of fp16; the scale would be a factor of 1024


def test_a_gradient_that_stays_infinite_stops_the_run(
    tiny: Tiny, scale_from: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    scale_from(2.0**10)
    plain = pico_train.run.next_token
    calls = 0

    def objective(model: nn.Module, batch: object, step: int) -> torch.Tensor:
        nonlocal calls
        calls += step == 1
        return plain(model, batch, step) * (float("inf") if step == 1 else 1.0)  # type: ignore[arg-type]

    monkeypatch.setattr(pico_train.run, "next_token", objective)
    config = tiny("training.optimization.gradient_accumulation_steps=1")
    with pytest.raises(NonFiniteError, match="pass 1: the loss is inf"):
        pico_train.train(config)
    assert calls == 17  # once, and 16 times at a smaller scale
    assert list(step_folders(run_of(config) / "checkpoints")) == [0]


def test_a_stopped_run_goes_on_at_its_scale(
    tiny: Tiny, scale_from: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    scale_from(2.0**20)
    [whole] = pico_train.train(tiny("checkpointing.run_name=whole"))
    append = MetricsLog.append

    def stop(self: MetricsLog, row: Row) -> None:
        if row.step == 5:
            raise KeyboardInterrupt
        append(self, row)

    monkeypatch.setattr(MetricsLog, "append", stop)
    config = tiny()
    with pytest.raises(KeyboardInterrupt):
        pico_train.train(config)
    monkeypatch.setattr(MetricsLog, "append", append)
    scale_from(2.0**3)  # not looked at: the stored scale counts
    [stopped] = pico_train.train(config)
    for step, folder in step_folders(whole.path / "checkpoints").items():
        other = step_folders(stopped.path / "checkpoints")[step]
        assert scaler_state(other) == scaler_state(folder)
        assert [row.sha256 for row in read_manifest(other).tensors] == [row.sha256 for row in read_manifest(folder).tensors]
