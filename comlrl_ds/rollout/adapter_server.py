"""An engine child that holds its base once, and adapters beside it: a sync brings an adapter, and nothing else changes."""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comlrl_ds.rollout.adapters import CONFIG_FILE, PEFT_PREFIX, WEIGHTS_FILE, layers_of
from comlrl_ds.rollout.engine_server import VLLMServer


class AdapterServer(VLLMServer):
    """vLLM with LoRA. Each version of a policy's adapter gets an id of its own, the next one; the oldest make room."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._ids = itertools.count(1)
        self._held: dict[str, Any] = {}  # requests by version, the oldest first
        self._arriving: dict[str, Any] = {}
        self._slots, self._base = settings["llm"]["max_loras"], settings["llm"]["model"]
        super().__init__(settings)

    def start_weight_update(self, say: Callable[[Any], None]) -> None:
        self.end_requests()
        self._arriving = {}

    def update_weights(self, say: Callable[[Any], None], update_info: dict[str, Any]) -> None:
        from comlrl_ds.rollout.chunks import copies

        if not update_info.get("base"):
            raise ValueError("whole weights for an engine that takes adapters; write rollout.lora: merge")
        self._arriving |= copies(update_info, update_info["tensors"])

    def finish_weight_update(self, say: Callable[[Any], None], version: str) -> dict[str, Any]:
        if version != self._base and version not in self._held:
            self._held[version] = self._load(version)
        self.adapter = self._held.get(version)  # None: the base alone
        self.reset_prefix_cache()
        probe = self.logprobs(say, self.probe_rows) if self.probe_rows else []
        return {"version": version, "probe": probe}

    def adapters(self, say: Callable[[Any], None]) -> dict[str, int]:
        """vLLM's id of every version that is held."""
        return {version: request.lora_int_id for version, request in self._held.items()}

    def wake(self, say: Callable[[Any], None], tags: list[str]) -> None:
        super().wake(say, tags)
        # Nothing promises that vLLM's room for adapters outlives a sleep as weights do.
        for request in self._held.values():
            self.engine.remove_lora(request.lora_int_id)
        self._held, self.adapter = {}, None

    def _load(self, version: str) -> Any:
        from vllm.lora.request import LoRARequest

        while len(self._held) >= self._slots:
            oldest = self._held.pop(next(iter(self._held)))
            self.engine.remove_lora(oldest.lora_int_id)
        folder = Path(tempfile.mkdtemp(prefix="adapter-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        try:
            layers = write_adapter(self._arriving, folder)
            request = LoRARequest(version, next(self._ids), str(folder))
            if not self.engine.add_lora(request):
                raise ValueError(f"vLLM took no adapter {version!r}")
        finally:
            shutil.rmtree(folder)
        bound = min(self.llm.collective_rpc("bound_layers", args=(request.lora_int_id,)))
        if bound != layers:
            raise ValueError(f"the adapter {version!r} has {layers} layers, and vLLM uses {bound} of them")
        return request


def write_adapter(tensors: dict[str, Any], folder: Path) -> int:
    """Writes an adapter as it was sent as a PEFT folder of one rank, smaller ones with zeros; returns its layers."""
    import torch
    from safetensors.torch import save_file

    layers = layers_of(tensors)
    rank = max(len(a) for a, _ in layers.values())
    state = {}
    for layer, (a, b) in layers.items():
        missing = rank - len(a)
        state[f"{PEFT_PREFIX}{layer}.lora_A.weight"] = torch.nn.functional.pad(a, (0, 0, 0, missing)).contiguous()
        state[f"{PEFT_PREFIX}{layer}.lora_B.weight"] = torch.nn.functional.pad(b, (0, missing)).contiguous()
    save_file(state, folder / WEIGHTS_FILE)
    endings = sorted({layer.rpartition(".")[2] for layer in layers})
    # B is scaled already.
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": endings, "bias": "none"}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return len(layers)


class BoundLayers:
    """What vLLM's workers are extended by (`worker_extension_cls`)."""

    model_runner: Any

    def bound_layers(self, adapter: int) -> int:
        """Layers of an adapter that this worker computes with, those that vLLM fuses counted one by one."""
        manager = self.model_runner.lora_manager._adapter_manager
        model = manager.get_adapter(adapter)
        count = 0
        for name in manager.modules:
            found = manager._get_lora_layer_weights(model, name)
            if found is not None:
                count += sum(a is not None for a in found.lora_a) if isinstance(found.lora_a, list) else 1
        return count
