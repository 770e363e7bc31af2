"""One thread per rank that notices when a rank dies, fails or hangs, and then ends all of them with one line.

Every second each rank tells the main one that it lives, how far its progress counter is and what it is doing, on a connection
of its own, so that this works while the main threads sit in collectives or generations. A closed connection is a death.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

from comlrl_ds.cluster.channel import hear, tell
from comlrl_ds.cluster.progress import PROGRESS

BEAT_S = 1.0
# An error is held back so long: where a rank died, its partners' collectives fail at the same moment, and the death explains
# them.
EXPLAIN_S = 0.5
# How long a main thread may take to end by itself before the process is ended under it.
GRACE_S = 4.0
DEFAULT_STALL_S = 1800.0


class ClusterFailure(RuntimeError):
    """A rank of the launch died, failed or hung; the message is the line that says so, `printed` whether the user has it."""

    def __init__(self, line: str, code: int = 1, printed: bool = True) -> None:
        super().__init__(line)
        self.code, self.printed = code, printed


@dataclass(frozen=True)
class Failure:
    """Why the launch ends: the line for the user, the exit code, and whether somebody else prints the line."""

    line: str
    code: int = 1
    printed: bool = False


def end_process(code: int) -> None:
    """Ends this process and its children at once, whatever its other threads are stuck in."""
    import psutil

    # Engine children would follow by themselves; but in a container whose first process collects no orphans they would
    # stay as zombies, for which DeepSpeed's launcher waits half a minute.
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error, OSError):
            child.kill()
            child.wait(2)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


class Watch(ABC):
    """What both sides share: the thread, the stall limit, and signals that end a process explained."""

    def __init__(self) -> None:
        self.stall_s = DEFAULT_STALL_S
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        self._terminated: float | None = None
        self._parent = os.getppid()
        self._catch_sigterm()

    def start(self, name: str) -> None:
        threading.Thread(target=self._run, daemon=True, name=name).start()

    def _run(self) -> None:
        try:
            self._loop()
        except Exception:  # unwatched, a rank could hang for ever: rather end it
            traceback.print_exc()
            end_process(1)

    def _orphaned(self) -> bool:
        """The launcher is gone: nobody would see this process's end, or end it."""
        return os.getppid() != self._parent

    def _catch_sigterm(self) -> None:
        """A launcher that sees one rank die ends the others by SIGTERM; the one that knows why must still say it."""
        if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            return
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)  # written at once, whatever the main thread does

    def _ready(self, pulses: list[Connection]) -> list[Connection]:
        ready = wait([*pulses, self._wake], timeout=BEAT_S / 4)
        if self._wake in ready:
            if signal.SIGTERM in os.read(self._wake, 64) and self._terminated is None:
                self._terminated = time.monotonic()
            ready.remove(self._wake)
        return [c for c in ready if isinstance(c, Connection)]

    @abstractmethod
    def _loop(self) -> None:
        """What the thread does."""


@dataclass
class _Seen:
    """What the main rank knows of another."""

    where: str
    pulse: Connection
    heard: float
    count: int = -1
    moved: float = 0.0
    doing: str | None = None
    left: bool = False


@dataclass
class _Pending:
    failure: Failure
    due: float
    settled: threading.Event = field(default_factory=threading.Event)


