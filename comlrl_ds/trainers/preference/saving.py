"""Saving where a run is, and going on from there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comlrl_ds.cluster import call
from comlrl_ds.config.errors import ConfigError, Problem
from comlrl_ds.preference.evaluation import Evaluation
from comlrl_ds.runs.checkpoints import Checkpoint, CheckpointError, CheckpointStore, read_checkpoint

if TYPE_CHECKING:
    from comlrl_ds.trainers.preference.reporting import Reporter
    from comlrl_ds.trainers.preference.session import Session


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        call: of `train`, from 1. first_round: with which it began. first_step: the policies' steps then.
        total_updates: at its end, expected; 0 until its first pairs are there.
        scheduled_at: updates when the learning-rate schedules in use began, which last until total_updates.
        round: in work, from 1. collected: whether its pairs are there and reported. fitted: whether its reward model is.
        epoch: of the round, in work. batches: of the epoch, done.
    """

    call: int = 1
    first_round: int = 1
    first_step: int = 0
    total_updates: int = 0
    scheduled_at: int = 0
    round: int = 1
    collected: bool = False
    fitted: bool = False
    epoch: int = 0
    batches: int = 0

    def next_round(self) -> None:
        self.round, self.collected, self.fitted, self.epoch, self.batches = self.round + 1, False, False, 0, 0


@dataclass
class Saver:
    """Checkpoints of one trainer: all device groups write, then the main rank makes it count.

    Args:
        store: where they are. every: epochs between two; 0 saves none. updates: updates between two within an epoch.
        epochs: of a round. last: updates at the last checkpoint.
    """

    store: CheckpointStore
    every: int = 1
    updates: int | None = None
    epochs: int = 1
    last: int = 0

    def due(self, updates: int, progress: Progress, end_of_epoch: bool) -> bool:
        """Whether enough happened since the last one."""
        if end_of_epoch and self.every:
            return ((progress.round - 1) * self.epochs + progress.epoch) % self.every == 0
        return bool(self.updates) and updates - self.last >= (self.updates or 0)

    def save(
        self, session: Session, reporter: Reporter, progress: Progress, evaluations: list[tuple[str, Evaluation]],
        more: dict[str, Any] | None = None,
    ) -> Path:  # fmt: skip
        """Writes a checkpoint of everything that the run has learned and counted; `more` is the trainer's own."""
        from comlrl_ds.engines.state import save_state

        folder = self.store.begin(reporter.updates)
        written = session.cluster.run({role: call(save_state, str(folder)) for role in session.engines})
        files = {name: (int(size), str(digest)) for part in written.values() for name, (size, digest) in part.items()}
        state = {
            "roles": session.engines, "progress": vars(progress), "counters": reporter.counters(), "steps": session.steps,
            "world": session.world(), "bases": session.bases(), "evaluations": plain_evaluations(evaluations),
        }  # fmt: skip
        self.last = reporter.updates
        return self.store.seal(folder, state | (more or {}), files)


def find_checkpoint(store: CheckpointStore, resume: str) -> tuple[Checkpoint | None, list[str]]:
    """What `resume` ("auto", or a checkpoint's folder) says to go on from, and a line for each newer one that is unusable.

    Raises:
        ConfigError: a folder that is no complete checkpoint.
    """
    if resume == "auto":
        return store.newest()
    try:
        return read_checkpoint(Path(resume).expanduser().absolute()), []
    except CheckpointError as error:
        raise ConfigError(Problem("--resume", str(error))) from None


def restore(checkpoint: Checkpoint, session: Session, reporter: Reporter) -> tuple[Progress, list[tuple[str, Evaluation]]]:
    """Puts counters and metrics back to a checkpoint; the engines follow when they are built (`restore_engines`).

    Raises:
        ConfigError: it was saved by another number of ranks, at another ZeRO stage, or with adapters of another base.
    """
    state = checkpoint.state
    for role, mark in session.bases().items():
        if state.get("bases", {}).get(role, mark) != mark:
            message = (
                f"the model of {role} has other weights than when {checkpoint.folder} was saved, whose adapter is for those"
            )
            raise ConfigError(Problem("agents", f"{message}; give the base of then"))
    for role, (ranks, stage) in session.world().items():
        saved = state["world"].get(role)
        if saved != [ranks, stage]:
            was = "absent" if saved is None else f"on {saved[0]} ranks at ZeRO-{saved[1]}"
            message = f"{role} was {was} when {checkpoint.folder} was saved, and is on {ranks} at ZeRO-{stage} now"
            way = f"take the policies out of it (comlrl-ds export RUN --agent i --checkpoint {checkpoint.folder})"
            message = f"{message}; resume with the placement of then, or {way} and start a new run from them"
            raise ConfigError(Problem("placement", message))
    reporter.restore(state["counters"])
    return Progress(**state["progress"]), read_evaluations(state["evaluations"])


def plain_evaluations(evaluations: Sequence[tuple[str, Evaluation]]) -> list[list[Any]]:
    """Named evaluations as plain types."""
    return [[name, e.items, e.rewards] for name, e in evaluations]


def read_evaluations(plain: Sequence[Sequence[Any]]) -> list[tuple[str, Evaluation]]:
    """What `plain_evaluations` gave."""
    return [(str(name), Evaluation(items, rewards)) for name, items, rewards in plain]


def restore_engines(checkpoint: Checkpoint, session: Session) -> None:
    """Weights, masters, optimizers and schedules of every engine that it holds; they are loaded, their schedules started."""
    from comlrl_ds.engines.state import load_state

    session.cluster.run({role: call(load_state, checkpoint) for role in checkpoint.state["roles"]})
    session.restored(int(checkpoint.state["steps"]))
