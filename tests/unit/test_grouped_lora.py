"""LoRA's products for a batch of adapters: they are checked before vLLM gets them, so the check has to notice wrong ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from comlrl_ds.rollout import grouped_lora
from comlrl_ds.rollout.grouped_lora import OPERATORS, products, verify


def test_each_token_has_its_adapter_or_none():
    generator = torch.Generator().manual_seed(1)
    x, w = torch.randn(6, 5, generator=generator), torch.randn(2, 3, 5, generator=generator)
    indices = torch.tensor([1, -1, 0, 1, -1])  # the batch is padded to more tokens than there are
    got = products(x, w, indices, torch.float32)
    for k, index in enumerate(indices.tolist()):
        expected = w[index] @ x[k] if index >= 0 else torch.zeros(3)
        assert torch.allclose(got[k], expected, atol=1e-6)
    assert len(got) == 5


def test_the_check_passes_ours_and_notices_others():
    verify(grouped_lora)
    ours = {operator.__name__: operator for operator in OPERATORS}

    def low_of_the_last(inputs, weights, output, indices, scaling=1.0):
        """As vLLM's own: a token without adapter gets the last one's product."""
        output[:, : weights.shape[-2]] = scaling * torch.einsum("bi,boi->bo", inputs, weights[indices].squeeze(1))

    def of_the_last(inputs, weights, output, indices, add_inputs=True):
        output += torch.einsum("bi,boi->bo", inputs, weights[indices].squeeze(1))

    with pytest.raises(RuntimeError, match=r"rollout\.lora: merge"):
        verify(SimpleNamespace(**(ours | {"bgmv_shrink": low_of_the_last, "bgmv_expand": of_the_last})))
    twice = lambda *a, **k: (grouped_lora.sgmv_expand_slice(*a, **k), grouped_lora.sgmv_expand_slice(*a, **k))  # noqa: E731
    with pytest.raises(RuntimeError, match=r"rollout\.lora: merge"):
        verify(SimpleNamespace(**(ours | {"sgmv_expand_slice": twice})))
