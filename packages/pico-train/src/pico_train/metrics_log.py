"""``metrics.jsonl``: one row per pass, the authority on how a run went. No torch, so that listing runs is quick."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pico_train.errors import PicoError


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
    memory_bytes: int | None


class MetricsLog:
    """``metrics.jsonl``: opened at the step a run stands at, with the rows of that step and later dropped."""

    def __init__(self, path: Path, step: int) -> None:
        kept = [row for row in read_rows(path) if row["step"] < step]
        staging = path.with_name(f"{path.name}.tmp")
        with staging.open("w", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(row, allow_nan=False)}\n" for row in kept)
            file.flush()
            os.fsync(file.fileno())
        staging.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def append(self, row: Row) -> None:
        """Write one row through to the file."""
        self._file.write(json.dumps(asdict(row), allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Bring the rows to the disk: before a checkpoint that follows them is published."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a ``metrics.jsonl``, in order; a last line that a kill has cut short is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            rows.append(json.loads(line))
        except ValueError:
            if number < len(lines):  # a whole line ends in a newline, so only the last piece may be torn
                raise PicoError(f"{path}, line {number} is not JSON: {line[:80]!r}") from None
    return rows
