"""The journal: every completion and score is on disk as soon as it exists."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any


class Journal:
    """Appends one JSON object per line; `sync` makes what was written survive a crash of the machine.

    Lines: {"kind": "completion", "stream", "round", "item", "agent", "candidate", "seed", "ids", "finish", "version"} and
    {"kind": "score", "round", "item", "candidate", "raw", "value"} (null where invalid).
    """

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(file, "a", encoding="utf-8")  # noqa: SIM115

    def append(self, kind: str, **fields: Any) -> None:
        """One line, handed to the system at once: a killed process loses nothing."""
        self._file.write(json.dumps({"kind": kind, **fields}, separators=(",", ":"), allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.sync()
        self._file.close()
