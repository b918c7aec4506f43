"""What the loop calls to save: the state and the captured pass become a published checkpoint with its manifest."""

import datetime
import importlib.metadata
import platform
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pico_train.capture import Captured, CaptureRule
from pico_train.checkpoint import contents
from pico_train.checkpoint.background import Background
from pico_train.checkpoint.folder import RunFolder
from pico_train.checkpoint.format import (
    CheckpointError,
    DataIdentity,
    MadeBy,
    Manifest,
    ModelShape,
    Parent,
    RunIdentity,
    Seeds,
    Split,
)
from pico_train.checkpoint.resume import holds_training_state, newest_complete, parent_hash
from pico_train.checkpoint.retention import RestartSchedule, prune
from pico_train.checkpoint.write import StoredTensor, write_checkpoint
from pico_train.config import RunConfig, config_hash
from pico_train.data.cache import TokenCache
from pico_train.data.order import ORDER_VERSION
from pico_train.hardware import Hardware
from pico_train.kernels import Kernels
from pico_train.ranks import Ranks
from pico_train.sharding import is_finite
from pico_train.state import TrainState


class NonFiniteWeights(CheckpointError):
    """The weights are NaN or infinite: nothing was saved."""

    alike_on_all_ranks = True


@dataclass(frozen=True)
class Saver:
    """Saves milestones and restart points of one run; everything that is the same for all of them is a field.

    A save takes a snapshot on the CPU, of the size of weights, moments and capture, and returns; ``background`` writes it.
    ``before_publishing`` brings the log to the disk, so that a checkpoint never precedes its rows.

    Where several ranks train, all of them save together: each takes part in putting sharded tensors together, the first has the snapshot
    and writes, and none goes on before that is settled. Whether a folder exists is asked on the first alone.
    """

    folder: RunFolder
    config: RunConfig
    ranks: Ranks
    cache: TokenCache
    hardware: Hardware
    kernels: Kernels
    rule: CaptureRule | None
    probe_hash: str | None
    command: tuple[str, ...]
    versions: dict[str, str]
    git_commit: str | None
    background: Background
    restart_schedule: RestartSchedule
    before_publishing: Callable[[], None]

    def milestone(self, state: TrainState, captured: Mapping[Split, Captured]) -> None:
        """Save the checkpoint of ``state.step`` with what was captured in its pass."""
        with_moments = self.config.checkpointing.holds_optimizer(state.step, self.config.training.max_steps)
        self._save(self.folder.checkpoints, state, captured, with_moments)
        if with_moments:
            self.restart_schedule.saved()

    def restart_point(self, state: TrainState) -> None:
        """Save what resuming at ``state.step`` needs, unless there is a checkpoint that holds it."""
        if not self.ranks.decided(lambda: self._is_saved(state.step)):
            self._save(self.folder.restart, state, {}, with_moments=True)
        self.restart_schedule.saved()

    def _is_saved(self, step: int) -> bool:
        self.background.wait()
        return any(
            holds_training_state(parent / f"step_{step}") for parent in (self.folder.checkpoints, self.folder.restart)
        )

    def _save(self, parent: Path, state: TrainState, captured: Mapping[Split, Captured], with_moments: bool) -> None:
        tensors = [*contents.weight_tensors(state.model), *contents.captured_tensors(captured)]
        if with_moments:
            tensors += contents.optimizer_tensors(state.model, state.optimizer)
        for stored in tensors:
            if stored.kind == "weights" and not is_finite(stored.tensor):
                raise NonFiniteWeights(
                    f"step {state.step}: the weights of {stored.module} are not finite; nothing was saved, and the "
                    "checkpoints before it are whole. A lower training.optimization.lr or a longer warm-up usually helps"
                )
        copies = [stored.snapshot(keep=self.ranks.first) for stored in tensors]
        snapshot = [stored for stored in copies if stored is not None]

        def submit() -> None:
            manifest = self._manifest(state, captured)
            documents = contents.documents(state, tokens=manifest.tokens, tokenizer=self.cache.tokenizer)
            empty = (contents.OPTIMIZER,) if with_moments else ()
            folder = parent / f"step_{state.step}"
            self.background.submit(partial(self._publish, folder, manifest, snapshot, documents, empty))

        self.ranks.lead(submit)

    def _publish(
        self,
        folder: Path,
        manifest: Manifest,
        tensors: list[StoredTensor],
        documents: dict[str, bytes],
        empty: tuple[str, ...],
    ) -> None:
        self.before_publishing()
        before = newest_complete(self.folder.checkpoints, below=manifest.step)
        if before:
            parent = Parent(step=before[1].step, manifest_sha256=parent_hash(before[0]))
            manifest = manifest.model_copy(update={"parent": parent})
        write_checkpoint(folder, manifest, tensors, documents, empty)
        if folder.parent == self.folder.restart:
            prune(self.folder.restart, self.config.checkpointing.restart.keep)

    def made_by(self, state: TrainState) -> MadeBy:
        """The circumstances in which ``state`` is trained now."""
        return MadeBy(
            command=list(self.command),
            versions=self.versions,
            git_commit=self.git_commit,
            device=self.hardware.device_name,
            precision=self.hardware.precision,
            n_threads=self.hardware.n_threads,
            world_size=self.hardware.world_size,
            strategy=self.hardware.strategy,
            micro_batch_size=state.micro_batch_size,
            attention_kernel=self.kernels.attention,
            head_tokens=self.kernels.head_tokens,
            compiled=self.kernels.compiled,
            created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )

    def _manifest(self, state: TrainState, captured: Mapping[Split, Captured]) -> Manifest:
        """All that is known before the writing: the rest is the parent, and the rows of tensors and files."""
        config = self.config
        return Manifest(
            run=RunIdentity(
                id=self.folder.run_id,
                name=self.folder.name,
                suite=self.folder.suite,
                config_hash=config_hash(config),
            ),
            made_by=self.made_by(state),
            step=state.step,
            tokens=state.step * config.data.dataloader.batch_size * config.model.max_seq_len,
            skipped_updates=state.skipped_updates,
            seeds=Seeds(**config.seeds.model_dump()),
            data=DataIdentity(
                fingerprint=self.cache.fingerprint,
                order_version=ORDER_VERSION,
                tokenizer_hash=self.cache.tokenizer_hash,
            ),
            probe_hash=self.probe_hash,
            model=model_shape(config),
            capture=contents.capture_record(self.rule, captured) if self.rule and captured else None,
            parent=None,
            tensors=[],
            files=[],
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


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that numbers depend on."""
    packages = ("pico-train", "torch", "lightning", "safetensors", "tokenizers", "numpy")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}


def git_commit() -> str | None:
    """The commit of the repository that this very file is tracked in, None where it is in none."""
    here = Path(__file__)

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *words], cwd=here.parent, capture_output=True, text=True, check=False)

    try:
        tracked = git("ls-files", "--error-unmatch", here.name).returncode == 0
        return git("rev-parse", "HEAD").stdout.strip() if tracked else None
    except FileNotFoundError:  # there is no git here
        return None
