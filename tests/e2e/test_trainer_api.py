"""The trainer as a library, on a tiny model with transformers rollouts, many small runs in this process."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from tasks_for_tests import chat, items, letters, text
from tiny import tiny_lm, tiny_tokenizer

from comlrl_ds.config.errors import ConfigError
from comlrl_ds.learners.madpo import NonFiniteError
from comlrl_ds.preference.oracle import OracleError
from comlrl_ds.rollout.base import RolloutError
from comlrl_ds.rollout.transformers_rollout import TransformersRollout
from comlrl_ds.trainers.preference import MADPOConfig, MADPOTrainer

FP32 = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 100_000}, "bf16": {"enabled": False}}
BASE = {
    "num_agents": 2, "preference_num_candidates": 4, "preference_pairs_per_sample": 1, "max_new_tokens": 8, "temperature": 1.0,
    "top_p": 1.0, "top_k": None, "num_train_epochs": 1, "train_batch_size": 4, "agent_learning_rate": 1e-3, "eval_interval": 0,
    "eval_num_samples": 4,
}  # fmt: skip


def trainer(folder, model, *, args=None, **arguments) -> MADPOTrainer:
    given = {
        "agent_model": str(model), "train_dataset": items(), "eval_dataset": items(), "reward_func": letters,
        "formatters": [chat, text], "deepspeed": FP32, "run_dir": folder / "run", "seed": 5, "verbose": False,
        "rollout": {"backend": "transformers", "max_model_len": 128},
    }  # fmt: skip
    return MADPOTrainer(args=MADPOConfig(**(BASE | (args or {}))), **(given | arguments))


def rows(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def steps(folder) -> list[dict]:
    return [r for r in rows(folder) if "train/loss" in r]


def exported(folder, agent: int) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "run" / "final" / f"agent_{agent}" / "model.safetensors")


def test_model_objects_train_and_a_missing_tokenizer_is_an_error(tmp_path, tiny_model):
    lms = [tiny_lm(60), tiny_lm(61)]
    with pytest.raises(ConfigError, match="tokenizer"):
        trainer(tmp_path, tiny_model, agent_model=None, agents=lms)
    with trainer(tmp_path, tiny_model, agent_model=None, agents=lms, tokenizer=tiny_tokenizer()) as t:
        t.train()
    for i, lm in enumerate(lms):
        moved = exported(tmp_path, i)
        assert all(moved[n].shape == p.shape and not torch.equal(moved[n], p) for n, p in lm.named_parameters())


def test_an_oracle_that_scores_several_tasks_at_a_time_gives_the_same_pairs(tmp_path, tiny_model):
    import threading
    import time

    at_work, most = set(), []

    def slow(a, b):
        at_work.add(threading.get_ident())
        most.append(len(at_work))
        time.sleep(0.005)
        at_work.discard(threading.get_ident())
        return letters(a, b)

    for workers in (1, 4):
        most.clear()
        with trainer(tmp_path / str(workers), tiny_model, reward_func=slow, args={"oracle_workers": workers}) as t:
            t.train()
        assert (max(most) > 1) == (workers > 1)
    one, four = ((tmp_path / n / "run/preference_replay/iteration_0001.json").read_text() for n in "14")
    assert one == four


def test_three_agents_with_their_own_models_and_limits(tmp_path, tiny_model):
    from tiny import save_tiny_model

    other = save_tiny_model(tmp_path / "other", 9, layers=1)  # another architecture: its engine is its own
    models = [str(tiny_model), str(other), str(tiny_model)]
    with trainer(
        tmp_path, tiny_model, agent_model=None, agents=models, formatters=text,
        reward_func=lambda a, b, c: letters(a, b)[0] + 0.01 * len(set(c[0])),
        args={"num_agents": 3, "max_new_tokens": [4, 6, 8]},
    ) as t:  # fmt: skip
        t.train()
    pairs = json.loads((tmp_path / "run/preference_replay/iteration_0001.json").read_text())["pairs"]
    assert pairs and all(len(p["winner_completions"]) == 3 for p in pairs)
    from safetensors.torch import load_file

    ids = load_file(tmp_path / "run/preference_replay/iteration_0001.ids.safetensors")
    for i, limit in enumerate((4, 6, 8)):
        assert ids[f"agent_{i}.completion_offsets"].diff().max() <= limit
    assert len(exported(tmp_path, 1)) < len(exported(tmp_path, 0))


def test_evaluation_by_the_task_reward_repeats_itself_and_zero_tasks_are_none(tmp_path, tiny_model):
    calls = []

    def counted(a, b):
        calls.append(1)
        return letters(a, b)

    def logger(agent_completions_turns, batch_items, prompts):
        return [{"length": len(agent_completions_turns[0][0][0])} for _ in batch_items]

    with trainer(
        tmp_path, tiny_model, reward_func=counted, eval_logger=logger, train_dataset=None,
        eval_aggregator=lambda found, num_turns: {"length": sum(f["length"] for f in found) / len(found)},
    ) as t:  # fmt: skip
        assert t.evaluate(0)["eval/n"] == 0 and not calls
        first = t.evaluate()
        file = tmp_path / "run/samples/eval_000000.json"
        content = file.read_bytes()
        second = t.evaluate()
        assert file.read_bytes() == content and len(calls) == 8
        rewards = [s["reward"] for x in json.loads(content) for s in x["samples"]]
        assert first["eval/turn_1/reward_mean"] == pytest.approx(math.fsum(rewards) / 4)
        assert first["eval/length"] == second["eval/length"] > 0
        assert t.cluster.local("actor.0") is None  # nothing is trained, so no actor was loaded


@pytest.mark.parametrize("changed", [{}, {"score_last_token": True}, {"dpo_beta": 0.5}, {"pair_selection": "random"},
                                     {"max_tokens_per_micro_batch": 40}, {"margin_pass": "two_pass"}, {"row_layout": "rows"},
                                     {"gradient_checkpointing": True}, {"logprob_chunk": 4}])  # fmt: skip
def test_what_a_setting_changes(tmp_path, tiny_model, changed, results={}):  # noqa: B006
    """The first three settings change what is learned; the others change how, not what."""
    with trainer(tmp_path, tiny_model, args=changed) as t:
        t.train()
    found = [r["train/loss"] for r in steps(tmp_path)], exported(tmp_path, 0)
    base = results.setdefault("base", found)
    close = all(torch.allclose(found[1][n], base[1][n], atol=2e-4) for n in base[1])
    name = next(iter(changed), None)
    if name in ("score_last_token", "dpo_beta", "pair_selection"):
        assert found[0] != base[0]
    else:
        assert found[0] == pytest.approx(base[0], abs=1e-5) and close


def test_steps_count_environment_steps_and_printed_lines_keep_their_distance(tmp_path, tiny_model, capsys):
    arguments = {"environment_steps_per_pair": 3, "logging_steps": 24, "train_batch_size": 2, "num_train_epochs": 2}
    with trainer(tmp_path, tiny_model, args=arguments, verbose=True, report_to=["tensorboard"]) as t:
        t.train()
    assert [r["env_step"] for r in steps(tmp_path)] == [6 * k for k in range(1, len(steps(tmp_path)) + 1)]
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("update ")]
    assert [int(line.split()[1].strip(":")) for line in printed] == [4, 8]
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))


def test_generation_keywords_reach_the_sampler_and_others_are_refused(tmp_path, tiny_model):
    with trainer(tmp_path, tiny_model) as t:
        with pytest.raises(ConfigError, match="repetition"):
            t.train(repetition_penalty=1.2)
        t.train(min_new_tokens=8)
    from safetensors.torch import load_file

    ids = load_file(tmp_path / "run/preference_replay/iteration_0001.ids.safetensors")
    assert set(ids["agent_0.completion_offsets"].diff().tolist()) == {8}


def test_an_interrupted_generation_asks_for_new_engines_and_gets_them(tmp_path, tiny_model):
    """A reward that raises leaves engines in the middle of their work; after close() the trainer goes on."""
    failing = [True]

    def oracle(a, b):
        if failing[0]:
            raise KeyError("not yet")
        return letters(a, b)

    dataset = (item for item in items())  # can only be walked once
    with trainer(tmp_path, tiny_model, train_dataset=dataset, reward_func=oracle, args={"collection_chunk_items": 2}) as t:
        with pytest.raises(OracleError, match="not yet"):
            t.train()
        failing[0] = False
        t.close()
        t.train()
    assert len(steps(tmp_path)) == 2


def test_an_engine_that_computes_something_else_than_its_trainer_ends_the_run_before_it_samples(
    tmp_path, tiny_model, monkeypatch
):
    """One norm arrives a tenth too large: the answers change, as after any sync, and are not the trainer's."""
    real = TransformersRollout.load

    def scaled(self, tensors):
        return real(self, ((n, t * 1.1 if n == "model.layers.1.input_layernorm.weight" else t) for n, t in tensors))

    monkeypatch.setattr(TransformersRollout, "load", scaled)
    sampled = []
    receive = TransformersRollout.receive
    monkeypatch.setattr(TransformersRollout, "receive", lambda self: sampled.append(self.held) or receive(self))
    args = {"eval_interval": 100}
    said = rf"weight sync of agent_[01]: engine 0 for {tiny_model} is \S+ nats a token off the trainer .* float32 explains"
    with trainer(tmp_path, tiny_model, args=args) as t, pytest.raises(RolloutError, match=said):
        t.train()
    assert set(sampled) == {str(tiny_model)}
    unchecked = {"backend": "transformers", "max_model_len": 128, "verify_sync": False}
    with trainer(tmp_path / "unchecked", tiny_model, args=args, rollout=unchecked) as t:
        t.train()


