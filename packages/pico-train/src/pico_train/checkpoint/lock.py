"""One process at a time in a run folder."""

import datetime
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from pico_train.checkpoint.folder import RunFolderError, unwritable


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold the lock of the run folder ``run``; the system gives it up when the process ends, however it ends.

    Raises:
        RunFolderError: another process holds it; the message names its host and process, and since when.
    """
    with _opened(run / "run.lock") as file:
        try:
            _lock(file.fileno())
        except OSError:
            file.seek(0)
            raise RunFolderError(
                f"{run} is in use by {file.read().strip() or 'another process'}: wait for it or stop it, or give this run "
                "another checkpointing.run_name"
            ) from None
        file.truncate(0)
        since = datetime.datetime.now(datetime.UTC).isoformat(sep=" ", timespec="seconds")
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {since}\n")
        file.flush()
        yield


def _opened(path: Path) -> TextIO:
    try:
        return path.open("a+", encoding="utf-8")
    except OSError as error:
        raise unwritable(path.parent, error) from error


def _lock(descriptor: int) -> None:
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
