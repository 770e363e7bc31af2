"""Checkpoints of a trainer, in its own words and in the peer's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from comlrl_ds.cluster import call
from comlrl_ds.config.errors import ConfigError, Problem
from comlrl_ds.runs.checkpoints import Checkpoint, CheckpointError, CheckpointStore, read_checkpoint
from comlrl_ds.runs.metrics import last_counters
from comlrl_ds.trainers.preference.conducted import conducted
from comlrl_ds.trainers.preference.saving import (
    Progress,
    Saver,
    find_checkpoint,
    plain_evaluations,
    read_evaluations,
    restore,
    restore_engines,
)

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
    _interrupted = False  # the last call of `train` has begun and not ended
    _checkpoint_dir: Path | None = None
    _saver: Saver | None = None

    @property
    def rounds(self) -> int:
        """Rounds of collection and training in one call of `train`."""
        return 1

    @conducted
    def save_checkpoint(self, folder: str | Path) -> None:
        """Writes folder/checkpoint-<updates>: weights, optimizers, schedules and counters as they are now."""
        saver = Saver(CheckpointStore(Path(folder).expanduser().absolute()))
        saver.save(self.session, self.reporter, self.progress or Progress(), self.evaluations, self._more_state())

    @conducted
    def load_checkpoint(self, folder: str | Path) -> None:
        """The next `train` goes on from this checkpoint, whatever the trainer has learned since.

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
        self._seed = self._run.seed_in(self.run_dir)
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
        own = self._saver is not None and self._saver.store.folder == self._checkpoint_dir
        if self._checkpoint_dir and not own and self._resume == "never" and CheckpointStore(self._checkpoint_dir).folders():
            message = f"{str(self._checkpoint_dir)!r} holds checkpoints; give another folder, or resume_from_checkpoint"
            raise ConfigError(Problem("checkpoint_dir", message))

    def _begin(self, resumes: bool) -> Progress | None:
        """Where this call of `train` begins; None: there is nothing left to do.

        A first call begins a run, or resumes the one in the folder. A further call goes on from the policies as they are, with
        rounds, updates and files numbered on; one that was interrupted is continued.

        Args:
            resumes: this call itself was told to resume.
        """
        before, interrupted = self.progress, self._interrupted
        if before is None:
            progress = Progress()
        elif interrupted or resumes:
            progress = before
        else:
            steps, round = self.policy_state.steps, before.round
            progress = Progress(call=before.call + 1, first_round=round, round=round, first_step=steps)
        store = CheckpointStore(self._checkpoint_dir or self.run_dir.checkpoints, self._checkpoint_limit)
        if self._resume == "auto" and not interrupted and self._is_complete(progress):
            return None
        checkpoint = self._checkpoint_for(progress, store)
        if checkpoint is not None and self._resume != "auto":
            progress = Progress(**checkpoint.state["progress"])
            if progress.round > self._last_round(progress) and self._is_complete(progress):
                return None
        self._saver = Saver(store, *self._checkpoint_every, epochs=self.args.num_train_epochs)
        if checkpoint is not None:
            progress = self._restored(checkpoint)
        elif interrupted and not self.policy_state.lost:
            updates = self.reporter.updates
            self.display.say(f"train() continues where it stopped, after update {updates} in round {progress.round}")
            if self._session is not None:
                self._session.discard_open_step()
        elif progress.call > 1:
            self._begin_again(progress, store)
        else:
            progress = self._begin_first()
        self._saver.last = self.reporter.updates
        self._resume = "never" if self._resume == "never" else "auto"  # a checkpoint is gone back to once
        self._interrupted = True
        return progress

    def _checkpoint_for(self, progress: Progress, store: CheckpointStore) -> Checkpoint | None:
        """The checkpoint that this call is resumed from, if it is."""
        held = self._interrupted and self._session is not None  # engines hold more than any checkpoint does
        if self._resume == "never" or not self.run_dir.holds_run or (held and self._resume == "auto"):
            return None
        checkpoint, skipped = find_checkpoint(store, self._resume)
        for line in skipped:
            self.display.say(f"skipped: {line}")
        if checkpoint is None and skipped:
            raise ConfigError(
                Problem("--resume", f"no checkpoint can be used: {line}; --resume never in another run.dir starts anew")
                for line in skipped
            )
        if checkpoint is not None and self._resume == "auto":
            saved = Progress(**checkpoint.state["progress"])
            return checkpoint if saved.call >= progress.call else None
        return checkpoint

    def _restored(self, checkpoint: Checkpoint) -> Progress:
        """Everything goes back to a checkpoint."""
        state, held = self.policy_state, self._session
        if state.lost or not state.on_disk or (held is not None and held.learned):
            # Engines of rollouts that have seen later versions would take an earlier one of the same number for theirs.
            self._end_session()
            state.restart_from(None)
        session, reporter = self.session, self.reporter
        progress, self.evaluations = restore(checkpoint, session, reporter)
        if progress.total_updates:
            self._start_schedules(progress.total_updates - progress.scheduled_at)
        self._start_others(checkpoint.state["roles"])
        restore_engines(checkpoint, session)
        self._restore_more(checkpoint.state)
        self.display.say(f"going on from update {reporter.updates} of {progress.total_updates}, {checkpoint.folder}")
        return progress

    def _begin_first(self) -> Progress:
        """The run begins, with what an interrupted one left in the folder where that may be resumed."""
        state, left = self.policy_state, self._resume != "never" and self.run_dir.holds_run
        if state.lost and (left or not state.steps):
            state.restart_from(None)
            left = True
        if self._session is None:
            state.check()
        if left:
            self.reporter.restore(None)
            self.display.say(f"going on with the run in {self.run_dir.path}: what is in its journal is not sampled again")
        return Progress()

    def _begin_again(self, progress: Progress, store: CheckpointStore) -> None:
        """A further call begins, in a process that resumes the run with the optimizers of its last checkpoint, if it wrote one
        when the call before had ended.
        """
        if self._counters is not None:  # of the run as it ended; a further call of an earlier process may have left more
            self.reporter.restore(self._counters)
            self._counters = None
            last, _ = store.newest()
            if last is not None and Progress(**last.state["progress"]).round == progress.round:
                self._restored(last)
        self.session.scheduled = False
        updates = self.reporter.updates
        self.display.say(
            f"train() is called again: it continues from the policies as they are after update {updates}, with round"
            f" {progress.round}"
        )

    def _end_call(self) -> None:
        """Notes where the run stands for a process that resumes it, and that the call has ended."""
        assert self.progress
        if self.policy_state.folder == self.run_dir.final and self.policy_state.on_disk:
            more = {"counters": self.reporter.counters(), "evaluations": plain_evaluations(self.evaluations)}
            self.policy_state.note(more | {"more": self._more_state()})
        self.run_dir.mark_complete(self._last_round(self.progress))
        self._interrupted = False

    def _is_complete(self, progress: Progress) -> bool:
        """Whether the run in the folder has come to the end of this call; its end is then this trainer's, too."""
        if not self.run_dir.complete_to(self._last_round(progress)):
            return False
        self._adopt(progress)
        self.display.say(f"this run is complete; its results are in {self.run_dir.path}")
        return True

    def _adopt(self, progress: Progress) -> None:
        """The policies that the run in the folder ended with, and what is counted of it, are this trainer's from now on."""
        progress.round = self._last_round(progress) + 1
        self.progress, self._interrupted = progress, False
        final, state = self.run_dir.final, self.policy_state
        if not final.is_dir() or (state.folder == final and state.on_disk and not state.lost):
            return
        self._end_session()
        noted = state.adopt(final)
        self._counters = noted.get("counters") or last_counters(self.run_dir.metrics)
        self.evaluations = read_evaluations(noted.get("evaluations", ()))
        if "more" in noted:
            self._restore_more(noted["more"])
        if self._reporter is not None:
            self._reporter.restore(self._counters, cut=False)

    def _last_round(self, progress: Progress) -> int:
        """Of the call."""
        return progress.first_round + self.rounds - 1

    def _expect_updates(self, progress: Progress, left: int) -> None:
        """Starts the learning-rate schedules of a call when its first pairs are there, or of engines that were started anew.

        Args:
            left: updates that the call will still make, if this is its beginning.
        """
        if progress.total_updates and self.session.scheduled:
            return
        if not progress.total_updates:
            progress.total_updates = self.reporter.updates + left
        progress.scheduled_at = self.reporter.updates
        self._start_schedules(max(1, progress.total_updates - progress.scheduled_at))

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
        """Starts schedules that last for so many updates."""
        from comlrl_ds.engines.engine import PolicyEngine

        self.cluster.run({role: call(PolicyEngine.start_schedule, total) for role in self.session.actors})
        self.session.scheduled = True
