"""Rounding is told from other weights: by bounds that correct forwards of each type keep, and wrong ones do not."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tiny import save_tiny_model, tiny_lm

from comlrl_ds.rollout.agreement import SHARE, SHARE_GPU, Reference, check_agreement, layers_of_model, tolerance
from comlrl_ds.rollout.base import RolloutError
from comlrl_ds.rollout.engine_settings import probe_rows

ROWS = probe_rows(320)


def logprobs_of(lm) -> list[list[float]]:
    with torch.no_grad():
        out = [lm(torch.tensor([r])).logits[0].double().log_softmax(-1) for r in ROWS]
    return [[float(z[k, r[k + 1]]) for k in range(len(r) - 1)] for z, r in zip(out, ROWS)]


def judged(found, reference, dtype="float32", layers=2, on_cpu=True) -> float:
    return check_agreement("agent_1", "engine 2 for base", found, reference, dtype=dtype, layers=layers, on_cpu=on_cpu)


def test_the_bound_is_the_share_of_the_coarser_type_times_layers_and_size():
    reference = Reference([[-2.0, -4.0], [-6.0]], "float32")
    assert tolerance(reference, "float32", 9, True) == pytest.approx(2**-16 * 3 * 4)
    assert tolerance(reference, "bfloat16", 4, True) == pytest.approx(2**-6 * 2 * 4)
    assert tolerance(Reference(reference.logprobs, "bfloat16"), "float32", 4, True) == pytest.approx(2**-6 * 2 * 4)
    # A GPU may multiply float32 in TF32, whose step is float16's.
    assert tolerance(reference, "float32", 4, False) == tolerance(reference, "float16", 4, True) == 2**-9 * 2 * 4
    for name, share in SHARE.items():
        assert 2 * torch.finfo(getattr(torch, name)).eps <= share <= SHARE_GPU[name]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("scale", [1.0, 6.0, 10.0])
@pytest.mark.parametrize("layers", [2, 8])
def test_rounding_of_a_narrow_type_is_within_its_bound_against_double_precision(dtype, scale, layers):
    """The exact forward stands for the trainer; the other rounds every layer, as an engine does, the weights being equal."""
    narrow = tiny_lm(7, layers=layers, scale=scale).to(getattr(torch, dtype)).eval()
    exact = logprobs_of(copy.deepcopy(narrow).double())
    assert judged(logprobs_of(narrow), Reference(exact, dtype), dtype, layers) > 0


@pytest.mark.parametrize("scale", [1.0, 6.0, 10.0])
def test_one_layer_that_kept_its_old_weights_is_beyond_the_bound_of_float32(scale):
    """One matrix of seven in one of two layers is moved by a hundredth of its size."""
    lm = tiny_lm(7, scale=scale).eval()
    stale, new = logprobs_of(lm), copy.deepcopy(lm)
    with torch.no_grad():
        weight = new.model.layers[1].mlp.down_proj.weight
        weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * float(weight.std()) / 100)
    reference = Reference(logprobs_of(new), "float32")
    assert judged(logprobs_of(new), reference) == 0
    with pytest.raises(RolloutError, match=r"weight sync of agent_1: engine 2 for base is \S+ nats a token off the trainer"):
        judged(stale, reference)


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_log_probs_that_are_no_numbers_never_pass(bad):
    with pytest.raises(RolloutError, match="off the trainer"):
        judged([[bad, -1.0]], Reference([[-1.0, -1.0]], "bfloat16"), "bfloat16")


def test_the_number_of_layers_comes_from_the_folder(tmp_path):
    from transformers import GPT2Config

    assert layers_of_model(str(save_tiny_model(tmp_path / "llama", 1, layers=3))) == 3
    GPT2Config(n_layer=5).save_pretrained(tmp_path / "gpt2")
    assert layers_of_model(str(tmp_path / "gpt2")) == 5
