"""Sizes of models without loading them, and memory by part: against the real models, and in closed form."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from comlrl_ds.planning.estimate import (
    Learning,
    Memory,
    Work,
    activation_bytes,
    edge_bytes,
    edge_seconds,
    engine,
    frozen,
    together,
    trained,
)
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
    assert (shape.parameters, shape.hidden, shape.layers, shape.vocabulary) == (counted(config), 48, 3, 97)
    assert shape.origin == "config.json" and shape.head == (0 if config.tie_word_embeddings else 97 * 48)


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
    head = 8192 * 128256
    assert shape_of_model(str(tmp_path)) == ModelShape(1000, 8192, 80, 128256, "weights", inner=28672, head=head)


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
SHAPE = ModelShape(1000, hidden=10, layers=4, vocabulary=100, inner=30)
WORK = Work(tokens=50, chunk=20)
# 12 copies of the hidden and 4 of the inner units for each token and layer; logits, softmax and their gradient of one chunk in
# fp32; three gradients of the vocabulary's matrix, where that learns.
FORWARD = 2 * 50 * 4 * (12 * 10 + 4 * 30) + 20 * 100 * 4 * 3
KEPT = FORWARD + 3 * 2 * 100 * 10


@pytest.mark.parametrize(
    ("zero", "weights", "gradients", "optimizer", "activations", "host"),
    [
        ({"stage": 0}, 2000, 6000, 12000, KEPT, 0),
        ({"stage": 1}, 2000, 6000, 3000, KEPT, 0),
        ({"stage": 2}, 2000, 1000, 3000, KEPT + 2 * 50, 0),
        ({"stage": 2, "overlap_comm": True, "reduce_bucket_size": "auto"}, 2000, 1000, 3000, KEPT + 2 * 2 * 100, 0),
        ({"stage": 2, "contiguous_gradients": False}, 2000, 1000, 3000, KEPT, 0),
        ({"stage": 3}, 500, 1000 + 2 * 50, 3000, KEPT + 2000, 0),
        ({"stage": 3, "stage3_max_live_parameters": 7}, 500, 1000 + 2 * 50, 3000, KEPT + 14, 0),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, 2000, 1000, 0, KEPT + 2 * 50, 3000),
        (
            {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
            0, 1000 + 2 * 50, 0, KEPT + 2000, 3500,
        ),
        (
            {"stage": 3, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "none"}},
            500, 1000 + 2 * 50, 0, KEPT + 2000, 0,
        ),
    ],
)  # fmt: skip
def test_memory_of_a_trained_role_on_four_ranks(zero, weights, gradients, optimizer, activations, host):
    memory = trained(SHAPE, "bfloat16", 4, {"reduce_bucket_size": 50} | zero, WORK)
    found = [memory.device[p] for p in ("weights", "gradients", "optimizer", "activations")]
    assert found == [weights, gradients, optimizer, activations]
    assert memory.host == host and memory.known


def test_buckets_that_nobody_filled_take_room_on_a_gpu_only():
    sizes = [trained(SHAPE, "float32", 1, {"stage": 1}, WORK, on_cpu=c).device["gradients"] for c in (False, True)]
    assert sizes[0] - sizes[1] == 4 * (500_000_000 - 1000)


@pytest.mark.parametrize(("stage", "weights", "shared"), [(1, 2 * 1070, 2 * 70), (3, 2 * 1070 // 4, 2 * 70 // 4)])
def test_what_learns_alone_has_gradients_and_optimizer(stage, weights, shared):
    zero = {"stage": stage, "reduce_bucket_size": 50, "stage3_max_live_parameters": 7}
    learning = Learning(70, fixed=1000, adapter=64)
    one = trained(SHAPE, "bfloat16", 4, zero, WORK, learning=learning)
    assert one.device["weights"] == weights and one.device["optimizer"] == 12 * 70 // 4
    assert one.device["gradients"] == (6 * 70 if stage == 1 else 70 + 2 * 50)
    assert one.device["activations"] == FORWARD + (0 if stage == 1 else 2 * 7)
    other = trained(SHAPE, "bfloat16", 4, zero, WORK, learning=learning, base_is_held=True)
    assert other.device["weights"] == shared and other.device["optimizer"] == one.device["optimizer"]


def test_activations():
    vocabulary = 20 * 100 * 4 * 3
    block = 12 * 10 + 4 * 30
    assert activation_bytes(SHAPE, "float32", WORK) == 4 * 50 * 4 * (block - 2 * 10) + vocabulary
    checkpointed = Work(50, 20, checkpointing=True)
    assert activation_bytes(SHAPE, "bfloat16", checkpointed) == 2 * 50 * (4 * 10 + block) + vocabulary
    assert activation_bytes(SHAPE, "float16", Work(50, 900)) == 2 * 50 * 4 * block + 50 * 100 * 4 * 3
    unknown = ModelShape(1000, hidden=10, layers=4, vocabulary=100)
    assert activation_bytes(unknown, "bfloat16", WORK) == 2 * 50 * 4 * (12 * 10 + 4 * 35) + vocabulary


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


def test_bytes_of_a_weight_edge():
    assert edge_bytes(SHAPE, "bfloat16") == 2000 and edge_bytes(ModelShape(None), "bfloat16") is None
    assert edge_bytes(SHAPE, "bfloat16", adapter=64) == 2 * 64


def test_seconds_of_a_weight_edge():
    assert edge_seconds(10 * GB, "host", True) == 20 and edge_seconds(10 * GB, "host", False) == 40
    assert edge_seconds(10 * GB, "nccl", False) == 0.5 and edge_seconds(None, "ipc", True) is None
