"""What MARLHF does at its limits: numbers that are not finite, texts that are too long, evaluations of nothing, devices."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from marlhf_runs import rows, sampled, trainer
from safetensors.torch import load_file, save_file
from tasks_for_tests import letters
from tiny import tiny_tokenizer
from transformers import GPT2Config, GPT2LMHeadModel

from comlrl_ds.config.errors import ConfigError
from comlrl_ds.engines.scalar import ScalarEngine
from comlrl_ds.learners.madpo import NonFiniteError
from comlrl_ds.learners.scalar import RewardFit
from comlrl_ds.preference.joint_text import reward_text
from comlrl_ds.trainers.preference.reward_learning import RewardLearner


def counted(calls: list[int]):
    """The oracle, with a note of every call."""

    def oracle(a, b):
        calls.append(len(a))
        return letters(a, b)

    return oracle


# --- numbers that are not finite
def break_forward(lm, calls: list[int], bad: set[int]) -> None:
    """The model's hidden states are NaN in the forwards with these numbers, counted from 0."""
    real = lm.model.norm.forward

    def forward(x):
        calls.append(len(calls))
        return real(x) * (float("nan") if calls[-1] in bad else 1)

    lm.model.norm.forward = forward


@pytest.mark.parametrize("algorithm", ["magrpo", "maac"])
def test_scores_that_stay_nonfinite_end_the_run_and_name_agent_and_task(tmp_path, tiny_model, algorithm):
    """W13: neither agent moves, nothing stands in for the loss, and the limit is kept to the step."""
    run = tmp_path / "run"
    args = {"rl_algorithm": algorithm, "max_nonfinite_steps": 2, "train_batch_size": 1}
    with trainer(run, tiny_model, args=args) as t:
        assert t.session.actors == ["actor.0", "actor.1"]
        break_forward(t.cluster.local("actor.1").scorer.lm, [], set(range(1000)))
        with pytest.raises(NonFiniteError, match=r"of agent 1 is not finite \(task [0-4]\); that is step 2 of max_nonfinite"):
            t.train()
        steps = rows(run, "rl/loss/agent_1")
        assert [step["train/nonfinite_steps"] for step in steps] == [1, 2]
        assert all(step["rl/loss/agent_1"] is None for step in steps)
        start = load_file(tiny_model / "model.safetensors")
        for role in ("actor.0", "actor.1"):
            assert all(torch.equal(start[n], p) for n, p in t.cluster.local(role).named_weights())


@pytest.mark.parametrize("args", [{}, {"rl_algorithm": "iac"}, {"reference_kl_enabled": True}], ids=str)
def test_a_weight_that_is_not_finite_names_agent_and_update(tmp_path, tiny_model, args):
    """The folder itself is broken: what is sampled from it, its log-probs and its KL are NaN, and no file chokes on them."""
    folder = shutil.copytree(tiny_model, tmp_path / "broken")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"][0, 0] = math.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    run = tmp_path / "run"
    with (
        trainer(
            run, tiny_model, agent_model=None, agents=[str(tiny_model), str(folder)], args={"max_nonfinite_steps": 2} | args
        ) as t,
        pytest.raises(NonFiniteError, match=r"^update 2 skipped on every agent: a number of agent 1 is not finite \(task \d"),
    ):
        t.train()
    assert [step["train/nonfinite_steps"] for step in rows(run, "rl/loss/agent_1")] == [1, 2]


def test_the_run_goes_on_after_a_nonfinite_step(tmp_path, tiny_model):
    """W13: one bad forward of one agent costs all agents that step and nobody another; weights and optimizers stay sound."""
    run, moved = tmp_path / "run", []

    def look(samples):
        lms = [t.cluster.local(role).scorer.lm for role in t.session.actors]
        moved.append([[p.detach().clone() for p in lm.parameters()] for lm in lms])
        return {}

    with trainer(run, tiny_model, metrics_callback=look) as t:
        assert t.session.actors
        break_forward(t.cluster.local("actor.1").scorer.lm, [], {0})
        t.train()
    steps = rows(run, "rl/loss/agent_1")
    assert [step["train/nonfinite_steps"] for step in steps] == [1, 1, 1]
    assert steps[0]["rl/loss/agent_1"] is None and all(math.isfinite(step["rl/loss/agent_1"]) for step in steps[1:])
    start, skipped, stepped = moved
    for i in range(2):
        assert all(torch.equal(a, b) for a, b in zip(start[i], skipped[i]))
        assert not any(torch.equal(a, b) for a, b in zip(skipped[i], stepped[i]))
        assert all(x.isfinite().all() for x in load_file(run / f"final/agent_{i}/model.safetensors").values())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_learned_reward_that_is_not_finite_teaches_nobody(tmp_path, tiny_model, monkeypatch, bad):
    """W13: it spoils its task's baseline, so every agent's step is dropped and counted."""
    real = RewardLearner.scores
    monkeypatch.setattr(RewardLearner, "scores", lambda *given: [bad, *real(*given)[1:]])
    run = tmp_path / "run"
    with trainer(run, tiny_model, args={"max_nonfinite_steps": 3}) as t:
        with pytest.raises(NonFiniteError, match=r"update 3 skipped on every agent"):
            t.train()
        start = load_file(tiny_model / "model.safetensors")
        for role in t.session.actors:
            assert all(torch.equal(start[n], p) for n, p in t.cluster.local(role).named_weights())
    assert [step["train/nonfinite_steps"] for step in rows(run, "rl/loss/agent_0")] == [1, 2, 3]


