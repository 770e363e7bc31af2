"""Critics and reward models of MARLHF: the head that was asked for, their life over rounds, and what is saved of them."""

from __future__ import annotations

import pytest
import torch
from marlhf_runs import ids_of, literal_ids, rows, scalar, trainer
from safetensors.torch import load_file
from tasks_for_tests import items, text

from comlrl_ds.cluster import call
from comlrl_ds.engines.scalar import ScalarEngine
from comlrl_ds.preference.joint_text import critic_text, reward_text
from comlrl_ds.trainers.preference import MARLHFIterTrainer

CRITIC = {"num_generations": 2, "rollout_buffer_size": 4, "critic_learning_rate": 1e-2}


def values(trainer, role, texts):
    """What a live engine says."""
    return trainer.cluster.run({role: call(ScalarEngine.values, texts)})[role]


# --- heads
@pytest.mark.parametrize(("algorithm", "critics"), [("maac", ["critic"]), ("iac", ["critic_0", "critic_1"])])
def test_the_hidden_layer_reaches_the_critics_and_what_is_saved_says_the_same(tmp_path, tiny_model, algorithm, critics):
    """W9, W11: w·tanh(A z + a) + b, from the files of final/ and of save_model alone; the reward model lies beside them."""
    args = CRITIC | {"rl_algorithm": algorithm, "critic_value_head_hidden_dim": 7}
    run, seen = tmp_path / "run", []
    with trainer(run, tiny_model, args=args, metrics_callback=lambda samples: seen.extend(samples) or {}) as t:
        t.train()
        t.save_model(tmp_path / "saved")
        prompts = [[text(item)] * 2 for item in items()[:5]]
        texts = [ids_of(critic_text(p) if algorithm == "maac" else p[0]) for p in prompts]
        live = {name: values(t, name.replace("_", "."), texts) for name in critics}
        for folder in (run / "final", tmp_path / "saved"):
            for name in critics:
                head = load_file(folder / name / "scalar_head.safetensors")
                assert {n: list(x.shape) for n, x in head.items()} == {
                    "0.weight": [7, 64], "0.bias": [7], "2.weight": [1, 7], "2.bias": [1],
                }  # fmt: skip
                assert scalar(folder / name, texts) == pytest.approx(live[name], abs=1e-4)
                assert (folder / name / "tokenizer.json").exists()
    assert len({tuple(v) for v in live.values()}) == len(critics)  # each has weights of its own
    # The reward model of final/ gives every reward that was learned from.
    joint = [literal_ids(reward_text([text(s["item"])] * 2, s["completions"])) for s in seen]
    assert len(joint) == 10 and scalar(run / "final/reward_model", joint) == pytest.approx(
        [s["reward"] for s in seen], abs=1e-4
    )


# --- rounds
class Watched(MARLHFIterTrainer):
    """Notes its critics at the end of each round."""

    ends: list

    def _end_round(self, progress):
        self.ends.append(critics_of(self))
        super()._end_round(progress)


def critics_of(trainer):
    """By role: its weights, and the state of its optimizer."""
    found = {}
    for role in (r for r in trainer.session.others if r.startswith("critic")):
        engine = trainer.cluster.local(role)
        states = engine.deepspeed.optimizer.optimizer.state.values()
        moments = [x.detach().clone() for s in states for x in (s["exp_avg"], s["exp_avg_sq"])]
        steps = {int(s["step"]) for s in states}
        found[role] = ({n: x.clone() for n, x in engine.named_weights()}, moments, steps)
    return found


@pytest.mark.parametrize(("algorithm", "roles"), [("maac", ["critic"]), ("iac", ["critic.0", "critic.1"])])
def test_critics_and_anchor_remain_over_rounds(tmp_path, tiny_model, algorithm, roles):
    """W10: round 2 begins with the weights and the optimizers that round 1 left. W8: and with the anchor of round 1."""
    buffers = []
    args = CRITIC | {
        "rl_algorithm": algorithm, "num_iterations": 2, "num_train_epochs": 1, "preference_pairs_per_sample": 2,
        "reference_kl_enabled": True,
    }  # fmt: skip
    run = tmp_path / "run"
    look = lambda samples: buffers.append(critics_of(t)) or {}  # noqa: E731
    with trainer(run, tiny_model, kind=Watched, rounds=True, args=args, metrics_callback=look) as t:
        t.ends = []
        t.train()
        ends = t.ends
    assert len(buffers) == 6 and len(ends) == 2  # two tasks of two responses make a buffer: three in a round
    for role in roles:
        start, left, taken, last = buffers[0][role], ends[0][role], buffers[3][role], ends[1][role]
        assert start[2] == set() and left[2] == taken[2] == {3} and last[2] == {6}
        assert all(torch.equal(left[0][n], taken[0][n]) for n in left[0])
        assert len(left[1]) > 0 and all(torch.equal(a, b) for a, b in zip(left[1], taken[1], strict=True))
        assert not any(torch.equal(start[0][n], taken[0][n]) for n in start[0] if "weight" in n)
    kls = [row["turn_1/reference_kl_mean"] for row in rows(run, "turn_1/reference_kl_mean")]
    assert abs(kls[0]) < 1e-9 and all(k > 1e-4 for k in kls[1:])
