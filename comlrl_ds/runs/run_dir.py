"""The folder of a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from comlrl_ds.config.errors import ConfigError, Problem
from comlrl_ds.runs.files import write_atomically


class RunDir:
    """`run_dir` and the places in it. Holds one run: a folder that holds another is refused, never overwritten."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder).expanduser().absolute()

    def check(self) -> None:
        """Raises ConfigError where the folder cannot hold a new run."""
        if (self.path / "config.yaml").exists():
            raise ConfigError(Problem("run.dir", f"{str(self.path)!r} already holds a run; give another run.dir"))
        parent = next(p for p in (self.path, *self.path.parents) if p.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise ConfigError(
                Problem("run.dir", f"{str(self.path)!r} cannot be written: {str(parent)!r} is not a writable folder")
            )

    def create(self, config: dict[str, Any]) -> None:
        """Makes the folder and writes the resolved configuration."""
        self.check()
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / "config.yaml", yaml.safe_dump(config, sort_keys=False, allow_unicode=True).encode())

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def replay(self) -> Path:
        return self.path / "preference_replay"

    @property
    def journal(self) -> Path:
        return self.path / "preference_replay" / "journal.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def final(self) -> Path:
        return self.path / "final"

    @property
    def sources(self) -> Path:
        return self.path / "sources"

    @property
    def engine_log(self) -> Path:
        return self.path / "engines.log"
