"""An engine as the main rank and the actors' leads see it: a connection to an engine child, wherever that runs."""

from __future__ import annotations

import contextlib
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from comlrl_ds.cluster.channel import hear, tell
from comlrl_ds.cluster.progress import tick
from comlrl_ds.rollout.base import (
    Completion,
    PolicyWeights,
    Request,
    RequestsRefused,
    RolloutEngine,
    RolloutError,
    Sampling,
    SyncReport,
)
from comlrl_ds.rollout.engine_process import EngineAddress, EngineProcess
from comlrl_ds.rollout.host_sender import HostSender, Manifest, WeightClient, changed_share


class WeightCalls:
    """The client's half of vLLM's weight transfer, over a connection to an engine.

    Args:
        name: of the engine, for messages. ended: says how it ended, once it has.
    """

    def __init__(self, name: str, connection: Connection | None, timeout_s: float, ended: Callable[[], str]) -> None:
        self.name, self.connection, self.timeout_s, self._ended = name, connection, timeout_s, ended

    def start_weight_update(self) -> None:
        self.call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.call("update_weights", update_info=update_info)

    def finish_weight_update(self, version: str) -> dict[str, Any]:
        return self.call("finish_weight_update", version=version)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.call("init_weight_transfer", init_info=init_info)

    def call(self, name: str, **arguments: Any) -> Any:
        self.send(name, arguments)
        return self.reply()[1]

    def send(self, name: str, arguments: dict[str, Any]) -> None:
        if self.connection is None:
            raise RolloutError(f"{self.name} is not running")
        try:
            tell(self.connection, [name, arguments])
        except (BrokenPipeError, ConnectionError):
            raise RolloutError(f"{self.name} {self._ended()}") from None

    def reply(self) -> tuple[str, Any]:
        assert self.connection
        if not self.connection.poll(self.timeout_s):
            raise RolloutError(f"{self.name} has not answered for {self.timeout_s:.0f} s (rollout.timeout_s)")
        tick()
        try:
            kind, value = hear(self.connection)
        except (EOFError, ConnectionError):
            raise RolloutError(f"{self.name} {self._ended()}") from None
        if kind == "error":
            raise RolloutError(f"{self.name}: {value}")
        return kind, value


class EngineClient(RolloutEngine):
    """An engine in another process: what it was last sent, and whether that took effect.

    Args:
        address: where it is. identity: of this machine. name: of the engine, for messages.
        verify: whether syncs are verified by the engine's answers.
    """

    def __init__(self, address: EngineAddress, *, identity: str = "", name: str, verify: bool) -> None:
        self.address, self.name, self.verify, self._identity = address, name, verify, identity
        self.source = self.held = address.source
        self.manifest: Manifest | None = None
        self.probe_rows: Sequence[Sequence[int]] = ()
        self.probe: list[list[float]] = []
        self._sender: HostSender | None = None

    @property
    @abstractmethod
    def calls(self) -> WeightClient:
        """The calls of a sync."""

    # Whether it holds its base for good, and adapters beside it.
    takes_adapters = False

    def sync_weights(self, policy: PolicyWeights) -> SyncReport:
        """Sends the weights of this process, or those on disk, itself."""
        if self.takes_adapters and policy.key == self.source:
            started = time.perf_counter()
            self.calls.start_weight_update()
            self.probe = self.calls.finish_weight_update(policy.key)["probe"]  # the base, which it has
            self.held, self.manifest = policy.key, None
            return SyncReport(time.perf_counter() - started, 0)
        far = None if self.address.identity == self._identity else self.address.host
        self._sender = self._sender or HostSender(self.calls, self.source, far=far)
        self._sender.manifest = self.manifest
        report, probe = self._sender.send(policy)
        assert self._sender.manifest is not None
        self.synced(policy, self._sender.manifest, probe)
        return report

    def synced(
        self, policy: PolicyWeights, manifest: Manifest, probe: list[list[float]],
        judge: Callable[[list[list[float]]], object] | None = None,
    ) -> None:  # fmt: skip
        """Takes note of a sync that somebody did, and verifies its effect.

        Args:
            judge: raises where these log-probs of the probe rows are not those of the weights that were sent.

        Raises:
            RolloutError: other tensors arrived, and the engine answers as before.
        """
        # Log-probs of an engine for a fixed batch are exactly repeatable, so new weights must change some of them.
        # A change that leaves most tensors as they were may be too small to show.
        same = self.verify and self.probe and self.probe == probe
        if same and manifest and (share := changed_share(self.manifest, manifest, self.source)) > 0.5:
            raise RolloutError(
                f"weight sync of {policy.name}: {share:.0%} of the tensors changed, but the engine answers as before"
            )
        if judge:
            judge(probe)
        self.held, self.probe, self.manifest = policy.key, probe, manifest

    def close_sender(self) -> None:
        if self._sender:
            self._sender.close()


class VLLMRollout(EngineClient):
    """An engine child of this process, or of another rank's.

    Args:
        child: the child, where this process owns it. address: where it listens, where another rank does.
        identity: of this machine. verify: whether syncs are verified by the engine's answers.
        timeout_s: longest silence while it works. ended: says how it ended, once it has.
    """

    def __init__(
        self, child: EngineProcess | None = None, *, address: EngineAddress | None = None, identity: str = "",
        timeout_s: float = 600, verify: bool = True, ended: Callable[[], str] | None = None,
    ) -> None:  # fmt: skip
        if child:
            address = EngineAddress(child.local, 0, child.key, "", identity, child.source)
        assert address
        name = f"the engine for {address.source}"
        super().__init__(address, identity=identity, name=name, verify=verify)
        self.child = child
        how = child.how_it_ended if child else ended or (lambda: "closed its connection")
        self._calls = WeightCalls(name, None, timeout_s, how)

    @property
    def calls(self) -> WeightCalls:
        return self._calls

    def wait_ready(self, probe: list[list[float]] | None = None) -> None:
        """Blocks until the engine answers, and connects to it. Args: probe, what its owner heard from it when it was ready."""
        if self.calls.connection is not None:
            return
        self.probe = self.child.wait_ready()["probe"] if self.child else probe or []
        try:
            self.connection = self.calls.connection = self.address.connect(self._identity, self.calls.timeout_s)
        except (OSError, EOFError) as error:
            raise RolloutError(f"{self.name} cannot be reached: {error}") from None

    # --- generating
    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        wired = [
            {"prompt": r.prompt, "max_new_tokens": r.max_new_tokens, "seed": r.seed, "stop_ids": r.stop_ids} for r in requests
        ]
        self.calls.send("generate", {"requests": wired, "sampling": sampling.as_dict()})

    def receive(self) -> list[tuple[int, Completion]] | None:
        kind, value = self.calls.reply()
        if kind != "part":
            if value:
                raise RequestsRefused([(int(k), str(reason)) for k, reason in value])
            return None
        return [(k, Completion(tuple(ids), reason, self.held, tuple(scores))) for k, ids, reason, scores in value]

    def prompt_logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        return self.calls.call("logprobs", rows=[list(r) for r in rows])

    def usage(self) -> dict[str, float]:
        """CPU seconds and peak resident memory (MB) of the engine's process."""
        return self.calls.call("usage")

    def shutdown(self) -> None:
        if self.connection is not None:
            with contextlib.suppress(OSError):
                self.connection.close()
            self.connection = self.calls.connection = None
        if self.child:
            self.child.shutdown()
        self.close_sender()
