"""What a run will need: its steps, tokens, disk and memory, from the configuration alone. Nothing is allocated."""

from dataclasses import dataclass

import torch

from pico_train.capture import modules_to_capture
from pico_train.config import RunConfig
from pico_train.model.decoder import PicoDecoder

FP32 = 4  # bytes
INTERPRETER_BYTES = 450_000_000  # Python with torch and Lightning loaded, before a model exists


@dataclass(frozen=True)
class Estimate:
    """The needs of one run; bytes are bytes."""

    n_parameters: int
    tokens: int
    save_steps: list[int]
    disk_bytes: int
    memory_bytes: int


def estimate(config: RunConfig) -> Estimate:
    """Count what a run of ``config`` computes and stores.

    Disk: for each saved step the weights and two moments per parameter (none at step 0) in fp32, and per split the captured
    activations and gradients. Memory, on a CPU: weights, gradients and two moments in fp32; what the backward pass of one micro-batch keeps
    (per block about 12 numbers of width d_model, 4 of the hidden width and the attention's output and log-sum, and three copies of
    the logits); one checkpoint's capture; and the interpreter.
    """
    model, training, dynamics = config.model, config.training, config.checkpointing.learning_dynamics
    n = model.n_parameters
    steps = config.checkpointing.save_steps(training.max_steps)
    capture = _capture_bytes(config) if dynamics.layer_suffixes else 0
    n_micro = training.optimization.gradient_accumulation_steps
    micro_tokens = config.data.dataloader.batch_size // n_micro * model.max_seq_len
    per_token = model.n_layers * (12 * model.d_model + 4 * model.activation_hidden_dim) + 3 * model.vocab_size
    return Estimate(
        n_parameters=n,
        tokens=training.max_steps * config.data.dataloader.batch_size * model.max_seq_len,
        save_steps=steps,
        disk_bytes=sum(FP32 * n * (1 if step == 0 else 3) + capture for step in steps),
        memory_bytes=INTERPRETER_BYTES + FP32 * (4 * n + micro_tokens * per_token) + capture,
    )


def _capture_bytes(config: RunConfig) -> int:
    """Bytes of the activations, gradients and batches that one checkpoint holds."""
    dynamics, seq_len = config.checkpointing.learning_dynamics, config.model.max_seq_len
    with torch.device("meta"):
        model = PicoDecoder(config.model)
    modules = modules_to_capture(model, dynamics.layer_suffixes or ())
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
