"""The arguments that describe a team: models, tokenizers, devices, and what is refused before anything is loaded."""

from __future__ import annotations

import json

import pytest
import tiny_models
import torch

from comlrl_ds.config import ConfigError, MADPOConfig, RolloutConfig
from comlrl_ds.engines.loading import load_tokenizer, local_folder, stop_ids
from comlrl_ds.trainers.preference import MADPOTrainer
from comlrl_ds.trainers.preference.team import ModelConfig, read_agents, set_up_team


def refused(call, *parts):
    with pytest.raises(ConfigError) as caught:
        call()
    assert all(part in str(caught.value) for part in parts), str(caught.value)


# --- agents
def test_one_model_for_all_or_one_for_each():
    assert read_agents("m", None, 3) == ["m", "m", "m"]
    assert read_agents(None, ["a", "b"], 7) == ["a", "b"]
    assert read_agents("m", ["m", "m"], 2) == ["m", "m"]
    refused(lambda: read_agents(None, None, 2), "agent_model: required")
    refused(lambda: read_agents(None, [], 2), "agents: empty")
    refused(lambda: read_agents("m", ["m"], 2), "agents: contradicts agent_model = 'm'")
    refused(lambda: read_agents("m", ["m", "x"], 2), "contradicts")
    refused(lambda: read_agents(object(), None, 2), "a model object serves one agent")


def test_the_model_dict_of_the_peer():
    assert ModelConfig.read(None) == ModelConfig("auto", "sdpa")
    assert ModelConfig.read({"dtype": torch.bfloat16, "attn_implementation": None}) == ModelConfig("bfloat16", None)
    assert ModelConfig.read({"torch_dtype": "fp32", "model_kwargs": {"attn_implementation": "eager"}}) == ModelConfig(
        "float32", "eager"
    )
    refused(
        lambda: ModelConfig.read({"dtyp": 1, "dtype": "int8", "special_tokens": ["x"]}),
        "model_config.dtyp: unknown key", "model_config.dtype: 'int8'", "model_config.special_tokens",
    )  # fmt: skip


# --- folders and tokenizers
def test_model_folders(tmp_path, model_folders):
    assert local_folder(model_folders[0], "x") == model_folders[0]
    refused(lambda: local_folder(str(tmp_path), "agents.0.model"), "agents.0.model: ", "has no config.json")
    (tmp_path / "config.json").write_text("{}")
    refused(lambda: local_folder(str(tmp_path), "agents.0.model"), "holds no weights")
    for absent in ("/no/such", "./no", "~/no/such", "a/b/c"):
        refused(lambda absent=absent: local_folder(absent, "agents.1.model"), f"agents.1.model: no folder {absent!r}")
    (tmp_path / "config.json").unlink()
    refused(lambda: load_tokenizer(str(tmp_path), "agents.0.model"), "agents.0.model: no tokenizer in")


def test_stop_ids_are_the_tokenizers_and_the_models(tmp_path):
    folder = tiny_models.save(tmp_path / "m", tiny_models.llama(layers=1), tiny_models.word_tokenizer())
    tokenizer = load_tokenizer(folder, "x")
    assert stop_ids(folder, tokenizer) == (2,)
    file = tmp_path / "m" / "generation_config.json"
    file.write_text('{"eos_token_id": [7, 5]}')
    assert stop_ids(folder, tokenizer) == (2, 5, 7)
    config = tmp_path / "m" / "config.json"
    content = json.loads(config.read_text())
    for written, ids in (
        ({"eos_token_id": 9}, (2, 5, 7, 9)),
        ({"text_config": {"eos_token_id": [8]}}, (2, 5, 7, 8)),
        ({}, (2, 5, 7)),
    ):
        config.write_text(json.dumps({k: v for k, v in content.items() if k != "eos_token_id"} | written))
        assert stop_ids(folder, tokenizer) == ids
    file.write_text("{}")
    tokenizer.eos_token = "<unk>"
    assert stop_ids(folder, tokenizer) == (0,)  # an id like any other
    file.write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ConfigError, match=r"generation_config.json: eos_token_id holds '</s>'"):
        stop_ids(folder, tokenizer)
    file.unlink()
    tokenizer.eos_token = None
    assert stop_ids(folder, tokenizer) == ()


