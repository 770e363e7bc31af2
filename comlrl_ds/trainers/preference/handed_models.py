"""Model objects that the user hands over: each is written to a folder of the run, from which engines load it."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from comlrl_ds.config.errors import ConfigError, Findings, Problem
from comlrl_ds.rollout.disk import tensors_in_files
from comlrl_ds.runs.failure import writing
from comlrl_ds.runs.run_dir import RunDir


def is_model(value: Any) -> bool:
    """Whether a value is a transformers model rather than a source of one."""
    return hasattr(value, "save_pretrained") and hasattr(value, "named_parameters")


class ModelCopies:
    """The folders of model objects, in `sources` of a run's folder.

    As a context manager it removes what it has written, and the folders that it made for that, when the block fails.

    Attributes:
        notes: a line for every two objects that have parameters in common, which their copies have not.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._written: list[Path] = []
        self._made: list[Path] = []
        self._owners: dict[int, tuple[str, Any]] = {}  # by id of a parameter; holding the model keeps the id its own
        self.notes: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._owners = {}
        if kind is None:
            return
        for folder in self._written:
            shutil.rmtree(folder, ignore_errors=True)
        for folder in self._made:  # the innermost first
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def holds(self, source: str) -> bool:
        """Whether a source is a model object's folder."""
        return Path(source).is_relative_to(self._run_dir.sources)

    def write(self, model: Any, name: str, path: str) -> str:
        """The folder `name` with a copy of a model object. One that a resumed run started from stays as it is.

        Args:
            path: where the user wrote the object.

        Raises:
            ConfigError: a PEFT model, or for a run that is resumed, a model of other weights than the run started from.
        """
        if hasattr(model, "peft_config"):
            message = "a PEFT model; save it with save_pretrained and give that folder, or give its merge_and_unload()"
            raise ConfigError(Problem(path, message))
        self._note_sharing(model, name)
        target = self._run_dir.sources / name
        if not (self._run_dir.holds_run and target.is_dir()):
            self._save(model, target)
            return str(target)
        again = target.with_name(f".{name}.again")
        try:
            self._save(model, again)
            same = _same_weights(again, target)
        finally:
            shutil.rmtree(again, ignore_errors=True)
        if not same:
            message = f"has other weights than the model object that the run in {str(self._run_dir.path)!r} started from"
            raise ConfigError(Problem(path, f"{message}; give that one, or another run_dir"))
        return str(target)

    def _save(self, model: Any, folder: Path) -> None:
        self._made += [p for p in folder.parents if not p.exists() and p not in self._made]
        if folder.exists():  # of a trainer that never started
            shutil.rmtree(folder)
        self._written.append(folder)
        with writing(folder):
            model.save_pretrained(folder)

    def _note_sharing(self, model: Any, name: str) -> None:
        others = {}
        for p in model.parameters():
            owner, other = self._owners.setdefault(id(p), (name, model))
            if owner != name:
                others[owner] = other is model
        for owner, same in others.items():
            what = "are one model object" if same else "are model objects with parameters in common"
            self.notes.append(f"{owner} and {name} {what}: they start as separate copies, which share no weights afterwards")


def _same_weights(one: Path, other: Path) -> bool:
    """Whether two folders hold the same tensors."""
    each = (tensors_in_files(str(folder)) for folder in (one, other))
    return all(
        a is not None and b is not None and a[0] == b[0] and a[1].dtype == b[1].dtype and a[1].equal(b[1])
        for a, b in itertools.zip_longest(*each)
    )


def folders_of(listed: Sequence[Any], paths: Sequence[str], names: Sequence[str], copies: ModelCopies) -> list[str]:
    """A folder for every model source, and for every model object.

    Args:
        paths: where the user wrote each. names: of the folders of model objects.

    Raises:
        ConfigError: with every problem, before any object is written.
    """
    from comlrl_ds.engines.loading import local_folder

    found, folders = Findings(), []
    for model, path in zip(listed, paths):
        if isinstance(model, str | Path):
            folders.append(found.of(partial(local_folder, str(model), path)) or "")
        elif not is_model(model):
            found.add(path.removesuffix(".model"), f"{type(model).__name__} is neither a model source nor a transformers model")
    found.raise_any()
    sources = iter(folders)
    return [
        next(sources) if isinstance(model, str | Path) else copies.write(model, name, path)
        for model, path, name in zip(listed, paths, names)
    ]
