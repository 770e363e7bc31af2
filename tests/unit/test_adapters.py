"""Adapters on disk and on their way, against peft on a tiny model."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import gpt2
from transformers import AutoModelForCausalLM

from comlrl_ds.config.lora import LoraSettings
from comlrl_ds.engines.lora import add_lora, published_name, save_adapter
from comlrl_ds.rollout.adapters import adapter_on_disk, base_of, is_adapter, merged

IDS = torch.tensor([[5, 6, 7, 8, 9]])


def filled(lm):
    """Numbers for every B, so that the adapter does something."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, p in lm.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.randn(p.shape, generator=generator) / 10)
    return lm


@pytest.mark.parametrize(
    "settings",
    [
        {"r": 4, "lora_alpha": 16},
        {"r": 4, "use_rslora": True, "rank_pattern": {"k_proj": 2}, "alpha_pattern": {"k_proj": 3.0}},
        {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]},
        {"target_modules": r".*\.layers\.0\..*_proj", "exclude_modules": ["o_proj"]},
    ],
)
@torch.no_grad()
def test_an_adapter_is_what_peft_makes_of_it(tmp_path, tiny_model, settings):
    """Peft's own model saves it, ours reads it and adds it to the base; and the other way round."""
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    theirs = filled(get_peft_model(base, LoraConfig(**({"target_modules": "all-linear"} | settings), task_type="CAUSAL_LM")))
    theirs.save_pretrained(tmp_path / "theirs")
    whole = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    plain = whole(IDS).logits
    state = dict(merged(str(tiny_model), dict(adapter_on_disk(str(tmp_path / "theirs"))), torch.float32))
    assert not whole.load_state_dict(state, strict=False).unexpected_keys
    assert torch.allclose(whole(IDS).logits, theirs(IDS).logits, atol=1e-5) and not torch.allclose(plain, whole(IDS).logits)
    ours = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    add_lora(ours, LoraSettings(adapter=str(tmp_path / "theirs")), source=str(tiny_model), seed=0, dropout=False)
    assert torch.allclose(ours(IDS).logits, theirs(IDS).logits, atol=1e-5)
    named = {n.replace(".default", ""): p for n, p in ours.named_parameters() if ".default." in n}
    save_adapter(ours.lora_config, named, tmp_path / "ours")
    assert is_adapter(tmp_path / "ours") and base_of(tmp_path / "ours") == str(tiny_model)
    one, other = (dict(adapter_on_disk(str(tmp_path / name))) for name in ("theirs", "ours"))
    assert one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@torch.no_grad()
def test_layers_whose_weights_are_transposed(tmp_path):
    lm = gpt2().float()
    lm.save_pretrained(tmp_path / "base")
    add_lora(lm, LoraSettings(r=4), source=str(tmp_path / "base"), seed=0, dropout=False)
    filled(lm)
    named = {n.replace(".default", ""): p for n, p in lm.named_parameters() if "lora_" in n}
    save_adapter(lm.lora_config, named, tmp_path / "adapter")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    state = dict(merged(str(tmp_path / "base"), dict(adapter_on_disk(str(tmp_path / "adapter"))), torch.float32))
    whole.load_state_dict(state, strict=False)
    assert torch.allclose(whole(IDS).logits, lm(IDS).logits, atol=1e-5)


def test_what_does_not_fit_is_said(tmp_path, tiny_model):
    sent = {"model.layers.9.q_proj.lora_A": torch.zeros(2, 64), "model.layers.9.q_proj.lora_B": torch.zeros(64, 2)}
    sent["model.layers.9.q_proj.lora_scale"] = torch.ones(1)
    with pytest.raises(ValueError, match=r"no layer 'model\.layers\.9\.q_proj'"):
        list(merged(str(tiny_model), sent, torch.float32))
    with pytest.raises(ValueError, match="is not on this machine"):
        list(merged(str(tmp_path / "nowhere"), sent, torch.float32))


def test_a_base_from_the_hub_has_its_repositorys_name():
    cached = "/x/hub/models--org--some-model/snapshots/0123abc"
    assert published_name(cached) == "org/some-model" and published_name("/x/models/mine") == "/x/models/mine"
