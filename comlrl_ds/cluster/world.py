"""The ranks of a launch as one machine that works for roles.

The main rank (global rank 0) runs the trainers' loops, the user's code and the run's files. The others serve: they build
the objects of the roles that their device group hosts, and execute calls on them. A loop says what each role shall do, never
which rank does it, so it is the same for one process, where everything is a plain function call, and for many.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comlrl_ds.cluster import groups
from comlrl_ds.cluster.channel import packed
from comlrl_ds.cluster.launch import Launch, read_launch, this_host
from comlrl_ds.cluster.layout import Layout, Slot
from comlrl_ds.cluster.link import MainLink, Member, WorkerLink
from comlrl_ds.cluster.progress import at_work
from comlrl_ds.cluster.watch import ClusterFailure, end_process
from comlrl_ds.config.environment import TRACEBACK, switched_on
from comlrl_ds.config.errors import ConfigError, Problem


@dataclass(frozen=True)
class Call:
    """function(object of the role, *args, **kwargs), on every rank that hosts the role.

    The function is one that can be imported; a method of a class is looked up on the object, as usual. Arguments can be
    pickled. Results are plain types (what JSON has).
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.function.__name__


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
    return Call(function, args, kwargs)


@dataclass(frozen=True)
class Seat:
    """Where a role's object lives on this rank: what a function given to `create` is told first."""

    role: str
    rank: int
    group: str
    group_rank: int
    group_size: int
    host_ranks: int  # ranks of the launch on this machine
    device: str


