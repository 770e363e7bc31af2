"""Files that a crash leaves whole."""

from __future__ import annotations

import os
from pathlib import Path

from comlrl_ds.runs.failure import writing


def write_atomically(file: Path, data: bytes) -> None:
    """A reader sees the old file or the whole new one, also after a crash."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with writing(file):
            with open(temporary, "wb") as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
            os.replace(temporary, file)
    except OSError:
        temporary.unlink(missing_ok=True)  # on a full disk it would take the room that is left
        raise


def sync(path: Path) -> None:
    """A file's content, or a folder's list of names, survives a crash of the machine from now on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
