"""How a trainer's engines come and go: started when first needed, given up to the next trainer of the process, ended by
`close`. The policies outlive them on disk.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, Self

from comlrl_ds.runs.failure import failure_line
from comlrl_ds.runs.files import write_folder
from comlrl_ds.trainers.preference.conducted import conducted
from comlrl_ds.trainers.preference.policy_state import PolicyState, copy_models

if TYPE_CHECKING:
    from comlrl_ds.cluster import Cluster
    from comlrl_ds.runs.display import Display
    from comlrl_ds.runs.run_dir import RunDir
    from comlrl_ds.trainers.preference.reporting import Reporter
    from comlrl_ds.trainers.preference.session import Session


class EngineOwner:
    """A trainer as the owner of engines.

    A process has the engines of one trainer at a time. A trainer that starts takes them from an idle one, whose policies are
    kept on disk; it does not interrupt one that is inside one of its methods.

    Attributes:
        policy_state: the version of the policies, and where they are while no engine holds them.
    """

    kind: ClassVar[str]
    cluster: Cluster
    display: Display
    run_dir: RunDir

    def __init__(self) -> None:
        self.policy_state = PolicyState()
        self._session: Session | None = None
        self._reporter: Reporter | None = None
        self._at_work: list[str] = []
        self._finalizer: weakref.finalize | None = None
        self._counters: dict[str, int] | None = None  # of the run that was adopted from its folder

    # --- what subclasses define
    def _new_session(self) -> Session:
        """Starts the engines, from `policy_state.folder` where that is set."""
        raise NotImplementedError

    def _session_started(self, session: Session) -> None:
        """Loads at once what will be needed soon."""

    def _new_reporter(self) -> Reporter:
        """Opens the run's folder."""
        raise NotImplementedError

    def _write_models(self, folder: Path) -> None:
        """Has the engines write agent_0 … and what else learns."""
        raise NotImplementedError

    # --- the running parts
    @property
    def session(self) -> Session:
        """The running parts, started on first use."""
        if self._session is None:
            self.policy_state.check()
            self._displace()
            self._session = self._new_session()
            self._session.owner = weakref.ref(self)
            # Not bound to the trainer, which could never be collected then.
            self._finalizer = weakref.finalize(self, self._session.close)
            self._session_started(self._session)
        return self._session

    @property
    def reporter(self) -> Reporter:
        """Counters and metrics of the run."""
        if self._reporter is None:
            self._reporter = self._new_reporter()
            self._reporter.restore(self._counters, cut=False)
        return self._reporter

    @contextmanager
    def working(self, method: str) -> Iterator[None]:
        """For the length of a block the trainer is at work in one of its methods."""
        if not self._at_work and self._session is not None:
            self._session.renew_interrupted_engines()
        self._at_work.append(method)
        try:
            yield
        finally:
            self._at_work.pop()

    def _displace(self) -> None:
        """Takes the engines of the process from the trainer that has them.

        Raises:
            RuntimeError: that one is at work.
        """
        tenant = self.cluster.tenant
        if tenant is None:
            return
        other = tenant.owner() if tenant.owner else None
        if other is None:  # it is gone, or was never finished
            tenant.close()
            return
        name = f"the {other.kind} trainer of {str(other.run_dir.path)!r}"
        if other._at_work:
            raise RuntimeError(
                f"{name} is inside its {other._at_work[0]}(), and a process has the engines of one trainer at a time; call this"
                " trainer when that has returned, or in another process"
            )
        other.close()
        self.display.say(f"{name} was idle and has given its engines up; its policies are {other._whereabouts()}")

    def _whereabouts(self) -> str:
        state = self.policy_state
        if state.lost is not None:
            return f"gone: {state.lost}"
        return f"in {state.folder}" if state.folder is not None else "those that it started from"

    # --- the policies
    @conducted
    def save_model(self, folder: str | Path) -> None:
        """Writes the present policies as agent_0, agent_1 … in Hugging Face layout, each with its tokenizer, and beside them
        what else the trainer learns.

        After `close` these are still the policies as they were last.

        Raises:
            PoliciesLostError: an exception ended the trainer's `with`, or the policies could not be kept at `close`.
        """
        place = Path(folder).absolute()
        if self._session is None:
            self.policy_state.check()
        if place in (self.run_dir.final, self.run_dir.kept):
            self._save_own(place)
        else:
            self._write_present(place)

    def _save_own(self, folder: Path) -> None:
        """Saves the present policies to a folder of the run, unless they are there."""
        if self.policy_state.folder != folder or not self.policy_state.on_disk:
            write_folder(folder, self._write_present)
            self.policy_state.saved(folder)

    def _write_present(self, folder: Path) -> None:
        """The engines write what they have learned; what they were only loaded with is copied, as loading may round it."""
        state, session = self.policy_state, self._session
        if state.folder is None or not state.on_disk or (session is not None and session.learned):
            self._write_models(folder)
        else:
            state.check()
            copy_models(state.folder, folder)

    # --- the end
    @conducted
    def close(self) -> None:
        """Ends the engines. The policies are kept: in final/ of the run's folder where that holds them, else in kept/.

        The trainer can be used again: its engines then start from what was kept, their optimizers anew. Called when the
        program ends, too, or the trainer is collected, but nothing is kept then.
        """
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self._close_after(failure_line(error))

    @conducted
    def _close_after(self, error: str) -> None:
        self._end(f"an exception ended its `with` block ({error}), and they were not kept")

    def _end(self, lost: str | None = None) -> None:
        """Ends the engines. Args: lost: why their policies are not kept; None: they are."""
        session, state = self._session, self.policy_state
        try:
            if lost is not None:
                state.lose(lost)
            elif session is not None and not state.on_disk:
                self._keep()
        finally:
            self._end_session()
            if self._reporter is not None:
                self._reporter.close()

    def _end_session(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None
        if self._finalizer is not None:
            self._finalizer.detach()
            self._finalizer = None

    def _keep(self) -> None:
        try:
            self._save_own(self.run_dir.kept)
        except Exception as error:  # whatever it was, it is said now, and whenever the policies are asked for
            self.policy_state.lose(f"they could not be kept at close: {failure_line(error)}")
            self.display.say(f"the policies could not be kept: {failure_line(error)}")
        else:
            self.display.say(f"the policies after {self.policy_state.steps} steps are kept in {self.run_dir.kept}")
