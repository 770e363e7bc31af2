"""The `task` section as Python objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from comlrl_ds.config.errors import ConfigError, Findings, Problem
from comlrl_ds.config.references import references, resolve
from comlrl_ds.config.run_file import TaskSection
from comlrl_ds.config.user_code import UserCodeError, call_user


@dataclass(frozen=True)
class LoadedTask:
    """What the references of a task section name. Datasets have a length and an index."""

    train: Any
    held_out: Any
    reward_func: Any
    reward_processor: Any
    formatters: Any
    adapter: Any = None


def load_task(task: TaskSection, base: Path) -> LoadedTask:
    """Imports what a task section names.

    Args:
        base: folder of the run file.

    Raises:
        ConfigError: with everything that cannot be found, or is no dataset.
    """
    found = Findings()
    read = {path: found.of(partial(resolve, name, path, base)) for path, name in references(task.model_dump())}
    found.raise_any()

    def dataset(path: str) -> Any:
        value = read.get(path)
        try:
            return as_sequence(call_user(value, what="dataset", where=path) if callable(value) else value, path)
        except UserCodeError as error:
            raise ConfigError(Problem("", str(error))) from error.__cause__

    formatters = read.get("task.formatters")
    if isinstance(task.formatters, list):
        formatters = [read[f"task.formatters.{i}"] for i in range(len(task.formatters))]
    train, held_out = found.of(partial(dataset, "task.dataset")), found.of(partial(dataset, "task.eval_dataset"))
    found.raise_any()
    if train is not None and task.train_limit is not None:
        train = [train[k] for k in range(min(task.train_limit, len(train)))]
    adapter = read.get("task.centralized_comparator_adapter")
    adapter = adapter() if isinstance(adapter, type) else adapter
    return LoadedTask(train, held_out, read["task.reward_func"], read.get("task.reward_processor"), formatters, adapter)


def check_tasks(dataset: Sequence[Any], path: str) -> None:
    """Raises ConfigError where a dataset has no task, or its first task is no mapping."""
    if not len(dataset):
        raise ConfigError(Problem(path, "has no task"))
    try:
        task_at(dataset, 0)
    except ConfigError as error:
        raise error.under(path) from None


def task_at(dataset: Sequence[Any], index: int) -> Mapping[str, Any]:
    """One task of a dataset.

    Raises:
        ConfigError: the dataset raised an exception, or what it gave is no mapping.
    """
    where = f"task {index}"
    try:
        task = call_user(dataset.__getitem__, index, what="dataset's", where=where)
    except UserCodeError as error:
        raise ConfigError(Problem("", str(error))) from error.__cause__
    if not isinstance(task, Mapping):
        raise ConfigError(Problem("", f"tasks must be mappings such as {{'prompt': …}}, but {where} is {type(task).__name__}"))
    return task


def as_sequence(dataset: Any, path: str) -> Sequence[Any] | None:
    """A dataset with a length and an index; what can only be walked is read into a list. None stays None."""
    if isinstance(dataset, Mapping):
        names = ", ".join(map(repr, list(dataset)[:5]))
        raise ConfigError(Problem(path, f"is a mapping of {names}; give a sequence of tasks, such as one of its values"))
    if dataset is None or (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        return dataset
    if not hasattr(dataset, "__iter__"):
        raise ConfigError(Problem(path, f"gives {type(dataset).__name__}; it must give a sequence of mappings"))
    return call_user(list, dataset, what="dataset's", where=path)


def as_list(value: Any, path: str, each: str) -> list[Any]:
    """What the user gave as a list, one for each of something.

    Args:
        each: what one of them is for, such as "agent".

    Raises:
        ConfigError: a mapping, a text, or anything else that has no order.
    """
    if isinstance(value, str | bytes | Mapping | set | frozenset) or not hasattr(value, "__iter__"):
        raise ConfigError(Problem(path, f"is a {type(value).__name__}; give a list, one per {each}, in the {each}s' order"))
    return list(value)
