"""Opening a run on disk: its identity, its complete steps, its training log, and one tensor at a time.

Comes in: a run folder in checkpoint format v1 (``packages/CHECKPOINT_FORMAT.md``). Goes out: `Run`,
`Checkpoint`, and tensors whose bytes were compared with the manifest's content hash; what fails that check is
never handed out. torch and pandas are imported on first use, so that listing runs stays quick.
"""

import glob
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open

from pico_analyze.checkpoint.format import (
    FORMAT_VERSION,
    STEP_FOLDER,
    CheckpointError,
    Kind,
    Manifest,
    Split,
    TensorError,
    TensorRow,
    content_hash,
    read_manifest,
    step_folders,
)

if TYPE_CHECKING:
    import pandas as pd
    import torch

logger = logging.getLogger(__name__)

RUN_FILE = "run.json"


class RunIdentity(BaseModel):
    """``run.json`` (section 1 of the format page): which run a folder holds."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    format: Literal["pico-run"]
    format_version: str
    run_id: str
    run: str = Field(pattern=r"^[^./\\][^/\\]*$")  # it names folders
    suite: str | None
    config_hash: str


def matches_suffix(module: str, suffix: str) -> bool:
    """Whether ``module`` ends in ``suffix`` at a dot: ``attention.v_proj`` in ``v_proj``, not in ``proj``; ``*``, ``?`` and ``[...]``
    stand for what they stand for in the names of files.

    >>> [matches_suffix("layers.0.attention.v_proj", suffix) for suffix in ("v_proj", "proj", "attention.*", "[kv]_proj")]
    [True, False, True, True]
    """
    return fnmatchcase(f".{module}", f"*.{suffix}")


@dataclass
class Checkpoint:
    """One complete step of a run. Each file is opened once, each tensor is read when asked for."""

    folder: Path
    manifest: Manifest
    device: str = "cpu"
    """Where `tensor` puts what it reads, as torch names it."""
    _handles: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    _verified: set[tuple[str, str]] = field(default_factory=set, init=False, repr=False)

    @property
    def step(self) -> int:
        """The number of passes done."""
        return self.manifest.step

    @property
    def tokens(self) -> int:
        """The scored tokens that the weights have been trained on."""
        return self.manifest.tokens

    def select(
        self,
        kind: Kind | None = None,
        split: Split | None = None,
        layer: int | None = None,
        module: str | None = None,
        role: str | None = None,
    ) -> list[TensorRow]:
        """The tensors that fit all that is given, in the manifest's order; ``module`` is a suffix.

        Raises:
            CheckpointError: there is no such kind or split.
        """
        for name, value, known in (("kind", kind, get_args(Kind)), ("split", split, get_args(Split))):
            if value is not None and value not in known:
                raise CheckpointError(f"{name}: there is no {value!r}; there are {', '.join(known)}")
        return [
            row
            for row in self.manifest.tensors
            if (kind is None or row.kind == kind)
            and (split is None or row.split == split)
            and (layer is None or row.layer == layer)
            and (module is None or matches_suffix(row.module, module))
            and (role is None or row.role == role)
        ]

    def tensor(self, row: TensorRow) -> "torch.Tensor":
        """The tensor that ``row`` names, as stored, its content hash verified.

        Raises:
            CheckpointError: the file cannot be read, lacks the key, or holds another shape, dtype or content.
        """
        import torch

        tensor = self._read(row)
        if (row.file, row.key) not in self._verified:
            # A view of the tensor's own bytes: nothing is copied to be hashed.
            data = tensor.reshape(-1).view(torch.uint8).numpy().data
            if content_hash(row.dtype, row.shape, data) != row.sha256:
                what = "does not have the content that the manifest names: it was changed or damaged"
                raise self._error(row, what)
            self._verified.add((row.file, row.key))
        return tensor.to(self.device)

    def sample(self, row: TensorRow, n: int) -> "torch.Tensor":
        """Up to ``n`` entries of the tensor, evenly spaced, in float64; only they are read, and no hash is verified.

        Raises:
            CheckpointError: as `tensor`, but for the content.
        """
        entries = self._read(row).reshape(-1)
        return entries[:: max(1, len(entries) // n)][:n].double()

    def _read(self, row: TensorRow) -> "torch.Tensor":
        """The tensor as stored, mapped into memory; its content is not verified."""
        if row.file not in {file.path for file in self.manifest.files}:
            raise self._error(row, "is in a file that the manifest does not list")
        if row.file not in self._handles:
            try:
                self._handles[row.file] = safe_open(self.folder / row.file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise self._error(row, f"cannot be read: {error}", whole_file=True) from None
        try:
            header = self._handles[row.file].get_slice(row.key)
            stored = (header.get_dtype(), list(header.get_shape()))
            if stored != (row.dtype, row.shape):
                raise self._error(row, f"is {stored[0]} {stored[1]} where the manifest says {row.dtype} {row.shape}")
            tensor: torch.Tensor = self._handles[row.file].get_tensor(row.key)
        except (SafetensorError, OSError) as error:
            raise self._error(row, f"cannot be read: {error}") from None
        return tensor

    def _error(self, row: TensorRow, what: str, *, whole_file: bool = False) -> TensorError:
        where = f"run {self.manifest.run.name}, step {self.step}"
        return TensorError(self.folder / row.file, what, None if whole_file else row.key, where)


@dataclass(frozen=True)
class Run:
    """A run on disk: the manifests of its complete steps, in order, and why other steps are skipped."""

    path: Path
    identity: RunIdentity
    manifests: Mapping[int, Manifest] = field(repr=False)
    skipped: Mapping[int, str] = field(repr=False)

    @property
    def name(self) -> str:
        """The run's name."""
        return self.identity.run

    @property
    def steps(self) -> tuple[int, ...]:
        """The complete steps, ascending."""
        return tuple(self.manifests)

    @property
    def n_parameters(self) -> int | None:
        """The number of parameters, None while there is no complete step."""
        return next((manifest.model.n_parameters for manifest in self.manifests.values()), None)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved configuration of the run, ``config.yaml``."""
        path = self.path / "config.yaml"
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None
        if not isinstance(content, dict):
            raise CheckpointError(f"{path} does not hold a mapping")
        return content

    def checkpoint(self, step: int, device: str = "cpu") -> Checkpoint:
        """The checkpoint of ``step``, whose tensors go to ``device``.

        Raises:
            CheckpointError: the run has no complete checkpoint of that step; the message lists those it has.
        """
        if step in self.manifests:
            return Checkpoint(self.path / "checkpoints" / f"step_{step}", self.manifests[step], device)
        if step in self.skipped:
            raise CheckpointError(f"step {step} of run {self.name} cannot be used: {self.skipped[step]}")
        raise CheckpointError(f"run {self.name} has no step {step}; it has {list_steps(self.steps)}")

    def training_log(self) -> "pd.DataFrame":
        """``metrics.jsonl``, one row per pass, null as NaN; without rows where there is no such file.

        A last line that a kill has torn is left out with a note.

        Raises:
            CheckpointError: any other line is not a strict JSON object.
        """
        return self._training_log.copy()

    @cached_property
    def _training_log(self) -> "pd.DataFrame":
        import pandas as pd

        path = self.path / "metrics.jsonl"
        lines = path.read_bytes().splitlines() if path.is_file() else []
        rows: list[dict[str, Any]] = []
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line, parse_constant=_not_json, parse_float=_finite)
                if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                    raise ValueError("not an object with a step")
            except ValueError as error:
                if number == len(lines):
                    logger.warning("%s: the last line is torn and left out", path)
                    continue
                raise CheckpointError(f"{path}, line {number}: {error}") from None
            rows.append(row)
        return pd.DataFrame(rows) if rows else pd.DataFrame({"step": pd.Series(dtype="int64")})


def _not_json(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _finite(word: str) -> float:
    if not math.isfinite(float(word)):
        raise ValueError(f"{word} is not a finite number")
    return float(word)


def list_steps(steps: Sequence[int]) -> str:
    """The steps as text for a message, the middle left out where there are many."""
    if not steps:
        return "no complete step"
    shown = [*steps[:8], "...", *steps[-3:]] if len(steps) > 12 else steps
    return f"the steps {', '.join(map(str, shown))}"


def read_identity(path: Path) -> RunIdentity:
    """``run.json`` of the run at ``path``.

    Raises:
        CheckpointError: it is missing, not valid, or of a newer major version.
    """
    file = path / RUN_FILE
    try:
        identity = RunIdentity.model_validate_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not a run: it has no {RUN_FILE}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(f"{file} is not valid: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    major = identity.format_version.split(".")[0]
    if not major.isdecimal() or int(major) > int(FORMAT_VERSION.split(".")[0]):
        raise CheckpointError(
            f"{file} has format version {identity.format_version!r}; this version reads up to {FORMAT_VERSION}"
        )
    return identity


def open_run(path: str | Path) -> Run:
    """Open the run folder at ``path``: its identity and the manifests of its complete steps.

    A step folder that is half-written, damaged or of another run or step is skipped; a logged note says why.

    Raises:
        CheckpointError: the folder is not a run.
    """
    path = Path(path).expanduser()
    identity = read_identity(path)
    manifests: dict[int, Manifest] = {}
    skipped: dict[int, str] = {}
    folders = step_folders(path / "checkpoints")
    for step, folder in folders.items():
        try:
            manifest = read_manifest(folder)
            if manifest.step != step:
                raise CheckpointError(f"{folder} holds step {manifest.step}, by its manifest")
            if manifest.run.id != identity.run_id:
                raise CheckpointError(f"{folder} belongs to another run ({manifest.run.name}, {manifest.run.id})")
        except CheckpointError as error:
            skipped[step] = str(error)
            logger.warning("run %s: step %d is skipped: %s", identity.run, step, error)
        else:
            manifests[step] = manifest
    for other in sorted(path.glob("checkpoints/*")):
        if not STEP_FOLDER.fullmatch(other.name):
            logger.info("run %s: %s is not a checkpoint", identity.run, other)
    return Run(path, identity, manifests, skipped)


def find_runs(patterns: Iterable[str | Path]) -> list[Path]:
    """The run folders that ``patterns`` name, each once, ordered by number of parameters, then by name.

    A pattern is a run folder, a folder that holds runs, a glob of either, or ``<runs_dir>/<suite>``, which
    means all runs of that suite.

    Raises:
        CheckpointError: a pattern names no run; the message lists the runs that are near.
    """
    found: dict[Path, Path] = {}
    for pattern in patterns:
        path = Path(pattern).expanduser()
        candidates = [path, *map(Path, sorted(glob.glob(str(path), recursive=True)))]
        matches = [run for candidate in candidates for run in _runs_at(candidate)]
        matches = matches or [run for run in _runs_at(path.parent) if _suite(run) == path.name]
        if not matches:
            raise CheckpointError(f"{pattern}: no run there; {_what_is_near(path)}")
        for run in matches:
            found.setdefault(run.resolve(), run)
    return sorted(found.values(), key=lambda run: (_n_parameters(run), run.name))


def _runs_at(path: Path) -> list[Path]:
    """The folder itself where it is a run, otherwise the runs directly below it."""
    if (path / RUN_FILE).is_file():
        return [path]
    return sorted(below for below in path.glob("*") if (below / RUN_FILE).is_file())


def _suite(run: Path) -> str | None:
    try:
        return read_identity(run).suite
    except CheckpointError:
        return None


def _n_parameters(run: Path) -> float:
    """The number of parameters by the first readable manifest; infinite, so ordered last, without one."""
    for folder in step_folders(run / "checkpoints").values():
        try:
            return read_manifest(folder).model.n_parameters
        except CheckpointError:
            continue
    return math.inf


def _what_is_near(path: Path) -> str:
    folder = next((parent for parent in path.parents if parent.is_dir()), Path())
    runs = _runs_at(folder)
    if not runs:
        return f"there is none in {folder} either"
    suites = sorted({suite for run in runs if (suite := _suite(run))})
    text = f"{folder} holds the runs {', '.join(run.name for run in runs)}"
    return text + (f" and the suites {', '.join(suites)}" if suites else "")
