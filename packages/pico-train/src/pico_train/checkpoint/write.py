"""Writing a checkpoint: everything beside its target, then one rename. Killed at any moment, the target is whole or not there."""

import dataclasses
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from pico_train.checkpoint.durable import flush
from pico_train.checkpoint.format import (
    MANIFEST,
    CheckpointError,
    FileRow,
    Kind,
    Manifest,
    Split,
    TensorRow,
    content_hash,
    file_hash,
    read_manifest,
    seal,
)
from pico_train.sharding import whole

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor and its place in a checkpoint: the fields of a manifest row that cannot be computed from it."""

    tensor: Tensor
    kind: Kind
    split: Split | None
    layer: int | None
    module: str
    role: str | None
    file: str
    key: str

    def snapshot(self, *, keep: bool) -> "StoredTensor | None":
        """The same with a copy of the whole tensor on the CPU, which training does not change; None where it is not to be kept.

        A sharded tensor is put together on every rank, so all of them call this.
        """
        together = whole(self.tensor.detach())
        return dataclasses.replace(self, tensor=together.to("cpu", copy=True)) if keep else None

    def row(self) -> TensorRow:
        """The manifest row, with the content hash of the tensor's bytes."""
        flat = whole(self.tensor.detach()).cpu().contiguous()
        shape, dtype = list(flat.shape), DTYPE_NAMES[flat.dtype]
        data = flat.reshape(-1).view(torch.uint8).numpy().data
        return TensorRow(
            kind=self.kind,
            split=self.split,
            layer=self.layer,
            module=self.module,
            role=self.role,
            file=self.file,
            key=self.key,
            shape=shape,
            dtype=dtype,
            sha256=content_hash(dtype, shape, data),
        )


def write_checkpoint(
    folder: Path,
    manifest: Manifest,
    tensors: Sequence[StoredTensor],
    documents: Mapping[str, bytes],
    empty: Iterable[str] = (),
) -> Manifest:
    """Publish the checkpoint ``folder`` (``.../step_<N>``) and return its manifest with the rows filled in.

    Args:
        manifest: all but the rows of tensors and files.
        tensors: every tensor, in the order of its file.
        documents: the other files, by path relative to ``folder``.
        empty: safetensors files to write although no tensor is in them.

    A valid checkpoint that is there already is left as it is. One that is not valid is moved aside, never deleted.

    Raises:
        CheckpointError: the disk is full or refuses; what was published before is untouched.
    """
    with suppress(CheckpointError):
        return read_manifest(folder)
    staging = folder.with_name(f"{folder.name}.tmp")
    try:
        if folder.exists():
            set_aside(folder)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        by_file: dict[str, dict[str, Tensor]] = {path: {} for path in empty}
        for stored in tensors:
            by_file.setdefault(stored.file, {})[stored.key] = stored.tensor.detach().contiguous()
        for path, content in by_file.items():
            (staging / path).parent.mkdir(parents=True, exist_ok=True)
            save_file(content, staging / path, metadata={"format": "pt"})
        for path, data in documents.items():
            (staging / path).parent.mkdir(parents=True, exist_ok=True)
            (staging / path).write_bytes(data)
        manifest = manifest.model_copy(
            update={
                "tensors": [stored.row() for stored in tensors],
                "files": [_file_row(staging, path) for path in sorted({*by_file, *documents})],
            }
        )
        manifest = manifest.model_copy(update={"sha256": seal(manifest.model_dump())})
        (staging / MANIFEST).write_text(manifest_text(manifest), encoding="utf-8")
        flush(staging / MANIFEST)
        for inner in [*(path for path in staging.rglob("*") if path.is_dir()), staging]:
            flush(inner)
        staging.rename(folder)
        flush(folder.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(staging, ignore_errors=True)
        why = error.strerror if isinstance(error, OSError) else None
        raise CheckpointError(
            f"{folder} could not be written: {why or error}. Checkpoints published before it are untouched; "
            "make room or mend the folder, and start the same command again"
        ) from error
    return manifest


def manifest_text(manifest: Manifest) -> str:
    """The manifest as it is stored; its SHA-256 links a checkpoint to the one before."""
    return json.dumps(manifest.model_dump(), indent=1, allow_nan=False) + "\n"


def set_aside(folder: Path) -> Path:
    """Rename a checkpoint folder that is not valid to ``<name>.damaged[-k]``, where no reader looks for it."""
    number = 1
    while (target := folder.with_name(f"{folder.name}.damaged{f'-{number}' if number > 1 else ''}")).exists():
        number += 1
    return folder.rename(target)


def _file_row(staging: Path, path: str) -> FileRow:
    file = staging / path
    flush(file)
    return FileRow(path=path, bytes=file.stat().st_size, sha256=file_hash(file))
