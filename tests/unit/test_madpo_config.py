"""MADPOConfig: defaults, rules, derived values, and every problem named at once."""

from __future__ import annotations

import pytest
from run_files import problems

from comlrl_ds.config import ConfigError, MADPOConfig, Problem

# The page's names and defaults.
DEFAULTS = {
    "num_train_epochs": 20,
    "agent_learning_rate": 5e-6,
    "logging_steps": 50,
    "num_agents": 2,
    "collaboration_mode": "decentralized",
    "parallel_training": "none",
    "agent_devices": None,
    "max_new_tokens": 256,
    "temperature": 0.6,
    "top_p": 0.6,
    "top_k": 50,
    "num_turns": 1,
    "discount": 1.0,
    "joint_mode": "aligned",
    "early_termination_threshold": None,
    "external_prompt_passthrough": False,
    "eval_interval": 16,
    "eval_num_samples": 4,
    "eval_batch_size": 1,
    "rollout_buffer_size": 2,
    "train_batch_size": None,
    "advantage_normalization": True,
    "advantage_mode": "mean",
    "reference_kl_enabled": False,
    "reference_kl_coef": 0.1,
    "reference_devices": None,
    "preference_num_candidates": 80,
    "preference_pairs_per_sample": 16,
    "pair_selection": "reward_gap",
    "dpo_beta": 0.1,
    "use_environment_step": True,
    "environment_steps_per_pair": 2,
}
ADDITIONS = {
    "overlong_prompt": "error",
    "oracle_on_error": "raise",
    "oracle_workers": 1,
    "max_invalid_fraction": 0.5,
    "collection_chunk_items": None,
    "max_grad_norm": None,
    "max_tokens_per_micro_batch": 2048,
    "margin_pass": "auto",
    "row_layout": "auto",
    "logprob_chunk": 512,
    "gradient_checkpointing": False,
    "score_last_token": None,
    "disable_dropout": True,
    "train_agents": None,
    "max_nonfinite_steps": 3,
    "eval_samples_per_item": 1,
    "eval_temperature": None,
}


def test_defaults_are_the_pages():
    config = MADPOConfig()
    assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS
    assert {name: getattr(config, name) for name in ADDITIONS} == ADDITIONS
    assert set(MADPOConfig.model_fields) == DEFAULTS.keys() | ADDITIONS.keys()
    assert config.scores_last_token is False
    assert config.batch_size == 2
    assert config.token_limits == [256, 256]


def test_derived_values():
    assert MADPOConfig(rollout_buffer_size=8).batch_size == 8
    assert MADPOConfig(rollout_buffer_size=8, train_batch_size=3).batch_size == 3
    assert MADPOConfig(max_new_tokens=[5, 7]).token_limits == [5, 7]
    assert MADPOConfig(num_agents=3, max_new_tokens=9).token_limits == [9, 9, 9]
    assert MADPOConfig(score_last_token=True).scores_last_token is True


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("num_train_epochs", [1], [0, -1, 1.5]),
        ("logging_steps", [1], [0]),
        ("num_agents", [1, 5], [0]),
        ("collaboration_mode", ["decentralized"], ["Decentralized", "both"]),
        ("num_turns", [1], [0, 2]),
        ("eval_interval", [0, 7], [-1]),
        ("eval_num_samples", [0, 7], [-1]),
        ("eval_batch_size", [1], [0]),
        ("eval_temperature", [None, 0.0, 1.0], [-0.1]),
        ("rollout_buffer_size", [1], [0]),
        ("train_batch_size", [1, None], [0]),
        ("advantage_mode", ["mean", "raw", "max", "rloo"], ["min"]),
        ("reference_kl_coef", [0.0, 1.0], [-0.1]),
        ("preference_num_candidates", [2], [1]),
        ("preference_pairs_per_sample", [1, None], [0]),
        ("dpo_beta", [1e-9, 5.0], [0.0, -1.0]),
        ("environment_steps_per_pair", [1], [0]),
        ("temperature", [1e-3, 2.0], [0.0]),
        ("top_p", [0.1, 1.0], [0.0, 1.1]),
        ("top_k", [1, None], [0]),
        ("max_new_tokens", [1, [1, 2]], [0, [0, 2], [1, 2, 3], [1], []]),
        ("agent_devices", [None, "cpu", ["cpu"], ["cpu", "cpu"]], [["cpu"] * 3, []]),
        ("reference_devices", [None, "cpu", ["cpu"], ["cpu", "cpu"]], [["cpu"] * 3]),
        ("max_invalid_fraction", [0.0, 1.0], [-0.1, 1.1]),
        ("max_grad_norm", [None, 0.5], [0.0]),
        ("max_nonfinite_steps", [1], [0]),
        ("overlong_prompt", ["error", "drop", "truncate_left"], ["cut"]),
        ("oracle_on_error", ["raise", "invalid"], ["ignore"]),
        ("margin_pass", ["auto", "one_forward", "two_pass"], ["both"]),
        ("row_layout", ["auto", "shared", "rows"], ["packed"]),
    ],
)
def test_rules(name, good, bad):
    for value in good:
        assert getattr(MADPOConfig(**{name: value}), name) == value
    for value in bad:
        found = problems(lambda value=value: MADPOConfig(**{name: value}))
        assert found
        assert all(name in f"{path}: {message}" for path, message in found.items())


