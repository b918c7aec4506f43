"""The memory model: each part counted a second way, the whole against the measured peak of real runs, and what is chosen from it."""

import json
from collections.abc import Callable
from pathlib import Path

import kills
import pytest
import torch
from click.testing import CliRunner

from pico_train.cli import main
from pico_train.config import ModelConfig, RunConfig
from pico_train.errors import UserError
from pico_train.hardware import Hardware
from pico_train.memory import (
    BASE_BYTES,
    HEADROOM,
    activation_bytes,
    control_group_room,
    free_memory,
    memory,
    micro_batch_size,
)
from pico_train.metrics_log import read_rows
from pico_train.model.decoder import PicoDecoder

Tiny = Callable[..., RunConfig]


def saved_bytes(config: ModelConfig, n_sequences: int, checkpointing: bool) -> int:
    """What autograd really keeps of a forward without the logits: the storages of all saved tensors but the weights."""
    model = PicoDecoder(config)
    model.activation_checkpointing = checkpointing
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.zeros(n_sequences, config.max_seq_len, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.hidden_states(ids)
    return sum(tensor.untyped_storage().nbytes() for at, tensor in kept.items() if at not in weights)


@pytest.mark.parametrize("changes", [{}, {"dropout": 0.1}, {"attention_n_kv_heads": 4}, {"activation_hidden_dim": 96}])
@pytest.mark.parametrize("n_layers", [1, 3])
def test_activations_are_what_autograd_saves(changes: dict[str, float], n_layers: int) -> None:
    shape = {"d_model": 32, "attention_n_heads": 4, "attention_n_kv_heads": 2, "activation_hidden_dim": 64}
    config = ModelConfig(**(shape | {"vocab_size": 50, "max_seq_len": 64, "n_layers": n_layers} | changes))  # type: ignore[arg-type]
    stated = activation_bytes(config, 4 * 64, "32-true", recompute=False)
    assert stated == pytest.approx(saved_bytes(config, 4, checkpointing=False), rel=0.04)


def test_recomputing_keeps_the_inputs_of_the_blocks_and_one_block() -> None:
    def config(n_layers: int) -> ModelConfig:
        return ModelConfig(
            d_model=32, attention_n_heads=4, vocab_size=50, max_seq_len=64, n_layers=n_layers, activation_hidden_dim=64
        )

    def stated(n_layers: int, recompute: bool) -> int:
        return activation_bytes(config(n_layers), 4 * 64, "32-true", recompute=recompute)

    def saved(n_layers: int) -> int:
        return saved_bytes(config(n_layers), 4, checkpointing=True)

    assert stated(6, recompute=True) - stated(2, recompute=True) == saved(6) - saved(2) == 4 * 4 * 64 * 32 * 4
    assert stated(1, recompute=True) - stated(1, recompute=False) == 4 * 64 * 32 * 4


ONE_GO = "training.optimization.gradient_accumulation_steps=1"
WIDE = (
    "model.d_model=128",
    "model.activation_hidden_dim=512",
    "model.max_seq_len=1024",
    "data.dataloader.batch_size=6",
)
SHAPES = {
    "large vocabulary": ("model.vocab_size=60000", "model.d_model=64", "model.max_seq_len=128", ONE_GO),
    "long windows": (*WIDE, "model.n_layers=4", ONE_GO),
    "accumulation": (
        "model.d_model=512",
        "model.activation_hidden_dim=2048",
        "model.n_layers=4",
        "model.max_seq_len=128",
        "training.optimization.gradient_accumulation_steps=8",
        "training.max_steps=2",
    ),
    "recomputing": (*WIDE, "model.n_layers=8", ONE_GO, "training.activation_checkpointing=true"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_stated_peak_is_the_measured_one(tiny: Tiny, tiny_yaml: Path, tmp_path: Path, shape: str) -> None:
    """A process of its own trains two or three passes, each of them saved; its highest resident memory against the model of it."""
    overrides = (
        "training.max_steps=1",
        *SHAPES[shape],
        "evaluation.metrics=null",
        "checkpointing.save_every_n_steps=1",
    )
    config = tiny(*overrides)
    kills.preload()
    output = tmp_path / "output"
    ended = kills.start(["run", str(tiny_yaml), *overrides], output)
    assert ended.code == 0, output.read_text()
    measured = read_rows(tmp_path / "runs" / "tiny" / "metrics.jsonl")[-1]["memory_bytes"]
    steps = config.training.optimization.gradient_accumulation_steps
    assert isinstance(steps, int)
    stated = memory(config, config.data.dataloader.batch_size // steps)
    assert stated.total == pytest.approx(measured, rel=0.25)


def choose(config: RunConfig, free: int | None, before: int | None = None, on_gpu: bool = False) -> int:
    hardware = Hardware("cuda" if on_gpu else "cpu", "32-true", "a device", n_threads=1)
    return micro_batch_size(config, hardware, free, before)


def test_auto_takes_as_many_sequences_as_fit(tiny: Tiny) -> None:
    big = ("training.optimization.gradient_accumulation_steps=auto", "model.max_seq_len=2048", "model.vocab_size=5000")
    small_probe = ("checkpointing.learning_dynamics.eval_data=null", "evaluation.metrics=null")
    config = tiny(*big, *small_probe)
    needs = {size: memory(config, size) for size in (1, 2, 4, 8)}
    assert choose(config, 10**12) == 8
    for size in (1, 2, 4):
        assert choose(config, int((needs[size].total - BASE_BYTES) / HEADROOM) + 1000) == size
        on_gpu = memory(config, size, on_gpu=True)
        assert choose(config, int(on_gpu.device / HEADROOM) + 1000, on_gpu=True) == size
    with pytest.raises(UserError, match=r"needs about .* GB more of memory with 1 sequence at a time"):
        choose(config, needs[1].total - BASE_BYTES - 1000)
    forced = tiny(*big, *small_probe, "training.ignore_memory=true")
    assert choose(forced, 1000) == 1
    with pytest.raises(UserError, match="'auto' needs to know the free memory"):
        choose(config, None)


def test_auto_stays_with_what_the_run_was_trained_with(tiny: Tiny) -> None:
    auto = "training.optimization.gradient_accumulation_steps=auto"
    config = tiny(
        auto, "model.max_seq_len=512", "evaluation.metrics=null", "checkpointing.learning_dynamics.eval_data=null"
    )
    assert choose(config, 10**12, before=2) == 2
    assert choose(config, memory(config, 2).total, before=2) == 2  # it fits, though without headroom
    assert choose(config, 10**12, before=3) == 8  # of another batch
    assert choose(config, int((memory(config, 1).total - BASE_BYTES) / HEADROOM) + 1000, before=8) == 1


def test_a_number_of_steps_is_taken_as_it_is_if_it_fits(tiny: Tiny) -> None:
    config = tiny("training.optimization.gradient_accumulation_steps=4")
    assert choose(config, 10**12) == 2
    assert choose(config, None) == 2
    with pytest.raises(UserError, match=r"training\.ignore_memory=true"):
        choose(config, 10**5)


def test_limits_of_control_groups_count(tmp_path: Path) -> None:
    """A job with 1000 bytes below a user with 5000, as Slurm nests them; the topmost group has no limit."""
    job = tmp_path / "user" / "job"
    job.mkdir(parents=True)
    for group, limit, used, cached in ((job, "1000", 700, 100), (job.parent, "5000", 4900, 50)):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\n")
    mine = tmp_path / "cgroup"
    mine.write_text("0::/user/job\n")
    assert sorted(control_group_room(tmp_path, mine)) == [150, 400]
    (job / "memory.max").write_text("max\n")
    assert control_group_room(tmp_path, mine) == [150]
    mine.write_text("4:memory:/job\n")
    assert control_group_room(tmp_path, mine) == []
    free = free_memory(torch.device("cpu"))
    assert free is None or 0 < free < 10**14


def test_a_run_under_auto_and_one_that_does_not_fit(
    tiny_yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the command line: the choice is said, kept when the run goes on, and too little memory leaves nothing behind."""
    auto = "training.optimization.gradient_accumulation_steps=auto"

    def start(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(
            main, ["run", str(tiny_yaml), auto, "training.optimization.lr_scheduler=constant", *words]
        )
        return result.exit_code, result.output

    monkeypatch.setattr("pico_train.run.free_memory", lambda device: 10**5)
    code, said = start()
    assert (code, "needs about" in said, "1 sequence at a time" in said) == (2, True, True)
    assert not list((tmp_path / "runs").rglob("*.safetensors"))

    config_needs = 30 * 10**6
    monkeypatch.setattr("pico_train.run.free_memory", lambda device: config_needs)
    code, said = start("training.max_steps=2")
    assert (code, "auto is 1, by the memory that is free" in said) == (0, True), said
    state = tmp_path / "runs" / "tiny" / "checkpoints" / "step_2" / "training_state" / "state.json"
    assert json.loads(state.read_text())["micro_batch_size"] == 8
    monkeypatch.setattr("pico_train.run.free_memory", lambda device: 10**12)
    code, said = start("training.max_steps=4", auto)
    assert (code, "8 sequences at a time" in said) == (0, True), said


def test_a_dry_run_lists_the_parts_and_their_sum(tiny_yaml: Path, tiny: Tiny) -> None:
    said = CliRunner().invoke(main, ["run", str(tiny_yaml), "--dry-run"]).output
    assert "memory with 4 sequences at a time 45" in said
    [line] = [line for line in said.splitlines() if "memory with" in line]
    parts = [part.split(" ")[0] for part in line.partition(": ")[2].split(", ")]
    assert parts == [
        "base",
        "weights",
        "gradients",
        "moments",
        "head",
        "capture",
        "snapshot",
    ]  # an evaluation is the peak
    assert "weights 57.2 kB, gradients 57.2 kB, moments 114 kB" in line
    said = (
        CliRunner()
        .invoke(main, ["run", str(tiny_yaml), "--dry-run", "training.optimization.gradient_accumulation_steps=auto"])
        .output
    )
    assert "memory with 1 sequence at a time" in said
    assert "memory with 8 sequences at a time" in said
