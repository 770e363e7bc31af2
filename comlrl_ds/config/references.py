"""`package.module:attribute` and `file.py:attribute`: how a run file names Python objects."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from comlrl_ds.config.errors import ConfigError, Problem, nearest
from comlrl_ds.config.user_code import raised


def resolve(reference: str, path: str, base: Path) -> Any:
    """The object that a reference names.

    Args:
        reference: "package.module:attribute" or "file.py:attribute"; a relative file is looked up from `base`.
        path: place in the run file, for the error.
        base: folder of the run file, then the working directory.
    """
    module_name, colon, attribute = reference.rpartition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(
            Problem(path, f"{reference!r} names no object; write 'package.module:attribute' or 'file.py:attribute'")
        )
    module = _load_file(module_name, path, base) if module_name.endswith(".py") else _load_module(module_name, path)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [n for n in vars(found) if not n.startswith("_")] if hasattr(found, "__dict__") else []
            raise ConfigError(Problem(path, f"{module_name!r} has no {part!r}{nearest(part, names)}"))
        found = getattr(found, part)
    return found


def references(task: Any) -> list[tuple[str, str]]:
    """(path, reference) of every Python object that the section `task` of a run file names, however broken the rest is."""
    found: list[tuple[str, str]] = []
    for name in ("dataset", "eval_dataset", "reward_func", "reward_processor", "formatters", "centralized_comparator_adapter"):
        value = task.get(name) if isinstance(task, dict) else None
        if isinstance(value, list):
            found += [(f"task.{name}.{i}", part) for i, part in enumerate(value) if isinstance(part, str)]
        elif isinstance(value, str):
            found.append((f"task.{name}", value))
    return found


def beside(folder: str, base: Path) -> str:
    """A folder is looked up from the working directory, then from the run file's."""
    return str(base / folder) if not Path(folder).is_dir() and (base / folder).is_dir() else folder


def _load_module(name: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise ConfigError(Problem(path, f"no module named {error.name!r}; is it installed, or on PYTHONPATH?")) from None
        raise ConfigError(Problem(path, f"importing {name!r} failed: {error}")) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(Problem(path, f"importing {name!r} failed: {raised(error)}")) from error


def _load_file(name: str, path: str, base: Path) -> ModuleType:
    tried = [Path(name).expanduser()] if Path(name).expanduser().is_absolute() else [base / name, Path.cwd() / name]
    file = next((f for f in tried if f.is_file()), None)
    if file is None:
        raise ConfigError(Problem(path, f"no file {name!r} (looked in {', '.join(str(f.parent) for f in tried)})"))
    file = file.resolve()
    key = f"comlrl_ds_user_{hashlib.blake2b(str(file).encode(), digest_size=6).hexdigest()}"
    if key in sys.modules:
        return sys.modules[key]
    spec = importlib.util.spec_from_file_location(key, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[key]
        raise ConfigError(Problem(path, f"running {str(file)!r} failed: {raised(error)}")) from error
    return module


def is_path(model: str) -> bool:
    """Whether a model's name can only be a folder's; one with at most one slash may be a repository."""
    return model.count("/") > 1 or model.startswith((".", "/", "~"))
