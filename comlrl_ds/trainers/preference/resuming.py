"""Checkpoints of a trainer, in its own words and in the peer's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from comlrl_ds.cluster import call
from comlrl_ds.config.errors import ConfigError, Problem
from comlrl_ds.runs.checkpoints import CheckpointError, CheckpointStore, read_checkpoint
from comlrl_ds.trainers.preference.conducted import conducted
from comlrl_ds.trainers.preference.saving import Progress, Saver, find_checkpoint, restore, restore_engines

if TYPE_CHECKING:
    from comlrl_ds.trainers.preference.base import PreferenceTrainer

    Base = PreferenceTrainer
else:
    Base = object


class ResumableTrainer(Base):
    """Adds saving and going on to a trainer.

    Attributes:
        progress: how far the run is.
    """

    progress: Progress | None = None
    _checkpoint_dir: Path | None = None
    _saver: Saver | None = None

    @conducted
    def save_checkpoint(self, folder: str | Path) -> None:
        """Writes folder/checkpoint-<updates>: weights, optimizers, schedules and counters as they are now."""
        saver = Saver(CheckpointStore(Path(folder).expanduser().absolute()))
        saver.save(self.session, self.reporter, self.progress or Progress(), self.evaluations, self._more_state())

    @conducted
    def load_checkpoint(self, folder: str | Path) -> None:
        """The next `train` goes on from this checkpoint.

        Args:
            folder: a checkpoint, a file in it, or a folder of checkpoints, of which the newest is taken.

        Raises:
            ConfigError: there is none, or it is damaged.
        """
        self._resume_from(folder)

    def _resume_from(self, wanted: str | Path) -> None:
        place = Path(wanted).expanduser().absolute()
        place = place.parent if place.is_file() else place
        inside = CheckpointStore(place).folders()
        try:
            checkpoint = read_checkpoint(inside[0] if inside else place)
        except CheckpointError as error:
            raise ConfigError(Problem("resume_from_checkpoint", str(error))) from None
        self._resume = str(checkpoint.folder)
        home = checkpoint.state.get("run_dir")
        if home and Path(home) != self.run_dir.path:
            if self._run.named or self._session is not None:
                message = f"{str(checkpoint.folder)!r} belongs to the run in {home!r}; give that as run_dir, or none"
                raise ConfigError(Problem("resume_from_checkpoint", message))
            self.run_dir = type(self.run_dir)(home, resume=True)
        self.run_dir.allow_resume()
        self.run_dir.check_same(self._resolved_config())

    def _checkpoint_options(
        self, resume: str | Path | None, folder: str | Path | None, interval: int | None, limit: int | None
    ) -> None:
        """The arguments of `train`.

        Raises:
            ConfigError: a checkpoint that is not there; an interval or a limit below 1; a folder with another run's.
        """
        for name, value in (("checkpoint_interval", interval), ("checkpoint_total_limit", limit)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(Problem(name, f"{value!r}: write a whole number of at least 1"))
        if interval is not None:
            self._checkpoint_every = (interval, self._checkpoint_every[1])
        if limit is not None:
            self._checkpoint_limit = limit
        if folder is not None:
            self._checkpoint_dir = Path(folder).expanduser().absolute()
        if resume in ("auto", True):
            self._resume = "auto"
            self.run_dir.allow_resume()
        elif resume is not None:
            self._resume_from(resume)
        if self._checkpoint_dir and self._resume == "never" and CheckpointStore(self._checkpoint_dir).folders():
            message = f"{str(self._checkpoint_dir)!r} holds checkpoints; give another folder, or resume_from_checkpoint"
            raise ConfigError(Problem("checkpoint_dir", message))

    def _go_on(self) -> Progress:
        """With `resume`, everything goes back to the checkpoint that the run goes on from, if there is one."""
        store = CheckpointStore(self._checkpoint_dir or self.run_dir.checkpoints, self._checkpoint_limit)
        self._saver = Saver(store, *self._checkpoint_every, epochs=self.args.num_train_epochs)
        if self._resume == "never" or not self.run_dir.holds_run:
            return Progress()
        checkpoint, skipped = find_checkpoint(store, self._resume)
        for line in skipped:
            self.display.say(f"skipped: {line}")
        if checkpoint is None and skipped:
            raise ConfigError(
                Problem("--resume", f"no checkpoint can be used: {line}; --resume never in another run.dir starts anew")
                for line in skipped
            )
        session, reporter = self.session, self.reporter
        if checkpoint is None:
            reporter.restore(None)
            self.display.say(f"going on with the run in {self.run_dir.path}: what is in its journal is not sampled again")
            return Progress()
        progress, self.evaluations = restore(checkpoint, session, reporter)
        if progress.total_updates:
            self._start_schedules(progress.total_updates)
        self._start_others(checkpoint.state["roles"])
        restore_engines(checkpoint, session)
        self._restore_more(checkpoint.state)
        self._saver.last = reporter.updates
        self.display.say(f"going on from update {reporter.updates} of {progress.total_updates}, {checkpoint.folder}")
        return progress

    def _save_if_due(self, progress: Progress, *, end_of_epoch: bool) -> None:
        saver = self._saver
        if saver is not None and saver.due(self.reporter.updates, progress, end_of_epoch):
            saver.save(self.session, self.reporter, progress, self.evaluations, self._more_state())

    def _more_state(self) -> dict[str, Any]:
        """Plain types that a checkpoint holds besides."""
        return {"run_dir": str(self.run_dir.path)}

    def _restore_more(self, state: dict[str, Any]) -> None:
        """Takes back what `_more_state` gave."""

    def _start_others(self, roles: list[str]) -> None:
        """Loads the engines of further roles that a checkpoint holds."""

    def _start_schedules(self, total: int) -> None:
        from comlrl_ds.engines.engine import PolicyEngine

        self.cluster.run({role: call(PolicyEngine.start_schedule, total) for role in self.session.actors})
