"""Trainer half of the `host` weight transfer: whole models in chunks, to any number of engines at a time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from comlrl_ds.rollout.adapters import SCALE, A, B
from comlrl_ds.rollout.base import PolicyWeights, RolloutError, SyncReport
from comlrl_ds.rollout.outbox import Outbox, room

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_BYTES = 512 << 20
# name → [shape, digest of the bits, dtype]
Manifest = dict[str, list[Any]]


class WeightClient(Protocol):
    """The calls of vLLM's weight transfer that a sync makes."""

    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: dict[str, Any]) -> None: ...
    def finish_weight_update(self, version: str) -> dict[str, Any]: ...


@runtime_checkable
class SharedClient(Protocol):
    """The client of an engine that others use, too, and that must serve them again when a sync has failed."""

    def abandon_weight_update(self) -> str: ...


@dataclass
class HostSender:
    """Sends whole models to one engine.

    Args:
        client: the engine. source: folder whose weights it started with.
        chunk_bytes: size of a chunk, unless one tensor is larger.
        far: an address of the engine's machine where that is another one than this, else None.
        manifest: what the engine was last sent, empty at first; a later sync must have the same names and shapes.
    """

    client: WeightClient
    source: str
    chunk_bytes: int = CHUNK_BYTES
    far: str | None = None
    manifest: Manifest | None = None
    before: Manifest | None = None
    outbox: Outbox | None = None

    def send(self, policy: PolicyWeights) -> tuple[SyncReport, list[list[float]]]:
        """One sync. Returns the report and the engine's probe log-probs with the new weights.

        Raises:
            RolloutError: an empty tensor; other names or shapes than in the sync before; another version reported.
        """
        self.outbox = self.outbox or Outbox()
        return send_to_all([self], policy.name, policy.key, stream(policy), self.outbox, policy.base)[0]

    def changed_share(self) -> float:
        """Share of tensors that the last sync changed, against the one before it or, for the first, the weights on disk."""
        return changed_share(self.before, self.manifest or {}, self.source)

    def close(self) -> None:
        if self.outbox:
            self.outbox.close()


def changed_share(before: Manifest | None, after: Manifest, source: str) -> float:
    """Share of tensors whose bits differ between two manifests; no earlier one stands for the weights at `source`."""
    if _is_adapter(after) and not (before and _is_adapter(before)):
        return 1.0  # of layers that had other weights than the base's with this adapter
    if not before or _is_adapter(before):
        import torch

        from comlrl_ds.rollout.disk import tensors_on_disk

        kept = ((name, t.to(getattr(torch, after[name][2]))) for name, t in tensors_on_disk(source) if name in after)
        before = {name: [list(t.shape), _digest(t), after[name][2]] for name, t in kept}
    return sum(before.get(name, [None, None])[1] != entry[1] for name, entry in after.items()) / len(after)


def send_to_all(
    senders: Sequence[HostSender],
    name: str,
    key: str,
    tensors: Iterable[tuple[str, Tensor]],
    outbox: Outbox,
    base: str | None = None,
) -> list[tuple[SyncReport, list[list[float]]]]:
    """One pass over a policy's tensors, each chunk to every engine at the same time.

    Args:
        name: of the policy, for messages. key: the version that the engines shall report.
        base: of an adapter, which the engines add to it; None for whole weights.

    Raises:
        RolloutError: an engine that fails or does not answer, with the policy and the last parameter sent; an empty tensor;
            other names or shapes than in the sync before; another version reported.
    """
    try:
        return _send_to_all(senders, name, key, tensors, outbox, base)
    except BaseException as error:
        left = _abandon(senders)
        if left and isinstance(error, RolloutError):
            raise RolloutError("; ".join([str(error), *left])) from error
        raise


def _abandon(senders: Sequence[HostSender]) -> list[str]:
    """Ends the sync of engines that others use, at the same time; what is left to the user."""
    clients = [s.client for s in senders if isinstance(s.client, SharedClient)]
    if not clients:
        return []
    with ThreadPoolExecutor(len(clients)) as threads:
        return [left for left in threads.map(lambda client: client.abandon_weight_update(), clients) if left]


def _send_to_all(
    senders: Sequence[HostSender], name: str, key: str, tensors: Iterable[tuple[str, Tensor]], outbox: Outbox, base: str | None
) -> list[tuple[SyncReport, list[list[float]]]]:
    started = time.perf_counter()
    manifest: Manifest = {}
    chunk: list[tuple[str, Tensor]] = []
    used = total = 0
    with ThreadPoolExecutor(len(senders)) as threads:
        sent = "before any parameter was sent"

        def every(act: Any) -> list[Any]:
            try:
                return list(threads.map(act, senders)) if len(senders) > 1 else [act(senders[0])]
            except RolloutError as error:
                raise RolloutError(f"weight sync of {name}: {error}, {sent}") from error

        def flush() -> None:
            nonlocal sent
            sent = f"the last parameter sent being {chunk[-1][0]}"
            described = outbox.fill(chunk)
            more = {"tensors": described} | ({"base": base} if base else {})
            every(lambda s: s.client.update_weights(outbox.place(s.far is not None, s.far or "") | more))

        every(lambda s: s.client.start_weight_update())
        limit = min(s.chunk_bytes for s in senders)
        for tensor_name, tensor in tensors:
            if tensor.numel() == 0:
                raise RolloutError(f"weight sync of {name}: {tensor_name} is empty; was it gathered?")
            dtype = str(tensor.dtype).removeprefix("torch.")
            manifest[tensor_name] = [list(tensor.shape), _digest(tensor), dtype]
            if chunk and used + tensor.nbytes > limit:
                flush()
                chunk, used = [], 0
            chunk.append((tensor_name, tensor))
            used += room(tensor)
            total += tensor.nbytes
        for s in senders:
            _check_names(name, s.manifest, manifest)
        flush()
        answers = every(lambda s: s.client.finish_weight_update(key))
    for s, answer in zip(senders, answers):
        if answer["version"] != key:
            raise RolloutError(f"weight sync of {name}: sent version {key!r}, the engine reports {answer['version']!r}")
        s.before, s.manifest = s.manifest, manifest
    report = SyncReport(time.perf_counter() - started, total)
    return [(report, answer["probe"]) for answer in answers]


def _check_names(policy: str, before: Manifest | None, now: Manifest) -> None:
    if not now:
        raise RolloutError(f"weight sync of {policy}: no tensors")
    if before and (_is_adapter(before) or _is_adapter(now)):
        return  # adapters of two agents need not have the same layers, and the engine knows which there are
    for name in sorted(before.keys() | now.keys()) if before else ():
        old, new = (tuple(m[name][0]) if name in m else None for m in (before or {}, now))
        if old != new:
            was, is_now = ("absent" if old is None else old), ("missing" if new is None else new)
            raise RolloutError(f"weight sync of {policy}: {name} was {was} in the sync before, now {is_now}")


def _is_adapter(manifest: Manifest) -> bool:
    return next(iter(manifest)).endswith((A, B, SCALE))


def stream(policy: PolicyWeights) -> Iterable[tuple[str, Tensor]]:
    """A fresh pass over a policy's tensors, of this process or on disk."""
    if policy.tensors is not None:
        return ((name, tensor.detach()) for name, tensor in policy.tensors())
    from comlrl_ds.rollout.disk import tensors_on_disk

    return tensors_on_disk(policy.source)


def _digest(tensor: Tensor) -> int:
    """A sum over the raw bits: cheap, and different after any training step that moved the tensor."""
    import torch

    flat = tensor.detach().contiguous().view(-1)
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    return int(flat.view(words).sum(dtype=torch.int64))
