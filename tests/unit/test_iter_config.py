"""MADPOIterConfig: the page's defaults, aliases and rules, every problem named, and no key ever shown."""

from __future__ import annotations

import json
import pickle

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from run_files import GOOD, problems, written

from comlrl_ds.config import ConfigError, MADPOConfig
from comlrl_ds.config.iterative import MADPOIterConfig
from comlrl_ds.config.run_file import load_run_file

CHANGED = {
    "preference_num_candidates": 20,
    "preference_pairs_per_sample": 4,
    "pair_selection": "comparator_reward",
    "num_train_epochs": 1,
}
ITERATIVE = {
    "num_iterations": 6,
    "preference_replay_mode": "current",
    "preference_replay_k": None,
    "preference_replay_lambda": None,
    "preference_replay_sample_size": None,
    "preference_replay_dir": None,
    "log_reward_distribution": False,
    "policy_checkpoint_dir": None,
    "comparator_policy": "current",
    "comparator_generation_mode": "decentralized",
    "comparator_centralized_agent_index": 0,
    "comparator_model_name": None,
    "comparator_agents": None,
    "comparator_devices": None,
    "comparator_num_candidates": None,
    "comparator_history_k": None,
    "comparator_api_url": None,
    "comparator_api_format": "generic",
    "comparator_api_model": None,
    "comparator_api_max_n_per_request": None,
    "comparator_api_timeout": 120.0,
    "comparator_api_headers": None,
    "comparator_api_key": None,
    "comparator_api_key_env": None,
    "comparator_api_key_header": "Authorization",
    "comparator_api_key_prefix": "Bearer",
    "comparator_api_response_field": "completions",
    "comparator_api_extra_body": None,
}
ADDITIONS = {
    "keep_policy_checkpoints": None,
    "comparator_api_item_fields": None,
    "comparator_api_concurrency": 16,
    "comparator_api_max_retries": 5,
    "comparator_api_backoff": 1.0,
    "comparator_api_max_wait": 60.0,
    "comparator_api_max_failure_fraction": 0.1,
}
API = {"comparator_policy": "api", "comparator_api_url": "http://localhost/p"}
MODEL = {"comparator_policy": "model", "comparator_model_name": "m"}


def found(**settings):
    return problems(lambda: MADPOIterConfig(**settings))


def test_defaults_are_the_pages():
    config, base = MADPOIterConfig(), MADPOConfig()
    own = CHANGED | ITERATIVE | ADDITIONS
    assert {name: getattr(config, name) for name in own} == own
    others = MADPOConfig.model_fields.keys() - CHANGED.keys()
    assert {name: getattr(config, name) for name in others} == {name: getattr(base, name) for name in others}
    assert MADPOIterConfig.model_fields.keys() == MADPOConfig.model_fields.keys() | own.keys()
    assert MADPOIterConfig(pair_selection=None).pair_selection == "comparator_reward"


def test_derived_values():
    config = MADPOIterConfig()
    assert (config.history_k, config.comparator_candidates, config.compares_centralized) == (1, 20, False)
    assert (config.keeps_policies, config.saves_policies) == (False, False)
    assert MADPOIterConfig(comparator_num_candidates=7).comparator_candidates == 7
    assert MADPOIterConfig(comparator_policy="history").history_k == 1
    assert MADPOIterConfig(comparator_policy="history", comparator_history_k=3).history_k == 3
    assert MADPOIterConfig(comparator_generation_mode="centralized").compares_centralized is True


@pytest.mark.parametrize(
    ("settings", "keeps", "saves"),
    [
        ({"comparator_policy": "history"}, False, True),
        ({"policy_checkpoint_dir": "p"}, True, True),
        ({"policy_checkpoint_dir": "p", "keep_policy_checkpoints": False}, False, True),
        ({"keep_policy_checkpoints": True}, True, True),
        ({"keep_policy_checkpoints": False}, False, False),
        (MODEL, False, False),
    ],
)
def test_when_policies_are_saved_and_kept(settings, keeps, saves):
    config = MADPOIterConfig(**settings)
    assert (config.keeps_policies, config.saves_policies) == (keeps, saves)


