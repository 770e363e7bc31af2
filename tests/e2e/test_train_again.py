"""Further calls of `train` on one trainer: they go on from the policies as they are, and number on what they write."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from marlhf_runs import logprob, plain, rows
from marlhf_runs import trainer as marlhf
from safetensors.torch import load_file
from tasks_for_tests import items, letters, text

from comlrl_ds.trainers.preference import MADPOConfig, MADPOIterConfig, MADPOIterTrainer, MADPOTrainer

SCHEDULE = {
    "type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 1, "warmup_max_lr": "auto"},
}  # fmt: skip
DEEPSPEED = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 100_000}, "scheduler": SCHEDULE}
BASE = {
    "num_agents": 2, "preference_num_candidates": 4, "preference_pairs_per_sample": 2, "max_new_tokens": 8, "temperature": 1.0,
    "top_p": 1.0, "top_k": None, "num_train_epochs": 2, "train_batch_size": 2, "agent_learning_rate": 3e-3, "eval_interval": 3,
    "eval_num_samples": 4, "max_grad_norm": None,
}  # fmt: skip
UPDATES = 8  # of a call: two epochs over two pairs of each of four tasks, two at a time


def trainer(folder: Path, model: Path, *, rounds: int = 0, args=None, **arguments):
    kind, config = (MADPOIterTrainer, MADPOIterConfig) if rounds else (MADPOTrainer, MADPOConfig)
    settings = BASE | ({"num_iterations": rounds} if rounds else {}) | (args or {})
    given = {
        "agent_model": str(model), "train_dataset": items()[:4], "eval_dataset": items(), "reward_func": letters,
        "formatters": text, "run_dir": folder, "seed": 5, "verbose": False, "model_config": {"dtype": "float32"},
        "rollout": {"backend": "transformers", "max_model_len": 128}, "deepspeed": DEEPSPEED, "checkpoint_total_limit": None,
    }  # fmt: skip
    return kind(args=config(**settings), **(given | arguments))


def final(run: Path) -> dict[str, torch.Tensor]:
    return {f"{i}.{n}": t for i in (0, 1) for n, t in load_file(run / f"final/agent_{i}/model.safetensors").items()}


def same(found, wanted) -> bool:
    return bool(wanted) and found.keys() == wanted.keys() and all(torch.equal(found[n], w) for n, w in wanted.items())


def metrics(run: Path) -> list[dict]:
    """Without what depends on the time that things took, or on when engines were started."""
    timed = ("time", "seconds", "_s", "overlap", "bytes")
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    found = [{k: v for k, v in row.items() if not any(part in k for part in timed)} for row in lines]
    return [row for row in found if len(row) > 2]


@pytest.fixture(scope="module")
def twice(tmp_path_factory, tiny_model):
    """(folder of a run of two calls, a copy of it after the first, what was printed)"""
    import contextlib
    import io

    folder, printed = tmp_path_factory.mktemp("twice"), io.StringIO()
    with trainer(folder / "run", tiny_model, verbose=True, checkpoint_every_updates=3) as t:
        t.display.console.file = printed
        t.train()
        shutil.copytree(folder / "run", folder / "once")
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder / "once/tensorboard")
        t.train()
    return folder / "run", folder / "once", printed.getvalue()


def test_files_of_the_first_call_stay_and_the_second_numbers_on(twice):
    run, once, printed = twice
    steps = rows(run, "train/loss")
    assert [row["update"] for row in steps] == list(range(1, 2 * UPDATES + 1))
    assert [row["env_step"] for row in steps] == [4 * k for k in range(1, 2 * UPDATES + 1)]
    kept = ("samples/*", "preference_replay/*", "checkpoints/*/manifest.json")
    before = [f.relative_to(once) for pattern in kept for f in once.glob(pattern)]
    assert len(before) > 8 and all((run / f).read_bytes() == (once / f).read_bytes() for f in before)
    assert (run / "metrics.jsonl").read_bytes().startswith((once / "metrics.jsonl").read_bytes())
    names = {f.name for f in (run / "preference_replay").iterdir()}
    assert {"iteration_0001.json", "iteration_0002.json", "journal_0001.jsonl", "journal_0002.jsonl"} <= names
    updates = sorted(int(f.name.split("-")[1]) for f in (run / "checkpoints").iterdir())
    assert updates == [3, 4, 6, 7, 11, 12, 14, 15][: len(updates)] or updates[0] < UPDATES < updates[-1]
    assert (
        printed.count("train() is called again: it continues from the policies as they are after update 8, with round 2") == 1
    )
    assert not same(final(run), final(once))


def test_the_second_call_begins_with_the_policies_of_the_first_on_pairs_of_its_own(twice):
    """The first loss by transformers alone, from the weights that the first call left."""
    run, once, _ = twice
    pairs = [json.loads((run / f"preference_replay/iteration_000{k}.json").read_text())["pairs"] for k in (1, 2)]
    assert pairs[0] != pairs[1]
    from tiny import tiny_tokenizer

    from comlrl_ds.maths.seeds import generator_of
    from comlrl_ds.preference.round_files import RoundFolder

    sampled = RoundFolder(run / "preference_replay", [tiny_tokenizer()] * 2).sampled(2)
    order = list(range(len(sampled)))
    generator_of(5, "order", 2, 0).shuffle(order)
    losses = []
    lms = [plain(once / f"final/agent_{i}") for i in range(2)]
    with torch.no_grad():
        for pair in (sampled[k] for k in order[:2]):
            margin = 0.0
            for lm, tokens in zip(lms, pair.tokens):
                sides = [logprob(lm, tokens.prompt, side[:-1]) for side in (tokens.winner, tokens.loser)]
                margin += float(sides[0] - sides[1])
            losses.append(-torch.nn.functional.logsigmoid(torch.tensor(0.1 * margin, dtype=torch.float64)).item())
    assert rows(run, "train/loss")[UPDATES]["train/loss"] == pytest.approx(sum(losses) / 2, abs=1e-5)


def test_schedules_begin_anew(twice):
    rates = [row["train/lr/agent_1"] for row in rows(twice[0], "train/lr/agent_1")]
    assert rates[UPDATES:] == pytest.approx(rates[:UPDATES]) and len(set(rates[:UPDATES])) > 5


def test_a_second_call_that_was_interrupted_ends_as_it_would_have(twice, tmp_path, tiny_model):
    """The script is started again: its first call finds the run complete, its second goes on from its own checkpoint."""
    run, once, _ = twice
    folder = shutil.copytree(run, tmp_path / "run")
    (folder / "complete").write_text("1")
    shutil.rmtree(folder / "final")
    shutil.copytree(once / "final", folder / "final")
    for checkpoint in (folder / "checkpoints").iterdir():
        if int(checkpoint.name.split("-")[1]) > UPDATES + 4:
            shutil.rmtree(checkpoint)
    with trainer(folder, tiny_model, resume="auto", checkpoint_every_updates=3) as t:
        t.train()
        assert t.reporter.updates == UPDATES
        t.train()
    assert same(final(folder), final(run)) and metrics(folder) == metrics(run)
    assert {f.name for f in (folder / "samples").iterdir()} == {f.name for f in (run / "samples").iterdir()}
    with trainer(folder, tiny_model, resume="auto") as t:
        t.train()
        t.train()  # both are complete
        t.save_model(tmp_path / "saved")
    assert metrics(folder) == metrics(run)
    assert (tmp_path / "saved/agent_0/model.safetensors").read_bytes() == (run / "final/agent_0/model.safetensors").read_bytes()


def test_a_second_call_in_another_process_begins_where_the_first_ended(twice, tmp_path, tiny_model):
    """With the same samples and first loss; rounds leave a checkpoint at their end, and so their optimizers, too."""
    run, once, _ = twice
    folder = shutil.copytree(once, tmp_path / "run")
    with trainer(folder, tiny_model, resume="auto") as t:
        t.train()
        t.train()
    name = "preference_replay/iteration_0002.json"
    assert (folder / name).read_bytes() == (run / name).read_bytes()
    losses = [rows(f, "train/loss")[UPDATES]["train/loss"] for f in (folder, run)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    with trainer(tmp_path / "rounds", tiny_model, rounds=1) as t:
        t.train()
        shutil.copytree(tmp_path / "rounds", tmp_path / "first")
        t.train()
    shutil.move(tmp_path / "rounds", tmp_path / "whole")
    shutil.move(tmp_path / "first", tmp_path / "rounds")
    with trainer(tmp_path / "rounds", tiny_model, rounds=1, resume="auto") as t:
        t.train()
        t.train()
    assert same(final(tmp_path / "rounds"), final(tmp_path / "whole"))
    assert metrics(tmp_path / "rounds") == metrics(tmp_path / "whole")


def test_a_call_that_is_told_to_resume_begins_no_further_one(twice, tmp_path, tiny_model):
    folder = shutil.copytree(twice[1], tmp_path / "run")
    with trainer(folder, tiny_model, resume="auto") as t:
        t.train()
        t.train(resume_from_checkpoint="auto")
        assert t.reporter.updates == UPDATES and t.cluster.local("actor.0") is None


def test_going_back_to_a_checkpoint_forgets_what_was_learned_since(tmp_path, tiny_model):
    """Also in the rollouts: the versions of the policies are counted anew, and engines held others of these numbers."""
    with trainer(tmp_path / "run", tiny_model, args={"eval_interval": 100}, checkpoint_every_updates=3) as t:
        t.train()
        ends, value = final(tmp_path / "run"), t.evaluate()["eval/turn_1/reward_mean"]
        t.train_on_pairs(t.round_folder.sampled(1))
        t.load_checkpoint(tmp_path / "run/checkpoints/checkpoint-000004")
        t.train()
        assert same(final(tmp_path / "run"), ends) and t.evaluate()["eval/turn_1/reward_mean"] == value
        assert [row["update"] for row in rows(tmp_path / "run", "train/loss")] == list(range(1, UPDATES + 1))


def test_rounds_are_numbered_on_and_compared_with_the_start(tmp_path, tiny_model):
    args = {"comparator_policy": "history", "keep_policy_checkpoints": True, "num_train_epochs": 1}
    with trainer(tmp_path / "run", tiny_model, rounds=2, args=args) as t:
        t.train()
        t.close()  # its engines start from what was kept
        t.train()
    run = tmp_path / "run"
    found = rows(run, "iter/current_iteration")
    assert [row["iter/current_iteration"] for row in found] == [1, 2, 3, 4] and (run / "complete").read_text() == "4"
    own = [row["iter/weights/agent_0"] for row in found]
    assert len(set(own)) == 4
    assert [row["iter/comparator_weights/agent_0"] for row in found] == [own[0], own[0], own[1], own[2]]
    assert {f.name for f in (run / "policy_checkpoints").glob("iter*")} == {f"iteration_000{k}" for k in range(4)}
    start, last = load_file(tiny_model / "model.safetensors"), load_file(run / "final/agent_0/model.safetensors")
    size = sum(float(w.double().square().sum()) for w in start.values())
    moved = sum(float((last[n].double() - w.double()).square().sum()) for n, w in start.items())
    drift = [row["iter/drift/agent_0"] for row in rows(run, "iter/drift/agent_0")]
    assert drift[-1] == pytest.approx((moved / size) ** 0.5, rel=1e-5) and len(drift) == 4


def test_marlhf_learns_on_with_its_critic(tmp_path, tiny_model):
    """The second call's critic is the first's, its KL is to the start, and its learning rates begin anew."""
    args = {
        "rl_algorithm": "maac", "rollout_buffer_size": 8, "train_batch_size": 4, "critic_learning_rate": 3e-3,
        "reference_kl_enabled": True, "agent_learning_rate": 1e-2,
    }  # fmt: skip
    with marlhf(tmp_path / "run", tiny_model, args=args, deepspeed=DEEPSPEED) as t:
        t.train()
        critic = t.cluster.local("critic")
        once = len(rows(tmp_path / "run", "rl/loss/agent_0"))
        t.train()
        assert t.cluster.local("critic") is critic
        share = t.cluster.local("actor.0").learning_rate() / 1e-2
        assert 0 < share < 1 and critic.learning_rate() / 3e-3 == pytest.approx(share)
    run = tmp_path / "run"
    rates = [row["train/lr/agent_0"] for row in rows(run, "train/lr/agent_0")]
    assert rates[once:] == pytest.approx(rates[:once]) and once > 3
    kl = [row["turn_1/reference_kl_mean"] for row in rows(run, "turn_1/reference_kl_mean")]
    assert abs(kl[0]) < 1e-6 and kl[len(kl) // 2] > 1e-3  # the second call begins away from the start
    assert (run / "complete").read_text() == "2"
