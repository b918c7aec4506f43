"""What a run will need: its steps, tokens and disk, from the configuration alone. Nothing is allocated."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from pico_train.capture import modules_to_capture
from pico_train.config import RunConfig
from pico_train.errors import UserError
from pico_train.model.decoder import PicoDecoder
from pico_train.optim import n_moments

FP32 = 4  # bytes


@dataclass(frozen=True)
class Estimate:
    """The needs of one run: ``disk_bytes`` of its milestones, ``restart_bytes`` of its restart points at most."""

    n_parameters: int
    tokens: int
    save_steps: list[int]
    disk_bytes: int
    restart_bytes: int


def estimate(config: RunConfig) -> Estimate:
    """Count what a run of ``config`` computes and stores.

    Disk: for each milestone the weights in fp32, with them the optimizer's moments where it is stored (none at step 0), and per split
    the captured activations and gradients; and the restart points that are kept, with one more while it is written.
    """
    model, training, checkpointing = config.model, config.training, config.checkpointing
    n, moments = model.n_parameters, n_moments(model, training.optimization.optimizer)
    steps = checkpointing.save_steps(training.max_steps)
    with_optimizer = {step for step in steps if step and checkpointing.holds_optimizer(step, training.max_steps)}
    capture = capture_bytes(config)
    return Estimate(
        n_parameters=n,
        tokens=training.max_steps * config.data.dataloader.batch_size * model.max_seq_len,
        save_steps=steps,
        disk_bytes=sum(FP32 * (n + moments * (step in with_optimizer)) + capture for step in steps),
        restart_bytes=(checkpointing.restart.keep + 1) * FP32 * (n + moments),
    )


def capture_bytes(config: RunConfig) -> int:
    """Bytes of the activations, gradients and batches that one checkpoint holds."""
    dynamics, seq_len = config.checkpointing.learning_dynamics, config.model.max_seq_len
    if not dynamics.layer_suffixes:
        return 0
    with torch.device("meta"):
        model = PicoDecoder(config.model)
    modules = modules_to_capture(model, dynamics.layer_suffixes)
    shapes = [model.get_parameter(f"{name}.weight").shape for name in modules]
    rows_per_sequence = {"all": seq_len, "sample": min(dynamics.tokens_per_sequence, seq_len)}
    sequences = [config.data.dataloader.batch_size]
    if dynamics.eval_data is not None:
        sequences.append(dynamics.probe_windows)
    total = 0
    for n_sequences in sequences:
        rows = n_sequences * rows_per_sequence.get(dynamics.effective_rule, 1)
        total += sum(FP32 * (rows * shape[0] + shape.numel()) for shape in shapes) + n_sequences * (seq_len + 3) * 4
    return total


def check_disk(config: RunConfig, run: Path) -> None:
    """Refuse to start where the disk of ``run`` cannot hold what its trail still needs.

    Raises:
        UserError: there is too little room, and ``checkpointing.ignore_disk_space`` does not say to start all the same.
    """
    needs = estimate(config)
    there = sum(path.stat().st_size for path in run.rglob("*.safetensors"))
    missing = needs.disk_bytes + needs.restart_bytes - there
    free = shutil.disk_usage(next(path for path in (run, *run.absolute().parents) if path.exists())).free
    if missing > free and not config.checkpointing.ignore_disk_space:
        raise UserError(
            f"the trail of {run.name} needs {missing / 1e9:,.3g} GB more and the disk of {run} has {free / 1e9:,.3g} GB free; make room, "
            "save less (checkpointing.save_every_n_steps, checkpointing.optimizer_state), or start all the same with "
            "checkpointing.ignore_disk_space=true"
        )