def test_the_base_trainer_knows_none_of_it():
    names = [*ITERATIVE, *ADDITIONS]
    refused = problems(lambda: MADPOConfig(**dict.fromkeys(names)))
    assert refused.keys() == set(names)
    assert all(message.startswith("unknown setting") for message in refused.values())
    assert "pair_selection" in problems(lambda: MADPOConfig(pair_selection="comparator_reward"))


# --- aliases
ALIASES = {
    "comparator_policy": {
        "current": "current self online",
        "current_copy": "current_copy copy online_copy current-offload current_offload",
        "model": "model external comparator reference ref",
        "history": "history checkpoint previous previous_iteration",
        "api": "api http endpoint",
    },
    "comparator_generation_mode": {
        "decentralized": "decentralized decentralised multi_agent multi-agent",
        "centralized": "centralized centralised single_agent single-agent",
    },
    "preference_replay_mode": {
        "current": "current latest new",
        "nearest_k": "nearest_k recent_k last_k k",
        "all_history": "all_history",
        "lambda_decay": "lambda_decay lambda td_lambda td-lambda",
    },
    "pair_selection": {name: name for name in ("comparator_reward", "reward_gap", "random", "all")},
}
FORMATS = {
    "generic": "generic",
    "openai": "openai openai_chat chat",
    "anthropic": "anthropic anthropic_messages messages",
    "openai_responses": "openai_responses responses codex",
}
NEEDED = {
    "model": {"comparator_model_name": "m"},
    "api": {"comparator_api_url": "http://localhost"},
    "nearest_k": {"preference_replay_k": 2},
    "lambda_decay": {"preference_replay_lambda": 0.5},
    "all": {"preference_pairs_per_sample": None},
}


@pytest.mark.parametrize(
    ("field", "meant", "alias"),
    [(f, name, a) for f, names in ALIASES.items() for name, listed in names.items() for a in listed.split()],
)
def test_aliases_whatever_their_case_and_blanks(field, meant, alias):
    for text in (alias, alias.upper(), f" {alias.title()}\t"):
        assert getattr(MADPOIterConfig(**{field: text}, **NEEDED.get(meant, {})), field) == meant


@pytest.mark.parametrize(("meant", "alias"), [(name, a) for name, listed in FORMATS.items() for a in listed.split()])
def test_aliases_of_the_api_formats(meant, alias):
    for text in (alias, f" {alias.upper()} "):
        assert MADPOIterConfig(**API, comparator_api_format=text, comparator_api_model="m").api.format == meant
        MADPOIterConfig(comparator_api_format=text)


@pytest.mark.parametrize("field", ALIASES)
def test_other_names_are_refused(field):
    assert list(found(**{field: "nearly"})) == [field]


# --- rules
@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("num_iterations", [1], [0]),
        ("comparator_num_candidates", [1, None], [0]),
        ("comparator_centralized_agent_index", [0, 7], [-1]),  # 7: nobody is asked for it when decentralised
        ("comparator_devices", [None, "cpu", ["cpu"], ["cpu"] * 2], [["cpu"] * 3, []]),
        ("preference_num_candidates", [2], [1]),
        ("preference_pairs_per_sample", [1, None], [0]),
        ("num_train_epochs", [1], [0]),
        ("max_new_tokens", [[1, 2]], [[1, 2, 3]]),
    ],
)
def test_rules(name, good, bad):
    for value in good:
        assert getattr(MADPOIterConfig(**{name: value}), name) == value
    for value in bad:
        assert list(found(**{name: value})) == [name]


