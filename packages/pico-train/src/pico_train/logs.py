"""What a run says to who watches: ``train.log``, and a progress bar or plain lines."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm.auto import tqdm

from pico_train.metrics_log import Row

log = logging.getLogger("pico_train")


class _LogFile(logging.FileHandler):
    """A file whose disk may fill: a line that cannot be written there is still shown to who watches."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Go on."""


@contextmanager
def log_to(file: Path, level: str) -> Iterator[None]:
    """Send what the package logs to ``file`` as well, from ``level`` on, for the length of a run."""
    handler = _LogFile(file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    before = log.level
    log.addHandler(handler)
    log.setLevel(level)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
        handler.close()


class ConsoleHandler(logging.Handler):
    """Messages for a person: the text alone, warnings marked, printed above a progress bar rather than through it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record to standard error."""
        mark = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        tqdm.write(mark + self.format(record), file=sys.stderr)


class Progress:
    """A bar on a terminal or in a notebook; elsewhere a plain line every ``every`` steps."""

    def __init__(self, name: str, *, begin: int, max_steps: int, every: int) -> None:
        self._name, self._max_steps, self._every = name, max_steps, every
        self._bar = (
            tqdm(
                desc=name,
                total=max_steps + 1,
                initial=begin,
                unit="pass",
                dynamic_ncols=True,
                file=sys.stderr,
            )
            if watched()
            else None
        )
        self._val_loss: float | None = None

    def show(self, row: Row) -> None:
        """Show one row of the log."""
        self._val_loss = row.val_loss if row.val_loss is not None else self._val_loss
        loss = "not finite" if row.loss is None else f"{row.loss:.4f}"
        val_loss = "" if self._val_loss is None else f"{self._val_loss:.4f}"
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss}" + (f", val {val_loss}" if val_loss else ""), refresh=False)
            self._bar.update()
        elif row.step % self._every == 0 or row.step == self._max_steps or row.val_loss is not None:
            log.info(
                "%s  step %d/%d  loss %s%s  lr %s  %s tokens/s",
                self._name,
                row.step,
                self._max_steps,
                loss,
                f"  val_loss {val_loss}" if row.val_loss is not None else "",
                "-" if row.lr is None else f"{row.lr:.2e}",
                f"{row.tokens_per_s:,.0f}",
            )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()


def watched() -> bool:
    """Whether a person looks on: standard error is a terminal, or this is a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules
