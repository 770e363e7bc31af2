"""An engine child and its owner: the process that starts it, knows when it is ready, and how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from typing import Any

from comlrl_ds.cluster.channel import hear, tell
from comlrl_ds.cluster.progress import tick
from comlrl_ds.rollout.base import RolloutError

# What a child has for ending by itself.
END_S = 5.0


@dataclass(frozen=True)
class EngineAddress:
    """Where an engine listens.

    Attributes:
        local: abstract socket; it leaves no file behind. port: of TCP, 0 where all ranks are on one machine.
        key: whoever connects must have it; of a server of the user's its address.
        host: address of its machine. identity: of its machine, see `Host`.
        source: folder whose weights it started with. index: its number. transport: how weights reach it.
        url: of a server that the user started; local, port and key are not used then.
    """

    local: str
    port: int
    key: str
    host: str
    identity: str
    source: str
    index: int = 0
    transport: str = "host"
    url: str = ""

    def connect(self, identity: str, timeout_s: float) -> Connection:
        """A connection for this process, which is on the machine `identity`.

        Raises:
            OSError, EOFError: none was made; TimeoutError: the engine does not answer.
        """
        place = self.local if identity == self.identity else (self.host, self.port)
        made: queue.SimpleQueue[Connection | Exception] = queue.SimpleQueue()

        def meet() -> None:
            try:
                made.put(Client(place, authkey=bytes.fromhex(self.key)))
            except Exception as error:  # handed to whoever waits
                made.put(error)

        # A stopped engine accepts a connection and never says a word, for which a client would wait without end.
        threading.Thread(target=meet, daemon=True, name="connect").start()
        try:
            found = made.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"it has not answered for {timeout_s:.0f} s") from None
        if isinstance(found, Exception):
            raise found
        return found


class EngineProcess:
    """Starts an engine child and returns at once: its start-up overlaps with whatever comes until `wait_ready`.

    Start engines from the main thread: the kernel's parent-death signal is bound to the thread that forks.

    Args:
        settings: "backend" and "llm", the arguments of the engine, from `engine_settings`.
        environment: the child's whole environment.
        probe: rows for verifying syncs; empty does not verify.
        start_timeout_s: longest start. log: open file for what the child prints; None is this process's own output.
        far: whether it listens for ranks on other machines, too.
    """

    def __init__(
        self, settings: Mapping[str, Any], environment: Mapping[str, str], *, probe: Sequence[Sequence[int]] = (),
        start_timeout_s: float = 600, log: Any = None, far: bool = False,
    ) -> None:  # fmt: skip
        self.source = str(settings["llm"]["model"])
        self._start_timeout_s = start_timeout_s
        self._end_by: float | None = None
        self._log = getattr(log, "name", None)
        # The key travels through the pipe, not through argv or environment.
        self.local, self.key = f"\0comlrl-{os.getpid()}-{secrets.token_hex(6)}", secrets.token_hex(16)
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "comlrl_ds.rollout.engine_server"],
            env=dict(environment), stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        message = {
            "parent": os.getpid(), "address": self.local, "key": self.key, "far": far, "probe": [list(row) for row in probe],
            **settings,
        }  # fmt: skip
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):  # a child that is dead already is reported by wait_ready
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def wait_ready(self) -> dict[str, Any]:
        """Blocks until the engine answers: {"pid", "probe": its probe log-probs, "port": of TCP or 0}.

        Raises:
            RolloutError: it died, or took longer than `start_timeout_s`.
        """
        end = time.monotonic() + self._start_timeout_s
        while True:
            try:
                connection = Client(self.local, authkey=bytes.fromhex(self.key))
                break
            except (FileNotFoundError, ConnectionRefusedError):
                if self.process.poll() is not None:
                    raise RolloutError(f"the engine for {self.source} {self.how_it_ended()}, before it was ready") from None
                if time.monotonic() > end:
                    raise RolloutError(
                        f"the engine for {self.source} does not listen after {self._start_timeout_s:.0f} s"
                    ) from None
                tick()
                time.sleep(0.05)
        with connection:
            tell(connection, ["ready", {}])
            while not connection.poll(0.5):
                tick()
                if time.monotonic() > end:
                    raise RolloutError(f"the engine for {self.source} is not ready after {self._start_timeout_s:.0f} s")
            try:
                kind, value = hear(connection)
            except (EOFError, ConnectionError):
                raise RolloutError(f"the engine for {self.source} {self.how_it_ended()}, before it was ready") from None
        if kind == "error":
            raise RolloutError(f"the engine for {self.source}: {value}")
        return value

    def how_it_ended(self) -> str:
        """In words."""
        try:
            code = self.process.wait(2)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return how + (f" (its output: {self._log})" if self._log else "")

    def ask_to_end(self) -> None:
        """Begins the end, so that several engines end at the same time; `shutdown` waits for it."""
        if self._end_by is None:
            self._end_by = time.monotonic() + END_S
        if self.process.stdin and not self.process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()  # its watcher ends it

    def shutdown(self) -> None:
        """Ends the child; one that does not end by itself in time is killed."""
        self.ask_to_end()
        assert self._end_by is not None
        try:
            self.process.wait(max(0.0, self._end_by - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
