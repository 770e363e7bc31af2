"""From a run file to a trainer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from comlrl_ds.config.errors import Findings
from comlrl_ds.config.references import beside, references, resolve
from comlrl_ds.config.run_file import RunFile
from comlrl_ds.trainers.preference.team import as_sequence


def build_trainer(run_file: RunFile, file: Path, *, agents: Sequence[str] | None = None, verbose: bool = True) -> Any:
    """The trainer that a run file describes, checked, with nothing loaded.

    Args:
        agents: other model sources in place of the file's, e.g. trained ones.
    """
    from comlrl_ds.engines.ds_config import read_deepspeed
    from comlrl_ds.trainers.preference import MADPOTrainer

    base, task, found = file.resolve().parent, run_file.task, Findings()
    read = {path: found.of(partial(resolve, name, path, base)) for path, name in references(task.model_dump())}
    found.raise_any()

    def dataset(path: str) -> Any:
        value = read.get(path)
        return as_sequence(value() if callable(value) else value, path)

    formatters = read.get("task.formatters")
    if isinstance(task.formatters, list):
        formatters = [read[f"task.formatters.{i}"] for i in range(len(task.formatters))]
    train = dataset("task.dataset")
    if train is not None and task.train_limit is not None:
        train = [train[k] for k in range(min(task.train_limit, len(train)))]
    return MADPOTrainer(
        agents=list(agents) if agents else [beside(a.model, base) for a in run_file.agents],
        model_config={"dtype": run_file.dtype, "attn_implementation": run_file.attn_implementation},
        train_dataset=train, eval_dataset=dataset("task.eval_dataset"), reward_func=read["task.reward_func"],
        reward_processor=read.get("task.reward_processor"), formatters=formatters, args=run_file.trainer_config,
        rollout=run_file.rollout, deepspeed=read_deepspeed(run_file.deepspeed, base),
        run_dir=run_file.run.dir, seed=run_file.run.seed, report_to=run_file.run.report_to, verbose=verbose,
    )  # fmt: skip
