"""LoRA adapters on their way to engines. What is sent of a layer is A and B in the type they are computed in, and the scaling;
the engine adds scaling · B A to the base, which it has, so a sync carries the adapter alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comlrl_ds.rollout.disk import tensors_on_disk

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
# After a layer's name: what is sent of it.
A, B, SCALE = ".lora_A", ".lora_B", ".lora_scale"
# What PEFT writes before the names of the model in it.
PEFT_PREFIX = "base_model.model."


def is_adapter(folder: str | Path) -> bool:
    return (Path(folder) / CONFIG_FILE).is_file()


def base_of(folder: str | Path) -> str | None:
    """The model that a PEFT folder says it is for."""
    return json.loads((Path(folder) / CONFIG_FILE).read_text()).get("base_model_name_or_path")


def wire(layer: str, a: Tensor, b: Tensor, scaling: float, transposed: bool) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of one layer, so that scaling · B A is the change of its weight as it stands on disk.

    Args:
        a, b: as peft holds them, [r, in] and [out, r]. transposed: the weight is [in, out], as in GPT-2.
    """
    import torch

    if transposed:
        a, b = b.T, a.T
    yield layer + A, a.detach().contiguous()
    yield layer + B, b.detach().contiguous()
    yield layer + SCALE, torch.tensor([scaling], dtype=torch.float32)


def layers_of(sent: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """(A, scaling · B) in fp32 of every layer that was sent."""
    names = [name.removesuffix(A) for name in sent if name.endswith(A)]
    return {n: (sent[n + A].float(), sent[n + B].float() * sent[n + SCALE].item()) for n in names}


def adapter_on_disk(folder: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a PEFT folder, as they are sent.

    Raises:
        ValueError: it holds more than LoRA of linear layers.
    """
    from peft import LoraConfig
    from safetensors.torch import load_file

    config: Any = LoraConfig.from_pretrained(folder)
    state = load_file(Path(folder) / WEIGHTS_FILE)
    layers = sorted({name.rpartition(".lora_")[0] for name in state})
    for layer in layers:
        pair = [state.pop(f"{layer}.lora_{x}.weight", None) for x in "AB"]
        if None in pair:
            break
        own = layer.removeprefix(PEFT_PREFIX)
        yield from wire(own, pair[0], pair[1], scaling_of(config, own, len(pair[0])), config.fan_in_fan_out)  # type: ignore[arg-type]
    if state:
        raise ValueError(f"{folder} holds {min(state)}, which is no LoRA of a linear layer")


def scaling_of(config: Any, layer: str, rank: int) -> float:
    """scaling of one layer by a `LoraConfig`."""
    from peft.utils.other import get_pattern_key

    pattern = config.alpha_pattern or {}
    alpha = pattern.get(get_pattern_key(pattern.keys(), layer), config.lora_alpha)
    return alpha / (rank**0.5 if config.use_rslora else rank)


def merged(
    base: str, adapter: Mapping[str, Tensor], dtype: torch.dtype, tensors: Iterable[tuple[str, Tensor]] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the whole model with the adapter in it; sums are made in fp32.

    Args:
        tensors: of the base, where they are to have other names than those of the loaded model.

    Raises:
        ValueError: no such base here, or one that lacks a layer of the adapter.
    """
    if not (Path(base) / "config.json").is_file():
        raise ValueError(f"the base of the adapter, {base!r}, is not on this machine")
    left = layers_of(adapter)
    for name, tensor in tensors_on_disk(base) if tensors is None else tensors:
        if (found := left.pop(name.removesuffix(".weight"), None)) is not None:
            a, b = found
            tensor = tensor.float() + b @ a
        yield name, tensor.to(dtype)
    if left:
        raise ValueError(f"{base!r} has no layer {min(left)!r}, which the adapter changes")
