"""Mixtures of experts in vLLM's workers: what a weight sync has to do for them beyond what it does for other models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

Named = Iterable[tuple[str, Tensor]]


def pack_experts_again(model: torch.nn.Module) -> list[tuple[Any, Any]]:
    """Makes the coming reload pack the experts for the CPU kernel, which vLLM does for a kernel's first weights only.

    Later weights would land unpacked in memory that the kernel reads as packed. A layer therefore forgets its kernel here,
    and makes another one, with padding and packing, when its new weights are complete.

    Returns:
        (method, kernel) of each such layer, for those that get no new weights.
    """
    forgotten = []
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "unquantized_backend", None) == UnquantizedMoeBackend.CPU:
            forgotten.append((method, method.moe_kernel))  # type: ignore[union-attr]
            method.moe_kernel = None  # type: ignore[union-attr]
    return forgotten


def names_of_files(config: Any) -> Callable[[Named], Iterator[tuple[str, Tensor]]]:
    """A pass that gives a mixture's tensors the names and shapes which they have in the files that vLLM loads.

    transformers joins the experts of a layer when it loads a model and renames what is around them; vLLM's loaders know
    the names of files, and for some models, Mixtral for one, no others. Models without experts pass unchanged, and so do
    those of which several joined tensors make one in the files, because they may arrive in different chunks.
    """
    from transformers import AutoModelForCausalLM
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter, revert_weight_conversion

    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
    except ValueError:  # a class of vLLM's own, whose names are those of files
        return iter
    rules = [r for r in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(r, PrefixChange)]
    joined = [r for r in rules if isinstance(r, WeightConverter)]
    experts = any("experts" in target for rule in joined for target in rule.target_patterns)
    if not experts or any(len(rule.target_patterns) > 1 for rule in joined):
        return iter
    model._weight_conversions = rules

    def renamed(tensors: Named) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            yield from revert_weight_conversion(model, {name: tensor}).items()

    return renamed
