"""Which layers adapters get, read from files' headers: the same as peft gives the loaded models."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import tiny_models
from run_files import problems
from tiny import save_tiny_model

from comlrl_ds.config import ConfigError
from comlrl_ds.config.lora import LoraSettings
from comlrl_ds.config.lora_layers import check_lora, layers_of, lora_layers, trained_parameters
from comlrl_ds.engines.lora import add_lora
from comlrl_ds.engines.lora import lora_layers as layers_with_lora


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Tied and untied Llamas, GPT-2, whose layers are transposed, also as a backbone alone, and others' names."""
    from transformers import AutoConfig, AutoModelForCausalLM

    root = tmp_path_factory.mktemp("layers")
    found = {name: root / name for name in ("tied", "untied", "gpt2", "gpt2_body", "gpt_neox", "opt", "qwen3", "phi3")}
    save_tiny_model(found["tied"], 0)
    tiny_models.save(found["untied"], tiny_models.llama())
    tiny_models.save(found["gpt2"], tiny_models.gpt2())
    # As the hub's GPT-2: files without the prefix of the body, and without a head.
    tiny_models.save(found["gpt2_body"], tiny_models.gpt2().transformer)
    common = {
        "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "pad_token_id": 0,
    }  # fmt: skip
    more = {"opt": {"ffn_dim": 96, "word_embed_proj_dim": 64}, "qwen3": {"head_dim": 16}}
    for kind in ("gpt_neox", "opt", "qwen3", "phi3"):
        config = AutoConfig.for_model(kind, **(common | more.get(kind, {})))
        AutoModelForCausalLM.from_config(config).save_pretrained(found[kind])
    return found


def by_peft(folder: Path, settings: LoraSettings, backbone: bool = False) -> dict[str, tuple[int, int, int]]:
    """(rank, out, in) of the layers of the loaded model that peft puts an adapter beside."""
    from transformers import AutoModel, AutoModelForCausalLM

    model = (AutoModel if backbone else AutoModelForCausalLM).from_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a tied head
        add_lora(model, settings, source="", seed=0, dropout=False)
    return {
        name: (len(m.lora_A["default"].weight), len(m.lora_B["default"].weight), m.lora_A["default"].weight.shape[1])
        for name, m in layers_with_lora(model).items()
    }


