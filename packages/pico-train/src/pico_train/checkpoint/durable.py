"""Files that outlast a kill and a power cut. No torch here."""

import os
from pathlib import Path


def replace_file(path: Path, text: str) -> None:
    """Write a small file so that a kill or a power cut leaves the old text or the new one, never a part."""
    staging = path.with_name(f"{path.name}.tmp")
    staging.write_text(text, encoding="utf-8")
    flush(staging)
    staging.replace(path)
    flush(path.parent)


def flush(path: Path) -> None:
    """fsync a file or a folder."""
    if path.is_dir() and os.name == "nt":
        return  # Windows opens no folders, and its renames are durable without this
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
