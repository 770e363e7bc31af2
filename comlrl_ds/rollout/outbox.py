"""The sender's half of a chunk of weights on its way to engines: memory that engines of this machine map, and that engines of
others read over TCP.

An anonymous file needs no room in /dev/shm, 64 MB in many containers, and is gone with its process.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import threading
from collections.abc import Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Listener
from typing import TYPE_CHECKING, Any

from comlrl_ds.cluster.launch import own_address

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 64


class Outbox:
    """Holds one chunk at a time."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("weights")
        self._size = self._used = 0
        self._map: mmap.mmap | None = None
        self._buffer: Any = None
        self._listener: Listener | None = None
        self._key = secrets.token_hex(16)

    def fill(self, tensors: Sequence[tuple[str, Tensor]]) -> list[list[Any]]:
        """Copies tensors in; returns [name, dtype, shape, byte offset] of each."""
        import torch

        described: list[list[Any]] = []
        offset = 0
        for name, t in tensors:
            described.append([name, str(t.dtype).removeprefix("torch."), list(t.shape), offset])
            offset += room(t)
        self._used = offset
        if offset > self._size:
            self._buffer = None
            os.ftruncate(self._fd, offset)
            self._size = offset
            self._map = mmap.mmap(self._fd, offset)
            self._buffer = torch.frombuffer(self._map, dtype=torch.uint8)
        for (_, t), (_, _, _, start) in zip(tensors, described):
            self._buffer[start : start + t.nbytes].view(t.dtype).view(t.shape).copy_(t)
        return described

    def place(self, far: bool, towards: str = "") -> dict[str, Any]:
        """Where an engine finds the chunk.

        Args:
            far: it is on another machine, or in another container. towards: an address of it.
        """
        if not far:
            # The path names this process's open file; a process of the same user and PID namespace may map it.
            return {"path": f"/proc/{os.getpid()}/fd/{self._fd}"}
        if self._listener is None:
            self._listener = Listener(("", 0), backlog=64, authkey=bytes.fromhex(self._key))
            threading.Thread(target=self._serve, args=(self._listener,), daemon=True, name="outbox").start()
        return {"at": [own_address(towards), self._listener.address[1]], "key": self._key, "size": self._used}

    def _serve(self, listener: Listener) -> None:
        """Gives the chunk to whoever has the key; nothing changes it before every engine has answered."""
        while True:
            try:
                with contextlib.suppress(EOFError, ConnectionError), listener.accept() as peer:
                    assert self._map
                    peer.send_bytes(memoryview(self._map)[: self._used])
            except OSError:
                return  # closed
            except AuthenticationError:  # wrong key: it gets nothing
                continue

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._fd >= 0:
            self._buffer = None
            os.close(self._fd)
            self._fd = -1


def room(tensor: Tensor) -> int:
    """Bytes that a tensor takes in a chunk."""
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