class MainWatch(Watch):
    """The main rank's side: hears all, decides, tells all."""

    def __init__(self, wake_main: Callable[[], None]) -> None:
        super().__init__()
        self.failure: Failure | None = None
        self._seen: dict[int, _Seen] = {}
        self._pending: _Pending | None = None
        self._lock = threading.Lock()
        self._wake_main = wake_main
        self._own = (-1, time.monotonic())
        self._end_at: float | None = None
        self.start("watch")

    def add(self, rank: int, where: str, pulse: Connection) -> None:
        now = time.monotonic()
        self._seen[rank] = _Seen(where, pulse, now, moved=now)
        if self.failure:
            self._tell_end(self._seen[rank])

    def fail(self, failure: Failure) -> Failure:
        """Ends the launch for a failure of this rank's, unless another rank's death explains it; says which it was."""
        with self._lock:
            if self.failure:
                return self.failure
            pending = self._pending = self._pending or _Pending(failure, time.monotonic() + EXPLAIN_S)
        pending.settled.wait(GRACE_S)
        return self.failure or failure

    def everybody_left(self) -> bool:
        return all(s.left for s in list(self._seen.values()))

    def say_goodbye(self) -> None:
        for s in list(self._seen.values()):
            with contextlib.suppress(OSError):
                tell(s.pulse, {"bye": True})

    # --- the thread
    def _loop(self) -> None:
        while True:
            seen = list(self._seen.items())  # at once: ranks may join meanwhile
            for pulse in self._ready([s.pulse for _, s in seen if not s.pulse.closed]):
                rank = next(r for r, s in seen if s.pulse is pulse)
                try:
                    self._take(rank, hear(pulse))
                except (EOFError, OSError):
                    pulse.close()
                    self._lost(rank)
            self._find_hangs()
            if self._orphaned():
                self._hold(Failure("the launcher of rank 0 is gone"))
            self._settle()

    def _take(self, rank: int, message: dict[str, object]) -> None:
        s, now = self._seen[rank], time.monotonic()
        s.heard = now
        if "bye" in message:
            s.left = True
        elif "failed" in message:
            self._hold(Failure(f"rank {rank} {s.where}, {message['failed']}"))
        else:
            if message["count"] != s.count or message["doing"] != s.doing:
                s.count, s.doing, s.moved = int(str(message["count"])), message["doing"], now  # type: ignore[assignment]
            tell(s.pulse, {"ok": True})

    def _lost(self, rank: int) -> None:
        s = self._seen[rank]
        if not s.left and self.failure is None:
            doing = f" during {s.doing}" if s.doing else ""
            self._decide(Failure(f"rank {rank} {s.where} ended without a word{doing}; killed, or out of memory?"))
        s.left = True

    def _find_hangs(self) -> None:
        now = time.monotonic()
        if PROGRESS.count != self._own[0]:
            self._own = (PROGRESS.count, now)
        here = {rank: s for rank, s in list(self._seen.items()) if not s.left}
        for rank, s in here.items():
            if now - s.heard > self.stall_s:
                self._hold(
                    Failure(f"rank {rank} {s.where} has not been heard of for {now - s.heard:.0f} s; stopped, or cut off?")
                )
        if any(now - s.heard > 3 * BEAT_S for s in here.values()):
            return  # whoever waits for a silent rank stands still too, and is not to blame
        for rank, s in here.items():
            if s.doing and now - s.moved > self.stall_s:
                self._hold(Failure(f"rank {rank} {s.where} hangs in {s.doing}: no progress for {now - s.moved:.0f} s"))
        if PROGRESS.doing and now - self._own[1] > self.stall_s:
            self._hold(Failure(f"rank 0 hangs in {PROGRESS.doing}: no progress for {now - self._own[1]:.0f} s"))

    def _hold(self, failure: Failure) -> None:
        with self._lock:
            self._pending = self._pending or _Pending(failure, time.monotonic() + EXPLAIN_S)

    def _settle(self) -> None:
        now = time.monotonic()
        if self._pending and not self.failure and now >= self._pending.due:
            self._decide(self._pending.failure)
        if self._terminated and not self.failure and now > self._terminated + 2 * EXPLAIN_S:
            self._decide(Failure("the launch was told to end (SIGTERM)", 143))
        if self._end_at and now > self._end_at and self.failure:
            end_process(self.failure.code)

    def _decide(self, failure: Failure) -> None:
        with self._lock:
            self.failure = failure
            if not failure.printed:
                print(f"comlrl-ds: {failure.line}", file=sys.stderr, flush=True)
        for s in list(self._seen.values()):
            self._tell_end(s)
        if not failure.printed:  # a failure that the main thread itself reports ends with that thread
            self._end_at = time.monotonic() + GRACE_S
        if self._pending:
            self._pending.settled.set()
        self._wake_main()

    def _tell_end(self, s: _Seen) -> None:
        assert self.failure
        with contextlib.suppress(OSError):
            tell(s.pulse, {"end": self.failure.code})


class WorkerWatch(Watch):
    """The side of every other rank: tells of itself, and ends the process when told, or when the main rank is gone.

    Args:
        pulse: connection to the main rank. main: where that is. speaks: whether this rank prints that the main one is gone.
    """

    def __init__(self, pulse: Connection, main: str, speaks: bool) -> None:
        super().__init__()
        self._pulse, self._main, self._speaks = pulse, main, speaks
        self._leaving = False
        self._lock = threading.Lock()
        self._failed = False
        self.start("watch")

    def fail(self, line: str) -> None:
        """Tells the main rank of an error here, which ends all ranks; returns when there is nothing more to do."""
        self._failed = True
        with contextlib.suppress(OSError):
            self._say({"failed": line})
        time.sleep(2 * GRACE_S)

    def leave(self) -> None:
        """From now on neither side's end means anything."""
        self._leaving = True
        with contextlib.suppress(OSError):
            self._say({"bye": True})

    def _say(self, message: dict[str, object]) -> None:
        with self._lock:
            tell(self._pulse, message)

    def _loop(self) -> None:
        sent, heard = 0.0, time.monotonic()
        while not self._leaving:
            now = time.monotonic()
            try:
                if now - sent >= BEAT_S:
                    self._say({"count": PROGRESS.count, "doing": PROGRESS.doing})
                    sent = now
                for pulse in self._ready([self._pulse]):
                    message = hear(pulse)
                    heard = time.monotonic()
                    if "end" in message:
                        end_process(int(message["end"]))
                    if "bye" in message:
                        return
            except (EOFError, OSError):
                if not self._leaving:
                    self._end(f"the main rank on {self._main} ended without a word; killed, or out of memory?", 1)
                return
            if time.monotonic() - heard > self.stall_s:
                self._end(
                    f"the main rank on {self._main} has not been heard of for {self.stall_s:.0f} s; stopped, or cut off?", 1
                )
            if self._orphaned() and not self._failed:
                self._failed = True
                self._say({"failed": "its launcher is gone"})
            if self._terminated and time.monotonic() > self._terminated + GRACE_S:
                end_process(143)

    def _end(self, line: str, code: int) -> None:
        if self._speaks:
            print(f"comlrl-ds: {line}", file=sys.stderr, flush=True)
        end_process(code)
