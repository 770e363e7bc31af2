"""From a run file to a trainer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comlrl_ds.config.errors import ConfigError
from comlrl_ds.config.references import resolve
from comlrl_ds.config.run_file import RunFile
from comlrl_ds.trainers.preference.team import as_sequence


def build_trainer(run_file: RunFile, file: Path, *, agents: Sequence[str] | None = None, verbose: bool = True) -> Any:
    """The trainer that a run file describes, checked, with nothing loaded.

    Args:
        agents: other model sources in place of the file's, e.g. trained ones.
    """
    from comlrl_ds.trainers.preference import MADPOTrainer

    base, problems = file.resolve().parent, []

    def read(reference: str | None, path: str) -> Any:
        if reference is None:
            return None
        try:
            return resolve(reference, path, base)
        except ConfigError as error:
            problems.extend(error.problems)
            return None

    task = run_file.task
    named = task.formatters
    formatters = (
        [read(f, f"task.formatters.{i}") for i, f in enumerate(named)]
        if isinstance(named, list)
        else read(named, "task.formatters")
    )
    reward_func = read(task.reward_func, "task.reward_func")
    reward_processor = read(task.reward_processor, "task.reward_processor")
    train, held = read(task.dataset, "task.dataset"), read(task.eval_dataset, "task.eval_dataset")
    if problems:
        raise ConfigError(problems)
    train = as_sequence(train() if callable(train) else train, "task.dataset")
    held = as_sequence(held() if callable(held) else held, "task.eval_dataset")
    if train is not None and task.train_limit is not None:
        train = [train[k] for k in range(min(task.train_limit, len(train)))]
    return MADPOTrainer(
        agents=list(agents) if agents else [_relative(a.model, base) for a in run_file.agents],
        model_config={"dtype": run_file.dtype, "attn_implementation": run_file.attn_implementation},
        train_dataset=train, eval_dataset=held, reward_func=reward_func, reward_processor=reward_processor,
        formatters=formatters, args=run_file.trainer_config, rollout=run_file.rollout, deepspeed=_deepspeed(run_file, base),
        run_dir=run_file.run.dir, seed=run_file.run.seed, report_to=run_file.run.report_to, verbose=verbose,
    )  # fmt: skip


def _relative(model: str, base: Path) -> str:
    """A folder is looked up from the working directory, then from the run file's."""
    beside = base / model
    return str(beside) if not Path(model).is_dir() and beside.is_dir() else model


def _deepspeed(run_file: RunFile, base: Path) -> Any:
    from comlrl_ds.engines.ds_config import read_deepspeed

    if not isinstance(run_file.deepspeed, str) or Path(run_file.deepspeed).is_file():
        return read_deepspeed(run_file.deepspeed)
    return read_deepspeed(run_file.deepspeed, base)