@pytest.mark.parametrize("policy", ["current", "current_copy", "history"])
@pytest.mark.parametrize(("name", "value"), [("comparator_model_name", "m"), ("comparator_agents", ["a", "b"])])
def test_policies_with_the_agents_weights_take_no_model(policy, name, value):
    refused = found(comparator_policy=policy, **{name: value})
    assert list(refused) == [name]
    assert policy in refused[name] and "'model'" in refused[name]


def test_the_policy_model_needs_a_model():
    refused = found(comparator_policy="model")
    assert list(refused) == ["comparator_model_name"]
    assert "comparator_agents" in refused["comparator_model_name"]
    MADPOIterConfig(**MODEL)
    MADPOIterConfig(comparator_policy="model", comparator_agents=["a", "b"])
    MADPOIterConfig(**MODEL, comparator_agents=["m", "m"])
    assert "contradicts" in found(**MODEL, comparator_agents=["m", "n"])["comparator_agents"]
    # The page does not check them where an endpoint answers.
    MADPOIterConfig(**API, comparator_model_name="m")


@pytest.mark.parametrize("settings", [{}, {"comparator_policy": "current_copy"}, MODEL, API])
def test_only_history_goes_back(settings):
    refused = found(**settings, comparator_history_k=1)
    assert list(refused) == ["comparator_history_k"]
    assert "comparator_policy: history" in refused["comparator_history_k"]


def test_history_goes_back_at_least_one_round():
    assert list(found(comparator_policy="history", comparator_history_k=0)) == ["comparator_history_k"]


@pytest.mark.parametrize("agents", [1, 2, 5])
def test_the_centralised_comparator_is_one_of_the_agents(agents):
    settings = {"num_agents": agents, "comparator_generation_mode": "centralized"}
    MADPOIterConfig(**settings, comparator_centralized_agent_index=agents - 1)
    refused = found(**settings, comparator_centralized_agent_index=agents)
    assert list(refused) == ["comparator_centralized_agent_index"]
    assert f"0 to {agents - 1}" in refused["comparator_centralized_agent_index"]


@given(st.integers(1, 4), st.integers(0, 5), st.booleans())
def test_how_many_comparators_are_listed(agents, listed, centralized):
    settings = {"num_agents": agents, "comparator_policy": "model", "comparator_agents": ["m"] * listed}
    settings |= {"comparator_generation_mode": "centralized"} if centralized else {}
    if listed == agents or (centralized and listed == 1):
        assert MADPOIterConfig(**settings).comparator_agents == ["m"] * listed
    else:
        assert list(found(**settings)) == ["comparator_agents"]


def test_all_pairs_have_no_cap():
    assert found(pair_selection="all").keys() == {"preference_pairs_per_sample"}
    assert "write null" in found(pair_selection="all")["preference_pairs_per_sample"]
    MADPOIterConfig(pair_selection="all", preference_pairs_per_sample=None)


@pytest.mark.parametrize("settings", [{}, {"comparator_policy": "history"}, MODEL, API])
@pytest.mark.parametrize("name", ["olama", "", "generic!"])
def test_an_unknown_api_format_is_refused_whatever_the_policy(settings, name):
    assert list(found(**settings, comparator_api_format=name)) == ["comparator_api_format"]


def test_an_endpoint_has_an_address():
    assert list(found(comparator_policy="api")) == ["comparator_api_url"]
    assert list(found(comparator_policy="http", comparator_api_url="ftp://host")) == ["comparator_api_url"]
    assert list(found(**API, comparator_api_format="openai")) == ["comparator_api_model"]


