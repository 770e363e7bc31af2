"""MARLHF as a library, on a tiny model with transformers rollouts, many small runs in this process."""

from __future__ import annotations

import json
from pathlib import Path

import marlhf_runs
import pytest
import torch
from marlhf_runs import literal_ids, rows
from tasks_for_tests import items, letters, text
from tiny import tiny_lm, tiny_tokenizer

from comlrl_ds.config.errors import ConfigError
from comlrl_ds.preference.joint_text import reward_text
from comlrl_ds.trainers.preference import (
    JointRewardModel,
    MADPOConfig,
    MADPOTrainer,
    MARLHFConfig,
    MARLHFTrainer,
)

BACKENDS = ("magrpo", "mareinforce", "marloo", "maremax")


def trainer(folder: Path, model: Path, *, args=None, **arguments):
    """A trainer whose reward model sees the pairs three times."""
    return marlhf_runs.trainer(folder, model, args={"reward_num_train_epochs": 3} | (args or {}), **arguments)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_model):
    """A run of every backend with the same seed, each with a KL of weight 0 to look at."""
    folder = tmp_path_factory.mktemp("marlhf")
    for name in BACKENDS:
        args = {"rl_algorithm": name, "reference_kl_enabled": True, "reference_kl_coef": 0.0, "num_train_epochs": 2}
        with trainer(folder / name, tiny_model, args=args) as t:
            t.train()
    return folder


def test_the_backends_differ_on_the_same_rewards(trained):
    """W2: they start from the same samples and the same reward model, and only magrpo normalises by default."""
    first = {name: rows(trained / name, "rl/reward_spread")[0] for name in BACKENDS}
    rewards = {name: row["turn_1/reward_mean"] for name, row in first.items()}
    assert len(set(rewards.values())) == 1
    sizes = {name: row["rl/advantage_abs/agent_0"] for name, row in first.items()}
    assert len({round(size, 9) for size in sizes.values()}) == 4, sizes
    finals = {(trained / name / "final/agent_0/model.safetensors").read_bytes() for name in BACKENDS}
    assert len(finals) == 4


def test_the_kl_starts_at_zero_and_grows(trained):
    """W8: the anchor is the first policy."""
    kls = [row["turn_1/reference_kl_mean"] for row in rows(trained / "magrpo", "turn_1/reference_kl_mean")]
    assert len(kls) == 6 and abs(kls[0]) < 1e-9 and all(k > 1e-4 for k in kls[1:])


def test_the_saved_reward_model_orders_the_pairs_as_it_said(trained):
    """Loaded in plain torch, one text at a time; a language model without a head is refused."""
    run = trained / "magrpo"
    model = JointRewardModel.from_pretrained(str(run / "final/reward_model")).eval()
    pairs = json.loads((run / "preference_replay/iteration_0001.json").read_text())["pairs"]

    @torch.no_grad()
    def score(prompts, responses):
        ids = literal_ids(reward_text(prompts, responses))
        hidden = model.backbone(input_ids=torch.tensor([ids]))[0][0, -1]
        return float(model.head(hidden))

    margins: dict[str, list[float]] = {}
    for p in pairs:
        margin = score(p["prompts"], p["winner_completions"]) - score(p["prompts"], p["loser_completions"])
        margins.setdefault(p["prompts"][0], []).append(margin)
    fit = rows(run, "reward/accuracy")[0]
    assert fit["reward/pairs"] + fit["reward/eval_pairs"] == len(pairs)
    # One task of five was held out.
    said = [fit[f"reward/eval_{name}"] for name in ("pairs", "accuracy", "margin")]
    found = [[len(m), sum(x > 0 for x in m) / len(m), sum(m) / len(m)] for m in margins.values()]
    assert sum(said == pytest.approx(of_task, abs=1e-4) for of_task in found) == 1
    assert fit["reward/accuracy"] > 0.8 and fit["reward/loss"] < fit["reward/first_loss"]
    with pytest.raises(ConfigError, match="scalar_head"):
        JointRewardModel.from_pretrained(str(run / "final/agent_0"))


