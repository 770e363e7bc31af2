"""What an interrupted run left on disk is used again where the very same thing would be asked for, and nowhere else."""

from __future__ import annotations

import json
import shutil

import pytest
from tasks_for_tests import items, letters, text
from tiny import tiny_tokenizer

from comlrl_ds.config.errors import ConfigError
from comlrl_ds.preference.oracle import OracleError
from comlrl_ds.preference.round_files import RoundFolder
from comlrl_ds.trainers.preference import MADPOConfig, MADPOTrainer

ARGS = {
    "num_agents": 2, "preference_num_candidates": 4, "preference_pairs_per_sample": 1, "max_new_tokens": 8, "temperature": 1.0,
    "top_p": 1.0, "top_k": None, "train_batch_size": 3, "agent_learning_rate": 1e-3, "eval_interval": 0,
}  # fmt: skip


def trainer(folder, model, *, args=None, **arguments) -> MADPOTrainer:
    given = {
        "agent_model": str(model), "train_dataset": items()[:4], "reward_func": letters, "formatters": text, "run_dir": folder,
        "seed": 5, "model_config": {"dtype": "float32"}, "rollout": {"backend": "transformers", "max_model_len": 512},
        "resume": "auto",
    }  # fmt: skip
    return MADPOTrainer(args=MADPOConfig(**(ARGS | (args or {}))), **(given | arguments))


def run(folder, model, **arguments) -> list[dict]:
    """The run's pairs, as its file of the round tells them."""
    with trainer(folder, model, **arguments) as t:
        t.train()
    return json.loads((folder / "preference_replay/iteration_0001.json").read_text())["pairs"]


def fails_late(first, second, batch_items):
    if "violin" in batch_items[0]["prompt"]:
        raise KeyError("not today")
    return letters(first, second)


def other_letters(first, second):
    return [-x for x in letters(first, second)]


def journaled(run) -> list[dict]:
    return [json.loads(line) for line in (run / "preference_replay/journal_0001.jsonl").read_text().splitlines()]


def completions(run, *items: int) -> int:
    """How many completions of these tasks are in the run's journal. Scoring runs beside sampling, so that an error of the
    reward function may come before the last completions of other tasks.
    """
    return sum(x["kind"] == "completion" and (not items or x["item"] in items) for x in journaled(run))


@pytest.fixture(scope="module")
def broken(tmp_path_factory, tiny_model):
    """A run that ended in the reward function at its fourth task, with all of that task and most of the others sampled."""
    folder = tmp_path_factory.mktemp("broken") / "run"
    with pytest.raises(OracleError, match="fails_late"), trainer(folder, tiny_model, reward_func=fails_late) as t:
        t.train()
    assert completions(folder, 3) == 2 * 4 and completions(folder, 0) > 0
    return folder


def volcano():
    return [{"prompt": "Topic: a volcano."}, *items()[1:4]]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"train_dataset": volcano()}, (0,)),
        ({"formatters": lambda item: item["prompt"] + " Say it:"}, (0, 1, 2, 3)),
        ({"reward_func": other_letters}, "scores by fails_late"),
    ],
    ids=["tasks", "formatters", "reward"],
)
def test_a_changed_run_is_the_run_that_it_would_be_from_the_start(tmp_path, tiny_model, broken, capsys, changed, says):
    changed = {"reward_func": letters} | changed
    alone = run(tmp_path / "alone", tiny_model, **changed)
    shutil.copytree(broken, tmp_path / "again")
    capsys.readouterr()
    assert run(tmp_path / "again", tiny_model, **changed) == alone
    printed = " ".join(capsys.readouterr().out.split())
    if isinstance(says, tuple):  # these tasks' prompts are others now
        says = f"{completions(broken, *says)} completions of the interrupted run are sampled anew"
    assert says in printed
    assert f"the reward function is {changed['reward_func'].__name__}" in printed


def test_what_stays_the_same_is_reused(tmp_path, tiny_model, broken, capsys):
    shutil.copytree(broken, tmp_path / "run")
    before = [x for x in journaled(tmp_path / "run") if x["kind"] == "completion"]
    assert run(tmp_path / "run", tiny_model) == run(tmp_path / "alone", tiny_model)
    assert "sampled anew" not in capsys.readouterr().out
    after = [x for x in journaled(tmp_path / "run") if x["kind"] == "completion"]
    assert after[: len(before)] == before and len(after) == 4 * 2 * 4


def test_finished_rounds_of_other_tasks_are_refused(tmp_path, tiny_model):
    """A round that is complete on disk is not mixed with what the settings say now."""
    with trainer(tmp_path / "run", tiny_model) as t:
        t.collect_preferences(t._sampling({}))
    for changed, named in (
        ({"train_dataset": volcano()}, "tasks"), ({"reward_func": other_letters}, "other_letters"),
    ):  # fmt: skip
        with trainer(tmp_path / "run", tiny_model, **changed) as t, pytest.raises(ConfigError, match=named):
            t.train()


def test_checkpoints_of_which_none_can_be_used_end_the_run(tmp_path, tiny_model):
    """Otherwise the run would train from the start, and say so in a line that nobody reads."""
    with trainer(tmp_path / "run", tiny_model) as t:
        t.collect_preferences(t._sampling({}))
        t.save_checkpoint(tmp_path / "run/checkpoints")
    (folder,) = (tmp_path / "run/checkpoints").glob("checkpoint-*")
    (lost, *_) = sorted(f for f in folder.rglob("*") if f.is_dir() and "actor" in f.name)
    shutil.rmtree(lost)
    with (
        trainer(tmp_path / "run", tiny_model) as t,
        pytest.raises(ConfigError, match=r"no checkpoint can be used: .*--resume never"),
    ):
        t.train()
    assert not (tmp_path / "run/final").exists()


def test_pairs_that_differ_in_no_scored_token_are_dropped_and_counted(tmp_path, tiny_model):
    """Answers of two tokens, of which the default rule scores the first only."""
    args = {
        "max_new_tokens": 2, "preference_num_candidates": 8, "preference_pairs_per_sample": None, "pair_selection": "all",
        "top_k": 2, "train_batch_size": 1, "num_train_epochs": 1, "logging_steps": 1,
    }  # fmt: skip
    every = run(tmp_path / "every", tiny_model, args=args | {"score_last_token": True})
    teaching = run(tmp_path / "run", tiny_model, args=args)
    pairs = RoundFolder(tmp_path / "every" / "preference_replay", [tiny_tokenizer()] * 2).sampled(1)
    same = sum(all(t.winner[:-1] == t.loser[:-1] for t in pair.tokens) for pair in pairs)
    assert 0 < same < len(every) and len(teaching) == len(every) - same
    rows = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    (collected,) = [r for r in rows if "collect/pairs" in r]
    assert collected["collect/pairs_without_gradient"] == same and collected["collect/pairs"] == len(teaching)
    steps = [r for r in rows if "train/loss" in r]
    assert len(steps) == len(teaching) and all(r["train/grad_norm/agent_0"] + r["train/grad_norm/agent_1"] > 0 for r in steps)