# --- the whole team
def team_of(folders, **changes):
    settings = {
        "tokenizer": None, "formatters": None, "reward_func": lambda a, b: 0.0, "reward_processor": None,
        "args": MADPOConfig(max_new_tokens=[6, 10]), "rollout": RolloutConfig(backend="transformers", max_model_len=40),
    }  # fmt: skip
    return set_up_team(folders, **(settings | changes))


def test_a_team_leaves_each_agent_room_for_its_completion(model_folders):
    setup = team_of(model_folders)
    assert setup.prompt_limits == [34, 30]
    assert (list(setup.team.token_limits), list(setup.team.stop_ids)) == ([6, 10], [(2,), (2,)])
    assert setup.team.size == 2
    own = tiny_models.word_tokenizer(bos=False)
    assert team_of(model_folders, tokenizer=own).team.tokenizers == [own, own]
    mixed = team_of(model_folders, tokenizer=[None, own]).team.tokenizers
    assert (mixed[0].bos_token_id, mixed[1]) == (1, own)


def test_everything_that_is_wrong_with_a_team_is_said_at_once(model_folders):
    refused(
        lambda: team_of(
            model_folders, formatters=[str], reward_func=None, rollout=RolloutConfig(backend="transformers", max_model_len=8)
        ),
        "formatters: 1 formatters for 2 agents", "reward_func: required", "max_new_tokens: agent 1: 10 new tokens",
    )  # fmt: skip
    refused(lambda: team_of(model_folders, tokenizer=[None]), "tokenizer: 1 tokenizers for 2 agents")


def basics(folders):
    args = MADPOConfig(max_new_tokens=6)
    return {"agents": folders, "reward_func": lambda a, b: 0.0, "rollout": {"backend": "transformers"}, "args": args}


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"train_dataset": []}, ["train_dataset: has no task"]),
        ({"train_dataset": ["w3"]}, ["train_dataset: tasks must be mappings such as {'prompt': …}, but task 0 is str"]),
        ({"train_dataset": [{"prompt": 5}]}, ["train_dataset: task 0, agent 0: the formatter returned int"]),
        ({"eval_dataset": [{}], "formatters": lambda item: [{"role": "user", "content": "w3"}]}, ["no chat template"]),
        ({"eval_logger": print}, ["eval_logger and eval_aggregator go together"]),
        ({"args": MADPOConfig(num_agents=3)}, ["args.num_agents: 3, but 2 agents are given"]),
        ({"agents": [tiny_models.gpt2(layers=1)] * 2}, ["tokenizer: required when agents are model objects"]),
        ({"agents": [5, 6]}, ["agents.0: int is neither a model source nor a transformers model"]),
        ({"rollout": {"backend": "vlm"}}, ["backend: 'vlm' is not one of"]),
    ],
)  # fmt: skip
def test_a_trainer_refuses_before_anything_is_loaded(model_folders, tmp_path, changes, parts):
    settings = basics(model_folders)
    refused(lambda: MADPOTrainer(**(settings | {"run_dir": tmp_path / "run"} | changes)), *parts)
    assert not (tmp_path / "run").exists()


def test_a_trainer_needs_a_dataset_and_known_keywords_to_train(model_folders, tmp_path):
    settings = basics(model_folders)
    trainer = MADPOTrainer(**settings, run_dir=tmp_path / "run")
    refused(trainer.train, "train_dataset: required to train")
    assert trainer.evaluate() == {}
    trainer.train_dataset = [{"prompt": "w3"}]
    refused(lambda: trainer.train(num_beams=2), "train(num_beams=…): unknown; valid: temperature")
    assert not (tmp_path / "run").exists()
