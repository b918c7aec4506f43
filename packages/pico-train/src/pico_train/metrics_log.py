"""``metrics.jsonl``: one row per pass, the authority on how a run went. No torch, so that listing runs is quick."""

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pico_train.errors import PicoError, UserError


@dataclass(frozen=True)
class Row:
    """One line of ``metrics.jsonl``; ``packages/CHECKPOINT_FORMAT.md``, section 7, says what each number is."""

    step: int
    tokens: int
    loss: float | None
    val_loss: float | None
    lr: float | None
    grad_norm: float | None
    grad_norms: dict[str, float] | None
    noise_scale: float | None
    updated: bool
    seconds: float
    data_seconds: float
    save_seconds: float
    tokens_per_s: float
    mfu: float | None
    memory_bytes: int | None


class MetricsLog:
    """``metrics.jsonl``: opened at the step a run stands at, with the rows of that step and later dropped.

    Raises:
        UserError: rows before that step are missing.
    """

    def __init__(self, path: Path, step: int) -> None:
        last, end = last_row(path, below=step)
        if (reached := -1 if last is None else last["step"]) != step - 1:
            raise UserError(
                f"{path} ends at step {reached} although the run stands at step {step}: rows are missing. Bring the file back, or "
                "move the checkpoints after that step away, and the passes are made again"
            )
        self._file = path.open("a", encoding="utf-8")
        self._file.truncate(end)  # one operation of the file system: a kill leaves the old end or the new one
        self.sync()

    def append(self, row: Row) -> None:
        """Write one row through to the file.

        Raises:
            PicoError: the disk is full or refuses.
        """
        try:
            self._file.write(json.dumps(asdict(row), allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise PicoError(
                f"{self._file.name} could not be written: {error.strerror or error}. The checkpoints are untouched; "
                "make room or mend the folder, and start the same command again"
            ) from error

    def sync(self) -> None:
        """Bring the rows to the disk: before a checkpoint that follows them is published."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def last_row(path: Path, below: float = math.inf) -> tuple[dict[str, Any] | None, int]:
    """The last whole row whose step is below ``below``, and the byte where it ends; (None, 0) where there is none.

    Only the end of the file is read, so it takes as long for the millionth step as for the tenth.
    """
    if not path.exists():
        return None, 0
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        block = 1 << 16
        while True:
            begin = max(0, size - block)
            file.seek(begin)
            *lines, torn = file.read(size - begin).split(b"\n")
            end = size - len(torn)
            if begin > 0 and lines:
                lines.pop(0)  # its beginning is before the block
            for line in reversed(lines):
                row = _parsed(path, line)
                if row["step"] < below:
                    return row, end
                end -= len(line) + 1
            if begin == 0:
                return None, 0
            block *= 8


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a ``metrics.jsonl``, in order; a last line that a kill has cut short is left out."""
    if not path.exists():
        return []
    *lines, _ = path.read_bytes().split(b"\n")  # a whole line ends in a line feed
    return [_parsed(path, line) for line in lines]


def _parsed(path: Path, line: bytes) -> dict[str, Any]:
    try:
        row: dict[str, Any] = json.loads(line)
        row["step"] + 0
    except (ValueError, TypeError, KeyError):
        raise PicoError(f"{path} has a line that is no row: {line[:80]!r}; remove it, or bring the file back") from None
    return row
