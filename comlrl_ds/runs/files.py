"""Files that a crash leaves whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
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


def write_folder(final: Path, write: Callable[[Path], None]) -> Path:
    """Has `write` fill a temporary sibling, syncs every file in it, and puts it in place, where it replaces an older folder."""
    temporary, old = (final.with_name(f".{final.name}.{end}") for end in ("tmp", "old.tmp"))
    for left in (temporary, old):  # of an attempt that was interrupted
        if left.exists():
            shutil.rmtree(left)
    temporary.mkdir(parents=True)
    write(temporary)
    for file in temporary.rglob("*"):
        if file.is_file():
            sync(file)
    if final.exists():
        os.replace(final, old)
    os.replace(temporary, final)
    sync(final.parent)
    if old.exists():
        shutil.rmtree(old)
    return final


def sync(path: Path) -> None:
    """A file's content, or a folder's list of names, survives a crash of the machine from now on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