@pytest.mark.parametrize(("algorithm", "kind"), [("maac", "v"), ("maac", "q"), ("iac", "v"), ("iac", "q")])
def test_critics_give_the_baseline_and_learn(tmp_path, tiny_model, algorithm, kind):
    """A = ρ − V with V of the seeded start, by plain torch, in the first buffer; two tasks of two responses each."""
    from comlrl_ds.engines.loading import load_backbone
    from comlrl_ds.engines.scalar import ScalarModel
    from comlrl_ds.maths.seeds import seed_of
    from comlrl_ds.preference.joint_text import critic_text

    seen = []
    args = {
        "rl_algorithm": algorithm, "critic_type": kind, "num_generations": 2, "rollout_buffer_size": 4, "train_batch_size": 3,
        "advantage_normalization": False, "critic_learning_rate": 3e-4, "num_train_epochs": 3, "agent_learning_rate": 1e-6,
    }  # fmt: skip
    with trainer(
        tmp_path / "run", tiny_model, args=args, metrics_callback=lambda samples: seen.append(samples) or {"n": len(samples)}
    ) as t:  # fmt: skip
        t.train()
    run, tokenizer = tmp_path / "run", tiny_tokenizer()
    assert len(seen[0]) == 4 and rows(run, "rl/callback/n")[0]["rl/callback/n"] == 4
    backbone = load_backbone(str(tiny_model), dtype="float32", attn_implementation="sdpa", dropout=False)
    ids = lambda content: tokenizer(content)["input_ids"]  # noqa: E731

    @torch.no_grad()
    def value(critic, row):
        model = ScalarModel(backbone, head_seed=seed_of(5, "critic_head", critic))
        return float(model.head(backbone(input_ids=torch.tensor([list(row)]))[0][0, -1]))

    journal = [json.loads(x) for x in (run / "preference_replay/journal_0001.jsonl").read_text().splitlines()]
    sampled = {
        (x["item"], x["agent"], x["candidate"]): x["ids"] for x in journal if x.get("stream") == "policy.0"
    }  # fmt: skip
    for critic in range(1 if algorithm == "maac" else 2):
        sizes = []
        for n, sample in enumerate(seen[0]):
            item, g = divmod(n, 2)
            prompts = [text(items()[item])] * 2
            if algorithm == "maac":
                row = ids(critic_text(prompts, sample["completions"] if kind == "q" else None))
            else:
                row = ids(prompts[critic]) + (sampled[item, critic, g] if kind == "q" else [])
            sizes.append(abs(sample["reward"] - value(critic, row)))
        first = rows(run, "rl/advantage_abs/agent_0")[0]
        for agent in [0, 1] if algorithm == "maac" else [critic]:
            assert first[f"rl/advantage_abs/agent_{agent}"] == pytest.approx(sum(sizes) / 4, rel=1e-4)
        losses = [row[f"value/loss/agent_{critic}"] for row in rows(run, f"value/loss/agent_{critic}")]
        # 3 epochs of 3 buffers: 4, 4 and 2 responses, 3 a step. Beside a critic that says 0 it does better from epoch to epoch.
        left = []
        for epoch in range(3):
            own = sum(n * loss for n, loss in zip((3, 1, 3, 1, 2), losses[5 * epoch : 5 * epoch + 5], strict=True))
            nothing = sum(sample["reward"] ** 2 for buffer in seen[3 * epoch : 3 * epoch + 3] for sample in buffer)
            left.append(own / (0.6 * nothing))
        assert left[2] < left[0] and left[2] < 0.9
        name = "critic" if algorithm == "maac" else f"critic_{critic}"
        assert (run / "final" / name / "scalar_head.safetensors").exists()


def test_the_anchor_of_later_rounds_is_the_first_policy(tmp_path, tiny_model):
    args = {"num_iterations": 2, "reference_kl_enabled": True, "preference_pairs_per_sample": 2}
    with trainer(tmp_path / "run", tiny_model, rounds=True, args=args) as t:
        t.train()
    kls = [row["turn_1/reference_kl_mean"] for row in rows(tmp_path / "run", "turn_1/reference_kl_mean")]
    assert len(kls) == 6 and abs(kls[0]) < 1e-9 and kls[3] > 1e-4
    assert len(rows(tmp_path / "run", "reward/accuracy")) == 2


