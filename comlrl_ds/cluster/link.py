"""The connections of a launch: one star, the main rank in the middle.

The main rank listens on MASTER_ADDR:MASTER_PORT from its first moment, before anything heavy is imported, so that the others
learn of a mistake in the run file as fast as it is found.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from comlrl_ds import __version__
from comlrl_ds.cluster.channel import accepted, connected, hear, hear_object, listen, tell
from comlrl_ds.cluster.launch import Host, Launch, this_host
from comlrl_ds.cluster.layout import Slot
from comlrl_ds.cluster.watch import ClusterFailure, Failure, MainWatch, WorkerWatch
from comlrl_ds.config.errors import ConfigError, Problem

JOIN_TIMEOUT_S = 300.0
LEAVE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Member:
    """One rank of the launch, as it introduced itself."""

    rank: int
    local_rank: int
    host: Host

    @property
    def slot(self) -> Slot:
        return Slot(self.rank, self.host.name, self.local_rank, self.host.aliases)

    @property
    def where(self) -> str:
        return f"on {self.host.name}"


class MainLink:
    """The main rank's end. The others may join at any time; `members` waits for them."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._server = listen(launch.master_addr, launch.master_port)
        self._wake, self._waker = os.pipe()
        self._watch = MainWatch(self._wake_up)
        me = Member(0, launch.local_rank, this_host(launch.master_addr, launch.master_port))
        self._members: dict[int, Member] = {0: me}
        self._controls: dict[int, Connection] = {}
        self._pulses: set[int] = set()
        self._joined = threading.Condition()
        threading.Thread(target=self._accept, daemon=True, name="join").start()

    def _wake_up(self) -> None:
        os.write(self._waker, b"!")

    # --- joining
    def _accept(self) -> None:
        while True:
            try:
                peer = accepted(self._server)
            except OSError:
                return  # closed: the launch is over
            with contextlib.suppress(EOFError, OSError, ValueError, KeyError, TypeError):  # whoever speaks otherwise is no rank
                if peer.poll(10):
                    self._admit(peer, hear(peer))

    def _admit(self, peer: Connection, hello: dict[str, Any]) -> None:
        rank, channel = int(hello["rank"]), str(hello["channel"])
        taken = self._controls if channel == "control" else self._pulses
        if hello["size"] != self._launch.size:
            tell(peer, {"refused": f"this run has {self._launch.size} ranks, that process one of {hello['size']}"})
        elif hello["version"] != __version__:
            tell(peer, {"refused": f"comlrl_ds {__version__} on the main rank, {hello['version']} on rank {rank}"})
        elif not 0 < rank < self._launch.size or rank in taken:
            tell(peer, {"refused": f"another process is rank {rank} already; do two runs share one --master_port?"})
        else:
            tell(peer, {"main": self._members[0].host.name, "end": self._watch.failure.code if self._watch.failure else None})
            with self._joined:
                if channel == "control":
                    host = hello["host"]
                    named = Host(**{**host, "aliases": tuple(host["aliases"])})
                    self._members[rank] = Member(rank, int(hello["local_rank"]), named)
                    self._controls[rank] = peer
                else:
                    self._watch.add(rank, f"on {hello['host']['name']}", peer)
                    self._pulses.add(rank)
                self._joined.notify_all()

    def members(self, timeout_s: float = JOIN_TIMEOUT_S) -> list[Member]:
        """All ranks, in order; waits until they have joined.

        Raises:
            TimeoutError: some did not. ClusterFailure: one failed meanwhile.
        """
        others = set(range(1, self._launch.size))
        end = time.monotonic() + timeout_s
        with self._joined:
            while missing := others - (self._controls.keys() & self._pulses):
                self.check()
                if time.monotonic() > end:
                    listed = ", ".join(map(str, sorted(missing)))
                    raise TimeoutError(f"rank {listed} of {self._launch.size} did not join within {timeout_s:.0f} s")
                self._joined.wait(0.5)
        return [self._members[r] for r in range(self._launch.size)]

    # --- talking
    def check(self) -> None:
        """Raises ClusterFailure if the launch has failed."""
        if failure := self._watch.failure:
            raise ClusterFailure(failure.line, failure.code)

    @property
    def failed(self) -> bool:
        return self._watch.failure is not None

    def tell(self, rank: int, message: bytes) -> None:
        """Sends a packed message."""
        self.check()
        try:
            self._controls[rank].send_bytes(message)
        except OSError:
            self._gone(rank)

    def replies(self, ranks: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """(rank, reply) of each of the ranks, as they come."""
        waiting = {self._controls[r]: r for r in ranks}
        while waiting:
            self.check()
            ready = wait([*waiting, self._wake])
            for connection in [c for c in ready if isinstance(c, Connection)]:
                rank = waiting.pop(connection)
                try:
                    reply = hear(connection)
                except (EOFError, OSError):
                    self._gone(rank)
                yield rank, reply

    def _gone(self, rank: int) -> None:
        """The watch sees the same end, and knows more."""
        failure = self._watch.fail(Failure(f"rank {rank} {self._members[rank].where} closed its connection"))
        raise ClusterFailure(failure.line)

    # --- ending
    def set_stall(self, seconds: float) -> None:
        self._watch.stall_s = seconds

    def fail(self, line: str, code: int = 1) -> Failure:
        """Ends all other ranks for an error of this one; the answer says whether the line is still to be printed."""
        return self._watch.fail(Failure(line, code, printed=True))

    def leave(self) -> None:
        """Waits until all others are through, then closes; the last one out is the one that the others need."""
        if self._watch.failure:
            self._wait(lambda: len(self._pulses) == self._launch.size - 1, 10.0)  # who joins late is told then
            time.sleep(0.2)
            return
        self._wait(self._watch.everybody_left, LEAVE_TIMEOUT_S)
        self._watch.say_goodbye()
        self._server.close()

    def _wait(self, done: Any, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while not done() and time.monotonic() < end:
            time.sleep(0.02)


class WorkerLink:
    """Every other rank's end.

    Raises:
        ClusterFailure: the main rank does not answer. ConfigError: it refuses this process.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        try:
            self._control = connected(launch.master_addr, launch.master_port, JOIN_TIMEOUT_S)
            host = this_host(launch.master_addr, launch.master_port)
            main = self._introduce(self._control, "control", host)
            pulse = connected(launch.master_addr, launch.master_port, 30.0)
            self._introduce(pulse, "pulse", host)
        except (TimeoutError, EOFError, OSError) as error:
            raise ClusterFailure(f"rank {launch.rank} cannot join the main rank: {error}", printed=False) from None
        self._watch = WorkerWatch(pulse, main, speaks=launch.rank == 1)

    def _introduce(self, connection: Connection, channel: str, host: Host) -> str:
        launch = self._launch
        hello = {"channel": channel, "rank": launch.rank, "size": launch.size, "local_rank": launch.local_rank}
        tell(connection, hello | {"version": __version__, "host": host.as_dict()})
        answer = hear(connection)
        if "refused" in answer:
            raise ConfigError(Problem("MASTER_PORT", answer["refused"]))
        if answer["end"] is not None:
            raise SystemExit(int(answer["end"]))
        return str(answer["main"])

    def next(self) -> Any:
        """The main rank's next message."""
        try:
            return hear_object(self._control)
        except (EOFError, OSError):
            time.sleep(60)  # the watch sees the same end, and ends this process with the reason
            raise ClusterFailure("the main rank is gone") from None

    def reply(self, message: Any) -> None:
        tell(self._control, message)

    def set_stall(self, seconds: float) -> None:
        self._watch.stall_s = seconds

    def fail(self, line: str) -> None:
        """Ends all ranks for an error of this one."""
        self._watch.fail(line)

    def leave(self) -> None:
        self._watch.leave()
