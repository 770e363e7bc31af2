"""LoRA in the models of engines: adapters beside frozen layers, what is sent and saved of them, and the model without them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comlrl_ds.config.errors import ConfigError, Problem
from comlrl_ds.config.lora import LoraSettings
from comlrl_ds.rollout.adapters import PEFT_PREFIX, WEIGHTS_FILE
from comlrl_ds.rollout.disk import mark_of, weight_files
from comlrl_ds.runs.failure import writing

# The adapter that learns, and the one that it started from, where it is not zero.
ADAPTER, START = "default", "start"


def add_lora(model: Any, settings: LoraSettings, *, source: str, seed: int, dropout: bool, current: str | None = None) -> None:
    """Puts an adapter beside layers of a transformers model, and freezes all the rest of it.

    Args:
        source: folder or repository of the model, which its saved adapters name. seed: of A; equal seeds give equal adapters.
        dropout: keep the settings' own; otherwise it is 0.
        current: a PEFT folder that the learning adapter is filled from; the model without what it has learned stays as the
            settings say.

    Raises:
        ConfigError: an adapter that does not fit the model.
    """
    from peft import LoraConfig, inject_adapter_in_model

    config: Any = LoraConfig.from_pretrained(settings.adapter) if settings.adapter else LoraConfig(**settings.peft_fields)
    config.inference_mode, config.task_type, config.base_model_name_or_path = False, "CAUSAL_LM", published_name(source)
    if not dropout:
        config.lora_dropout = 0.0
    names = [ADAPTER, START] if settings.adapter else [ADAPTER]
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # the second is meant
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")  # peft sees what the layers are
        torch.manual_seed(seed)
        for name in names:
            inject_adapter_in_model(config, model, name)
    if settings.adapter:
        state = _read(settings.adapter)
        for name in names:
            _fill(model, name, dict(state), settings.adapter)
    if current:
        _fill(model, ADAPTER, _read(current), current)
    model.requires_grad_(False)
    for layer in lora_layers(model).values():
        layer.set_adapter(ADAPTER)
        for part in (layer.lora_A, layer.lora_B):
            part[ADAPTER].requires_grad_(True)
            if settings.adapter:
                part[START].requires_grad_(False)
    # Kept in saved adapters, which are right on no other weights.
    config.base_mark = mark_of(source) if weight_files(Path(source)) else ""
    model.lora_config = config


def published_name(source: str) -> str:
    """What a saved adapter calls its base: the repository, where that is a folder of the hub's cache, which others lack."""
    parts = Path(source).parts
    cached = parts[-3] if len(parts) > 2 and parts[-2] == "snapshots" else ""
    return cached.removeprefix("models--").replace("--", "/") if cached.startswith("models--") else source


def lora_layers(model: nn.Module) -> dict[str, Any]:
    """Layers with adapters, by name."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


@dataclass(frozen=True)
class AdapterLayer:
    """The adapter of one layer that learns: `a` [r, in], `b` [out, r], perhaps sharded. `transposed`: weights are [in, out]."""

    name: str
    a: Any
    b: Any
    scaling: float
    transposed: bool


def adapter_layers(model: nn.Module, prefix: str) -> list[AdapterLayer]:
    """Of every layer that has one, by its name after `prefix`; none in a model without LoRA."""
    if not has_lora(model):
        return []
    return [
        AdapterLayer(
            name.removeprefix(prefix), m.lora_A[ADAPTER].weight, m.lora_B[ADAPTER].weight, m.scaling[ADAPTER], m.fan_in_fan_out
        )
        for name, m in lora_layers(model).items()
    ]


def has_lora(model: nn.Module) -> bool:
    return any(hasattr(m, "lora_config") for m in model.modules())


@contextmanager
def anchored(model: nn.Module) -> Iterator[None]:
    """For the length of a block the model computes as it did before it learned anything."""
    layers = lora_layers(model).values()
    # peft turns gradients of adapters on and off when it switches them, which breaks DeepSpeed's hooks.
    flags = [(p, p.requires_grad) for layer in layers for p in layer.parameters()]
    starts = any(START in layer.lora_A for layer in layers)

    def compute(learned: bool) -> None:
        for layer in layers:
            if starts:
                layer.set_adapter(ADAPTER if learned else START)
            else:
                layer.enable_adapters(learned)

    try:
        compute(learned=False)
        yield
    finally:
        compute(learned=True)
        for p, flag in flags:
            p.requires_grad_(flag)


# Beside an adapter: the hash of its base's files when it learned (`mark_of`).
BASE_FILE = "comlrl_ds_base.json"


def mark_of_base(folder: Path) -> str:
    """The hash that stands beside an adapter of its base; empty where the folder was written by something else.

    Raises:
        ConfigError: the file is not what `save_adapter` writes.
    """
    file = folder / BASE_FILE
    if not file.is_file():
        return ""
    try:
        return str(json.loads(file.read_text())["mark"])
    except (ValueError, KeyError, TypeError):
        raise ConfigError(Problem(str(file), "holds no hash of the adapter's base; save the adapter again")) from None


def save_adapter(config: Any, tensors: dict[str, Tensor], folder: Path) -> None:
    """Writes a PEFT folder.

    Args:
        config: `lora_config` of the model. tensors: by name in the model, without the adapter's.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    named = {PEFT_PREFIX + name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    with writing(folder):
        config.save_pretrained(folder)
        save_file(named, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        if mark := getattr(config, "base_mark", ""):
            (folder / BASE_FILE).write_text(json.dumps({"mark": mark}) + "\n")


def _read(folder: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name.removeprefix(PEFT_PREFIX): t for name, t in load_file(Path(folder) / WEIGHTS_FILE).items()}


@torch.no_grad()
def _fill(model: nn.Module, adapter: str, state: dict[str, Tensor], folder: str) -> None:
    for name, layer in lora_layers(model).items():
        for part, holder in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B)):
            found = state.pop(f"{name}.{part}.weight", None)
            if found is None or found.shape != holder[adapter].weight.shape:
                was = "is missing" if found is None else f"has shape {tuple(found.shape)}"
                raise ConfigError(Problem(folder, f"{name}.{part} {was}; this adapter is for another model"))
            holder[adapter].weight.copy_(found)
    if state:
        raise ConfigError(Problem(folder, f"{min(state)} is no LoRA weight of this model"))