def test_the_newest_reward_model_judges_new_comparisons(tmp_path, tiny_model):
    """The task reward is asked until there is a reward model, and for evaluations."""
    calls = []

    def counted(a, b):
        calls.append((a[0], b[0]))
        return letters(a, b)

    args = {"num_iterations": 2, "preference_scoring_reward": "learned", "preference_pairs_per_sample": 2}
    with trainer(tmp_path / "run", tiny_model, rounds=True, args=args, reward_func=counted) as t:
        t.train()
        assert len(calls) == 5 * 2 * 4  # the first round's tasks × sides × candidates
        t.evaluate()
        assert len(calls) == 5 * 2 * 4 + 4
    first, second = (
        json.loads((tmp_path / f"run/preference_replay/iteration_000{n}.json").read_text())["pairs"] for n in (1, 2)
    )
    by_task = lambda p: letters([p["winner_completions"][0]], [p["winner_completions"][1]])[0]  # noqa: E731
    assert all(p["winner_reward"] == pytest.approx(by_task(p)) for p in first)
    assert second and not any(p["winner_reward"] == pytest.approx(by_task(p)) for p in second)
    assert all(p["raw_rewards"] == [p["winner_reward"], p["loser_reward"]] for p in second)


def test_long_texts_are_cut_and_counted(tmp_path, tiny_model):
    with trainer(tmp_path / "run", tiny_model, args={"reward_max_length": 150}) as t:
        t.train()
    assert rows(tmp_path / "run", "reward/accuracy")[0]["reward/cut_texts"] > 0


def test_a_limit_that_cuts_responses_is_said(tmp_path, tiny_model, capsys):
    with trainer(tmp_path / "run", tiny_model, args={"reward_max_length": 60}, verbose=True) as t:
        t.train()
    fit = rows(tmp_path / "run", "reward/accuracy")[0]
    said = capsys.readouterr().out.replace("\n", " ")
    assert fit["reward/cut_responses"] >= 2 * fit["reward/pairs"]
    assert f"{2 * fit['reward/pairs']} of the {2 * fit['reward/pairs']} joint texts have more than 60 tokens" in said
    assert "raise args.reward_max_length" in said


def test_what_cannot_work_is_refused_before_anything_is_sampled(tmp_path, tiny_model):
    """F9: model objects have no source to start a reward model from."""
    lms = [tiny_lm(60), tiny_lm(61)]
    with pytest.raises(ConfigError, match="reward_model_name"):
        trainer(tmp_path / "a", tiny_model, agent_model=None, agents=lms, tokenizer=tiny_tokenizer())
    with pytest.raises(ConfigError, match="reward_model_name: no folder"):
        trainer(tmp_path / "b", tiny_model, args={"reward_model_name": "./nowhere"})
    for args in ({}, {"rl_algorithm": "iac", "use_separate_critic": False}):
        with pytest.raises(ConfigError, match="critic_model: given, but"):
            trainer(tmp_path / "c", tiny_model, args=args, critic_model=str(tiny_model))
    with pytest.raises(ConfigError, match="critics: 1 for 2 critics of iac"):
        trainer(tmp_path / "c", tiny_model, args={"rl_algorithm": "iac"}, critics=[str(tiny_model)])
    with pytest.raises(ConfigError, match="MARLHFConfig"):
        MADPOTrainer(agent_model=str(tiny_model), args=MARLHFConfig(), reward_func=letters, train_dataset=items())
    with pytest.raises(ConfigError, match="MADPOConfig"):
        MARLHFTrainer(agent_model=str(tiny_model), args=MADPOConfig(), reward_func=letters, train_dataset=items())


def test_a_frozen_reward_backbone_learns_by_its_head_alone(tmp_path, tiny_model):
    from safetensors.torch import load_file

    with trainer(tmp_path / "run", tiny_model, args={"reward_freeze_backbone": True}) as t:
        t.train()
    start = load_file(tiny_model / "model.safetensors")
    kept = load_file(tmp_path / "run/final/reward_model/model.safetensors")
    assert kept and all(torch.equal(kept[n], start[n if n in start else f"model.{n}"]) for n in kept)
    fit = rows(tmp_path / "run", "reward/accuracy")[0]
    assert fit["reward/loss"] != fit["reward/first_loss"]