def test_steps_that_stay_nonfinite_end_the_run_and_name_agent_pair_and_file(tmp_path, tiny_model):
    with trainer(tmp_path, tiny_model, args={"max_nonfinite_steps": 2, "train_batch_size": 1}) as t:
        assert t.session.actors == ["actor.0", "actor.1"]
        lm = t.cluster.local("actor.1").scorer.lm
        lm.model.norm.forward = lambda x: x * float("nan")
        with pytest.raises(NonFiniteError, match=r"agent 1, pair \d+ of .*iteration_0001.json \(task \d+\)"):
            t.train()
    assert [r["train/nonfinite_steps"] for r in steps(tmp_path)] == [1, 2]
    assert steps(tmp_path)[0]["train/loss"] is None


def test_contradictions_are_found_before_anything_is_loaded(tmp_path, tiny_model):
    for arguments, words in [
        ({"deepspeed": FP32 | {"train_batch_size": 9}}, "train_batch_size"),
        ({"deepspeed": "no/such/file.json"}, "no file"),
        ({"args": {"agent_devices": "cuda:7"}}, "cuda:7"),
        ({"formatters": [chat]}, "1 formatters for 2 agents"),
        ({"reward_func": None}, "reward_func"),
        ({"reward_func": lambda a, b, c, d, e: 0}, "takes 5 positional"),
        ({"train_dataset": []}, "has no task"),
        ({"agent_model": str(tmp_path)}, "no config.json"),
        ({"agent_model": "./nowhere"}, "no folder"),
        ({"formatters": lambda item: 3}, "returned int"),
        ({"model_config": {"dtype": "int4"}}, "int4"),
    ]:
        with pytest.raises(ConfigError, match=words):
            trainer(tmp_path, tiny_model, **arguments)
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def with_dropout(tmp_path_factory):
    """A tiny model of which dropout is a part, and the weights of an uninterrupted run with it."""
    folder = tmp_path_factory.mktemp("dropout")
    lm = tiny_lm(70)
    lm.config.attention_dropout = 0.3
    lm.save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    with trainer(folder, folder / "model", args=NOISY, checkpoint_every_updates=1, checkpoint_total_limit=None) as t:
        t.train()
    return folder