# --- replay
@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"mode": "current", "sample_size": 5}, ["sample_size"]),
        ({"mode": "current", "lambda": 0.5}, ["lambda"]),
        ({"mode": "current", "k": 2}, ["k"]),
        ({"mode": "current", "k": True}, ["k"]),
        ({"mode": "new", "k": 2, "lambda": 0.5, "sample_size": 5}, ["k", "lambda", "sample_size"]),
        ({"mode": "nearest_k"}, ["k"]),
        ({"mode": "nearest_k", "k": 0}, ["k"]),
        ({"mode": "nearest_k", "k": 2, "lambda": 0.5}, ["lambda"]),
        ({"mode": "all_history", "k": 1}, ["k"]),
        ({"mode": "all_history", "lambda": 0.5}, ["lambda"]),
        ({"mode": "all_history", "sample_size": 0}, ["sample_size"]),
        ({"mode": "lambda_decay"}, ["lambda"]),
        ({"mode": "lambda_decay", "lambda": 1.01}, ["lambda"]),
        ({"mode": "lambda_decay", "lambda": -0.01}, ["lambda"]),
        ({"mode": "lambda_decay", "lambda": 0.5, "k": 1}, ["k"]),
    ],
)
def test_case_47_refused_replay_settings(settings, wrong):
    assert list(found(**{f"preference_replay_{k}": v for k, v in settings.items()})) == [
        f"preference_replay_{w}" for w in wrong
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "current", "k": 1},
        {"mode": "nearest_k", "k": 1, "sample_size": 1},
        {"mode": "all_history", "sample_size": 9},
        {"mode": "lambda_decay", "lambda": 0, "sample_size": 9},
        {"mode": "lambda_decay", "lambda": 1.0},
    ],
)
def test_case_47_accepted_replay_settings(settings):
    replay = MADPOIterConfig(**{f"preference_replay_{k}": v for k, v in settings.items()}).replay
    assert (replay.mode, replay.k, replay.decay, replay.sample_size) == tuple(
        settings.get(name) for name in ("mode", "k", "lambda", "sample_size")
    )


# --- several at once
def test_every_problem_of_rounds_and_comparator_is_found_at_once():
    wrong = {
        "preference_replay_k": 2, "preference_replay_lambda": 0.5, "comparator_model_name": "m",
        "comparator_agents": ["a", "b"], "comparator_api_format": "olama",
    }  # fmt: skip
    assert found(comparator_policy="history", **wrong).keys() == wrong.keys()
    assert found(num_iterations=0, comparator_policy="nobody", num_iteration=3).keys() == {
        "num_iterations", "comparator_policy", "num_iteration",
    }  # fmt: skip
    assert "did you mean 'num_iterations'" in found(num_iteration=3)["num_iteration"]
    refused = found(**API | {"comparator_api_url": None}, comparator_api_timeout=0, comparator_history_k=2)
    assert refused.keys() == {"comparator_api_url", "comparator_api_timeout", "comparator_history_k"}
    lists = {"comparator_agents": ["m"] * 3, "comparator_devices": ["cpu"] * 3}
    lists["comparator_centralized_agent_index"] = 2
    assert found(**MODEL, comparator_generation_mode="centralized", **lists).keys() == lists.keys()


def test_problems_of_sizes_rounds_and_comparator_are_found_at_once():
    wrong = {"max_new_tokens": [1, 2, 3], "preference_replay_k": 2, "comparator_devices": ["cpu"] * 3}
    assert found(**wrong).keys() == wrong.keys()


def test_assigning_checks_too():
    config = MADPOIterConfig()
    with pytest.raises(ConfigError, match="comparator_history_k"):
        config.comparator_history_k = 2


# --- one actor for every role
def test_one_actor_writes_every_role():
    config = MADPOIterConfig(collaboration_mode="centralized", num_agents=3, max_new_tokens=9)
    assert (config.centralized, config.num_actors, config.num_agents) == (True, 1, 3)
    assert config.token_limits == [9]
    assert MADPOIterConfig(collaboration_mode="centralized", max_new_tokens=[5]).token_limits == [5]
    assert list(found(collaboration_mode="centralized", max_new_tokens=[5, 6])) == ["max_new_tokens"]
    # The comparator is centralised, too, whatever is written.
    assert config.compares_centralized
    assert MADPOIterConfig(collaboration_mode="centralized", comparator_generation_mode="multi_agent").compares_centralized
    assert list(found(collaboration_mode="centralized", comparator_centralized_agent_index=1)) == [
        "comparator_centralized_agent_index"
    ]
    for listed in (["m"], ["m"] * 2):
        MADPOIterConfig(collaboration_mode="centralized", comparator_policy="model", comparator_agents=listed)
    assert list(found(collaboration_mode="Centralized")) == ["collaboration_mode"]


