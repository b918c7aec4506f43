"""Checkpoint format v1 as pico-analyze reads it: the models behind ``manifest.json``, the names of the files, the content hash.

The normative page is ``packages/CHECKPOINT_FORMAT.md``; the section numbers below are its sections. pico-train has its own
copy of these models, and ``tests/contract/`` holds both to the page. No torch here.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

FORMAT = "pico-checkpoint"
FORMAT_VERSION = "1.2"
MANIFEST = "manifest.json"
STEP_FOLDER = re.compile(r"step_(0|[1-9][0-9]*)")

Kind = Literal["weights", "activations", "gradients", "optimizer", "batch"]
Split = Literal["train", "val"]


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file and what is wrong with it."""


class TensorError(CheckpointError):
    """A tensor that cannot be had. Without ``key`` all of the file cannot: ``what`` is then wrong with each of its tensors."""

    def __init__(self, path: Path, what: str, key: str | None, where: str) -> None:
        self.path, self.what, self.key = path, what, key
        super().__init__(f"{path}: {key} ({where}) {what}" if key else f"{path} ({where}) {what}")


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class RunIdentity(_Model):
    """Which run a checkpoint belongs to (section 3)."""

    id: str
    name: str
    suite: str | None
    config_hash: str


class MadeBy(_Model):
    """The circumstances in which a checkpoint was written; no number of the run depends on ``command`` or ``created_at``."""

    command: list[str]
    versions: dict[str, str]
    git_commit: str | None
    device: str
    precision: str
    n_threads: int
    world_size: int = 1
    strategy: str = "single_device"
    micro_batch_size: int | None = None
    attention_kernel: str | None = None
    head_tokens: int | None = None
    compiled: bool | None = None
    created_at: str


class Seeds(_Model):
    """The three seeds of a run."""

    weights: int
    data: int
    dropout: int


class DataIdentity(_Model):
    """What was read and in which order (section 3)."""

    fingerprint: str
    order_version: int
    tokenizer_hash: str


class ModelShape(_Model):
    """The shape of the model; ``n_parameters_without_embeddings`` leaves out the input and the output embedding."""

    family: str
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    vocab_size: int
    seq_len: int
    tied_embeddings: bool
    n_parameters: int
    n_parameters_without_embeddings: int


class CaptureRecord(_Model):
    """Which tokens of which modules were captured (section 5); ``rows`` counts activation rows by split."""

    rule: Literal["last", "position", "mean", "all", "sample"]
    position: int | None
    tokens_per_sequence: int | None
    modules: list[str]
    rows: dict[Split, int]


class Parent(_Model):
    """The checkpoint of the same run before this one."""

    step: int
    manifest_sha256: str


class TensorRow(_Model):
    """One stored tensor (section 3): what it is, where it is, and its content hash."""

    kind: Kind
    split: Split | None
    layer: int | None
    module: str
    role: str | None
    file: str
    key: str
    shape: list[int]
    dtype: str
    sha256: str


class FileRow(_Model):
    """One file of the checkpoint; ``path`` is relative to its folder."""

    path: str
    bytes: int
    sha256: str


class Manifest(_Model):
    """``manifest.json`` (section 3)."""

    format: str = FORMAT
    format_version: str = FORMAT_VERSION
    run: RunIdentity
    made_by: MadeBy
    step: int
    tokens: int
    skipped_updates: int
    seeds: Seeds
    data: DataIdentity
    probe_hash: str | None
    model: ModelShape
    capture: CaptureRecord | None
    parent: Parent | None
    tensors: list[TensorRow]
    files: list[FileRow]
    sha256: str | None = None


def content_hash(dtype: str, shape: Sequence[int], data: bytes | memoryview) -> str:
    """SHA-256 over ``<dtype>:<shape joined by ,>:`` and the tensor's bytes (section 3): the identity of a tensor."""
    digest = hashlib.sha256(f"{dtype}:{','.join(map(str, shape))}:".encode("ascii"))
    digest.update(data)
    return digest.hexdigest()


def seal(manifest: Mapping[str, Any]) -> str:
    """The field ``sha256`` of a manifest (section 3): SHA-256 over all its other fields, so that no change goes unnoticed."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode("ascii")).hexdigest()


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def step_folders(checkpoints: Path) -> dict[int, Path]:
    """The folders named ``step_<N>`` below ``checkpoints``, ordered by N as a number, whether complete or not."""
    if not checkpoints.is_dir():
        return {}
    matches = ((STEP_FOLDER.fullmatch(path.name), path) for path in checkpoints.iterdir() if path.is_dir())
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint at ``folder``, its files present in their stated sizes.

    Raises:
        CheckpointError: there is no manifest, it is not valid, it was changed, it is of a newer major version, or a file is
            missing or has another size.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {MANIFEST}: it was not written to its end") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a manifest of format {FORMAT}")
    major = str(content.get("format_version", "")).split(".")[0]
    if not major.isdecimal() or int(major) > int(FORMAT_VERSION.split(".")[0]):
        raise CheckpointError(
            f"{path} has format version {content.get('format_version')!r}; this version reads up to {FORMAT_VERSION}"
        )
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{path} is not valid: {where}: {first['msg']}") from None
    sealed = "sha256" in content or manifest.format_version != "1.0"
    if sealed and content.get("sha256") != seal(content):
        raise CheckpointError(f"{path} is not what was written: it does not have the SHA-256 that it states of itself")
    for row in manifest.files:
        file = folder / row.path
        if not file.resolve().is_relative_to(folder.resolve()):
            raise CheckpointError(f"{path} names the file {row.path!r}, outside its own folder")
        if not file.is_file():
            raise CheckpointError(f"{file} is missing although {MANIFEST} lists it")
        if file.stat().st_size != row.bytes:
            raise CheckpointError(f"{file} has {file.stat().st_size:,} bytes where {MANIFEST} says {row.bytes:,}")
    return manifest
