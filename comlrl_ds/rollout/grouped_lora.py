"""LoRA's products on a CPU: one matrix product for each adapter of a batch.

vLLM's own operators copy an adapter for every token, and give a token without adapter the last one's: its index is −1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LARGEST_ERROR = 1e-4


def products(inputs: Tensor, weights: Tensor, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """[tokens, out] x · Wᵀ, each token with the adapter of its index, and 0 where that is −1.

    Args:
        inputs: [tokens or more, in]. weights: [adapters, (1,) out, in]. indices: [tokens].
    """
    inputs = inputs[: len(indices)]
    found = inputs.new_zeros((len(inputs), weights.shape[-2]), dtype=dtype)
    for index in torch.unique(indices).tolist():
        if index >= 0:
            rows = indices == index
            weight = weights[index].reshape(weights.shape[-2:])
            found[rows] = (inputs[rows].to(weight.dtype) @ weight.T).to(dtype)
    return found


def bgmv_shrink(inputs: Tensor, weights: Tensor, output: Tensor, indices: Tensor, scaling: float = 1.0) -> None:
    found = products(inputs, weights, indices, output.dtype)
    output[: len(found), : found.shape[1]] = scaling * found


def bgmv_expand(inputs: Tensor, weights: Tensor, output: Tensor, indices: Tensor, add_inputs: bool = True) -> None:
    # Adapter and model may pad a layer's width differently.
    bgmv_expand_slice(inputs, weights, output, indices, 0, min(weights.shape[-2], output.shape[1]), add_inputs)


def bgmv_expand_slice(
    inputs: Tensor, weights: Tensor, output: Tensor, indices: Tensor, offset: int, size: int, add_inputs: bool = True
) -> None:
    found = products(inputs, weights, indices, output.dtype)[:, :size]
    place = output[: len(found), offset : offset + size]
    place.copy_(place + found if add_inputs else found)


def sgmv_shrink(
    inputs: Tensor, weights: Tensor, output: Tensor, starts: Tensor, lengths: Tensor, indices: Tensor, batches: int,
    longest: int, tokens: int, scaling: float,
) -> None:  # fmt: skip
    bgmv_shrink(inputs, weights, output, torch.repeat_interleave(indices, lengths), scaling)


def sgmv_expand(
    inputs: Tensor, weights: Tensor, output: Tensor, starts: Tensor, lengths: Tensor, indices: Tensor, batches: int,
    longest: int, tokens: int, add_inputs: bool = False,
) -> None:  # fmt: skip
    bgmv_expand(inputs, weights, output, torch.repeat_interleave(indices, lengths), add_inputs)


def sgmv_expand_slice(
    inputs: Tensor, weights: Tensor, output: Tensor, starts: Tensor, lengths: Tensor, indices: Tensor, batches: int,
    longest: int, tokens: int, offset: int, size: int, add_inputs: bool = False,
) -> None:  # fmt: skip
    bgmv_expand_slice(inputs, weights, output, torch.repeat_interleave(indices, lengths), offset, size, add_inputs)


OPERATORS = (bgmv_shrink, bgmv_expand, bgmv_expand_slice, sgmv_shrink, sgmv_expand, sgmv_expand_slice)


def install() -> None:
    """Puts these operators in place of vLLM's in this process, once they have been seen to agree with plain products.

    Raises:
        RuntimeError: they do not, or this vLLM has other operators.
    """
    from vllm.lora.punica_wrapper import punica_cpu

    missing = [f.__name__ for f in OPERATORS if not hasattr(punica_cpu, f.__name__)]
    if missing:
        raise RuntimeError(f"this vLLM has no operator {missing[0]} for LoRA on a CPU; write rollout.lora: merge")
    for operator in OPERATORS:
        setattr(punica_cpu, operator.__name__, operator)
    verify(punica_cpu)


def verify(module: Any) -> None:
    """Compares a module's operators with plain products on random tensors, tokens without adapter among them.

    Raises:
        RuntimeError: they differ.
    """
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    x, a, b, out = draw(7, 12), draw(3, 1, 4, 12), draw(3, 1, 10, 4), draw(7, 10)
    indices, starts, lengths = torch.tensor([2, -1, 0]), torch.tensor([0, 3, 5]), torch.tensor([3, 2, 2])
    whole = torch.repeat_interleave(indices, lengths)
    expected = out.clone()
    for k, index in enumerate(whole.tolist()):
        if index >= 0:
            expected[k] += 0.5 * (b[index, 0] @ (a[index, 0] @ x[k]))
    for prefix, arguments in (("bgmv", (whole,)), ("sgmv", (starts, lengths, indices, 3, 3, 7))):
        low, got = torch.zeros(7, 4), out.clone()
        getattr(module, f"{prefix}_shrink")(x, a, low, *arguments, 0.5)
        getattr(module, f"{prefix}_expand_slice")(low, b[:, :, :6], got, *arguments, 0, 6, True)
        getattr(module, f"{prefix}_expand_slice")(low, b[:, :, 6:], got, *arguments, 6, 4, True)
        also = out.clone()
        getattr(module, f"{prefix}_expand")(low, b, also, *arguments, True)
        if max((got - expected).abs().max(), (also - expected).abs().max()) > LARGEST_ERROR:
            raise RuntimeError("the operators for LoRA on a CPU give wrong products; write rollout.lora: merge")