@pytest.mark.parametrize("kind", [MADPOConfig, MADPOIterConfig])
@pytest.mark.parametrize(
    ("mode", "written", "counts"),
    [
        ("decentralized", None, False),
        ("decentralized", True, True),
        ("centralized", None, True),
        ("centralized", False, False),
    ],
)
def test_whether_the_last_token_counts(kind, mode, written, counts):
    assert kind(collaboration_mode=mode, score_last_token=written).scores_last_token is counts


# --- who learns
@pytest.mark.parametrize(
    ("settings", "learning"),
    [
        ({}, [True, True]),
        ({"train_agents": [1]}, [False, True]),
        ({"train_agents": [1, 0]}, [True, True]),
        ({"num_agents": 3, "train_agents": [2, 0]}, [True, False, True]),
        ({"collaboration_mode": "centralized", "train_agents": [0]}, [True]),
    ],
)
def test_who_learns(settings, learning):
    config = MADPOIterConfig(**settings)
    assert [config.learns(i) for i in range(config.num_actors)] == learning


@pytest.mark.parametrize(
    ("settings", "path", "part"),
    [
        ({"train_agents": []}, "train_agents", "null"),
        ({"train_agents": [0, 2]}, "train_agents", "0 to 1"),
        ({"train_agents": [-1]}, "train_agents.0", "0"),
        ({"train_agents": [1], "collaboration_mode": "centralized"}, "train_agents", "0 to 0"),
    ],
)
def test_learners_that_are_none_of_the_agents(settings, path, part):
    refused = found(**settings)
    assert list(refused) == [path]
    assert part in refused[path]


# --- secrets (F1 of the peer)
PLANTS = {name: f"planted-{name}-0123456789" for name in ("key", "header", "query", "body", "deep", "list")}
SECRET = {
    "comparator_policy": "api",
    "comparator_api_url": f"https://host.example/v1?version=2&api_key={PLANTS['query']}",
    "comparator_api_key": PLANTS["key"],
    "comparator_api_headers": {"X-Auth": PLANTS["header"]},
    "comparator_api_extra_body": {
        "api_key": PLANTS["body"], "options": [{"password": PLANTS["deep"]}], "tokens": [PLANTS["list"]], "seed": 7,
    },
}  # fmt: skip
SHOWN = {
    "repr": repr,
    "str": str,
    "yaml": lambda config: yaml.safe_dump(config.model_dump()),
    "json": lambda config: json.dumps(config.model_dump(mode="json")) + config.model_dump_json(),
    "pickle": lambda config: pickle.dumps(config).decode("latin-1"),
}


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("how", SHOWN)
def test_no_key_is_shown_or_stored(how, plant):
    assert PLANTS[plant] not in SHOWN[how](MADPOIterConfig(**SECRET))


def test_what_is_hidden_is_still_there_for_use():
    config = MADPOIterConfig(**SECRET)
    api = config.api
    assert api.credential().reveal() == PLANTS["key"]
    assert api.headers == {"X-Auth": PLANTS["header"]}
    assert api.url == SECRET["comparator_api_url"]
    assert api.extra_body == SECRET["comparator_api_extra_body"]
    dumped = config.model_dump()
    assert dumped["comparator_api_url"].startswith("https://host.example/v1?")
    assert dumped["comparator_api_extra_body"]["seed"] == 7
    assert dumped.keys() & {"comparator_api_key", "comparator_api_headers"} == set()


