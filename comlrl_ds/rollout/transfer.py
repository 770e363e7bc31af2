"""Weights of a live actor on their way to engines: what every rank of the actor's device group does in a sync."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from comlrl_ds.rollout.base import RolloutError
from comlrl_ds.rollout.engine_client import WeightCalls
from comlrl_ds.rollout.engine_process import EngineAddress
from comlrl_ds.rollout.host_sender import HostSender, Manifest, WeightClient, send_to_all
from comlrl_ds.rollout.outbox import Outbox

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class WeightHolder(Protocol):
    """An actor's engine, as far as a sync goes. Passing over the weights is a collective of its ranks."""

    name: str

    @property
    def rank(self) -> int: ...
    def named_weights(self, dtype: torch.dtype | None = None) -> Iterable[tuple[str, Tensor]]: ...
    def weight_shapes(self) -> list[tuple[str, tuple[int, ...]]]: ...
    def token_logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]: ...
    @property
    def dtype(self) -> str: ...


@dataclass(frozen=True)
class Target:
    """An engine that shall get weights, what it was last sent, and the rows that it answers for afterwards."""

    address: EngineAddress
    manifest: Manifest | None
    timeout_s: float
    probe: tuple[tuple[int, ...], ...] = ()

    def as_plain(self) -> dict[str, Any]:
        return asdict(self)


def send_live(
    holder: WeightHolder,
    name: str,
    key: str,
    dtype: str,
    targets: Sequence[dict[str, Any]],
    chunk_bytes: int = 512 << 20,
    base: str | None = None,
) -> list[dict[str, Any]]:
    """Sends an actor's weights to engines; called on every rank of its group, of which the first does the sending.

    Args:
        name, key, base: of the policy. dtype: that whole weights travel in.
        targets: `Target.as_plain()` of engines of one transport.

    Returns:
        for each target {"seconds", "bytes", "manifest", "probe"}, and "trainer" of those with rows, see `reference_of`.
    """
    results = _send_live(holder, name, key, dtype, targets, chunk_bytes, base)
    rows = targets[0]["probe"]
    trainer = reference_of(holder, rows) if rows else None
    return [result | {"trainer": trainer} for result in results]


def reference_of(holder: WeightHolder, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """{"logprobs", "dtype"}: what the actor computes for the probe rows, and in which type; a collective of its ranks."""
    return {"logprobs": holder.token_logprobs(rows), "dtype": holder.dtype}


def _send_live(
    holder: WeightHolder, name: str, key: str, dtype: str, targets: Sequence[dict[str, Any]], chunk_bytes: int,
    base: str | None,
) -> list[dict[str, Any]]:  # fmt: skip
    import torch

    weights = getattr(torch, dtype)
    transport = targets[0]["address"]["transport"]
    if transport != "host":
        from comlrl_ds.rollout.gpu_transfer import send_by

        calls: list[Any] = [_calls(t) if holder.rank == 0 else None for t in targets]
        return [send_by(transport, holder, name, key, weights, c) for c in calls]
    if holder.rank:
        for _ in holder.named_weights(weights):
            pass
        return []
    who = f"{name} ({holder.name})"
    try:
        # At the same time: those that do not answer cost the time-out once.
        with ThreadPoolExecutor(len(targets)) as threads:
            senders = list(threads.map(lambda t: _sender(t, chunk_bytes), targets))
    except RolloutError as error:
        raise RolloutError(f"weight sync of {who}: {error}, before any parameter was sent") from error
    results = send_to_all(senders, who, key, holder.named_weights(weights), _outbox(), base)
    return [
        {"seconds": report.seconds, "bytes": report.bytes, "manifest": s.manifest, "probe": probe}
        for s, (report, probe) in zip(senders, results)
    ]


# One memory file, and one connection per engine, for the life of the process.
_OUTBOX: list[Outbox] = []
_CALLS: dict[str, WeightClient] = {}


def _outbox() -> Outbox:
    if not _OUTBOX:
        _OUTBOX.append(Outbox())
    return _OUTBOX[0]


def _calls(target: dict[str, Any]) -> WeightClient:
    from comlrl_ds.cluster.launch import this_identity

    address = EngineAddress(**target["address"])
    if address.url and address.key not in _CALLS:
        from comlrl_ds.rollout.http_calls import HTTPCalls

        _CALLS[address.key] = HTTPCalls(address.url, target["timeout_s"], target["probe"])
    if address.key not in _CALLS:
        name = f"engine {address.index} for {address.source}"
        end = time.monotonic() + min(30.0, target["timeout_s"])
        while True:
            try:
                connection = address.connect(this_identity(), target["timeout_s"])
                break
            except (OSError, EOFError) as error:
                if time.monotonic() > end:
                    raise RolloutError(f"{name} cannot be reached: {error}") from None
                time.sleep(0.1)
        _CALLS[address.key] = WeightCalls(name, connection, target["timeout_s"], lambda: "closed its connection")
    return _CALLS[address.key]


def _sender(target: dict[str, Any], chunk_bytes: int) -> HostSender:
    from comlrl_ds.cluster.launch import this_identity

    address = target["address"]
    far = None if address["identity"] == this_identity() else address["host"]
    return HostSender(_calls(target), address["source"], chunk_bytes, far=far, manifest=target["manifest"])
