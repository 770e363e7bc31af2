"""The arguments of a trainer that say where and how a run is kept, checked by the rules of a run file's `run` section."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from comlrl_ds.config.errors import Findings
from comlrl_ds.config.run_file import RunSection
from comlrl_ds.config.trackers import WandbConfig, check_trackers, read_wandb
from comlrl_ds.maths.seeds import SEEDS
from comlrl_ds.runs.run_dir import RunDir
from comlrl_ds.runs.trackers import Tracker, trackers_for


@dataclass(frozen=True)
class Seed:
    """What everything random in a run follows from, and where it comes from."""

    value: int
    origin: str

    def __str__(self) -> str:
        return f"seed {self.value} ({self.origin})"


@dataclass(frozen=True)
class RunArguments:
    """What was read.

    Attributes:
        section: the settings, but for the seed. run_dir: the folder. named: whether the user named it.
        given_seed: what the user gave; None: nothing. torch_seed: what torch's generator was seeded with at that time.
    """

    section: RunSection
    run_dir: RunDir
    named: bool
    given_seed: int | None
    torch_seed: int

    def seed_in(self, run_dir: RunDir) -> Seed:
        """The seed of the run in a folder: the given one; else that of the run there which is resumed; else torch's."""
        if self.given_seed is not None:
            return Seed(self.given_seed, "given")
        if (recorded := run_dir.recorded_seed) is not None:
            return Seed(recorded, "the resumed run's")
        return Seed(self.torch_seed, "from torch.initial_seed()")

    def described(self, run_dir: RunDir, seed: int) -> dict[str, Any]:
        """For the recorded configuration of the run in a folder."""
        section = self.section
        wandb = section.wandb.model_dump(exclude_defaults=True) if section.wandb else None
        kept = {"report_to": section.report_to, "wandb": wandb, "stall_timeout_s": section.stall_timeout_s}
        return {"dir": str(run_dir.path), "seed": seed, **kept}

    def start_trackers(self, run_dir: RunDir, config: Mapping[str, Any], *, resumed: bool, quiet: bool) -> list[Tracker]:
        """The trackers of the run in a folder.

        Args:
            config: the run's recorded configuration, whose `args` W&B also shows by their plain names.

        Raises:
            ConfigError: W&B could not be started.
        """
        shown = {**config["args"], "algorithm": config["trainer"], "model_name": config["agents"][0]["model"], **config}
        return trackers_for(
            self.section.trackers, run_dir.path, wandb=self.section.wandb, run_id=run_dir.run_id, config=shown,
            resumed=resumed, quiet=quiet,
        )  # fmt: skip


def read_run(
    kind: str, run_dir: str | Path | None, wandb_config: Any, resume: str, settings: Mapping[str, Any]
) -> RunArguments:
    """The arguments around a run.

    Args:
        kind: of the trainer, for the name of a folder.
        settings: fields of `RunSection`, but `dir` and `wandb`; the seed may be None.

    Raises:
        ConfigError: a value that the run file's section refuses, or a tracker whose package is not installed.
    """
    import torch

    found = Findings()
    wandb: WandbConfig | None = found.of(partial(read_wandb, wandb_config))
    given_seed = settings.get("seed")
    kept = {name: value for name, value in settings.items() if name != "seed" or value is not None}
    section = found.of(lambda: RunSection(wandb=wandb, **kept))
    if section is not None:
        found.of(partial(check_trackers, section.trackers))
    found.raise_any()
    assert section
    place = run_dir or (wandb.run_dir if wandb else None)
    folder = place or Path("runs") / f"{kind}-{datetime.now():%Y%m%d-%H%M%S}"
    given = None if given_seed is None else section.seed
    return RunArguments(section, RunDir(folder, resume != "never"), bool(place), given, torch.initial_seed() % SEEDS)
