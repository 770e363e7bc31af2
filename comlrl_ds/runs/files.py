"""Files that a crash leaves whole."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(file: Path, data: bytes) -> None:
    """A reader sees the old file or the whole new one, also after a crash."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, file)
