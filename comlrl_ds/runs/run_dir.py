"""The folder of a run."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import yaml

from comlrl_ds.config.errors import ConfigError, Problem
from comlrl_ds.runs.files import write_atomically

# Settings that do not change what a run computes.
_MAY_CHANGE = (
    "run.dir", "run.report_to", "run.stall_timeout_s", "run.checkpoint", "placement", "rollout.engines", "rollout.threads",
    "rollout.urls", "rollout.transport", "rollout.kv_cache_bytes", "rollout.gpu_memory", "rollout.start_timeout",
    "rollout.timeout", "rollout.max_num_seqs", "args.logging_steps", "args.agent_devices", "args.comparator_devices",
    "args.num_iterations", "rollout.sleep_level", "run.wandb",
)  # fmt: skip


class RunDir:
    """`run_dir` and the places in it. Holds one run: a folder that holds another is refused, never overwritten.

    Args:
        resume: whether the run that it holds, if any, may be gone on with.
    """

    def __init__(self, folder: str | Path, resume: bool = False) -> None:
        self.path = Path(folder).expanduser().absolute()
        self._resume = resume

    def allow_resume(self) -> None:
        """From now on the run that it holds may be gone on with."""
        self._resume = True

    def check(self) -> None:
        """Raises ConfigError where the folder cannot hold this run."""
        if self.holds_run and not self._resume:
            message = f"{str(self.path)!r} already holds a run; give another run.dir, or --resume auto to go on with it"
            raise ConfigError(Problem("run.dir", message))
        parent = next(p for p in (self.path, *self.path.parents) if p.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise ConfigError(
                Problem("run.dir", f"{str(self.path)!r} cannot be written: {str(parent)!r} is not a writable folder")
            )

    def create(self, config: dict[str, Any]) -> None:
        """Makes the folder and writes the resolved configuration."""
        self.check()
        if self.holds_run:
            self.check_same(config)
            return
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / "config.yaml", yaml.safe_dump(config, sort_keys=False, allow_unicode=True).encode())

    @property
    def holds_run(self) -> bool:
        return (self.path / "config.yaml").exists()

    @property
    def complete(self) -> bool:
        """Whether the run in it came to its end."""
        return (self.path / "complete").exists()

    def mark_complete(self, rounds: int = 1) -> None:
        write_atomically(self.path / "complete", str(rounds).encode())

    def complete_to(self, rounds: int) -> bool:
        """Whether it came to its end after at least so many rounds."""
        return self.complete and int((self.path / "complete").read_text() or 1) >= rounds

    @property
    def run_id(self) -> str:
        """A name that no other run has; made when first asked for."""
        file = self.path / "run_id"
        if not file.exists():
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomically(file, uuid.uuid4().hex[:12].encode())
        return file.read_text()

    @property
    def recorded_seed(self) -> int | None:
        """The seed of the run that it holds and that may be resumed; None where there is none.

        Raises:
            ConfigError: the recorded configuration is not YAML.
        """
        if not (self._resume and self.holds_run):
            return None
        seed = _flat(self._recorded()).get("run.seed")
        return seed if isinstance(seed, int) else None

    def _recorded(self) -> dict[str, Any]:
        try:
            found = yaml.safe_load((self.path / "config.yaml").read_text())
        except yaml.YAMLError as error:
            raise ConfigError(Problem("run.dir", f"{self.path / 'config.yaml'} is not YAML: {error}")) from None
        return found if isinstance(found, dict) else {}

    def check_same(self, config: dict[str, Any]) -> None:
        """Raises ConfigError where the run in the folder was started with other settings than `config`, a problem each.

        Where roles sit, how engines are driven and where results go may change.
        """
        if not self.holds_run:
            return
        old, new = _flat(self._recorded()), _flat(yaml.safe_load(yaml.safe_dump(config)))
        where = f"in {str(self.path)!r}"
        problems = [
            Problem(name, f"is {new.get(name)!r}, but {old.get(name)!r} {where}; set it back, or give another run.dir")
            for name in sorted(old.keys() | new.keys())
            if old.get(name) != new.get(name) and not name.startswith(_MAY_CHANGE)
        ]
        if problems:
            raise ConfigError(problems)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def replay(self) -> Path:
        return self.path / "preference_replay"

    def journal(self, round: int) -> Path:
        """What was sampled, scored and answered in a round."""
        return self.path / "preference_replay" / f"journal_{round:04d}.jsonl"

    @property
    def policies(self) -> Path:
        return self.path / "policy_checkpoints"

    @property
    def distributions(self) -> Path:
        return self.path / "reward_distributions"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def final(self) -> Path:
        return self.path / "final"

    @property
    def kept(self) -> Path:
        """The policies of a trainer whose engines have ended, where they are not those in `final`."""
        return self.path / "kept"

    @property
    def sources(self) -> Path:
        return self.path / "sources"

    @property
    def engine_log(self) -> Path:
        return self.path / "engines.log"


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted path."""
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    found: dict[str, Any] = {}
    for name, inner in value.items():
        found |= _flat(inner, f"{prefix}.{name}" if prefix else str(name))
    return found
