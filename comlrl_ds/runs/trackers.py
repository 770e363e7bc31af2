"""The trackers of `report_to`: TensorBoard and Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from comlrl_ds.config.errors import ConfigError, Problem
from comlrl_ds.config.trackers import WandbConfig


class Tracker(Protocol):
    """Takes metrics as they come. One that was closed starts again with the next ones."""

    def track(self, env_step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in `folder`."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def track(self, env_step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, env_step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """One W&B run, started at once, so that what keeps it from starting shows before anything is loaded.

    Environment steps are the horizontal axis of every metric. A run that the user's own `wandb.init` started is used as it
    is, and is not finished here.

    Args:
        settings: of the user. folder: of the run. run_id: the W&B run's, where the settings name none. config: what it shows as
            the run's settings. resumed: whether the run goes on after an interruption. quiet: W&B prints nothing.

    Raises:
        ConfigError: W&B could not be started.
    """

    def __init__(
        self, settings: WandbConfig, folder: Path, run_id: str, config: Mapping[str, Any], resumed: bool, quiet: bool
    ) -> None:
        sections = dict(settings.config_sections)
        dataset = sections.get("dataset")
        for key in ("name", "type"):
            if isinstance(dataset, Mapping) and dataset.get(key):
                sections[f"dataset_{key}"] = dataset[key]
        self._folder = Path(settings.dir).expanduser().absolute() if settings.dir else folder
        self._options: dict[str, Any] = {
            "project": settings.project, "entity": settings.entity, "name": settings.name or settings.run_name,
            "tags": settings.tags, "group": settings.group, "job_type": settings.job_type, "notes": settings.notes,
            "mode": settings.mode, "id": settings.id or run_id, "dir": str(self._folder), "config": {**config, **sections},
        }  # fmt: skip
        self._resume, self._quiet = settings.resume, quiet
        self._run: Any = None
        self._start(resumed)

    def _start(self, resumed: bool) -> None:
        import wandb

        active = wandb.run
        self._folder.mkdir(parents=True, exist_ok=True)
        resume: Any = self._resume if self._resume is not None else "allow" if resumed else None
        try:
            self._run = wandb.init(**self._options, resume=resume, settings=wandb.Settings(silent=self._quiet))
        except Exception as error:  # whatever W&B raises: no login, no network, a project that is not the user's
            said = " ".join(str(error).split())
            message = f"W&B could not be started ({type(error).__name__}: {said})"
            message += "; log in with `wandb login`, or set WANDB_MODE=offline to keep its files here"
            raise ConfigError(Problem("wandb", message)) from error
        self._own = self._run is not active
        if self._own:
            self._run.define_metric("env_step", hidden=True)
            self._run.define_metric("*", step_metric="env_step")

    def track(self, env_step: int, values: Mapping[str, float]) -> None:
        if self._run is None:
            self._start(resumed=True)
        self._run.log({**values, "env_step": env_step})

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None and self._own:
            run.finish()


def trackers_for(
    names: Sequence[str], folder: Path, *, wandb: WandbConfig | None = None, run_id: str = "",
    config: Mapping[str, Any] | None = None, resumed: bool = False, quiet: bool = False,
) -> list[Tracker]:  # fmt: skip
    """The trackers that `report_to` names, each started once; further arguments are `WandB`'s."""
    started: list[Tracker] = []
    if "tensorboard" in names:
        started.append(TensorBoard(folder / "tensorboard"))
    if "wandb" in names:
        started.append(WandB(wandb or WandbConfig(), folder, run_id, config or {}, resumed, quiet))
    return started