def test_a_reward_fit_that_stays_nonfinite_ends_the_run(tmp_path, tiny_model, monkeypatch):
    """W13: before any policy learns from it."""
    real = ScalarEngine.values
    monkeypatch.setattr(ScalarEngine, "values", lambda self, *given: [x * math.nan for x in real(self, *given)])
    run = tmp_path / "run"
    with (
        trainer(run, tiny_model, args={"max_nonfinite_steps": 2}) as t,
        pytest.raises(NonFiniteError, match=r"reward fit of round 1: 2 steps"),
    ):
        t.train()
    assert not rows(run, "rl/loss/agent_0") and not sampled(run)


def test_a_critic_that_stays_nonfinite_ends_the_run(tmp_path, tiny_model, monkeypatch):
    """W13: its values are finite, its gradients are not."""
    real = ScalarEngine.backward

    def spoiled(self, weights):
        return real(self, [x * math.inf for x in weights] if self.name == "critic" else weights)

    monkeypatch.setattr(ScalarEngine, "backward", spoiled)
    run = tmp_path / "run"
    args = {"rl_algorithm": "maac", "max_nonfinite_steps": 2, "rollout_buffer_size": 4}
    with trainer(run, tiny_model, args=args) as t, pytest.raises(NonFiniteError, match="critic"):
        t.train()


# --- texts that are too long
def test_overlong_joint_texts_lose_prompts_and_winner_and_loser_stay_apart(tmp_path, tiny_model, monkeypatch):
    """W14: every text of the fit and of policy learning is within the limit and ends as it did; the cuts are counted."""
    limit, fitted, scored = 150, [], []  # without prompts no text is longer
    step, values = RewardFit.step, RewardFit.values
    monkeypatch.setattr(RewardFit, "step", lambda self, batch: fitted.extend(batch) or step(self, batch))
    monkeypatch.setattr(RewardFit, "values", lambda self, r, *more: scored.extend(r) or values(self, r, *more))
    run, tokenizer = tmp_path / "run", tiny_tokenizer()
    with trainer(run, tiny_model, args={"reward_max_length": limit, "max_new_tokens": 5, "reward_eval_fraction": 0}) as t:
        t.train()
    pairs = json.loads((run / "preference_replay/iteration_0001.json").read_text())["pairs"]
    long = [max(len(tokenizer(reward_text(p["prompts"], p[side]))["input_ids"]) for p in pairs) for side in SIDES]
    assert min(long) > limit  # so there is something to cut
    assert fitted and len(fitted) == len(pairs) and all(w != x and max(len(w), len(x)) <= limit for w, x in fitted)
    kept = [tokenizer.decode(list(row)) for pair in fitted for row in pair]
    whole = [[f"Agent 1 response:\n{a}\n\n", f"Agent 2 response:\n{b}"] for a, b in (p[side] for p in pairs for side in SIDES)]
    assert all(any(first in k and k.endswith(last) for first, last in whole) for k in kept)
    assert scored and max(map(len, scored)) <= limit
    fit = rows(run, "reward/cut_texts")[0]
    assert fit["reward/cut_texts"] > 0 and fit["reward/cut_responses"] == 0


SIDES = ("winner_completions", "loser_completions")


def long_text(item):
    """One task's prompt does not leave room for its answer."""
    return item["prompt"] * (40 if "violin" in item["prompt"] else 1) + " Answer:"


