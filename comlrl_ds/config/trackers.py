"""Where metrics go beside metrics.jsonl: the trackers that a run may name, and the settings of Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Literal

from pydantic import Field

from comlrl_ds.config.errors import ConfigError, Problem, Settings

Tracker = Literal["tensorboard", "wandb"]


class WandbConfig(Settings):
    """Settings of a Weights & Biases run; the names are those of the peer's `wandb_config`, and of `wandb.init`."""

    project: str | None = Field(None, description="None: as W&B's own settings say.")
    entity: str | None = Field(None, description="User or team.")
    name: str | None = Field(None, description="Of the run; None: W&B makes one up.")
    run_name: str | None = Field(None, description="Another word for name.")
    dir: str | None = Field(None, description="Where W&B keeps its files; None: in the run's folder.")
    tags: list[str] | None = Field(None, description="Of the run.")
    id: str | None = Field(None, description="Of the run; None: an id that a resumed run keeps.")
    resume: bool | Literal["allow", "never", "must", "auto"] | None = Field(
        None, description="As in wandb.init; None: a resumed run goes on with its W&B run."
    )
    group: str | None = Field(None, description="As in wandb.init, as are the next three.")
    job_type: str | None = None
    notes: str | None = None
    mode: Literal["online", "offline", "disabled", "shared"] | None = Field(None, description="None: as WANDB_MODE says.")
    output_dir: str | None = Field(None, description="The run's folder, where run.dir names none.")
    config_sections: dict[str, Any] = Field(
        default_factory=dict, description="Added to the settings that W&B shows; of output, base_dir and verbose count."
    )

    @property
    def run_dir(self) -> str | None:
        """The folder of the run that these settings name: output_dir, else config_sections.output.base_dir, else dir."""
        return self.output_dir or self._output.get("base_dir") or self.dir

    @property
    def verbose(self) -> bool:
        """What config_sections.output.verbose says; by default progress is printed."""
        return bool(self._output.get("verbose", True))

    @property
    def _output(self) -> Mapping[str, Any]:
        found = self.config_sections.get("output")
        return found if isinstance(found, Mapping) else {}


def read_wandb(value: Any) -> WandbConfig | None:
    """The `wandb_config` argument, checked; None where it is None.

    Raises:
        ConfigError: no mapping, an unknown name, or a value that W&B does not take.
    """
    if value is None or isinstance(value, WandbConfig):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(Problem("wandb_config", f"is a {type(value).__name__}; give a dict such as {{'project': …}}"))
    given = {str(k): str(v) if k in ("dir", "output_dir") and v is not None else v for k, v in value.items()}
    given["config_sections"] = given.get("config_sections") or {}
    try:
        return WandbConfig(**given)
    except ConfigError as error:
        raise error.under("wandb_config") from None


def check_trackers(names: Sequence[str]) -> None:
    """Raises ConfigError where the package of a tracker is not installed; each has the tracker's name."""
    missing = [name for name in dict.fromkeys(names) if find_spec(name) is None]
    if missing:
        raise ConfigError(
            Problem("report_to", f"{name} is not installed; pip install 'comlrl-ds[{name}]', or leave it out")
            for name in missing
        )
