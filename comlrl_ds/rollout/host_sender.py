"""Trainer half of the `host` weight transfer: tensors are copied into an anonymous memory file that the engine maps.

An anonymous file needs no room in /dev/shm, 64 MB in many containers, and is gone with its process.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from comlrl_ds.rollout.base import PolicyWeights, RolloutError, SyncReport

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_BYTES = 512 << 20


class WeightClient(Protocol):
    """The calls of vLLM's weight transfer that a sync makes."""

    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: dict[str, Any]) -> None: ...
    def finish_weight_update(self, version: str) -> dict[str, Any]: ...


class HostSender:
    """Sends whole models to one engine, and knows what it sent last: names, shapes, a digest of each tensor.

    Args:
        client: the engine. source: folder whose weights it started with.
        chunk_bytes: size of the memory file, unless one tensor is larger.
    """

    def __init__(self, client: WeightClient, source: str, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._client, self._source, self._chunk_bytes = client, source, chunk_bytes
        self._fd = os.memfd_create("weights")
        self._size = 0
        self._buffer: Any = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._digests: dict[str, int] = {}
        self._before: dict[str, int] = {}
        self._dtypes: dict[str, Any] = {}

    def send(self, policy: PolicyWeights) -> tuple[SyncReport, list[list[float]]]:
        """One sync. Returns the report and the engine's probe log-probs with the new weights.

        Raises:
            RolloutError: an empty tensor; other names or shapes than in the sync before; another version reported.
        """
        started = time.perf_counter()
        shapes: dict[str, tuple[int, ...]] = {}
        digests: dict[str, int] = {}
        dtypes: dict[str, Any] = {}
        chunk: list[tuple[str, Tensor, int]] = []
        used = total = 0
        self._client.start_weight_update()
        for name, tensor in _stream(policy):
            if tensor.numel() == 0:
                raise RolloutError(f"weight sync of {policy.name}: {name} is empty; was it gathered?")
            shapes[name], digests[name], dtypes[name] = tuple(tensor.shape), _digest(tensor), tensor.dtype
            if chunk and used + tensor.nbytes > self._chunk_bytes:
                self._flush(chunk, used)
                chunk, used = [], 0
            chunk.append((name, tensor, used))
            used += -(-tensor.nbytes // 64) * 64
            total += tensor.nbytes
        self._check_names(policy, shapes)
        self._flush(chunk, used)
        answer = self._client.finish_weight_update(policy.key)
        if answer["version"] != policy.key:
            raise RolloutError(
                f"weight sync of {policy.name}: sent version {policy.key!r}, the engine reports {answer['version']!r}"
            )
        self._shapes, self._before, self._digests = shapes, self._digests, digests
        self._dtypes = dtypes
        return SyncReport(time.perf_counter() - started, total), answer["probe"]

    def changed_share(self) -> float:
        """Share of tensors that the last sync changed, against the one before it or, for the first, the weights on disk."""
        before = self._before
        if not before:
            from comlrl_ds.rollout.disk import tensors_on_disk

            on_disk = tensors_on_disk(self._source)
            before = {name: _digest(t.to(self._dtypes[name])) for name, t in on_disk if name in self._dtypes}
        return sum(before.get(name) != digest for name, digest in self._digests.items()) / len(self._digests)

    def _check_names(self, policy: PolicyWeights, shapes: dict[str, tuple[int, ...]]) -> None:
        if not shapes:
            raise RolloutError(f"weight sync of {policy.name}: no tensors")
        for name in sorted(self._shapes.keys() | shapes.keys()) if self._shapes else ():
            old, new = self._shapes.get(name), shapes.get(name)
            if old != new:
                was, now = ("absent" if old is None else old), ("missing" if new is None else new)
                raise RolloutError(f"weight sync of {policy.name}: {name} was {was} in the sync before, now {now}")

    def _flush(self, chunk: list[tuple[str, Tensor, int]], size: int) -> None:
        import torch

        if size > self._size:
            self._buffer = None
            os.ftruncate(self._fd, size)
            self._size = size
            self._buffer = torch.frombuffer(mmap.mmap(self._fd, size), dtype=torch.uint8)
        for _, tensor, offset in chunk:
            self._buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        described = [[name, str(t.dtype).removeprefix("torch."), list(t.shape), offset] for name, t, offset in chunk]
        # The path names this process's open file; a process of the same user and PID namespace may map it.
        self._client.update_weights({"path": f"/proc/{os.getpid()}/fd/{self._fd}", "tensors": described})

    def close(self) -> None:
        if self._fd >= 0:
            self._buffer = None
            os.close(self._fd)
            self._fd = -1


def _stream(policy: PolicyWeights) -> Iterable[tuple[str, Tensor]]:
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
