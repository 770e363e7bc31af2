"""The engine's half: a chunk of weights as a buffer, mapped or read over TCP, and the tensors in it."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client
from typing import Any

import torch


@contextmanager
def opened(place: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The bytes of a chunk, for the length of a block. Args: place, from `Outbox.place`."""
    if "path" in place:
        with open(place["path"], "r+b") as file, mmap.mmap(file.fileno(), 0) as shared:
            buffer = torch.frombuffer(shared, dtype=torch.uint8)
            yield buffer
            del buffer
        return
    address, port = place["at"]
    with Client((address, port), authkey=bytes.fromhex(place["key"])) as peer:
        buffer = torch.empty(place["size"], dtype=torch.uint8)
        received = peer.recv_bytes_into(buffer.numpy())
    if received != place["size"]:
        raise ValueError(f"a chunk of {place['size']} bytes came as {received}")
    yield buffer


def copies(place: dict[str, Any], tensors: list[list[Any]]) -> dict[str, torch.Tensor]:
    """The tensors of a chunk, by name, that outlive it. Args: as `opened`, and [name, dtype, shape, byte offset] of each."""
    with opened(place) as buffer:
        found = {name: view(buffer, *rest).clone() for name, *rest in tensors}
        del buffer
    return found


def view(buffer: torch.Tensor, dtype_name: str, shape: list[int], offset: int) -> torch.Tensor:
    """One tensor of a chunk, without copying it."""
    dtype = getattr(torch, dtype_name)
    size = torch.Size(shape).numel() * dtype.itemsize
    return buffer[offset : offset + size].view(dtype).view(shape)