def test_overlong_prompts_are_refused_or_dropped_or_cut_and_counted(tmp_path, tiny_model):
    """W14: never cut unasked, and no policy learns on a task that was dropped."""
    calls: list[int] = []
    with trainer(tmp_path / "a", tiny_model, formatters=long_text, reward_func=counted(calls)) as t:
        with pytest.raises(ConfigError, match=r"task 3, agent 0: the prompt has \d+ tokens, but only 120 leave room"):
            t.train()
        assert not calls
    for way, tasks in (("drop", {0, 1, 2, 4}), ("truncate_left", {0, 1, 2, 3, 4})):
        with trainer(tmp_path / way, tiny_model, formatters=long_text, args={"overlong_prompt": way}) as t:
            t.train()
        collected = rows(tmp_path / way, "collect/pairs")[0]
        found = [collected["collect/dropped_prompts"], collected["collect/truncated_prompts"]]
        assert found == ([1, 0] if way == "drop" else [0, 2])
        assert {item for item, _, _ in sampled(tmp_path / way)} == tasks
    pairs = json.loads((tmp_path / "truncate_left/preference_replay/iteration_0001.json").read_text())["pairs"]
    cut = [prompt for p in pairs if "violin" in p["prompts"][0] for prompt in p["prompts"]]
    assert cut and all(prompt.endswith(" Answer:") and len(tiny_tokenizer()(prompt)["input_ids"]) <= 121 for prompt in cut)


@pytest.mark.parametrize("case", ["reward model", "critic"])
def test_joint_texts_longer_than_a_model_has_positions_are_cut_or_refused(tmp_path, case):
    """W14: a text of all agents is longer than any agent's own, which fits."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 320,
        "n_positions": 140,
        "n_embd": 64,
        "n_layer": 1,
        "n_head": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path / "gpt2")
    tiny_tokenizer().save_pretrained(tmp_path / "gpt2")
    calls: list[int] = []
    own = {
        # Its texts have about 150 to 200 tokens.
        "reward model": {},
        # Its texts have about 200, of which no agent's prompt has more than 120.
        "critic": {"args": {"rl_algorithm": "maac", "reward_max_length": 130}, "formatters": lambda item: item["prompt"] * 6},
    }
    try:
        with trainer(tmp_path / "run", tmp_path / "gpt2", reward_func=counted(calls), **own[case]) as t:
            t.train()
    except ConfigError:
        assert not calls
    else:
        assert case == "critic" or rows(tmp_path / "run", "reward/cut_texts")[0]["reward/cut_texts"] > 0


# --- evaluations
def test_no_eval_samples_is_no_evaluation(tmp_path, tiny_model):
    """W12: the oracle scores what is collected, and nothing else."""
    calls: list[int] = []
    run = tmp_path / "run"
    args = {"eval_num_samples": 0, "eval_interval": 1}
    with trainer(run, tiny_model, args=args, reward_func=counted(calls)) as t:
        t.train()
        assert len(calls) == 5 * 4  # tasks × candidates
        assert t.evaluate()["eval/n"] == 0 and t.evaluations == []
        assert len(calls) == 5 * 4
    assert not rows(run, "eval/n") and all(json.loads(f.read_text()) == [] for f in (run / "samples").glob("eval_*.json"))
    # The same run with one sample evaluates: at the start of each of its three buffers and at the end.
    with trainer(tmp_path / "one", tiny_model, args=args | {"eval_num_samples": 1}, reward_func=counted(calls)) as t:
        t.train()
    assert len(calls) == 2 * 5 * 4 + 4 and [row["eval/n"] for row in rows(tmp_path / "one", "eval/n")] == [1] * 4


# --- devices
def test_maac_needs_no_critic_devices(tmp_path, tiny_model):
    """F10: a list of agent_devices says nothing of the one critic; what cannot work is one line before anything is sampled."""
    calls: list[int] = []
    args = {"rl_algorithm": "maac", "parallel_training": "mp", "agent_devices": ["cpu", "cpu"]}
    with trainer(tmp_path / "run", tiny_model, args=args, reward_func=counted(calls)) as t:
        t.train()
        assert t.layout.roles["critic"] == t.layout.roles["actor.0"]
    assert rows(tmp_path / "run", "value/loss/agent_0") and calls
    calls.clear()
    for devices in ({"agent_devices": ["cuda:0", "cuda:1"]}, {"critic_devices": ["cpu", "cpu"]}):
        with pytest.raises(ConfigError) as caught:
            trainer(tmp_path / "other", tiny_model, args=args | devices, reward_func=counted(calls))
        assert len(caught.value.problems) == 1 and next(iter(devices)) in str(caught.value)
    assert not calls and not (tmp_path / "other").exists()
