"""MARLHFConfig and MARLHFIterConfig: the page's defaults, aliases and rules, derived values, every problem at once."""

from __future__ import annotations

import itertools
import json
import pickle

import pytest
import yaml
from run_files import problems

from comlrl_ds.config import MADPOConfig
from comlrl_ds.config.iterative import MADPOIterConfig
from comlrl_ds.config.marlhf import MARLHFConfig, MARLHFIterConfig

# The page's names and defaults.
OWN = {
    "rl_algorithm": "magrpo",
    "num_generations": 4,
    "reward_model_name": None,
    "reward_learning_rate": 1e-5,
    "reward_num_train_epochs": 1,
    "reward_train_batch_size": 1,
    "reward_max_length": None,
    "reward_freeze_backbone": False,
    "critic_model_name": None,
    "critic_learning_rate": None,
    "critic_devices": None,
    "use_separate_critic": True,
    "critic_type": "v",
    "value_loss_coef": 0.6,
    "value_clip_range": 0.2,
    "critic_value_head_hidden_dim": None,
    "value_head_hidden_dim": None,
}
# A device that nobody chose must not be asked for; normalising is decided by the backend.
DIFFERENT = {"reward_model_device": None, "advantage_normalization": None}
ADDITIONS = {
    "reward_eval_fraction": 0.1,
    "importance_correction": "none",
    "importance_clip": 2.0,
    "reward_lora": None,
    "critic_lora": None,
}
ROUNDS = {"num_train_epochs": 2, "reward_num_train_epochs": 2, "preference_scoring_reward": "task"}
REINFORCE = {"magrpo": "mean", "mareinforce": "raw", "maremax": "max", "marloo": "rloo"}
ALGORITHMS = [*REINFORCE, "maac", "iac"]
BOTH = pytest.mark.parametrize("kind", [MARLHFConfig, MARLHFIterConfig])


def values_of(config, names):
    return {name: getattr(config, name) for name in names}


# --- defaults
def test_defaults_are_the_pages():
    own = OWN | DIFFERENT | ADDITIONS
    assert values_of(MARLHFConfig(), own) == own
    others = MADPOConfig.model_fields.keys() - own.keys()
    assert values_of(MARLHFConfig(), others) == values_of(MADPOConfig(), others)
    assert MARLHFConfig.model_fields.keys() == MADPOConfig.model_fields.keys() | own.keys()


def test_defaults_of_the_rounds_are_the_pages():
    own = OWN | DIFFERENT | ADDITIONS | ROUNDS
    assert values_of(MARLHFIterConfig(), own) == own
    others = MADPOIterConfig.model_fields.keys() - own.keys()
    assert values_of(MARLHFIterConfig(), others) == values_of(MADPOIterConfig(), others)
    assert MARLHFIterConfig.model_fields.keys() == MADPOIterConfig.model_fields.keys() | own.keys()
    assert MARLHFIterConfig(pair_selection=None).pair_selection == "comparator_reward"


@pytest.mark.parametrize("kind", [MADPOConfig, MADPOIterConfig])
def test_madpo_knows_none_of_it(kind):
    names = [*OWN, "reward_model_device", *ADDITIONS, "preference_scoring_reward"]
    refused = problems(lambda: kind(**dict.fromkeys(names)))
    assert refused.keys() == set(names)
    assert all(message.startswith("unknown setting") for message in refused.values())


def test_the_base_trainer_knows_no_rounds():
    assert list(problems(lambda: MARLHFConfig(preference_scoring_reward="task"))) == ["preference_scoring_reward"]
    assert "pair_selection" in problems(lambda: MARLHFConfig(pair_selection="comparator_reward"))


# --- rules
@BOTH
@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("rl_algorithm", ALGORITHMS, ["grpo", "", 3]),
        ("num_generations", [2, 9], [1, 0]),
        ("reward_model_name", [None, "m"], [3]),
        ("reward_model_device", [None, "auto", "cpu", "cuda:0", "judge"], [3, ["cpu"]]),
        ("reward_learning_rate", [1e-9], [0.0, -1.0]),
        ("reward_num_train_epochs", [1], [0]),
        ("reward_train_batch_size", [1, 8], [0]),
        ("reward_max_length", [None, 1], [0]),
        ("reward_freeze_backbone", [True, False], ["perhaps"]),
        ("reward_eval_fraction", [0.0, 0.99], [-0.1, 1.0]),
        ("critic_model_name", [None, "m"], [3]),
        ("critic_learning_rate", [None, 1e-9], [0.0]),
        ("critic_devices", [None, "cpu", ["cpu"], ["cpu", "cpu"]], [[], ["cpu"] * 3]),
        ("use_separate_critic", [True, False], ["perhaps"]),
        ("critic_type", ["v", "q"], ["V", "a"]),
        ("value_loss_coef", [1e-9], [0.0]),
        ("value_clip_range", [None, 1e-9], [0.0]),
        ("critic_value_head_hidden_dim", [None, 1], [0]),
        ("value_head_hidden_dim", [None, 1], [0]),
        ("importance_correction", ["none", "truncated"], ["clipped"]),
        ("importance_clip", [0.5, 2.0], [0.0, -1.0]),
        ("advantage_normalization", [None, True, False], ["perhaps"]),
        ("oracle_workers", [1, 8], [0]),
        ("num_train_epochs", [1], [0]),
        ("rollout_buffer_size", [1], [0]),
        ("train_batch_size", [1, None], [0]),
        ("reference_kl_enabled", [True, False], ["perhaps"]),
        ("reference_kl_coef", [0.0, 1.0], [-0.1]),
        ("reference_devices", [None, "cpu", ["cpu", "cpu"]], [["cpu"] * 3]),
    ],
)
def test_rules(kind, name, good, bad):
    for value in good:
        assert getattr(kind(**{name: value}), name) == value
    for value in bad:
        assert list(problems(lambda value=value: kind(**{name: value}))) == [name]


