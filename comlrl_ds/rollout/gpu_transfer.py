"""The weight edges of GPUs: vLLM's own `nccl` and `ipc` transports, driven from the actor's ranks.

Written from vLLM 0.32's interface; not yet run on a GPU.
"""

from __future__ import annotations

import base64
import os
import pickle
import socket
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from comlrl_ds.cluster.launch import own_address
from comlrl_ds.rollout.engine_client import WeightCalls

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from comlrl_ds.rollout.transfer import WeightHolder

# Trainer side of each (transport, engine), for the life of the process: an NCCL communicator is made once.
_TRAINERS: dict[tuple[str, str, str], Any] = {}


class _VersionedCalls:
    """vLLM's client interface; its senders finish without naming a version, which is added here."""

    def __init__(self, calls: WeightCalls) -> None:
        self._calls, self.version = calls, ""
        self.answer: dict[str, Any] = {}

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._calls.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        self._calls.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        info = dict(update_info)
        if (handles := info.pop("ipc_handles", None)) is not None:
            # Handles are no plain types; the engine, a child of this launch, is told to accept them pickled.
            info["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(handles)).decode()
        self._calls.update_weights(info)

    def finish_weight_update(self, version: str | None = None) -> None:
        self.answer = self._calls.finish_weight_update(self.version)


def send_by(
    transport: str, holder: WeightHolder, name: str, key: str, dtype: torch.dtype, calls: WeightCalls | None
) -> dict[str, Any]:
    """One sync by "nccl" or "ipc"; every rank of the actor's group calls it, the first has `calls`.

    Returns:
        {"seconds", "bytes", "manifest", "probe"}; the manifest is empty, as nothing passes through this process's memory.
    """
    started = time.perf_counter()
    shapes = holder.weight_shapes()
    trainer = _trainer(transport, holder, name, dtype, calls)
    if calls is not None:
        trainer.client.version = key
    trainer.send_weights()
    if calls is None:
        return {}
    count = sum(_elements(shape) for _, shape in shapes)
    answer = trainer.client.answer
    return {
        "seconds": time.perf_counter() - started, "bytes": count * dtype.itemsize, "manifest": {}, "probe": answer["probe"],
    }  # fmt: skip


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count


def _trainer(transport: str, holder: WeightHolder, name: str, dtype: torch.dtype, calls: WeightCalls | None) -> Any:
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    key = (transport, name, calls.name if calls else "")
    if key in _TRAINERS:
        return _TRAINERS[key]

    class Source(WeightSource):
        def metadata(self) -> list[Any]:
            return [ParamMeta(n, dtype, shape) for n, shape in holder.weight_shapes()]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return iter(holder.named_weights(dtype))

    if transport == "nccl":
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        address, port = _rendezvous()
        world = 1 + (calls.call("workers") if calls else 0)
        info: Any = NCCLTrainerInitInfo(address, port, world, rank=holder.rank)
    else:
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        # Unpacked would keep every gathered tensor on every rank until the end.
        info = IPCTrainerInitInfo(packed=True, rank=holder.rank)
    client: Any = _VersionedCalls(calls) if calls else None
    _TRAINERS[key] = WeightTransferTrainerFactory.trainer_init(info, client=client, source=Source())
    return _TRAINERS[key]


def _rendezvous() -> tuple[str, int]:
    """An address of this machine and a free port, where the engine's workers meet the sender."""
    with socket.socket() as s:
        s.bind(("", 0))
        return own_address(os.environ["MASTER_ADDR"]), s.getsockname()[1]