WRONG = [
    {"comparator_api_timout": 3},
    {"num_agents": 0},
    {"comparator_policy": "nobody"},
    {"preference_replay_k": 2, "max_new_tokens": [1, 2, 3]},
    {"comparator_api_timeout": 0, "comparator_api_key_header": "a b"},
    {"comparator_api_format": "olama"},
    {"comparator_history_k": 1},
    {"comparator_api_keys": PLANTS["key"]},
    {"comparator_api_key": [PLANTS["key"]]},
    {"comparator_api_key": {"value": PLANTS["key"]}},
    {"comparator_api_headers": f"X-Auth: {PLANTS['header']}"},
    {"comparator_api_headers": [PLANTS["header"]]},
    {"comparator_api_headers": {"X-Auth": [PLANTS["header"]]}},
    {"comparator_api_headers": {"X-Auth": f"{PLANTS['header']}\n"}},
    {"comparator_api_headers": {5: PLANTS["header"]}},
    {"comparator_api_extra_body": PLANTS["body"]},
    {"comparator_api_extra_body": {"api_key": PLANTS["body"], "no json": {1}}},
    {"comparator_api_url": f"host.example?api_key={PLANTS['query']}"},
    {"comparator_api_url": f"https://user:{PLANTS['key']}@host.example"},
    {"comparator_api_url": [f"https://host.example?api_key={PLANTS['query']}"]},
    {"comparator_api_key": None, "comparator_api_key_env": PLANTS["key"]},
    {"comparator_api_key": None, "comparator_api_key_env": [PLANTS["key"]]},
]


@pytest.mark.parametrize("changes", WRONG, ids=lambda changes: ",".join(changes))
def test_a_refusal_shows_no_key(changes):
    with pytest.raises(ConfigError) as caught:
        MADPOIterConfig(**SECRET | changes)
    shown = f"{caught.value} {caught.value!r} {caught.value.problems}"
    assert not [plant for plant in PLANTS.values() if plant in shown]


def test_assigning_shows_no_key():
    config = MADPOIterConfig(**SECRET)
    with pytest.raises(ConfigError) as caught:
        config.num_iterations = 0
    assert [p.path for p in caught.value.problems] == ["num_iterations"]
    assert not [plant for plant in PLANTS.values() if plant in str(caught.value)]


def run_file(tmp_path, **changes):
    content = yaml.safe_load(GOOD) | {"trainer": "madpo_iter", "args": SECRET} | changes
    return written(tmp_path, yaml.safe_dump(content))


def test_a_run_file_shows_no_key(tmp_path):
    loaded = load_run_file(run_file(tmp_path))
    assert not [plant for plant in PLANTS.values() if plant in f"{loaded!r} {loaded}"]
    assert loaded.trainer_config.api.credential().reveal() == PLANTS["key"]


@pytest.mark.parametrize(
    ("changes", "overrides"),
    [
        ({"args": [SECRET]}, []),
        ({"args": f"comparator_api_key {PLANTS['key']}"}, []),
        ({"args": SECRET | {"comparator_api_timout": 3}}, []),
        ({"agents": []}, []),
        ({}, ["args.comparator_api_key.x=1"]),
    ],
)
def test_a_refused_run_file_shows_no_key(tmp_path, changes, overrides):
    with pytest.raises(ConfigError) as caught:
        load_run_file(run_file(tmp_path, **changes), overrides)
    assert not [plant for plant in PLANTS.values() if plant in str(caught.value)]


@pytest.mark.parametrize("line", ['comparator_api_key: "{}', "comparator_api_key: {}: x"])
def test_a_run_file_that_is_not_yaml_shows_no_key(tmp_path, line):
    with pytest.raises(ConfigError, match="not YAML") as caught:
        load_run_file(written(tmp_path, f"trainer: madpo_iter\nargs:\n  {line.format(PLANTS['key'])}\n"))
    assert PLANTS["key"] not in str(caught.value)