@BOTH
def test_case_blanks_and_aliases(kind):
    config = kind(rl_algorithm=" MAReMax\t", importance_correction=" Truncated")
    assert (config.rl_algorithm, config.importance_correction) == ("maremax", "truncated")
    assert kind(rl_algorithm="MAReForce").rl_algorithm == "mareinforce"
    assert kind(rl_algorithm=None).rl_algorithm == "magrpo"
    assert kind(importance_correction=None).importance_correction == "none"
    assert kind(importance_correction="null").importance_correction == "none"
    # The readings that MADPO's settings have.
    assert kind(joint_mode="Align", parallel_training=None).parallel_training == "none"


@pytest.mark.parametrize(
    ("meant", "alias"),
    [("task", a) for a in ("task", "oracle", "environment", "env")]
    + [("reward_model", a) for a in ("reward_model", "model", "learned")],
)
def test_aliases_of_the_scoring_reward(meant, alias):
    for text in (alias, f" {alias.upper()} "):
        assert MARLHFIterConfig(preference_scoring_reward=text).preference_scoring_reward == meant
    assert list(problems(lambda: MARLHFIterConfig(preference_scoring_reward="nobody"))) == ["preference_scoring_reward"]


@BOTH
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_only_a_critic_can_judge_a_single_response(kind, algorithm):
    if algorithm in REINFORCE:
        found = problems(lambda: kind(rl_algorithm=algorithm, num_generations=1))
        assert list(found) == ["num_generations"]
        assert algorithm in found["num_generations"] and "at least 2" in found["num_generations"]
    else:
        assert kind(rl_algorithm=algorithm, num_generations=1).num_generations == 1
    assert list(problems(lambda: kind(rl_algorithm=algorithm, num_generations=0))) == ["num_generations"]


# --- devices of critics (F10 of the peer: it ended only after collection and reward fit)
@BOTH
def test_maac_has_one_critic(kind):
    for devices in (["cpu"] * 2, [], ["cpu"] * 3):
        found = problems(lambda devices=devices: kind(rl_algorithm="maac", critic_devices=devices))
        assert list(found) == ["critic_devices"]
        assert f"a list of {len(devices)}" in found["critic_devices"] and "one critic" in found["critic_devices"]
    for devices in (None, "auto", "cuda:1", ["cuda:1"]):
        assert kind(rl_algorithm="maac", critic_devices=devices).critic_devices == devices


@BOTH
def test_maac_runs_where_only_the_agents_have_devices(kind):
    config = kind(rl_algorithm="maac", parallel_training="mp", agent_devices=["cuda:0", "cuda:1"])
    assert config.critic_devices is None


@BOTH
@pytest.mark.parametrize("algorithm", [a for a in ALGORITHMS if a != "maac"])
def test_the_others_have_a_critic_per_actor_or_none(kind, algorithm):
    # Those without critics refuse the same lists: a wrong length is no better for having no effect.
    for count, wrong in ((3, 2), (2, 3), (1, 2)):
        found = problems(lambda c=count, w=wrong: kind(rl_algorithm=algorithm, num_agents=c, critic_devices=["cpu"] * w))
        assert list(found) == ["critic_devices"]
        assert f"a list of {wrong} for {count} actor{'s' * (count > 1)};" in found["critic_devices"]
        kind(rl_algorithm=algorithm, num_agents=count, critic_devices=["cpu"] * count)
    one = {"collaboration_mode": "centralized", "num_agents": 3, "rl_algorithm": algorithm}
    assert kind(**one, critic_devices=["cpu"]).num_actors == 1
    assert list(problems(lambda: kind(**one, critic_devices=["cpu"] * 3))) == ["critic_devices"]


@BOTH
def test_value_heads_are_no_critics(kind):
    roles = lambda **given: kind(**given).critic_roles  # noqa: E731
    assert roles(rl_algorithm="maac") == ["critic"]
    assert roles(rl_algorithm="iac", num_agents=3) == ["critic.0", "critic.1", "critic.2"]
    assert roles(rl_algorithm="iac", use_separate_critic=False) == [] == roles(rl_algorithm="magrpo")
    assert roles(rl_algorithm="maac", use_separate_critic=False) == ["critic"]
    assert kind(rl_algorithm="iac", use_separate_critic=False).value_heads
    assert not kind(rl_algorithm="maac", use_separate_critic=False).value_heads


