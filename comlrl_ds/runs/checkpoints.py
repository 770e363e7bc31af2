"""Checkpoints of a run: whole or not there.

A checkpoint is written into a temporary sibling, every file of it is on disk before the manifest that lists them, and the
manifest before the rename that makes it count. What a crash leaves behind is a sibling that nobody takes for a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comlrl_ds.runs.files import sync, write_atomically

MANIFEST = "manifest.json"
_NAME = re.compile(r"checkpoint-(\d{6,})")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used; names the folder and what is wrong with it."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its folder, the trainer's state, and size and hash of each file by relative path."""

    folder: Path
    state: dict[str, Any]
    files: dict[str, tuple[int, str]]


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: where they are. limit: how many are kept, the newest; None keeps all.
    """

    def __init__(self, folder: Path, limit: int | None = None) -> None:
        self.folder, self._limit = folder, limit

    def begin(self, number: int) -> Path:
        """An empty folder to write a checkpoint into; `seal` makes it one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob(".checkpoint-*.tmp"):  # of a save that a crash interrupted
            shutil.rmtree(left)
        temporary = self.folder / f".checkpoint-{number:06d}.tmp"
        temporary.mkdir()
        return temporary

    def seal(self, temporary: Path, state: dict[str, Any], files: dict[str, tuple[int, str]]) -> Path:
        """Makes a written folder a checkpoint, and drops the oldest beyond the limit.

        Args:
            state: plain types. files: from `hashed`, of all that was written.
        """
        manifest = {"state": state, "files": {name: list(entry) for name, entry in files.items()}}
        write_atomically(temporary / MANIFEST, json.dumps(manifest).encode())
        final = self.folder / temporary.name.removeprefix(".").removesuffix(".tmp")
        if final.exists():  # of an earlier attempt at the same update, which this one repeats
            shutil.rmtree(final)
        os.replace(temporary, final)
        sync(self.folder)
        for old in self.folders()[self._limit :] if self._limit else []:
            shutil.rmtree(old)
        return final

    def folders(self) -> list[Path]:
        """Sealed checkpoints, newest first."""
        found = [f for f in self.folder.glob("checkpoint-*") if _NAME.fullmatch(f.name)] if self.folder.is_dir() else []
        return sorted(found, key=lambda f: int(f.name.partition("-")[2]), reverse=True)

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest usable checkpoint, and a line for each newer one that is not."""
        skipped: list[str] = []
        for folder in self.folders():
            try:
                return read_checkpoint(folder), skipped
            except CheckpointError as error:
                skipped.append(str(error))
        return None, skipped


def read_checkpoint(folder: Path) -> Checkpoint:
    """A checkpoint whose files are all there in their sizes; hashes are checked by those who load them (`check_hashes`).

    Raises:
        CheckpointError: with the folder, and the file that is missing or damaged.
    """
    try:
        content = json.loads((folder / MANIFEST).read_text())
        files = {str(name): (int(size), str(digest)) for name, (size, digest) in content["files"].items()}
        state = dict(content["state"])
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {MANIFEST}; it is no complete checkpoint") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged: {error}") from None
    for name, (size, _) in files.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{folder} is incomplete: {name} is missing")
        if file.stat().st_size != size:
            raise CheckpointError(f"{folder} is damaged: {name} has {file.stat().st_size} bytes, not {size}")
    return Checkpoint(folder, state, files)


def hashed(folder: Path, below: str = "") -> dict[str, tuple[int, str]]:
    """Size and hash of every file below folder/below, by path relative to `folder`; on disk when this returns."""
    found = {}
    for file in sorted(p for p in (folder / below).rglob("*") if p.is_file()):
        with open(file, "rb") as f:
            digest = hashlib.file_digest(f, "blake2b").hexdigest()[:32]
            os.fsync(f.fileno())
        found[file.relative_to(folder).as_posix()] = (file.stat().st_size, digest)
    return found


def check_hashes(checkpoint: Checkpoint, below: str) -> None:
    """Reads the files below folder/below again. Raises CheckpointError where one has changed."""
    now = hashed(checkpoint.folder, below)
    for name, entry in checkpoint.files.items():
        if name.startswith(f"{below}/") and now.get(name) != entry:
            raise CheckpointError(f"{checkpoint.folder} is damaged: the content of {name} has changed")