def test_case_blanks_and_aliases():
    config = MADPOConfig(pair_selection=" Random ", parallel_training="NULL", joint_mode="Align")
    assert (config.pair_selection, config.parallel_training, config.joint_mode) == ("random", "none", "aligned")
    assert MADPOConfig(parallel_training=" MP").parallel_training == "mp"
    config = MADPOConfig(pair_selection=None, parallel_training=None)
    assert (config.pair_selection, config.parallel_training) == ("reward_gap", "none")


def test_all_pairs_have_no_cap():
    with pytest.raises(ConfigError, match=r"preference_pairs_per_sample: 16 contradicts pair_selection .all.; write null"):
        MADPOConfig(pair_selection="all")
    assert MADPOConfig(pair_selection="all", preference_pairs_per_sample=None).preference_pairs_per_sample is None


def test_an_unknown_name_suggests_the_nearest():
    found = problems(lambda: MADPOConfig(dpo_betta=0.2))
    assert found == {"dpo_betta": "unknown setting; did you mean 'dpo_beta'?"}
    assert "valid: " in problems(lambda: MADPOConfig(zzz=0))["zzz"]


@pytest.mark.parametrize("name", ["interval", "strategy", "integer"])
def test_an_unknown_name_is_named_whatever_it_begins_with(name):
    assert list(problems(lambda: MADPOConfig(**{name: 1}))) == [name]


def test_every_problem_is_found_at_once():
    assert problems(lambda: MADPOConfig(dpo_beta=0, top_p=3, num_agent=2)).keys() == {"dpo_beta", "top_p", "num_agent"}


def test_every_wrong_list_is_found_at_once_at_its_own_place():
    found = problems(lambda: MADPOConfig(max_new_tokens=[1, 2, 3], agent_devices=["cpu"] * 3, pair_selection="all"))
    assert found.keys() == {"max_new_tokens", "agent_devices", "preference_pairs_per_sample"}


def test_assigning_checks_too():
    config = MADPOConfig()
    config.dpo_beta = 0.5
    with pytest.raises(ValueError, match="dpo_beta"):
        config.dpo_beta = -1.0
    assert config.dpo_beta == 0.5


def test_errors_are_value_errors_of_one_line_per_problem():
    error = ConfigError([Problem("a.b", "is wrong"), Problem("", "no place")])
    assert isinstance(error, ValueError)
    assert str(error) == "a.b: is wrong\nno place"
    assert str(error.under("args")) == "args.a.b: is wrong\nargs: no place"