class Cluster:
    """This process's part in the launch. One per process: `join`."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.layout: Layout | None = None
        self.device = ""
        self.spans: dict[str, list[tuple[float, float]]] = {}
        self.run_dir: Path | None = None
        self.tenant: Any = None  # the session whose roles these are: one trainer at a time
        self._objects: dict[str, Any] = {}
        self._hosts: dict[str, tuple[int, ...]] = {}
        self._ended = False
        self._doing = "set-up"  # the last piece of work that was begun
        self._conducting = 0
        self._store: Any = None
        self._main = MainLink(launch) if launch.size > 1 and launch.is_main else None
        self._worker = WorkerLink(launch) if launch.size > 1 and not launch.is_main else None
        if launch.size > 1:
            atexit.register(self.leave)

    @property
    def is_main(self) -> bool:
        return self.launch.is_main

    # --- setting up
    def members(self) -> list[Member]:
        """All ranks of the launch, in order; waits until they have joined. Main rank only."""
        if self._main:
            return self._main.members()
        host = this_host(self.launch.master_addr, self.launch.master_port)
        return [Member(0, self.launch.local_rank, host)]

    def slots(self) -> list[Slot]:
        return [m.slot for m in self.members()]

    def arrange(self, layout: Layout, stall_timeout_s: float, run_dir: Path) -> None:
        """Tells every rank who sits where. A later trainer of the process may move roles, but not change the groups.

        Raises:
            ConfigError: other groups than before.
        """
        before = self.layout
        # A group without roles makes no torch.distributed world, and later it is too late for one.
        new = _hosting(layout) - _hosting(before) if before and self.device else set()
        if before is not None and (dict(before.groups) != dict(layout.groups) or new):
            message = "other device groups than an earlier trainer of this process; start another process for it"
            raise ConfigError(Problem("placement.groups", message))
        if self._main:
            self._main.members()
        self._everywhere("arrange", layout, stall_timeout_s, run_dir)

    def join_groups(self, kind: str) -> None:
        """Makes every group's torch.distributed world, once. Args: kind, "cpu" or "cuda"."""
        if self.device:
            return
        if self._main:
            self._store = groups.serve_store()
        self._everywhere("join_groups", kind, self._store.port if self._main else 0)

    def _everywhere(self, kind: str, *arguments: Any) -> None:
        others = range(1, self.launch.size) if self._main else ()
        self._send(others, (kind, *arguments))
        with at_work("set-up"):
            getattr(self, f"_{kind}")(*arguments)
        self._collect(others)

    def _arrange(self, layout: Layout, stall_timeout_s: float, run_dir: Path) -> None:
        self.layout, self.run_dir = layout, run_dir
        if not run_dir.is_dir():
            host = this_host(self.launch.master_addr, self.launch.master_port).name
            message = f"{str(run_dir)!r} is not there on {host}; give a folder on storage that all machines share"
            raise ConfigError(Problem("run.dir", message))
        for link in (self._main, self._worker):
            if link:
                link.set_stall(stall_timeout_s)

    def _join_groups(self, kind: str, port: int) -> None:
        assert self.layout
        group = self.layout.group_of(self.launch.rank)
        if not any(place.group == group for place in self.layout.roles.values()):
            # Its ranks host rollout engines, or nothing: no collectives, so no torch and no DeepSpeed either.
            self.device = kind if kind == "cpu" else f"{kind}:{self.launch.local_rank}"
            return
        interface = this_host(self.launch.master_addr, self.launch.master_port).interface
        self.device = groups.join_group(self.launch, self.layout, kind, self._store or port, interface)

    # --- work for roles
    def create(self, builds: Mapping[str, Call], hosts: Mapping[str, tuple[int, ...]] | None = None) -> None:
        """Builds each role's object on its ranks: function(seat, *args, **kwargs); an older object is dropped first.

        Args:
            hosts: ranks of roles that are not in the layout, e.g. of rollout engines.
        """
        self._hosts |= hosts or {}
        self._run(builds, "create")

    def run(self, calls: Mapping[str, Call]) -> dict[str, Any]:
        """Executes each role's call on all ranks that host it; groups work at the same time, roles of one group take turns.

        Returns:
            what the role's lead, the first of its ranks, returned.
        """
        return self._run(calls, "run")

    def drop(self, roles: list[str]) -> None:
        """Forgets the objects of roles."""
        self._run({role: Call(_nothing) for role in roles}, "drop")
        for role in roles:
            self._hosts.pop(role, None)

    @property
    def placed(self) -> set[str]:
        """Roles outside the layout that have an object somewhere."""
        return set(self._hosts)

    @property
    def reaches_all(self) -> bool:
        """Whether the other ranks, if there are any, serve at this moment."""
        return self.launch.size == 1 or self._conducting > 0

    def local(self, role: str) -> Any:
        """This rank's object of a role, None where it hosts none."""
        return self._objects.get(role)

    def ranks_of(self, role: str) -> tuple[int, ...]:
        assert self.layout
        return self._hosts[role] if role in self._hosts else self.layout.ranks_of(role)

    def _run(self, calls: Mapping[str, Call], kind: str) -> dict[str, Any]:
        work: dict[int, list[tuple[str, Call]]] = {}
        for role, c in calls.items():
            for rank in self.ranks_of(role):
                work.setdefault(rank, []).append((role, c))
        cache: dict[tuple[str, ...], bytes] = {}
        for rank, jobs in work.items():
            if rank != self.launch.rank:
                roles = tuple(role for role, _ in jobs)
                if roles not in cache:
                    cache[roles] = packed((kind, jobs))
                assert self._main
                self._main.tell(rank, cache[roles])
        replies = {self.launch.rank: self._execute(kind, work[self.launch.rank])} if self.launch.rank in work else {}
        replies |= self._collect([r for r in work if r != self.launch.rank])
        results = {role: replies[self.ranks_of(role)[0]][role] for role in calls}
        for role, (_, start, end) in results.items():
            self.spans.setdefault(role, []).append((start, end))
        return {role: value for role, (value, _, _) in results.items()}

    def _execute(self, kind: str, jobs: list[tuple[str, Call]]) -> dict[str, tuple[Any, float, float]]:
        done = {}
        for role, c in jobs:
            started = time.time()
            self._doing = f"{role} {c.name if kind == 'run' else kind}"
            with at_work(self._doing):
                done[role] = (self._one(kind, role, c), started, time.time())
        return done

    def _one(self, kind: str, role: str, c: Call) -> Any:
        if kind == "run":
            target = self._objects[role]
            if "." in c.function.__qualname__.rpartition("<locals>.")[2]:
                return getattr(target, c.name)(*c.args, **c.kwargs)
            return c.function(target, *c.args, **c.kwargs)
        self._objects.pop(role, None)
        if kind == "create":
            self._objects[role] = c.function(self._seat(role), *c.args, **c.kwargs)
        return None

    def _seat(self, role: str) -> Seat:
        assert self.layout
        name = self.layout.group_of(self.launch.rank)
        ranks = self.layout.groups[name]
        here = sum(self.layout.host(s.rank) == self.layout.host(self.launch.rank) for s in self.layout.slots)
        return Seat(role, self.launch.rank, name, ranks.index(self.launch.rank), len(ranks), here, self.device)

    def _send(self, ranks: Any, message: Any) -> None:
        for rank in ranks:
            assert self._main
            self._main.tell(rank, packed(message))

    def _collect(self, ranks: Any) -> dict[int, Any]:
        return dict(self._main.replies(list(ranks))) if self._main else {}

    # --- the other ranks
    def serve(self) -> tuple[str, Any]:
        """Works for the main rank until it returns from a method of a trainer, ("return", its value), or leaves."""
        assert self._worker
        while True:
            kind, *rest = self._worker.next()
            if kind in ("return", "leave"):
                return kind, (rest[0] if rest else None)
            try:
                if kind in ("arrange", "join_groups"):
                    with at_work("set-up"):
                        getattr(self, f"_{kind}")(*rest)
                    self._worker.reply(None)
                    continue
                jobs = rest[0]
                results = self._execute(kind, jobs)
                # Only what the role's lead returned is of interest, and only there it is sure to be plain.
                leads = {role for role, _ in jobs if self._leads(role)}
                self._worker.reply({role: (r if role in leads else (None, *r[1:])) for role, r in results.items()})
            except BaseException as error:
                self._give_up(error)

    def _leads(self, role: str) -> bool:
        """Whether this rank is a role's lead; roles outside the layout have one rank."""
        assert self.layout
        return role not in self.layout.roles or self.layout.ranks_of(role)[0] == self.launch.rank

    def _give_up(self, error: BaseException) -> None:
        """Ends all ranks: the line goes to the main rank, the traceback to this rank's log."""
        assert self._worker
        text = traceback.format_exc()
        if self.run_dir is None or switched_on(TRACEBACK):
            print(text, file=sys.stderr, flush=True)
        else:
            (self.run_dir / f"rank_{self.launch.rank}.log").write_text(text)
        self._worker.fail(f"{self._doing}: {one_line(error)}")
        end_process(2 if isinstance(error, ConfigError) else 1)

    # --- ending
    def conduct(self, method: Callable[[], Any]) -> Any:
        """Runs a method of a trainer: here on the main rank, while the others serve until it returns. All get its value."""
        if self._worker:
            kind, value = self.serve()
            if kind == "leave":
                raise ClusterFailure("the main rank has left")
            return value
        self._conducting += 1
        try:
            value = method()
        except BaseException as error:
            if self._conducting == 1:
                self.fail(error)
            raise
        finally:
            self._conducting -= 1
        if self._main and not self._conducting and not self._main.failed:
            self._send(range(1, self.launch.size), ("return", value))
        return value

    def fail(self, error: BaseException, code: int | None = None) -> None:
        """Ends the other ranks for an error of this one; another rank's death that explains it replaces it.

        Raises:
            ClusterFailure: that death; its line is printed already.
        """
        if self._main is None or isinstance(error, ClusterFailure):
            return
        failure = self._main.fail(one_line(error), code or (2 if isinstance(error, ConfigError) else 1))
        if not failure.printed:
            raise ClusterFailure(failure.line, failure.code) from error

    def dismiss(self) -> None:
        """Tells the other ranks that nothing more comes, where they wait in `serve` for it."""
        if self._main and not self._ended and not self._main.failed:
            self.members()
            self._send(range(1, self.launch.size), ("leave",))

    def leave(self) -> None:
        """Ends this process's part in the launch; called when it ends anyway."""
        if self._ended:
            return
        self._ended = True
        self._objects.clear()
        uncaught = getattr(sys, "last_value", None)
        if self._main:
            if uncaught is not None and not isinstance(uncaught, ClusterFailure):
                self._main.fail(one_line(uncaught))
            self._main.leave()
        if self._worker:
            if uncaught is not None:
                self._worker.fail(one_line(uncaught))
            groups.leave_group()
            self._worker.leave()
        elif self.launch.size > 1:
            groups.leave_group()


def one_line(error: BaseException) -> str:
    """An error as one line."""
    if isinstance(error, ConfigError):
        return "; ".join(map(str, error.problems))
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _hosting(layout: Layout) -> set[str]:
    """The groups that roles work on."""
    return {place.group for place in layout.roles.values()}


def _nothing() -> None:
    """Stands in a call that has none."""


_HERE: list[Cluster] = []


def join() -> Cluster:
    """The launch that this process belongs to, as its environment says; joined once."""
    if not _HERE:
        _HERE.append(Cluster(read_launch(os.environ)))
    return _HERE[0]