LLAMA = [
    {},
    {"target_modules": "All-Linear", "exclude_modules": ["down_proj", "model.layers.0.self_attn.q_proj"]},
    {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": 1},
    {"target_modules": ["q_proj", "model.layers.1.mlp.up_proj", "lm_head"], "layers_to_transform": [0]},
    {"target_modules": ["mlp.gate_proj"], "layers_to_transform": []},
    {"target_modules": r".*layers\.[01]\..*[qk]_proj|lm_head", "exclude_modules": r".*1\.self_attn.*"},
    {"r": 3, "rank_pattern": {"up_proj": 5, r"layers\.0\.self_attn\..*": 7, "q_proj": 2, "model.layers.1.mlp.up_proj": 4}},
    {"rank_pattern": {"proj": 5, "k_pro.": 6}},
]


@pytest.mark.parametrize("fields", LLAMA, ids=range(len(LLAMA)))
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_layers_of_a_llama_are_those_of_peft(folders, name, fields):
    settings = LoraSettings(**fields)
    assert lora_layers(folders[name], settings) == by_peft(folders[name], settings) != {}


GPT2 = [
    {},
    {"target_modules": ["c_attn", "attn.c_proj"], "layers_to_transform": [1]},
    {"target_modules": r".*\.h\.0\.mlp\.c_(fc|proj)", "rank_pattern": {"c_fc": 2}},
    {"target_modules": ["lm_head"]},
]


@pytest.mark.parametrize("fields", GPT2, ids=range(len(GPT2)))
@pytest.mark.parametrize("name", ["gpt2", "gpt2_body"])
def test_layers_of_gpt2_are_those_of_peft(folders, name, fields):
    settings = LoraSettings(**fields)
    assert lora_layers(folders[name], settings) == by_peft(folders[name], settings) != {}


@pytest.mark.parametrize("name", ["gpt_neox", "opt", "qwen3", "phi3"])
@pytest.mark.parametrize("backbone", [False, True])
def test_layers_of_other_models_are_those_of_peft(folders, name, backbone):
    assert lora_layers(folders[name], LoraSettings(), backbone=backbone) == by_peft(folders[name], LoraSettings(), backbone)
    assert layers_of(folders[name]).head == ("embed_out" if name == "gpt_neox" else "lm_head")


@pytest.mark.parametrize("name", ["tied", "untied", "gpt2", "gpt2_body"])
def test_names_in_a_backbone_lack_the_prefix(folders, name):
    block = "h" if name.startswith("gpt2") else "layers"
    for settings in (LoraSettings(), LoraSettings(target_modules=rf"{block}\.0\..*proj", rank_pattern={rf"{block}.*": 2})):
        assert lora_layers(folders[name], settings, backbone=True) == by_peft(folders[name], settings, True) != {}
    assert "lm_head" not in layers_of(folders[name], backbone=True).linear


def test_trained_parameters_are_those_of_both_matrices(folders):
    import torch
    from transformers import AutoModelForCausalLM

    settings = LoraSettings(r=4, rank_pattern={"up_proj": 2})
    model = AutoModelForCausalLM.from_pretrained(folders["untied"], dtype=torch.float32)
    add_lora(model, settings, source="", seed=0, dropout=False)
    counted = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained_parameters(lora_layers(folders["untied"], settings).values()) == counted > 0


# --- what names nothing
def found_in(folder: Path, backbone: bool = False, **fields) -> dict[str, str]:
    return problems(
        lambda: check_lora("models/x", folder, LoraSettings(**fields), "agents.1.lora", backbone=backbone)
    )  # fmt: skip


WHERE = "agents.1.lora.target_modules"


def test_parts_that_name_no_layer(folders):
    ends = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    for target, named in (
        (["qproj"], "'qproj' names"),
        (["q_proj", "oproj", "self_attn"], "'oproj', 'self_attn' name"),
        (["embed_tokens"], "'embed_tokens' names"),
        (["norm"], "'norm' names"),
        ("q_proj", "'q_proj' names"),  # a string is matched whole
        ([], "[] names"),
    ):
        message = found_in(folders["tied"], target_modules=target)[WHERE]
        start, listed = message.split("; layers end in ")
        assert start == f"{named} no layer of models/x" and set(listed.split(", ")) == ends | {"lm_head"}
    assert WHERE in found_in(folders["tied"], backbone=True, target_modules=["q_proj", "lm_head"])


def test_what_is_no_linear_layer_is_said_before_peft_refuses_it(folders):
    for target, odd in ((r".*mlp.*", "model.layers.0.mlp"), (r".*(q_proj|embed_tokens)", "model.embed_tokens")):
        assert (
            f"also names {odd!r} of models/x, which is no linear layer"
            in found_in(folders["tied"], target_modules=target)[WHERE]
        )
    with pytest.raises(ValueError, match="not supported"):
        by_peft(folders["tied"], LoraSettings(target_modules=r".*mlp.*"))
    check_lora("", folders["tied"], LoraSettings(target_modules=r".*mlp.*", exclude_modules=r".*mlp(\.act_fn)?"), "")


def test_nothing_left(folders):
    assert found_in(folders["tied"], exclude_modules=r".*proj")[WHERE] == "exclude_modules leaves no layer of models/x"
    message = found_in(folders["tied"], target_modules=["q_proj"], layers_to_transform=[7])[WHERE]
    assert message == "layers_to_transform leaves no layer of models/x"
    assert "no regular expression" in found_in(folders["tied"], target_modules="(")[WHERE]
    with pytest.raises(ConfigError, match=r"layers_to_transform: goes with a list in target_modules, not with 'all-linear'"):
        LoraSettings(layers_to_transform=[0])


def test_what_is_not_checked(folders, tmp_path):
    """Adapters with settings of their own, models that are not here or broken, and those whose layers transformers renames."""
    wrong = LoraSettings(target_modules=["nothing"])
    check_lora("", folders["tied"], None, "")
    check_lora("", folders["tied"], LoraSettings(adapter="x"), "")
    check_lora("", tmp_path, wrong, "")
    config = json.loads((folders["untied"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_lora("", tmp_path, wrong, "")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 4)
    check_lora("", tmp_path, wrong, "")
    (tmp_path / "model.safetensors").write_bytes((folders["untied"] / "model.safetensors").read_bytes())
    assert WHERE in found_in(tmp_path, target_modules=["nothing"])
    for renamed in ({"num_local_experts": 4}, {"text_config": config}):
        (tmp_path / "config.json").write_text(json.dumps(config | renamed))
        check_lora("", tmp_path, wrong, "")


def test_trainers_say_so_before_weights_are_loaded(folders, tmp_path):
    from comlrl_ds.trainers.preference import MARLHFConfig, MARLHFTrainer

    wrong = LoraSettings(target_modules=["c_attn"])
    args = MARLHFConfig(rl_algorithm="iac", use_separate_critic=True, reward_lora=wrong, critic_lora=wrong, max_new_tokens=8)
    found = problems(
        lambda: MARLHFTrainer(
            agent_model=str(folders["tied"]), num_agents=2, lora=[wrong, {"r": 4}], args=args, run_dir=tmp_path / "run",
            train_dataset=[{"prompt": "a"}], reward_func=lambda *texts: 0.0, formatters=lambda item: item["prompt"],
            rollout={"backend": "transformers", "max_model_len": 128},
        )
    )  # fmt: skip
    assert found.keys() == {f"{p}.target_modules" for p in ("agents.0.lora", "args.reward_lora", "args.critic_lora")}
    assert all("'c_attn' names no layer of" in message for message in found.values())
