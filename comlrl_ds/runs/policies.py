"""Policies of earlier rounds on disk: whole or not there, and no more of them than are needed."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from comlrl_ds.runs.files import write_folder

_NAME = re.compile(r"iteration_(\d{4,})")


@dataclass(frozen=True)
class PolicyFolders:
    """`iteration_0000` … are the policies after the first round and later ones, each with agent_0, agent_1 …; `initial` are
    those of the start.

    Args:
        folder: of the run alone.
    """

    folder: Path

    def path(self, index: int) -> Path:
        """The policies after round `index`, from 0; below that the initial ones."""
        return self.folder / (f"iteration_{index:04d}" if index >= 0 else "initial")

    def save(self, index: int, write: Callable[[Path], None]) -> Path:
        """Has `write` fill a temporary folder and puts it in place, where it replaces one of an interrupted attempt."""
        for left in self.folder.glob(".*.tmp") if self.folder.is_dir() else ():
            if left.is_dir():
                shutil.rmtree(left)
        return write_folder(self.path(index), write)

    def drop_before(self, index: int) -> None:
        """Removes the policies after rounds before `index`."""
        for found in self.folder.iterdir() if self.folder.is_dir() else ():
            if (match := _NAME.fullmatch(found.name)) and int(match[1]) < index:
                shutil.rmtree(found)
