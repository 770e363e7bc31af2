"""Which weights an engine holds, and how far they are from others."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from comlrl_ds.cluster.progress import tick
from comlrl_ds.engines.loading import adapted_base
from comlrl_ds.rollout.adapters import adapter_on_disk, is_adapter, layers_of
from comlrl_ds.rollout.disk import DiskTensors, tensors_on_disk

if TYPE_CHECKING:
    from comlrl_ds.engines.engine import PolicyEngine

# Below 2^53: a metric is a float.
HASH_BITS = 48


def weights_hash(tensors: Iterable[tuple[str, Tensor]], dtype: str) -> int:
    """A whole number below 2^48 that is the same for the same names and values (in `dtype`), in whatever order."""
    return sum(_hash(name, tensor, dtype) for name, tensor in tensors) % (1 << HASH_BITS)


def hash_on_disk(folder: str, dtype: str) -> int:
    """`weights_hash` of a model's or of a PEFT folder: of this, the base's and the adapter's together."""
    if not is_adapter(folder):
        return weights_hash(tensors_on_disk(folder), dtype)
    base = _of_base(adapted_base(folder, "policy"), dtype)[0]
    return (base + weights_hash(adapter_on_disk(folder), "float32")) % (1 << HASH_BITS)


def fingerprint(engine: PolicyEngine, start: str, dtype: str, adapter: str | None = None) -> tuple[int, float]:
    """(`weights_hash`, ‖θ − θ₀‖ / ‖θ₀‖) of an engine's weights, θ₀ those of the folder `start`; a collective.

    Args:
        adapter: with LoRA, the PEFT folder that it started from.

    Returns:
        the numbers for the lead, (0, 0) for other ranks.
    """
    lead = engine.rank == 0
    if engine.learns_adapter:
        tensors = dict(engine.named_weights())
        return _of_adapter(tensors, start, dtype, adapter) if lead else (0, 0.0)
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


def _of_adapter(tensors: dict[str, Tensor], base: str, dtype: str, adapter: str | None) -> tuple[int, float]:
    now, old = layers_of(tensors), layers_of(dict(adapter_on_disk(adapter))) if adapter else {}
    total, size = _of_base(base, dtype)
    moved = 0.0
    for layer, (a, b) in now.items():
        if old:  # B A − B₀ A₀ is the product of both side by side
            a, b = torch.cat([a, old[layer][0]]), torch.cat([b, -old[layer][1]], 1)
        a, b = a.double(), b.double()
        moved += float(((a @ a.T) * (b.T @ b)).sum())  # ‖B A‖² without the product itself
    return (total + weights_hash(tensors.items(), "float32")) % (1 << HASH_BITS), math.sqrt(max(moved, 0.0) / size)


@lru_cache(maxsize=64)
def _of_base(folder: str, dtype: str) -> tuple[int, float]:
    """(`weights_hash`, ‖θ‖²) of a folder that nobody changes."""
    size, total = 0.0, 0
    for name, tensor in tensors_on_disk(folder):
        tick()
        total += _hash(name, tensor, dtype)
        size += float(tensor.double().square().sum())
    return total, size


def _hash(name: str, tensor: Tensor, dtype: str) -> int:
    data = tensor.detach().to("cpu", getattr(torch, dtype)).contiguous().view(torch.uint8).numpy()
    digest = hashlib.blake2b(name.encode(), digest_size=HASH_BITS // 8)
    digest.update(data.tobytes())
    return int.from_bytes(digest.digest(), "big")
