"""What a trainer's policies are while its engines come and go, and the folder that holds them in between."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comlrl_ds.rollout.disk import INDEX, weight_files
from comlrl_ds.runs.files import write_atomically

MARK_FILE = "policies.json"


class PoliciesLostError(RuntimeError):
    """The policies that a trainer has learned are neither in engines nor on disk; says why."""


@dataclass
class PolicyState:
    """The version of a trainer's policies, and of what learns beside them: critics and the reward model.

    Attributes:
        steps: optimizer steps behind the policies: their version.
        changes: how often anything was changed. Unlike `steps` it never goes back, so that equal numbers are equal weights.
        folder: the last folder of the run that everything was saved to: agent_0 … and what else learns.
        lost: why the present policies cannot be had; None: they can.
    """

    steps: int = 0
    changes: int = 0
    folder: Path | None = None
    lost: str | None = None
    _saved_changes: int = 0
    _mark: str = ""

    def stepped(self, taken: bool = True) -> None:
        """A joint step has ended. Args: taken: whether the policies took it, or dropped it."""
        self.steps += taken
        self.changes += 1

    def changed(self) -> None:
        """Something besides the policies has learned, or a checkpoint was loaded."""
        self.changes += 1

    @property
    def on_disk(self) -> bool:
        """Whether the present state can be read from disk: from `folder`, or where nothing has changed from the sources."""
        return self._saved_changes == self.changes

    def saved(self, folder: Path) -> None:
        """The present state has been written to a folder of the run, which is marked as holding it."""
        self.folder, self._saved_changes, self._mark = folder, self.changes, uuid.uuid4().hex
        self.note({})

    def note(self, more: Mapping[str, Any]) -> None:
        """Writes down beside the saved state what else a later process needs to go on from it, as plain types."""
        assert self.folder
        content = {"mark": self._mark, "steps": self.steps, **more}
        write_atomically(self.folder / MARK_FILE, json.dumps(content).encode())

    def adopt(self, folder: Path) -> dict[str, Any]:
        """From now on the policies are those that an earlier trainer of this run saved to a folder; what it noted there."""
        noted = _marked(folder)
        self.steps = int(noted.get("steps", 1))
        self.restart_from(folder)
        if noted:
            self._mark = noted["mark"]
        else:
            self.saved(folder)
        return noted

    def restart_from(self, folder: Path | None) -> None:
        """Engines start from a folder that was saved, or from the sources; whatever they held is given up."""
        self.changes += 1
        self.folder, self._saved_changes, self.lost = folder, self.changes, None
        if folder is None:
            self.steps = 0

    def lose(self, why: str) -> None:
        """The engines that held the present policies are gone."""
        self.lost = why

    def check(self) -> None:
        """Raises PoliciesLostError where the policies that the trainer has learned cannot be had any more."""
        if self.lost is None and not self.on_disk:
            self.lost = "its engines ended before its policies were kept"
        if self.lost is None and self.folder is not None and _marked(self.folder).get("mark") != self._mark:
            self.lost = f"{str(self.folder)!r}, where they were kept, was removed or overwritten"
        if self.lost is not None:
            way = 'train(resume_from_checkpoint="auto") resumes the run from its newest checkpoint'
            raise PoliciesLostError(f"the policies of this trainer are gone: {self.lost}; {way}")


def _marked(folder: Path) -> dict[str, Any]:
    """What stands in a folder's mark; empty without one."""
    file = folder / MARK_FILE
    return dict(json.loads(file.read_text())) if file.is_file() else {}


def copy_models(source: Path, target: Path) -> None:
    """Copies every model folder in `source` into `target`, where it replaces the weights of one of the same name."""
    for model in sorted(f for f in source.iterdir() if f.is_dir()):
        own = target / model.name
        if own.is_dir():
            for stale in [*weight_files(own), own / INDEX]:
                stale.unlink(missing_ok=True)
        shutil.copytree(model, own, dirs_exist_ok=True)
