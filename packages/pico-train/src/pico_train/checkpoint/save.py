"""What the loop calls to save: the state and the captured pass become one published checkpoint with its manifest."""

import datetime
import importlib.metadata
import platform
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pico_train.capture import Captured, CaptureRule
from pico_train.checkpoint import contents
from pico_train.checkpoint.folder import RunFolder
from pico_train.checkpoint.format import (
    DataIdentity,
    MadeBy,
    Manifest,
    ModelShape,
    Parent,
    RunIdentity,
    Seeds,
    Split,
)
from pico_train.checkpoint.resume import newest_complete, parent_hash
from pico_train.checkpoint.write import write_checkpoint
from pico_train.config import RunConfig, config_hash
from pico_train.data.cache import TokenCache
from pico_train.data.order import ORDER_VERSION
from pico_train.hardware import Hardware
from pico_train.state import TrainState


@dataclass(frozen=True)
class Saver:
    """Writes the checkpoints of one run; everything that is the same for all of them is a field.

    ``before_publishing`` is called before the first byte: it brings the log to the disk, so that a checkpoint never precedes its rows.
    """

    folder: RunFolder
    config: RunConfig
    cache: TokenCache
    hardware: Hardware
    rule: CaptureRule | None
    probe_hash: str | None
    command: tuple[str, ...]
    before_publishing: Callable[[], None]

    def __call__(self, state: TrainState, captured: Mapping[Split, Captured]) -> Manifest:
        """Publish the checkpoint of ``state.step`` and return its manifest."""
        step = state.step
        self.before_publishing()
        tokens = step * self.config.data.dataloader.batch_size * self.config.model.max_seq_len
        before = newest_complete(self.folder.checkpoints, below=step)
        manifest = Manifest(
            run=RunIdentity(
                id=self.folder.run_id,
                name=self.folder.name,
                suite=self.folder.suite,
                config_hash=config_hash(self.config),
            ),
            made_by=made_by(self.hardware, self.command),
            step=step,
            tokens=tokens,
            skipped_updates=state.skipped_updates,
            seeds=Seeds(**self.config.seeds.model_dump()),
            data=DataIdentity(
                fingerprint=self.cache.fingerprint,
                order_version=ORDER_VERSION,
                tokenizer_hash=self.cache.tokenizer_hash,
            ),
            probe_hash=self.probe_hash,
            model=model_shape(self.config),
            capture=contents.capture_record(self.rule, captured) if self.rule else None,
            parent=Parent(step=before[1].step, manifest_sha256=parent_hash(before[0])) if before else None,
            tensors=[],
            files=[],
        )
        return write_checkpoint(
            self.folder.checkpoints / f"step_{step}",
            manifest,
            tensors=[
                *contents.weight_tensors(state.model),
                *contents.optimizer_tensors(state.model, state.optimizer),
                *contents.captured_tensors(captured),
            ],
            documents=contents.documents(state, tokens=tokens, tokenizer=self.cache.tokenizer),
            empty=(contents.OPTIMIZER,),
        )


def model_shape(config: RunConfig) -> ModelShape:
    """The model's shape in the words of the manifest."""
    model = config.model
    return ModelShape(
        family=model.model_type,
        d_model=model.d_model,
        n_layers=model.n_layers,
        n_heads=model.attention_n_heads,
        n_kv_heads=model.n_kv_heads,
        head_dim=model.head_dim,
        hidden_dim=model.activation_hidden_dim,
        vocab_size=model.vocab_size,
        seq_len=model.max_seq_len,
        tied_embeddings=model.tie_embeddings,
        n_parameters=model.n_parameters,
        n_parameters_without_embeddings=model.n_parameters_without_embeddings,
    )


def made_by(hardware: Hardware, command: tuple[str, ...]) -> MadeBy:
    """The circumstances of this process."""
    packages = ("pico-train", "torch", "lightning", "safetensors", "tokenizers", "numpy")
    return MadeBy(
        command=list(command),
        versions={"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages},
        git_commit=git_commit(),
        device=hardware.device_name,
        precision=hardware.precision,
        n_threads=hardware.n_threads,
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def git_commit() -> str | None:
    """The commit of the repository that the code of this package stands in, None outside one."""
    found = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or None
