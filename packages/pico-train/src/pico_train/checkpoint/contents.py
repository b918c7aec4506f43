"""What goes into a checkpoint: the state of training and what was captured, as tensors with their places and documents."""

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor

from pico_train.capture import Captured, CaptureRule
from pico_train.checkpoint.format import CaptureRecord, Split, content_hash
from pico_train.checkpoint.write import StoredTensor
from pico_train.data.tokenizer import Tokenizer
from pico_train.model.decoder import PicoDecoder, layer_of, role_of
from pico_train.model.huggingface import generation_config, llama_config, to_llama_name
from pico_train.optim import state_by_name
from pico_train.state import TrainState, scaler_state

WEIGHTS = "model.safetensors"
OPTIMIZER = "training_state/optimizer.safetensors"
STATE = "training_state/state.json"


def weights_hash(model: PicoDecoder) -> str:
    """SHA-256 over the content hashes of all weights, one a line, in the manifest's order: what evaluations are keyed by."""
    lines = "\n".join(stored.row().sha256 for stored in weight_tensors(model))
    return hashlib.sha256(lines.encode("ascii")).hexdigest()


def weight_tensors(model: PicoDecoder) -> list[StoredTensor]:
    """Every parameter once, under its Llama name; a tied output embedding is the input embedding's."""
    tensors = []
    for name, parameter in model.named_parameters():
        module = name.removesuffix(".weight")
        tensors.append(
            StoredTensor(
                parameter,
                "weights",
                None,
                layer_of(module),
                module,
                role_of(module),
                WEIGHTS,
                to_llama_name(name),
            )
        )
    return tensors


def optimizer_tensors(model: PicoDecoder, optimizer: torch.optim.Optimizer) -> list[StoredTensor]:
    """The moments of every parameter by name; none before the first update."""
    tensors = []
    for key, tensor in state_by_name(model, optimizer).items():
        parameter, moment = key.rsplit(".", 1)
        module = parameter.removesuffix(".weight")
        tensors.append(StoredTensor(tensor, "optimizer", None, layer_of(module), module, moment, OPTIMIZER, key))
    return tensors


def captured_tensors(captured: Mapping[Split, Captured]) -> list[StoredTensor]:
    """Activations, gradients and batch of each split, in files of their own."""
    tensors = []
    for split, seen in captured.items():
        for module, rows in seen.activations.items():
            file = f"learning_dynamics/{split}_activations.safetensors"
            tensors.append(
                StoredTensor(rows, "activations", split, layer_of(module), module, role_of(module), file, module)
            )
        for module, gradient in seen.gradients.items():
            file = f"learning_dynamics/{split}_gradients.safetensors"
            tensors.append(
                StoredTensor(gradient, "gradients", split, layer_of(module), module, role_of(module), file, module)
            )
        batch = {"input_ids": seen.batch.input_ids.int(), "sample_ids": seen.batch.sample_ids}
        if seen.positions is not None:
            batch["positions"] = seen.positions.int()
        for name, tensor in batch.items():
            file = f"learning_dynamics/{split}_batch.safetensors"
            tensors.append(StoredTensor(tensor.cpu(), "batch", split, None, name, None, file, name))
    return tensors


def capture_record(rule: CaptureRule, captured: Mapping[Split, Captured]) -> CaptureRecord:
    """How the activations were captured, for the manifest."""
    rows: dict[Split, int] = {split: len(next(iter(seen.activations.values()))) for split, seen in captured.items()}
    return CaptureRecord(
        rule=rule.rule,
        position=rule.position,
        tokens_per_sequence=rule.tokens_per_sequence,
        modules=list(rule.modules),
        rows=rows,
    )


def documents(state: TrainState, *, tokens: int, tokenizer: Tokenizer) -> dict[str, bytes]:
    """The files that hold no tensors: model and tokenizer for transformers, and the counters of the trainer."""
    model = state.model
    ends = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    content = {
        "config.json": llama_config(model.config, **ends, dtype=model.embedding_proj.weight.dtype),
        "generation_config.json": generation_config(**ends),
        STATE: {
            "step": state.step,
            "tokens": tokens,
            "skipped_updates": state.skipped_updates,
            "gradient_scaler": scaler_state(state.scaler),
            "micro_batch_size": state.micro_batch_size,
            "compiled": state.compiled,
        },
    }
    return tokenizer.files() | {path: (json.dumps(value, indent=1) + "\n").encode() for path, value in content.items()}


def probe_hash(input_ids: Tensor) -> str:
    """The content hash of the probe's ``input_ids`` (sequences, seq_len + 1) as they are stored, I32."""
    ids = input_ids.int().cpu().contiguous()
    return content_hash("I32", list(ids.shape), ids.numpy().tobytes())
