"""What eval_logger and eval_aggregator may return, and what becomes of it."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from comlrl_ds.config.errors import ConfigError
from comlrl_ds.config.user_code import UserCodeError
from comlrl_ds.preference.user_metrics import read_metrics
from comlrl_ds.trainers.preference import MADPOConfig, MADPOTrainer


def rate(rows, num_turns):
    """An aggregator of the user's."""


def read(returned, prefix="eval/"):
    return read_metrics(returned, rate, what="eval_aggregator", where="evaluation", prefix=prefix)


@pytest.mark.parametrize(
    ("returned", "values"),
    [
        (None, {}),
        ({}, {}),
        ({"a": 1, "b/c": 0.5, "d": True}, {"eval/a": 1.0, "eval/b/c": 0.5, "eval/d": 1.0}),
        ({"a": np.float32(0.5), "b": np.array([2]), "c": torch.tensor([[3.0]], requires_grad=True), "d": [4]},
         {"eval/a": 0.5, "eval/b": 2.0, "eval/c": 3.0, "eval/d": 4.0}),
        ({7: 1.0}, {"eval/7": 1.0}),
        ({"a": 10**400, "b": -math.inf}, {"eval/a": math.inf, "eval/b": -math.inf}),
    ],
)  # fmt: skip
def test_mappings_of_numbers_are_metrics_and_none_is_nothing(returned, values):
    assert (found := read(returned)).values == values and not found.moved


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("accurate", "returned str 'accurate'; return a mapping of names to numbers, or None"),
        (3.0, "returned float 3.0; return a mapping"),
        ([("a", 1)], r"returned list \[\('a', 1\)\]; return a mapping"),
        ({"a": "high"}, "returned str 'high' for 'a'; return one number for every name"),
        ({"a": None}, "returned NoneType None for 'a'"),
        ({"a": [1, 2]}, r"returned list \[1, 2\] for 'a'"),
        ({"a": torch.zeros(2, 2)}, "returned Tensor .* for 'a'"),
        ({"a": {"b": 1}}, "returned dict .* for 'a'"),
        ({"a": 1j}, "returned complex 1j for 'a'"),
        ({"": 1}, "returned the key '', which is no name of a metric"),
        ({"a/": 1}, "returned the key 'a/', which"),
        ({None: 1}, "returned the key None, which"),
        ({("a", "b"): 1}, r"returned the key \('a', 'b'\), which"),
        ({1: 1, "1": 2}, "returned '1' twice"),
    ],
)
def test_anything_else_names_the_function_its_file_and_what_it_returned(returned, words):
    who = r"^evaluation: the eval_aggregator rate \(test_user_metrics.py, line \d+\) "
    with pytest.raises(UserCodeError, match=who + words) as caught:
        read(returned)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("prefix", "returned", "values"),
    [
        ("eval/", {"n": 7, "seconds": 8, "acc": 1}, {"eval/user/n": 7, "eval/user/seconds": 8, "eval/acc": 1}),
        ("eval/", {"turn_1/reward_mean": 5}, {"eval/user/turn_1/reward_mean": 5}),
        ("eval/", {"n": 7, "user/n": 8}, {"eval/user/n": 8, "eval/user/user/n": 7}),
        ("", {"train/loss": 1, "time": 2, "train/lr/agent_12": 3, "mine": 4},
         {"user/train/loss": 1, "user/time": 2, "user/train/lr/agent_12": 3, "mine": 4}),
    ],
)  # fmt: skip
def test_no_metric_of_the_trainers_is_overwritten(prefix, returned, values):
    found = read(returned, prefix)
    assert found.values == values
    assert set(found.moved.values()) == {name for name in values if "user/" in name and name != "eval/user/n"} | (
        {"eval/user/n"} if "seconds" in returned else set()
    )


def test_an_evaluation_keeps_its_own_numbers_and_ends_in_a_line(model_folders, tmp_path, capsys):
    answers = iter(
        [{"n": 99.0, "seconds": -1.0, "standard_error": -1.0, "turn_1/reward_mean": -1.0}, None, "good", KeyError("k")]
    )

    def aggregator(rows, num_turns):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    trainer = MADPOTrainer(
        agents=model_folders, eval_dataset=[{"prompt": "w3"}, {"prompt": "w4"}], reward_func=lambda a, b: 1.0,
        args=MADPOConfig(max_new_tokens=3), rollout={"backend": "transformers", "dtype": "float32"},
        eval_logger=lambda **given: None, eval_aggregator=aggregator, run_dir=tmp_path / "run",
    )  # fmt: skip
    with trainer:
        first = trainer.evaluate()
        assert first["eval/n"] == 2 and first["eval/seconds"] > 0 and first["eval/standard_error"] == 0
        assert first["eval/turn_1/reward_mean"] == 1 and first["eval/user/turn_1/reward_mean"] == -1
        assert first["eval/user/n"] == 99 and first["eval/user/seconds"] == -1
        said = capsys.readouterr().out
        assert "eval_aggregator returned names of the trainer's own metrics" in said
        assert "'n' is recorded as 'eval/user/n'" in said
        second = trainer.evaluate()
        assert second.keys() == {name for name in first if not name.startswith("eval/user/")}
        who = r"evaluation: the eval_aggregator .*aggregator \(test_user_metrics.py, line \d+\) "
        with pytest.raises(UserCodeError, match=who + "returned str 'good'; return a mapping"):
            trainer.evaluate()
        with pytest.raises(UserCodeError, match=who + r"raised KeyError: 'k' \(test_user_metrics.py, line \d+\)"):
            trainer.evaluate()
    assert json.loads((tmp_path / "run/samples/eval_000000.json").read_text())


@pytest.mark.parametrize("name", ["eval_logger", "eval_aggregator"])
def test_what_cannot_be_called_is_refused_by_the_constructor(model_folders, tmp_path, name):
    given = {"eval_logger": print, "eval_aggregator": print} | {name: {"accuracy": 1}}
    with pytest.raises(ConfigError, match=rf"{name}: \{{'accuracy': 1\}} is not callable; give a function"):
        MADPOTrainer(
            agents=model_folders, reward_func=lambda a, b: 1.0, run_dir=tmp_path / "run", args=MADPOConfig(max_new_tokens=3),
            rollout={"backend": "transformers"}, **given,
        )  # fmt: skip