NOISY = {"disable_dropout": False, "train_batch_size": 2, "num_train_epochs": 2, "margin_pass": "one_forward"}


def weights_of(folder):
    return {f"{agent}.{n}": w for agent in (0, 1) for n, w in exported(folder, agent).items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_masks_follow_from_the_seed_and_are_those_of_both_passes(tmp_path, with_dropout, capsys):
    # Another state of the generator, and the margins in a pass of their own.
    torch.manual_seed(99)
    with trainer(tmp_path, with_dropout / "model", args=NOISY | {"margin_pass": "two_pass"}, verbose=True) as t:
        t.train()
    assert same(weights_of(tmp_path), weights_of(with_dropout))
    numbers = [[r[k] for r in steps(f) for k in ("train/loss", "train/grad_norm/agent_0")] for f in (tmp_path, with_dropout)]
    assert len(numbers[0]) == 16 and numbers[0] == numbers[1]
    assert "note: dropout is on in training steps (args.disable_dropout: false)" in capsys.readouterr().out


def test_a_run_with_dropout_goes_on_as_if_it_had_not_been_interrupted(tmp_path, with_dropout):
    run = shutil.copytree(with_dropout / "run", tmp_path / "run")
    (run / "complete").unlink()
    for folder in (run / "final", *sorted((run / "checkpoints").iterdir())[-2:]):
        shutil.rmtree(folder)
    torch.manual_seed(98)
    with trainer(tmp_path, with_dropout / "model", args=NOISY, checkpoint_every_updates=1, resume="auto") as t:
        t.train()
    assert same(weights_of(tmp_path), weights_of(with_dropout))


def test_dropout_changes_what_is_learned_but_neither_evaluations_nor_the_gap_to_the_engine(tmp_path, with_dropout):
    with trainer(tmp_path, with_dropout / "model", args=NOISY | {"disable_dropout": True}) as t:
        t.train()
    assert not same(weights_of(tmp_path), weights_of(with_dropout))
    gaps = [r["rollout/logprob_gap"] for f in (tmp_path, with_dropout) for r in rows(f) if "rollout/logprob_gap" in r]
    assert len(gaps) >= 2 and max(gaps) < 1e-5
