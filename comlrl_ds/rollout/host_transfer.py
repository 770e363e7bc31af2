"""Engine half of the `host` weight transfer: tensors arrive in chunks, in memory that both processes map or over TCP.

Works on every device through vLLM's layerwise reload, which re-packs and re-quantises as the first load did.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader import reload as layerwise
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

from comlrl_ds.rollout.adapters import merged
from comlrl_ds.rollout.chunks import copies, opened, view
from comlrl_ds.rollout.mixtures import names_of_files, pack_experts_again


@dataclass
class HostInit(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class HostUpdate(WeightTransferUpdateInfo):
    """A chunk: where it is (`Outbox.place`), [name, dtype, shape, byte offset] of its tensors, and the base of an adapter.

    `abandon`: no chunk, but the end of a sync that failed. Layers that were not sent keep their weights.
    """

    tensors: list
    path: str | None = None
    at: list | None = None
    key: str | None = None
    size: int = 0
    base: str | None = None
    abandon: bool = False

    @property
    def place(self) -> dict:
        return {"path": self.path} if self.path else {"at": self.at, "key": self.key, "size": self.size}


class HostWeightTransfer(WeightTransferEngine[HostInit, HostUpdate]):
    init_info_cls, update_info_cls = HostInit, HostUpdate

    def init_transfer_engine(self, init_info: HostInit) -> None:
        self._expected: set[str] = set()
        self._loaded: set[str] = set()
        self._adapter: dict[str, torch.Tensor] = {}
        self._base = ""
        self._kernels: list = []
        self._as_in_files = names_of_files(self.model_config.hf_config)

    def shutdown(self) -> None:
        pass

    def start_weight_update(self) -> None:
        # Asked before the reload splits a tied head from its embedding: what is shared is listed, and sent, once.
        self._expected = {name for name, _ in self.model.named_parameters()}
        self._loaded = set()
        self._adapter = {}
        self._kernels = pack_experts_again(self.model)
        layerwise.initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict) -> None:
        # Not the base class's: it ends with a synchronisation that a CPU does not have.
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            self._reassemble()  # layers without weights would end the process at the next request
            raise

    def receive_weights(self, update: HostUpdate) -> None:
        if update.abandon:
            self._expected, self._adapter = set(), {}
            return
        if update.base:  # small, and merged when it is whole
            self._base = update.base
            self._adapter |= copies(update.place, update.tensors)
            return
        with opened(update.place) as buffer:
            loaded = self.model.load_weights(self._as_in_files((name, view(buffer, *rest)) for name, *rest in update.tensors))
            self._loaded |= set(loaded or ())
            _release_views(self.model)
            del buffer

    def finish_weight_update(self) -> None:
        if self._adapter:
            whole = self._as_in_files(merged(self._base, self._adapter, self.model_config.dtype))
            self._loaded |= set(self.model.load_weights(whole) or ())
            self._adapter = {}
        missing = sorted(self._expected - self._loaded)
        self._reassemble()
        if missing:
            raise ValueError(
                f"weight sync left {len(missing)} parameters of the engine without new values, e.g. {missing[0]!r}"
            )

    def _reassemble(self) -> None:
        """Gives layers what has arrived for them, and those that got nothing what they had."""
        layerwise.finalize_layerwise_reload(self.model, self.model_config)
        for method, kernel in self._kernels:
            method.moe_kernel = method.moe_kernel or kernel
        _repack_tied_head(self.model)


def _release_views(model: torch.nn.Module) -> None:
    """Layers that a chunk filled only in part still hold views of the mapping, which is about to go: copy those."""
    for module in model.modules():
        info = LAYERWISE_INFO.get(module)
        for _, bound in info.loaded_weights if info else ():
            for name, value in bound.arguments.items():
                if isinstance(value, torch.Tensor) and not value.is_meta and name != "param":
                    bound.arguments[name] = value.clone()


def _repack_tied_head(model: torch.nn.Module) -> None:
    """On a CPU each linear computes with a packed copy; a tied head gets no weights of its own, so it keeps the old pack."""
    embeddings = [m for m in model.modules() if type(m).__name__ == "VocabParallelEmbedding"]
    for head in model.modules():
        if type(head).__name__ != "ParallelLMHead":
            continue
        for embedding in embeddings:
            if head.weight is embedding.weight and hasattr(embedding, "cpu_linear"):
                head.cpu_linear = embedding.cpu_linear
