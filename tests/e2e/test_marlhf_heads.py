"""Value heads on actors and importance ratios through the trainer; their maths is tested in tests/dist/test_groups.py."""

from __future__ import annotations

import pytest
from marlhf_runs import rows, trainer
from safetensors.torch import load_file
from tasks_for_tests import items
from tiny import tiny_lm
from transformers import AutoModelForCausalLM

HEADS = {
    "rl_algorithm": "iac", "use_separate_critic": False, "value_head_hidden_dim": 8, "rollout_buffer_size": 8,
    "train_batch_size": 4, "num_train_epochs": 2,
}  # fmt: skip


@pytest.mark.parametrize("critic_type", ["v", "q"])
def test_actors_are_their_own_critics(tmp_path, tiny_model, critic_type):
    """No critic is loaded; heads learn, and are saved beside the weights, which load in transformers as ever."""
    with trainer(tmp_path / "run", tiny_model, args=HEADS | {"critic_type": critic_type}) as t:
        t.train()
        assert t.session.others == ("reward_model",)
    steps = rows(tmp_path / "run", "value/loss/agent_1")
    assert len(steps) == 2 * (2 + 2 + 1) and all(0 < row["value/loss/agent_0"] < 1e3 for row in steps)
    assert len({row["value/mean/agent_0"] for row in steps}) > 5  # they move
    for agent in range(2):
        folder = tmp_path / f"run/final/agent_{agent}"
        head = load_file(folder / "value_head/scalar_head.safetensors")
        assert {name: tuple(x.shape) for name, x in head.items()} == {
            "0.weight": (8, 64), "0.bias": (8,), "2.weight": (1, 8), "2.bias": (1,),
        }  # fmt: skip
        assert head["2.bias"].abs().item() > 0  # started at 0
        _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]


def test_importance_ratios_correct_later_steps_on_a_buffer(tmp_path, tiny_model):
    """In fp32 the engine agrees with the trainer until the first step; from then on it is another policy that sampled."""
    gaps, ends = {}, {}
    for kind in ("none", "truncated"):
        args = {"rl_algorithm": "mareinforce", "rollout_buffer_size": 4, "train_batch_size": 2, "importance_correction": kind}
        with trainer(tmp_path / kind, tiny_model, args=args) as t:
            t.train()
        gaps[kind] = [row["rl/logprob_gap/agent_0"] for row in rows(tmp_path / kind, "rl/logprob_gap/agent_0")]
        ends[kind] = load_file(tmp_path / kind / "final/agent_0/model.safetensors")
    assert gaps["none"][0] == gaps["truncated"][0] < 1e-4 < gaps["none"][1]
    assert any((ends["none"][n] != x).any() for n, x in ends["truncated"].items())


def test_a_schedule_holds_for_critics_and_reward_models_too(tmp_path, tiny_model):
    schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 1, "warmup_max_lr": "auto"}}
    content = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 100_000}, "scheduler": schedule}
    args = {"rl_algorithm": "maac", "rollout_buffer_size": 8, "train_batch_size": 4, "critic_learning_rate": 3e-3}
    with trainer(tmp_path / "run", tiny_model, args=args, deepspeed=content) as t:
        t.train()
        share = t.cluster.local("actor.0").learning_rate() / 1e-3
        assert 0 < share < 1 and t.cluster.local("critic").learning_rate() / 3e-3 == pytest.approx(share)
        assert t.cluster.local("reward_model").deepspeed.lr_scheduler is not None


def test_a_model_object_may_have_a_head(tmp_path, tiny_model):
    from tiny import tiny_tokenizer

    lms = [tiny_lm(60), tiny_lm(61)]
    given = {"agent_model": None, "agents": lms, "tokenizer": tiny_tokenizer(), "train_dataset": items()[:2]}
    with trainer(tmp_path / "run", tiny_model, args=HEADS | {"reward_model_name": str(tiny_model)}, **given) as t:
        t.train()
    assert (tmp_path / "run/final/agent_1/value_head/scalar_head.safetensors").is_file()
