"""A trainer's policies while its engines come and go: after its `with` block, beside another trainer, after an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from marlhf_runs import scalar
from marlhf_runs import trainer as marlhf
from safetensors.torch import load_file
from tasks_for_tests import items, letters, text

from comlrl_ds.cluster import call
from comlrl_ds.engines.engine import PolicyEngine
from comlrl_ds.engines.scalar import ScalarEngine
from comlrl_ds.preference.oracle import OracleError
from comlrl_ds.rollout.base import Sampling
from comlrl_ds.trainers.preference import MADPOConfig, MADPOTrainer
from comlrl_ds.trainers.preference.policy_state import PoliciesLostError

BASE = {
    "num_agents": 2, "preference_num_candidates": 4, "preference_pairs_per_sample": 2, "max_new_tokens": 8, "temperature": 1.0,
    "top_p": 1.0, "top_k": None, "num_train_epochs": 1, "train_batch_size": 4, "agent_learning_rate": 1e-2, "eval_interval": 0,
    "eval_num_samples": 4, "max_grad_norm": None,
}  # fmt: skip
SAMPLING = Sampling(1.0, 1.0, None)
ROWS = [[5, 6, 7, 8, 9, 10], [300, 2, 17]]


def trainer(folder: Path, model: Path, *, args=None, **arguments) -> MADPOTrainer:
    given = {
        "agent_model": str(model), "train_dataset": items()[:4], "eval_dataset": items(), "reward_func": letters,
        "formatters": text, "run_dir": folder, "seed": 5, "verbose": False, "model_config": {"dtype": "float32"},
        "rollout": {"backend": "transformers", "max_model_len": 128},
    }  # fmt: skip
    return MADPOTrainer(args=MADPOConfig(**(BASE | (args or {}))), **(given | arguments))


def weights(folder: Path, file: str = "model.safetensors") -> dict[str, torch.Tensor]:
    """Of both agents in a folder that holds them."""
    return {f"{i}.{n}": t for i in (0, 1) for n, t in load_file(folder / f"agent_{i}" / file).items()}


def live(t) -> dict[str, torch.Tensor]:
    """What the actors compute with."""
    engines = [t.cluster.local(role) for role in t.session.actors]
    return {f"{i}.{n}": w.detach().clone() for i, engine in enumerate(engines) for n, w in engine.named_weights()}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return bool(wanted) and wanted.keys() <= found.keys() and all(torch.equal(found[n], w) for n, w in wanted.items())


def reward(t) -> float:
    return t.evaluate()["eval/turn_1/reward_mean"]


def logprobs(t, method, agent: int = 0) -> list[list[float]]:
    role = t.session.actors[agent]
    return t.cluster.run({role: call(method, ROWS)})[role]


# --- after the block
@pytest.fixture(scope="module")
def ended(tmp_path_factory, tiny_model):
    """(folder, a trainer whose `with` block has ended, its reward before and after training)"""
    folder = tmp_path_factory.mktemp("ended")
    with trainer(folder / "run", tiny_model) as t:
        before = reward(t)
        t.train()
        after = reward(t)
        trained = live(t)
    return folder, t, before, after, trained


def test_the_trained_policies_are_saved_and_evaluated_after_the_block(ended, tiny_model):
    folder, t, before, after, trained = ended
    assert t.cluster.local("actor.0") is None and t.cluster.tenant is None
    t.save_model(folder / "saved")
    assert same(weights(folder / "saved"), trained) and (folder / "saved/agent_1/tokenizer.json").is_file()
    assert reward(t) == after != before
    assert same(live(t), trained)
    assert not (folder / "run/kept").exists()  # final/ has them
    t.close()


def test_a_resumed_run_that_is_complete_has_the_policies_of_its_end(ended, tiny_model):
    folder, first, _, after, trained = ended
    with trainer(folder / "run", tiny_model, resume="auto") as t:
        t.train()
        t.save_model(folder / "adopted")
        assert same(weights(folder / "adopted"), trained) and reward(t) == after
        assert t.reporter.updates == first.reporter.updates
    first.save_model(folder / "still")  # what was adopted is still the first trainer's, too
    assert same(weights(folder / "still"), trained)


def test_what_was_learned_beyond_the_run_is_kept_and_learned_from(tmp_path, tiny_model, capsys):
    """An interrupted run has no final/, one that learns on has an older one: the version decides, not the name."""
    with trainer(tmp_path / "run", tiny_model, verbose=True) as t:
        pairs = t.collect_preferences(SAMPLING).pairs
        t.train_on_pairs(pairs)
        once, value = live(t), reward(t)
        t.close()
        assert same(weights(tmp_path / "run/kept"), once) and reward(t) == value and same(live(t), once)
        t.save_model(tmp_path / "run/final")
        t.train_on_pairs(pairs)
        twice, value = live(t), reward(t)
    assert not same(twice, once)
    t.save_model(tmp_path / "saved")
    assert same(weights(tmp_path / "saved"), twice) and same(weights(tmp_path / "run/final"), once) and reward(t) == value
    t.close()
    assert "the policies after 4 steps are kept in" in capsys.readouterr().out


def test_an_adapter_is_kept_and_its_reference_stays_the_start(tmp_path, tiny_model):
    with trainer(tmp_path / "run", tiny_model, lora={"r": 4, "lora_alpha": 16}) as t:
        start = logprobs(t, PolicyEngine.token_logprobs)
        t.train()
        learned, value = logprobs(t, PolicyEngine.token_logprobs), reward(t)
        t.close()
        assert reward(t) == value
        assert logprobs(t, PolicyEngine.token_logprobs) == learned != start
        groups = [(row[:1], [row[1:]]) for row in ROWS]
        role = t.session.actors[0]
        (anchor,) = t.cluster.run({role: call(PolicyEngine.anchor_logprobs, groups)}).values()
        assert [x for (row,) in anchor for x in row] == pytest.approx([x for row in start for x in row], abs=1e-5)
    t.save_model(tmp_path / "saved")
    name = "adapter_model.safetensors"
    assert same(weights(tmp_path / "saved", name), weights(tmp_path / "run/final", name))


def test_critics_and_the_reward_model_are_kept(tmp_path, tiny_model):
    args = {"rl_algorithm": "maac", "rollout_buffer_size": 8, "critic_learning_rate": 1e-2, "critic_value_head_hidden_dim": 6}
    with marlhf(tmp_path / "run", tiny_model, args=args) as t:
        t.train()
        said = {role: t.cluster.local(role).values(ROWS) for role in ("critic", "reward_model")}
    assert said["critic"] == pytest.approx(scalar(tmp_path / "run/final/critic", ROWS), abs=1e-4)
    with t:
        t._critics()
        t._rewards().start(t.session.kept_of("reward_model"))
        for role in ("critic", "reward_model"):
            assert t.cluster.run({role: call(ScalarEngine.values, ROWS)})[role] == said[role]
        assert said["critic"] != pytest.approx(said["reward_model"], abs=1e-3)
    t.save_model(tmp_path / "saved")
    for part in ("critic", "reward_model", "agent_0"):
        names = {f.name for f in (tmp_path / "run/final" / part).iterdir()}
        assert {f.name for f in (tmp_path / "saved" / part).iterdir()} == names
        for name in names:
            assert (tmp_path / "saved" / part / name).read_bytes() == (tmp_path / "run/final" / part / name).read_bytes()


def test_value_heads_are_kept(tmp_path, tiny_model):
    args = {"rl_algorithm": "iac", "use_separate_critic": False, "value_head_hidden_dim": 8, "rollout_buffer_size": 8}
    with marlhf(tmp_path / "run", tiny_model, args=args) as t:
        start = logprobs(t, PolicyEngine.values, 1)
        t.train()
        said = logprobs(t, PolicyEngine.values, 1)
        t.close()
        assert logprobs(t, PolicyEngine.values, 1) == said != start


def test_what_cannot_be_had_is_refused_with_the_reason(tmp_path, tiny_model, capsys):
    with pytest.raises(ZeroDivisionError), trainer(tmp_path / "error", tiny_model) as t:
        t.train_on_pairs(t.collect_preferences(SAMPLING).pairs)
        _ = 1 / 0
    for use in (t.evaluate, lambda: t.save_model(tmp_path / "saved"), t.train):
        with pytest.raises(PoliciesLostError, match=r"an exception ended its `with` block \(ZeroDivisionError"):
            use()
    with trainer(tmp_path / "full", tiny_model, verbose=True) as t:
        t.train_on_pairs(t.collect_preferences(SAMPLING).pairs)
        (tmp_path / "full/.kept.tmp").write_text("in the way")
    assert "the policies could not be kept: NotADirectoryError" in capsys.readouterr().out
    with pytest.raises(PoliciesLostError, match=r"could not be kept at close: NotADirectoryError"):
        t.save_model(tmp_path / "saved")
    with trainer(tmp_path / "gone", tiny_model) as t:
        t.train()
    (tmp_path / "gone/final").rename(tmp_path / "gone/moved")
    with pytest.raises(PoliciesLostError, match=r"final'.* was removed or overwritten"):
        t.evaluate()
    assert not (tmp_path / "saved").exists() and t.cluster.tenant is None


# --- beside another trainer
def test_an_idle_trainer_gives_its_engines_to_the_next(tmp_path, tiny_model, capsys):
    one = trainer(tmp_path / "one", tiny_model)
    one.train_on_pairs(one.collect_preferences(SAMPLING).pairs)
    trained, value = live(one), reward(one)
    two = trainer(tmp_path / "two", tiny_model, seed=6, verbose=True)
    two.train()
    said = f"of '{tmp_path / 'one'}' was idle and has given its engines up; its policies are in {tmp_path / 'one/kept'}"
    assert capsys.readouterr().out.count(said) == 1
    other = live(two)
    assert reward(one) == value and same(live(one), trained)  # takes them back
    one.save_model(tmp_path / "saved")
    assert same(weights(tmp_path / "saved"), trained)
    two.save_model(tmp_path / "others")
    assert same(weights(tmp_path / "others"), other) and not same(other, trained)
    one.close()
    two.close()


def test_a_trainer_at_work_is_not_interrupted(tmp_path, tiny_model):
    refused = []
    other = trainer(tmp_path / "other", tiny_model)

    def asks_another(a, b):
        if not refused:
            with pytest.raises(RuntimeError, match=r"the madpo trainer of '.*run' is inside its train\(\)") as error:
                other.evaluate()
            refused.append(error.value)
        return letters(a, b)

    with trainer(tmp_path / "run", tiny_model, reward_func=asks_another) as t:
        t.train()
        trained = live(t)
    assert refused and same(weights(tmp_path / "run/final"), trained)
    assert reward(other) >= 0
    other.close()


def test_a_failed_train_leaves_the_trainer_idle_and_continues_when_it_is_called_again(tmp_path, tiny_model, capsys):
    """As in a notebook: the cell fails, another trainer is tried, the reward function is mended, the cell is run again."""
    broken = [True]

    def oracle(a, b):
        if broken[0]:
            raise KeyError("not yet")
        return letters(a, b)

    failed = trainer(tmp_path / "failed", tiny_model, reward_func=oracle, args={"collection_chunk_items": 2}, verbose=True)
    with pytest.raises(OracleError, match="not yet"):
        failed.train()
    with pytest.raises(OracleError, match="not yet"):
        failed.train()  # nobody has closed it, and its engines are new
    with trainer(tmp_path / "other", tiny_model) as t:
        t.train()
    broken[0] = False
    failed.train()
    failed.close()
    assert "train() continues where it stopped, after update 0 in round 1" in capsys.readouterr().out
    assert same(weights(tmp_path / "failed/final"), weights(tmp_path / "other/final"))
    journal = (tmp_path / "failed/preference_replay/journal_0001.jsonl").read_text().splitlines()
    ids = [json.loads(x) for x in journal if '"ids"' in x]
    assert len(ids) == 4 * 2 * 4 == len({(x["item"], x["agent"], x["candidate"]) for x in ids})


def test_engines_that_cannot_start_leave_room_for_the_next_trainer(tmp_path, tiny_model, monkeypatch):
    from comlrl_ds.rollout import transformers_rollout

    def broken(self, *arguments, **keywords):
        raise OSError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(transformers_rollout.TransformersRollout, "__init__", broken)
        bad = trainer(tmp_path / "bad", tiny_model)
        with pytest.raises(OSError, match="no room"):
            bad.evaluate()
    with trainer(tmp_path / "good", tiny_model) as t:
        assert reward(t) == reward(t)
