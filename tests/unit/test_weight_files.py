"""Weights on disk under the names of the loaded model, bit for bit what transformers loads, whatever the files call them."""

from __future__ import annotations

import json

import pytest
import torch
import transformers as t
from safetensors.torch import load_file, save_file

from comlrl_ds.rollout.adapters import merged, wire
from comlrl_ds.rollout.disk import DiskTensors, WeightsError, mark_of, tensors_on_disk

SIZES = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "max_position_embeddings": 64,
}  # fmt: skip
NO_GROUPS = {k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "pad_token_id")}
GPT2 = {"vocab_size": 64, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
FALCON = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
MOE = SIZES | {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
MODELS = {
    "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**SIZES)),
    "llama tied": lambda: t.LlamaForCausalLM(t.LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(**GPT2)),
    "neox": lambda: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**NO_GROUPS, tie_word_embeddings=False)),
    "qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**SIZES)),
    "gemma2": lambda: t.Gemma2ForCausalLM(t.Gemma2Config(**SIZES, head_dim=8)),
    "gemma3": lambda: t.Gemma3ForCausalLM(t.Gemma3TextConfig(**SIZES, head_dim=8)),
    "phi3": lambda: t.Phi3ForCausalLM(t.Phi3Config(**SIZES)),
    "bloom": lambda: t.BloomForCausalLM(t.BloomConfig(vocab_size=64, hidden_size=16, n_layer=2, n_head=2)),
    "falcon": lambda: t.FalconForCausalLM(t.FalconConfig(**FALCON)),
    "olmo2": lambda: t.Olmo2ForCausalLM(t.Olmo2Config(**SIZES)),
    "mixtral": lambda: t.MixtralForCausalLM(t.MixtralConfig(**SIZES, num_local_experts=4)),
    "qwen2 moe": lambda: t.Qwen2MoeForCausalLM(t.Qwen2MoeConfig(**MOE, shared_expert_intermediate_size=8)),
    "qwen3 moe": lambda: t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**MOE)),
}  # fmt: skip


def saved(folder, name, seed=1, **how):
    torch.manual_seed(seed)
    MODELS[name]().save_pretrained(folder, **how)
    return folder


def edited(folder, edit):
    """The folder with its tensors as `edit` makes them of those that are there."""
    file = folder / "model.safetensors"
    save_file(edit(load_file(file)), file, metadata={"format": "pt"})
    return folder


def expected(folder):
    """What transformers loads, each parameter once."""
    return dict(t.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").named_parameters())


def check(folder):
    want, got = expected(folder), dict(tensors_on_disk(str(folder)))
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name].to(p.dtype), p) for name, p in want.items())
    reader = DiskTensors(str(folder))
    assert all(torch.equal(reader[name].to(p.dtype), p) for name, p in want.items())


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model(tmp_path, name):
    check(saved(tmp_path, name))


def with_buffers(state):
    return state | {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.arange(4.0) for i in (0, 1)}


def without_prefix(state):
    return {name.removeprefix("transformer."): tensor for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("llama", with_buffers),
        ("gpt2", without_prefix),
        ("gpt2", lambda s: without_prefix(s) | {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64) for i in (0, 1)}),
        ("llama tied", lambda s: s | {"lm_head.weight": s["model.embed_tokens.weight"].clone()}),
        ("llama tied", lambda s: s | {"lm_head.weight": torch.randn(64, 16)}),  # the file contradicts the tie
        ("llama", lambda s: {n: x.bfloat16() for n, x in s.items()}),
    ],
)
def test_names_in_files_that_are_not_the_models(tmp_path, name, edit):
    check(edited(saved(tmp_path, name), edit))


def test_several_files_and_files_that_belong_to_nothing(tmp_path):
    saved(tmp_path, "llama", max_shard_size="8KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    before = mark_of(str(tmp_path))
    save_file({"model.embed_tokens.weight": torch.zeros(64, 16)}, tmp_path / "model-stray.safetensors")
    save_file({"v_head.weight": torch.zeros(1, 16)}, tmp_path / "value_head.safetensors")
    check(tmp_path)
    assert mark_of(str(tmp_path)) == before


def test_files_of_torch(tmp_path):
    model = MODELS["llama"]()
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    check(tmp_path)
    before = mark_of(str(tmp_path))
    torch.save({n: x + 1 for n, x in model.state_dict().items()}, tmp_path / "pytorch_model.bin")
    assert mark_of(str(tmp_path)) != before


@pytest.mark.parametrize(
    ("edit", "part"),
    [
        (lambda s: {n: x for n, x in s.items() if n != "model.norm.weight"}, "no weights for model.norm.weight"),
        (lambda s: {n: x for n, x in s.items() if n != "lm_head.weight"}, "no weights for lm_head.weight"),
        (lambda s: {n: x for n, x in s.items() if "layers.1" not in n}, "and 8 more"),
    ],
)
def test_what_would_start_at_random_is_refused(tmp_path, edit, part):
    with pytest.raises(WeightsError, match=part):
        DiskTensors(str(edited(saved(tmp_path, "llama"), edit)))


def test_a_damaged_file_is_named(tmp_path):
    file = saved(tmp_path, "llama") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        DiskTensors(str(tmp_path))


def test_an_adapter_is_added_under_the_models_names(tmp_path):
    """GPT-2 as on the hub: the adapter names transformer.h.0…, the file h.0…."""
    folder = edited(saved(tmp_path, "gpt2"), without_prefix)
    layer = "transformer.h.0.attn.c_attn"
    a, b = torch.randn(2, 16), torch.randn(48, 2)
    sent = dict(wire(layer, a, b, 0.5, transposed=True))
    got, want = dict(merged(str(folder), sent, torch.float32)), expected(folder)
    assert got.keys() == want.keys()
    changed = [n for n in want if not torch.equal(got[n], want[n])]
    assert changed == [f"{layer}.weight"]
    assert torch.allclose(got[f"{layer}.weight"], want[f"{layer}.weight"] + 0.5 * (b @ a).T, atol=1e-6)


def test_a_config_alone_says_what_is_tied(tmp_path):
    saved(tmp_path, "llama tied")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": False}))
    with pytest.raises(WeightsError, match=r"no weights for lm_head\.weight"):
        DiskTensors(str(tmp_path))
