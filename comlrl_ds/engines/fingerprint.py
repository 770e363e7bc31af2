"""Which weights an engine holds, and how far they are from others."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from comlrl_ds.cluster.progress import tick
from comlrl_ds.rollout.disk import DiskTensors, tensors_on_disk

if TYPE_CHECKING:
    from comlrl_ds.engines.engine import PolicyEngine

# Below 2^53: a metric is a float.
HASH_BITS = 48


def weights_hash(tensors: Iterable[tuple[str, Tensor]], dtype: str) -> int:
    """A whole number below 2^48 that is the same for the same names and values (in `dtype`), in whatever order."""
    return sum(_hash(name, tensor, dtype) for name, tensor in tensors) % (1 << HASH_BITS)


def hash_on_disk(folder: str, dtype: str) -> int:
    """`weights_hash` of a model folder."""
    return weights_hash(tensors_on_disk(folder), dtype)


def fingerprint(engine: PolicyEngine, start: str, dtype: str) -> tuple[int, float]:
    """(`weights_hash`, ‖θ − θ₀‖ / ‖θ₀‖) of an engine's weights, θ₀ those of the folder `start`; a collective.

    Returns:
        the numbers for the lead, (0, 0) for other ranks.
    """
    lead = engine.rank == 0
    before = DiskTensors(start) if lead else None
    total, moved, size = 0, 0.0, 0.0
    for name, tensor in engine.named_weights():
        if before is None:
            continue
        tick()
        total += _hash(name, tensor, dtype)
        old = before[name].to(tensor.device, torch.float32)
        moved += float((tensor.to(torch.float32) - old).double().square().sum())
        size += float(old.double().square().sum())
    return total % (1 << HASH_BITS), math.sqrt(moved / size) if size else 0.0


def _hash(name: str, tensor: Tensor, dtype: str) -> int:
    data = tensor.detach().to("cpu", getattr(torch, dtype)).contiguous().view(torch.uint8).numpy()
    digest = hashlib.blake2b(name.encode(), digest_size=HASH_BITS // 8)
    digest.update(data.tobytes())
    return int.from_bytes(digest.digest(), "big")