# --- derived values
@BOTH
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_the_backend_decides(kind, algorithm):
    config = kind(rl_algorithm=algorithm)
    assert config.reinforce is (algorithm in REINFORCE)
    assert config.advantage_mode_of == REINFORCE.get(algorithm)
    assert config.normalizes is (algorithm in ("magrpo", "maac", "iac"))
    for written in (True, False):
        assert kind(rl_algorithm=algorithm, advantage_normalization=written).normalizes is written


@BOTH
@pytest.mark.parametrize(("algorithm", "written"), itertools.product(REINFORCE, REINFORCE.values()))
def test_the_backend_sets_the_mode_of_advantages(kind, algorithm, written):
    config = kind(rl_algorithm=algorithm, advantage_mode=written)
    assert config.advantage_mode == REINFORCE[algorithm]
    config.rl_algorithm = "marloo"
    assert config.advantage_mode == "rloo"
    config.advantage_mode = written
    assert config.advantage_mode == "rloo"
    assert kind(**config.model_dump(exclude={"rl_algorithm"}), rl_algorithm="maremax").advantage_mode == "max"


@BOTH
def test_a_wrong_mode_is_refused_all_the_same(kind):
    assert list(problems(lambda: kind(advantage_mode="min"))) == ["advantage_mode"]


@BOTH
def test_critics_learn_as_fast_as_agents_unless_told(kind):
    assert kind().critic_rate == 5e-6
    assert kind(agent_learning_rate=1e-4).critic_rate == 1e-4
    assert kind(agent_learning_rate=1e-4, critic_learning_rate=2e-4).critic_rate == 2e-4


@BOTH
@pytest.mark.parametrize("written", [None, True, False])
@pytest.mark.parametrize("mode", ["decentralized", "centralized"])
def test_every_token_counts(kind, written, mode):
    assert kind(score_last_token=written, collaboration_mode=mode).scores_last_token is True


# --- every problem at once
WRONG = {
    "max_new_tokens": [1, 2, 3],
    "num_generations": 1,
    "critic_devices": ["cpu"] * 3,
    "pair_selection": "all",
}


def test_every_problem_is_found_at_once():
    found = problems(lambda: MARLHFConfig(**WRONG))
    assert found.keys() == WRONG.keys() - {"pair_selection"} | {"preference_pairs_per_sample"}
    wrong = WRONG | {"comparator_devices": ["cpu"] * 3, "preference_replay_k": 2, "comparator_history_k": 1}
    found = problems(lambda: MARLHFIterConfig(**wrong))
    assert found.keys() == wrong.keys() - {"pair_selection"} | {"preference_pairs_per_sample"}
    assert problems(lambda: MARLHFConfig(value_loss_coef=0, rl_algoritm="iac")).keys() == {"value_loss_coef", "rl_algoritm"}


@BOTH
def test_each_problem_is_said_once(kind):
    with pytest.raises(ValueError) as caught:
        kind(**WRONG)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(set(lines)) == 4


@BOTH
def test_assigning_checks_too(kind):
    config = kind(rl_algorithm="iac", num_generations=1)
    with pytest.raises(ValueError, match="num_generations"):
        config.rl_algorithm = "magrpo"
    with pytest.raises(ValueError, match="importance_clip"):
        kind().importance_clip = 0.0


# --- rounds are those of MADPO
def test_rounds_are_those_of_madpo():
    config = MARLHFIterConfig(preference_replay_mode="last_k", preference_replay_k=3, comparator_policy="previous")
    assert (config.replay.mode, config.replay.k) == ("nearest_k", 3)
    assert (config.comparator_policy, config.history_k, config.saves_policies) == ("history", 1, True)
    assert (config.comparator_candidates, config.compares_centralized) == (20, False)
    assert isinstance(config, MARLHFConfig) and isinstance(config, MADPOIterConfig)


SHOWN = {
    "repr": repr,
    "yaml": lambda config: yaml.safe_dump(config.model_dump()),
    "json": lambda config: json.dumps(config.model_dump(mode="json")) + config.model_dump_json(),
    "pickle": lambda config: pickle.dumps(config).decode("latin-1"),
}


@pytest.mark.parametrize("how", SHOWN)
def test_no_key_is_shown_or_stored(how):
    config = MARLHFIterConfig(
        comparator_policy="api",
        comparator_api_url="https://host.example/v1?api_key=planted-query",
        comparator_api_key="planted-key",
        comparator_api_headers={"X-Auth": "planted-header"},
        comparator_api_extra_body={"api_key": "planted-body"},
    )
    assert "planted" not in SHOWN[how](config)
    assert config.api.credential().reveal() == "planted-key"


@BOTH
def test_a_written_configuration_reads_back(kind):
    config = kind(
        rl_algorithm="iac", critic_devices=["cpu", "cuda:0"], importance_correction="truncated", value_clip_range=None
    )
    assert kind(**yaml.safe_load(yaml.safe_dump(config.model_dump()))) == config
