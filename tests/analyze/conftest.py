"""Tiny synthetic runs in checkpoint format v1, written with safetensors and json alone."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pico_analyze.checkpoint.format import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    CaptureRecord,
    DataIdentity,
    FileRow,
    MadeBy,
    Manifest,
    ModelShape,
    RunIdentity,
    Seeds,
    TensorRow,
    content_hash,
    file_hash,
    seal,
)

DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.int32: "I32",
    torch.int64: "I64",
}
ROLES = {
    "embedding_proj": "embed",
    "attention_norm": "attention_norm",
    "attention.q_proj": "q",
    "attention.k_proj": "k",
    "attention.v_proj": "v",
    "attention.o_proj": "o",
    "swiglu.w_2": "down",
    "de_embedding_proj": "unembed",
}
CAPTURED = ("attention.v_proj", "attention.o_proj", "swiglu.w_2")
ROWS, BATCH, SEQ_LEN, VOCABULARY = 24, 4, 8, 32

# (kind, split, module) -> tensor; for the optimizer's, the moment stands in the place of the split
Tensors = dict[tuple[str, str | None, str], Tensor]


def model_shape(d_model: int = 16, n_layers: int = 2, n_heads: int = 4, n_kv_heads: int = 2) -> ModelShape:
    return ModelShape(
        family="pico_decoder",
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=d_model // n_heads,
        hidden_dim=2 * d_model,
        vocab_size=VOCABULARY,
        seq_len=SEQ_LEN,
        tied_embeddings=True,
        n_parameters=1000 * d_model,
        n_parameters_without_embeddings=1000 * d_model - VOCABULARY * d_model,
    )


def synthetic_tensors(shape: ModelShape, step: int, seed: int, splits: tuple[str, ...]) -> Tensors:
    """Random weights, activations and gradients of one step; the probe's ids are the same at every step."""
    generator = torch.Generator().manual_seed(1000 * seed + step)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    d, kv, hidden = shape.d_model, shape.n_kv_heads * shape.head_dim, shape.hidden_dim
    weights = {
        "attention_norm": (d,),
        "attention.v_proj": (kv, d),
        "attention.o_proj": (d, d),
        "swiglu.w_2": (d, hidden),
    }
    tensors: Tensors = {("weights", None, "embedding_proj"): random(VOCABULARY, d)}
    for layer in range(shape.n_layers):
        for name, size in weights.items():
            tensors["weights", None, f"layers.{layer}.{name}"] = random(*size)
    for split in splits:
        ids = torch.Generator().manual_seed(step if split == "train" else 99)
        tensors["batch", split, "input_ids"] = torch.randint(
            VOCABULARY, (BATCH, SEQ_LEN + 1), generator=ids, dtype=torch.int32
        )
        for layer in range(shape.n_layers):
            for name in CAPTURED:
                module = f"layers.{layer}.{name}"
                tensors["activations", split, module] = random(ROWS, weights[name][0]).bfloat16()
                tensors["gradients", split, module] = 1e-3 * random(*weights[name])
    return tensors


