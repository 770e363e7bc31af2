"""Dropout: off by its effect, whatever the code of a model calls it."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from tiny_models import gpt2

from comlrl_ds.engines.dropout import masks_of, published
from comlrl_ds.engines.loading import load_backbone, load_causal_lm
from comlrl_ds.engines.scorer import Scorer, fit_to_model, inputs_of

SIZES = {"vocab_size": 61, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
# Dropout as a module, as a function with a rate from the module, as one with a rate read from the configuration in forward.
KINDS = {
    "GPT2": {"resid_pdrop": 0.5, "attn_pdrop": 0.5, "embd_pdrop": 0.5},
    "Bloom": {"hidden_dropout": 0.5, "attention_dropout": 0.5},
    "Falcon": {"hidden_dropout": 0.5, "attention_dropout": 0.5},
    "GPTNeoX": {"hidden_dropout": 0.5, "attention_dropout": 0.5},
    "OPT": {"dropout": 0.5, "attention_dropout": 0.5, "layerdrop": 0.5, "ffn_dim": 64, "word_embed_proj_dim": 32},
}


def saved(kind, folder):
    config = getattr(transformers, f"{kind}Config")(**SIZES | KINDS[kind])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("load", [load_causal_lm, load_backbone])
def test_dropout_is_off_unless_asked_for(tmp_path, kind, load):
    folder, ids = saved(kind, tmp_path / "model"), torch.tensor([[5, 6, 7, 8] * 4])
    still = load(folder, dtype="float32", attn_implementation="eager", dropout=False)
    assert still.training
    assert torch.equal(still(ids)[0], still(ids)[0])
    noisy = load(folder, dtype="float32", attn_implementation="eager", dropout=True)
    assert not torch.equal(noisy(ids)[0], noisy(ids)[0])
    # What is saved has its rates again, and the model in hand has none still.
    with published(still):
        still.save_pretrained(tmp_path / "saved")
    rates = {name: rate for name, rate in KINDS[kind].items() if rate == 0.5}
    assert rates.items() <= json.loads((tmp_path / "saved" / "config.json").read_text()).items()
    assert torch.equal(still(ids)[0], still(ids)[0])


def test_dropout_that_no_rate_turns_off_is_an_error_that_names_the_module(tmp_path):
    gpt2().save_pretrained(tmp_path)
    lm = load_causal_lm(str(tmp_path), dtype="float32", attn_implementation="sdpa", dropout=False)
    scorer = Scorer(lm)
    fit = lambda: fit_to_model(scorer, lambda batch: scorer(**inputs_of(batch)), "auto", 1e-3, "cpu")  # noqa: E731
    assert fit() == "shared"
    mlp = lm.transformer.h[1].mlp.c_fc
    mlp.register_forward_hook(lambda m, _, z: torch.nn.functional.dropout(z, 0.3, training=m.training))
    before = torch.random.get_rng_state()
    with pytest.raises(ValueError, match=r"args\.disable_dropout: .* first in transformer\.h\.1\.mlp\.c_fc;"):
        fit()
    assert torch.equal(torch.random.get_rng_state(), before)
    lm.eval()  # nothing is random then
    assert fit() == "shared"


def test_masks_follow_from_seed_rank_step_and_rows_and_move_no_other_draws():
    def drawn(seed=1, rank=0, step=0, ids=(5, 6)):
        with masks_of(seed, rank, step, {"ids": torch.tensor(ids), "visible": None}, "cpu"):
            return torch.rand(4)

    before = torch.random.get_rng_state()
    assert torch.equal(drawn(), drawn())
    others = [drawn(seed=2), drawn(rank=1), drawn(step=1), drawn(ids=(5, 7)), drawn(ids=((5, 6),))]
    assert not any(torch.equal(drawn(), other) for other in others)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not torch.equal(drawn(seed=None), drawn(seed=None))  # off: whatever draws is not ours


def test_a_models_layout_is_found_without_its_dropout(tmp_path):
    folder = saved("GPT2", tmp_path)
    scorer = Scorer(load_causal_lm(folder, dtype="float32", attn_implementation="sdpa", dropout=True))
    assert fit_to_model(scorer, lambda batch: scorer(**inputs_of(batch)), "auto", 1e-3, "cpu") == "shared"
    assert scorer.training and not scorer.whole_logits
