"""Sizes of models without loading them, and memory by part: against the real models, and in closed form."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from comlrl_ds.planning.estimate import Memory, Work, activation_bytes, edge_seconds, engine, frozen, together, trained
from comlrl_ds.planning.model_shapes import ModelShape, shape_of_config, shape_of_model

GB = 10**9
LLAMA_70B = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256,
    "num_attention_heads": 64, "num_key_value_heads": 8, "tie_word_embeddings": False, "max_position_embeddings": 131072,
}  # fmt: skip


def counted(config) -> int:
    """Parameters of the real thing."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())


# --- sizes of models
def tiny(kind: str, **fields):
    from transformers import AutoConfig

    common = {
        "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }  # fmt: skip
    return AutoConfig.for_model(kind, **(common | fields))


CONFIGS = {
    "llama": lambda: tiny("llama"),
    "llama_tied_biased": lambda: tiny("llama", tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=20),
    "qwen2": lambda: tiny("qwen2", tie_word_embeddings=True),
    "qwen3": lambda: tiny("qwen3", head_dim=16),
    "gemma2": lambda: tiny("gemma2", head_dim=16),
    "mixtral": lambda: tiny("mixtral", num_local_experts=4),
    "qwen3_moe": lambda: tiny("qwen3_moe", num_experts=4, moe_intermediate_size=24, head_dim=16),
    "qwen2_moe": lambda: tiny("qwen2_moe", num_experts=4, moe_intermediate_size=24, shared_expert_intermediate_size=40),
    "gpt2": lambda: __import__("transformers").GPT2Config(vocab_size=97, n_embd=48, n_layer=3, n_head=4, n_positions=60),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_counted_from_the_config_as_in_the_model(tmp_path, name):
    config = CONFIGS[name]()
    config.save_pretrained(tmp_path)
    shape = shape_of_model(str(tmp_path))
    assert shape == ModelShape(counted(config), 48, 3, 97, "config.json")


def test_parameters_of_the_demo_model_and_of_a_nested_config():
    from transformers import LlamaConfig

    demo = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    assert shape_of_config({"text_config": demo.to_dict()}).parameters == counted(demo) == 134_515_008
    assert shape_of_config(LLAMA_70B).parameters == 70_553_706_496


def test_weight_files_win_over_the_config(tmp_path, model_folders):
    import tiny_models

    shape = shape_of_model(model_folders[0])
    assert (shape.parameters, shape.origin) == (sum(p.numel() for p in tiny_models.llama(layers=1).parameters()), "weights")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B | {"dtype": "float32"}))
    index = {"metadata": {"total_size": 4000}, "weight_map": {"a": "absent.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert shape_of_model(str(tmp_path)) == ModelShape(1000, 8192, 80, 128256, "weights")


def test_a_repository_is_looked_up_in_the_hubs_cache(tmp_path, monkeypatch):
    import huggingface_hub

    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    answers = {"org/known": str(tmp_path / "config.json")}
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda repository, file: answers.get(repository))
    assert shape_of_model("org/known") == shape_of_config(LLAMA_70B)
    assert shape_of_model("org/other").origin == "unknown"


@pytest.mark.parametrize(
    ("name", "parameters", "layers"),
    [
        ("org/Some-3.1-70B-Instruct", 70e9, 80),
        ("org/x-135m", 135e6, 30),
        ("./absent-0.5B-it", 0.5e9, 24),
        ("org/x-30B-A3B", 30e9, 64),
        ("org/x-8x7B-v0.1", 8 * 7e9 * 0.82, 32),
    ],
)
def test_a_size_guessed_from_a_name(name, parameters, layers):
    shape = shape_of_model(name)
    assert (shape.parameters, shape.layers, shape.origin) == (int(parameters), layers, "guess")
    assert "(guess)" in shape.text


@pytest.mark.parametrize("name", ["org/phi-2", "org/model-4bit", "org/v1.5", "./nowhere"])
def test_names_that_state_no_size(name):
    assert shape_of_model(name).parameters is None


# --- memory by part
SHAPE = ModelShape(1000, hidden=10, layers=4, vocabulary=100)
WORK = Work(tokens=50, chunk=20)


@pytest.mark.parametrize(
    ("zero", "weights", "gradients", "optimizer", "host"),
    [
        ({"stage": 0}, 2000, 4000, 12000, 0),
        ({"stage": 1}, 2000, 4000, 3000, 0),
        ({"stage": 2}, 2000, 1000, 3000, 0),
        ({"stage": 3}, 500, 1000, 3000, 0),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, 2000, 1000, 0, 3000),
        ({"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}, 0, 1000, 0, 3500),
        ({"stage": 3, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "none"}}, 500, 1000, 0, 0),
    ],
)
def test_memory_of_a_trained_role_on_four_ranks(zero, weights, gradients, optimizer, host):
    memory = trained(SHAPE, "bfloat16", 4, zero, WORK)
    assert [memory.device[p] for p in ("weights", "gradients", "optimizer")] == [weights, gradients, optimizer]
    assert memory.host == host and memory.known
    # 34 bytes per token, layer and unit; logits, softmax and their gradient of one chunk in fp32.
    assert memory.device["activations"] == 34 * 50 * 4 * 10 + 20 * 100 * 4 * 3


def test_activations():
    vocabulary = 20 * 100 * 4 * 3
    assert activation_bytes(SHAPE, "float32", WORK) == 2 * 34 * 50 * 4 * 10 + vocabulary
    checkpointed = Work(50, 20, checkpointing=True)
    assert activation_bytes(SHAPE, "bfloat16", checkpointed) == 4 * 50 * 10 * 2 + 34 * 50 * 10 + vocabulary
    assert activation_bytes(SHAPE, "float16", Work(50, 900)) == 34 * 50 * 4 * 10 + 50 * 100 * 4 * 3


def test_memory_of_frozen_roles_and_of_engines():
    assert frozen(SHAPE, "float32", 4, {"stage": 2}).device == {"weights": 4000}
    assert frozen(SHAPE, "float32", 4, {"stage": 3}).device == {"weights": 1000}
    sizes = {"kv_cache_bytes": None, "share": 0.5, "device_bytes": 10_000}
    assert engine(SHAPE, "bfloat16", 2, on_cpu=False, **sizes).device == {"vLLM weights": 1000, "KV cache": 4000}
    assert engine(SHAPE, "bfloat16", 1, on_cpu=True, **sizes).device == {"vLLM weights": 2000, "KV cache": 2**30}
    small = engine(SHAPE, "bfloat16", 1, on_cpu=True, **(sizes | {"kv_cache_bytes": 77}))
    assert small.device["KV cache"] == 77
    assert not engine(ModelShape(None), "bfloat16", 1, on_cpu=True, **sizes).known


def test_roles_and_engines_of_one_device_take_turns():
    trainer = Memory(Counter({"weights": 10, "optimizer": 20, "activations": 5}), host=3)
    sampler = Memory(Counter({"vLLM weights": 10, "KV cache": 0}), host=4)
    side_by_side = together(trainer, sampler, take_turns=False)
    assert (side_by_side.peak, side_by_side.host, side_by_side.total) == (45, 7, 45)
    turns = together(trainer, sampler, take_turns=True)
    assert (turns.peak, turns.host, turns.total) == (35, 7 + 30 + 10, 45) and "KV cache" in turns.device
    offloaded = together(Memory(Counter(weights=10)), sampler, take_turns=True)
    assert offloaded.peak == 20  # both have their weights there while they are synced
    assert together(Memory(), sampler, take_turns=True) == Memory(sampler.device, 4, peak=10)
    assert not together(trainer, Memory(known=False), take_turns=True).known


def test_seconds_of_a_weight_edge():
    assert edge_seconds(10 * GB, "host", True) == 20 and edge_seconds(10 * GB, "host", False) == 40
    assert edge_seconds(10 * GB, "nccl", False) == 0.5 and edge_seconds(None, "ipc", True) is None