def write_checkpoint(
    folder: Path, identity: RunIdentity, shape: ModelShape, step: int, seed: int, tensors: Tensors
) -> None:
    """One complete checkpoint folder holding ``tensors``."""
    files: dict[str, dict[str, Tensor]] = {}
    rows = []
    for (kind, split, module), tensor in tensors.items():
        moment, split = (split, None) if kind == "optimizer" else (None, split)
        file = {"weights": "model.safetensors", "optimizer": "training_state/optimizer.safetensors"}.get(
            kind, f"learning_dynamics/{split}_{kind}.safetensors"
        )
        key = {"weights": f"model.{module}.weight", "optimizer": f"{module}.weight.{moment}"}.get(kind, module)
        files.setdefault(file, {})[key] = tensor.contiguous()
        layer, _, suffix = module.removeprefix("layers.").partition(".")
        dtype = DTYPES[tensor.dtype]
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        rows.append(
            TensorRow(
                kind=kind,
                split=split,
                layer=int(layer) if suffix else None,
                module=module,
                role=moment or ROLES.get(suffix or module),
                file=file,
                key=key,
                shape=list(tensor.shape),
                dtype=dtype,
                sha256=content_hash(dtype, tensor.shape, data),
            )
        )
    for file, content in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        save_file(content, folder / file)
    captured = sorted({split for kind, split, _ in tensors if kind == "activations"})
    manifest = Manifest(
        format=FORMAT,
        format_version=FORMAT_VERSION,
        run=identity,
        made_by=MadeBy(
            command=["pico-train"],
            versions={"torch": torch.__version__},
            git_commit=None,
            device="cpu",
            precision="32-true",
            n_threads=1,
            created_at="2026-01-01T00:00:00Z",
        ),
        step=step,
        tokens=step * BATCH * SEQ_LEN,
        skipped_updates=0,
        seeds=Seeds(weights=seed, data=1, dropout=2),
        data=DataIdentity(fingerprint="f" * 64, order_version=1, tokenizer_hash="0" * 64),
        probe_hash=next((row.sha256 for row in rows if (row.kind, row.split) == ("batch", "val")), None),
        model=shape,
        capture=CaptureRecord(
            rule="all",
            position=None,
            tokens_per_sequence=None,
            modules=list(CAPTURED),
            rows=dict.fromkeys(captured, ROWS),
        )
        if captured
        else None,
        parent=None,
        tensors=rows,
        files=[
            FileRow(path=file, bytes=(folder / file).stat().st_size, sha256=file_hash(folder / file)) for file in files
        ],
    )
    content = manifest.model_dump()
    (folder / MANIFEST).write_text(json.dumps(content | {"sha256": seal(content)}))


def write_run(
    folder: Path,
    *,
    steps: tuple[int, ...] = (0, 1, 2, 10),
    splits: tuple[str, ...] = ("train", "val"),
    shape: ModelShape | None = None,
    suite: str | None = None,
    seed: int = 0,
    change: Callable[[int, Tensors], None] | None = None,
) -> Path:
    """A run at ``folder``, named for it; ``change(step, tensors)`` may edit what a step stores."""
    shape = shape or model_shape()
    identity = RunIdentity(id=f"id-{folder.name}", name=folder.name, suite=suite, config_hash="c" * 64)
    for step in steps:
        tensors = synthetic_tensors(shape, step, seed, splits)
        if change is not None:
            change(step, tensors)
        write_checkpoint(folder / "checkpoints" / f"step_{step}", identity, shape, step, seed, tensors)
    run_file = {
        "format": "pico-run",
        "format_version": FORMAT_VERSION,
        "run_id": identity.id,
        "run": identity.name,
        "suite": suite,
        "config_hash": identity.config_hash,
    }
    (folder / "run.json").write_text(json.dumps(run_file))
    (folder / "config.yaml").write_text(f"model: {{d_model: {shape.d_model}}}\n")
    log = [
        {"step": step, "loss": 4.0 - step / 10, "val_loss": 4.5 - step / 10 if step % 10 == 0 else None}
        for step in range(max(steps) + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
    return folder


@pytest.fixture
def make_run(tmp_path):
    """``make_run("name", **options)``: a run below ``tmp_path / "runs"``; see `write_run` for the options."""
    return lambda name="demo", **options: write_run(tmp_path / "runs" / name, **options)


@pytest.fixture
def make_shape():
    """The shape of a tiny model, any part of it changed."""
    return model_shape


@pytest.fixture
def run_folder(make_run):
    """A run of 2 layers, d_model 16, 4 heads, 2 kv heads, at the steps 0, 1, 2, 10, with all kinds and both splits."""
    return make_run()


@pytest.fixture
def flip_byte():
    """Change one byte of the tensor that a manifest row names, leaving the file's size and header as they are."""

    def flip(folder: Path, row: TensorRow) -> None:
        path = folder / row.file
        content = bytearray(path.read_bytes())
        header_bytes = int.from_bytes(content[:8], "little")
        begin, _ = json.loads(content[8 : 8 + header_bytes])[row.key]["data_offsets"]
        content[8 + header_bytes + begin] ^= 1
        path.write_bytes(content)

    return flip
