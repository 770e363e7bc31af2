"""Every iterative example on tiny models, in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from messages_server import messages_server
from walk_examples import EXAMPLES, NAMES, ONE_SHOT, ROUNDS, walk

KEY = "sk-planted-0123456789"


def metrics(run: Path) -> list[dict]:
    """Of each round what was logged under iter/."""
    rounds: list[dict] = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = {k: v for k, v in json.loads(line).items() if k.startswith("iter/")}
        if "iter/current_iteration" in row:
            rounds.append({})
        if row:
            rounds[-1] |= row
    return rounds


@pytest.fixture(scope="module")
def walked(tmp_path_factory, tiny_model):
    """(folder of the runs, requests that the API got)"""
    from tiny import save_tiny_model

    folder = tmp_path_factory.mktemp("walk")
    other = save_tiny_model(folder / "other", 9, layers=1)  # another architecture
    with messages_server() as (url, requests), pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANTHROPIC_API_KEY", KEY)
        walk({"models": [str(tiny_model), str(other)], "folder": str(folder / "runs"), "url": url})
    return folder / "runs", requests


def test_every_iterative_example_is_walked():
    # The quickstart and the three ranks have tests of their own; the coding task wants a model that writes code.
    assert {f.stem for f in EXAMPLES.glob("*.yaml")} - {"quickstart", "three_ranks", "coding"} == set(NAMES)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ONE_SHOT])
def test_rounds_leave_their_files_and_metrics(walked, name):
    run = walked[0] / name
    rows = metrics(run)
    assert [r["iter/current_iteration"] for r in rows] == list(range(1, ROUNDS + 1))
    total = 0
    for number, row in enumerate(rows, 1):
        content = json.loads((run / "preference_replay" / f"iteration_{number:04d}.json").read_text())
        pairs = content["pairs"]
        assert content["iteration"] == number and content["num_pairs"] == len(pairs) == row["iter/current_preference_pairs"]
        total += len(pairs)
        assert row["iter/total_preference_pairs"] == total and 0 < len(pairs) <= 4 * 2
        assert 0 <= row["iter/win_rate"] <= 1
        assert row["iter/compared"] + row["iter/missing"] == 4 * 3  # indices of both sides
        for pair in pairs:  # either side may win
            assert {pair["target_raw_reward"], pair["comparator_raw_reward"]} == set(pair["raw_rewards"])
            assert len(pair["prompts"]) == (1 if name == "centralized" else 2)
        assert row["iter/drift/agent_0"] > (rows[number - 2]["iter/drift/agent_0"] if number > 1 else 0) * 0.5
    assert rows[0]["iter/drift/agent_0"] > 0
    weights = "adapter_model" if name == "iter_lora" else "model"
    assert (run / "final" / "agent_0" / f"{weights}.safetensors").exists()


def hashes(row: dict, what: str) -> list[int]:
    return [row[k] for k in sorted(row) if k.startswith(f"iter/{what}/")]


@pytest.mark.parametrize("name", ["iter_current", "iter_current_copy"])
def test_the_current_policies_are_compared_with_themselves(walked, name):
    rows = metrics(walked[0] / name)
    assert all(hashes(r, "weights") == hashes(r, "comparator_weights") for r in rows)
    assert len({tuple(hashes(r, "weights")) for r in rows}) == ROUNDS


def test_history_is_one_round_older(walked):
    """W3: with k = 1 the policies with which the round before began; the initial ones until there are any."""
    rows = metrics(walked[0] / "iter_history")
    current, compared = [hashes(r, "weights") for r in rows], [hashes(r, "comparator_weights") for r in rows]
    assert compared == [current[0], current[0], current[1]]
    assert all(a != b for a, b in zip(current[1], compared[1])) and all(a != b for a, b in zip(current[2], compared[2]))


def test_a_fixed_model_of_another_architecture_stays(walked):
    rows = metrics(walked[0] / "iter_model")
    first = hashes(rows[0], "comparator_weights")
    assert all(hashes(r, "comparator_weights") == first for r in rows) and first != hashes(rows[0], "weights")


def test_replay_modes_train_on_the_rounds_they_name(walked):
    def parts(name):
        return [{int(k[-4:]): v for k, v in r.items() if k.startswith("iter/replay_share/")} for r in metrics(walked[0] / name)]

    assert parts("iter_current") == [{1: 1.0}, {2: 1.0}, {3: 1.0}]
    assert set(parts("iter_current_copy")[2]) <= {2, 3}  # nearest_k, k = 2
    assert any(set(p) - {k} for k, p in enumerate(parts("iter_model"), 1))  # all_history
    for rows in (metrics(walked[0] / "iter_history"),):
        assert [r["iter/train_preference_pairs"] for r in rows] == [7] * ROUNDS


def test_the_api_is_asked_once_for_each_answer_and_its_key_is_in_no_file(walked):
    """F1: neither the key nor anything that holds it is written."""
    folder, requests = walked
    assert len(requests) == ROUNDS * 4 * 2 * 3  # rounds × tasks × agents × candidates
    assert all(r["headers"]["x-api-key"] == KEY and "Authorization" not in r["headers"] for r in requests)
    files = [f for f in (folder / "iter_api").rglob("*") if f.is_file()]
    assert len(files) > 10
    assert not [f for f in files if KEY.encode() in f.read_bytes()]
    for number in range(1, ROUNDS + 1):
        pairs = json.loads((folder / "iter_api/preference_replay" / f"iteration_{number:04d}.json").read_text())["pairs"]
        sides = [p["winner_completions"] + p["loser_completions"] for p in pairs]
        assert all(any(text.endswith("!") for text in texts) for texts in sides)  # all text blocks (F7)


def test_each_round_of_marlhf_fits_a_new_reward_model(walked):
    rows = [json.loads(x) for x in (walked[0] / "marlhf_iter/metrics.jsonl").read_text().splitlines()]
    fits = [r for r in rows if "reward/accuracy" in r]
    assert len(fits) == ROUNDS and all(r["reward/pairs"] + r["reward/eval_pairs"] > 0 for r in fits)
    # From the same start: the first steps of each begin at log 2, as the head hardly tells texts apart.
    assert all(abs(r["reward/first_loss"] - 0.69) < 0.5 for r in fits)


def test_a_joint_answer_is_taken_apart_or_kept_whole(walked):
    """A centralised comparator's halves are two responses; one actor's answer stays one."""
    pairs = json.loads((walked[0] / "iter_centralized/preference_replay/iteration_0001.json").read_text())["pairs"]
    assert all(len(p["winner_completions"]) == len(p["loser_completions"]) == 2 for p in pairs)
    pairs = json.loads((walked[0] / "centralized/preference_replay/iteration_0001.json").read_text())["pairs"]
    assert all(" | " in p["prompts"][0] and len(p["winner_completions"]) == 1 for p in pairs)
    distribution = json.loads((walked[0] / "iter_centralized/reward_distributions/iteration_0003.json").read_text())
    assert distribution["candidate"]["target"]["sample_count"] == 16 and len(distribution["bin_edges"]) == 17


# --- one thing at a time
ARGS = {
    "num_agents": 2, "num_iterations": 2, "preference_num_candidates": 4, "preference_pairs_per_sample": 1,
    "max_new_tokens": 8, "temperature": 1.0, "top_p": 1.0, "top_k": None, "train_batch_size": 3, "agent_learning_rate": 1e-3,
    "eval_interval": 0, "eval_num_samples": 4,
}  # fmt: skip


def trainer(folder, model, *, base=False, args=None, **arguments):
    from tasks_for_tests import items, letters, text

    from comlrl_ds.trainers.preference import MADPOConfig, MADPOIterConfig, MADPOIterTrainer, MADPOTrainer

    kind, config = (MADPOTrainer, MADPOConfig) if base else (MADPOIterTrainer, MADPOIterConfig)
    settings = ARGS | (args or {})
    if base:
        del settings["num_iterations"]
    given = {
        "agent_model": str(model), "train_dataset": items()[:4], "eval_dataset": items(), "reward_func": letters,
        "formatters": text, "run_dir": folder, "seed": 5, "verbose": False, "model_config": {"dtype": "float32"},
        "rollout": {"backend": "transformers", "max_model_len": 512},
    }  # fmt: skip
    return kind(args=config(**settings), **(given | arguments))


def target_samples(run: Path, round: int = 1) -> dict:
    lines = (json.loads(x) for x in (run / f"preference_replay/journal_{round:04d}.jsonl").read_text().splitlines())
    return {
        (x["item"], x["agent"], x["candidate"]): (x["ids"], x["seed"])
        for x in lines
        if x["kind"] == "completion" and x["stream"] == "target"
    }


def test_samples_do_not_depend_on_the_comparator_or_on_evaluation(tmp_path, tiny_model):
    """W15: streams never touch each other."""
    from tiny import save_tiny_model

    other = str(save_tiny_model(tmp_path / "other", 9, layers=1))
    runs = {
        "alone": {"base": True},
        "current": {},
        "model": {"args": {"comparator_policy": "model", "comparator_model_name": other, "comparator_num_candidates": 2}},
        "evaluated": {"args": {"eval_interval": 1}},
    }
    found = {}
    for name, settings in runs.items():
        with trainer(tmp_path / name, tiny_model, **settings) as t:
            t.train()
        found[name] = target_samples(tmp_path / name)
    assert len(found["alone"]) == 4 * 2 * 4
    assert all(samples == found["alone"] for samples in found.values())
    assert target_samples(tmp_path / "evaluated", 2) == target_samples(tmp_path / "current", 2)


def test_a_prompt_too_long_for_the_comparator_is_blamed_on_it_and_dropped_on_both_sides(tmp_path, tiny_model, capsys):
    from tiny import save_tiny_model

    from comlrl_ds.config.errors import ConfigError

    other = save_tiny_model(tmp_path / "other", 9, layers=1)
    config = other / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 100}))
    args = {"comparator_policy": "model", "comparator_model_name": str(other), "num_iterations": 1}
    long = lambda item: item["prompt"] * (8 if "violin" in item["prompt"] else 1)  # noqa: E731
    with trainer(tmp_path / "a", tiny_model, args=args, formatters=long, verbose=True) as t:
        with pytest.raises(ConfigError, match=r"task 3, comparator 0: the prompt has \d+ tokens, but only 92 leave room"):
            t.train()
        assert not (tmp_path / "a" / "preference_replay" / "journal_0001.jsonl").exists()
    with trainer(tmp_path / "b", tiny_model, args=args | {"overlong_prompt": "drop"}, formatters=long, verbose=True) as t:
        t.train()
    row = metrics(tmp_path / "b")[0]
    assert row["iter/comparator_dropped_prompts"] == 1 and row["iter/compared"] == 3 * 4
    assert "1 task dropped because a prompt is too long (task 3, comparator 0)" in capsys.readouterr().out
    assert {item for item, _, _ in target_samples(tmp_path / "b")} == {0, 1, 2}


def test_joint_answers_without_sections_are_counted_and_the_run_ends_well(tmp_path, tiny_model):
    """F8: an untrained model writes no tags."""
    with trainer(tmp_path / "run", tiny_model, args={"comparator_generation_mode": "centralized", "num_iterations": 1}) as t:
        t.train()
    row = metrics(tmp_path / "run")[0]
    assert row["iter/parse_failures"] == row["iter/missing"] == 4 * 4 and row["iter/compared"] == 0
    assert row["iter/current_preference_pairs"] == 0 and row["iter/win_rate"] is None
    assert not (tmp_path / "run" / "final").exists() and (tmp_path / "run" / "complete").exists()


def test_answers_of_an_api_are_paid_for_once(tmp_path, tiny_model):
    """F3: what a run that broke had been answered is in its journal."""
    from tasks_for_tests import letters

    from comlrl_ds.preference.oracle import OracleError

    calls = []

    def breaks(a, b):
        calls.append(a)
        if len(calls) == 9:
            raise RuntimeError("no more")
        return letters(a, b)

    with messages_server() as (url, requests):
        args = {
            "comparator_policy": "api", "comparator_api_format": "anthropic", "comparator_api_url": url,
            "comparator_api_model": "m", "comparator_num_candidates": 2, "comparator_api_key": KEY, "num_iterations": 1,
            "comparator_api_headers": {"x-extra": KEY + "-header"},
        }  # fmt: skip
        with pytest.raises(OracleError), trainer(tmp_path / "run", tiny_model, args=args, reward_func=breaks) as t:
            t.train()
        with trainer(tmp_path / "run", tiny_model, args=args, reward_func=letters, resume="auto") as t:
            t.train()
        assert len(requests) == 4 * 2 * 2  # tasks × agents × candidates
        assert len({json.dumps(r["body"]["messages"]) for r in requests}) == 4
    row = metrics(tmp_path / "run")[0]
    assert row["iter/api_known"] + row["iter/api_answers"] == 16 and row["iter/missing"] == 0
    assert not [f for f in (tmp_path / "run").rglob("*") if f.is_file() and KEY.encode() in f.read_bytes()]
    assert KEY not in repr(t.args) and KEY not in str(vars(t.args))


def test_an_earlier_runs_files_are_neither_read_nor_overwritten(tmp_path, tiny_model):
    """F14: a sub-folder of the run's own takes the new ones."""
    places = {"preference_replay_dir": str(tmp_path / "shared"), "policy_checkpoint_dir": str(tmp_path / "policies")}
    for name in ("first", "second"):
        with trainer(tmp_path / name, tiny_model, args=places | {"num_iterations": 1}, seed=len(name)) as t:
            t.train()
        if name == "first":
            before = {f: f.read_bytes() for f in (tmp_path / "shared").rglob("*") if f.is_file()}
            before |= {f: f.read_bytes() for f in (tmp_path / "policies").rglob("*") if f.is_file()}
    assert all(f.read_bytes() == content for f, content in before.items())
    own = tmp_path / "shared" / f"run_{(tmp_path / 'second' / 'run_id').read_text()}"
    assert (own / "iteration_0001.json").exists() and (tmp_path / "shared" / "iteration_0001.json").exists()
    policies = tmp_path / "policies" / own.name
    assert {f.name for f in policies.iterdir() if f.is_dir()} == {"initial", "iteration_0000"}
    assert {f.name for f in (policies / "initial").iterdir()} == {"agent_0", "agent_1"}


def test_checkpoints_as_the_peers_trainers_take_them(tmp_path, tiny_model):
    """checkpoint_dir and resume_from_checkpoint; more rounds go on where the run ended."""
    from comlrl_ds.config.errors import ConfigError

    with trainer(tmp_path / "run", tiny_model) as t:
        t.train(checkpoint_dir=tmp_path / "saved", checkpoint_total_limit=1)
        ended = t.reporter.updates
    assert [f.name for f in (tmp_path / "saved").iterdir()] == [f"checkpoint-{ended:06d}"]
    with trainer(tmp_path / "again", tiny_model) as t, pytest.raises(ConfigError, match="holds checkpoints"):
        t.train(checkpoint_dir=tmp_path / "saved")
    with trainer(None, tiny_model, args={"num_iterations": 3}) as t:  # no run_dir: the checkpoint's
        t.train(resume_from_checkpoint=tmp_path / "saved" / f"checkpoint-{ended:06d}", checkpoint_dir=tmp_path / "saved")
        assert t.run_dir.path == tmp_path / "run" and t.reporter.updates > ended
        t.save_checkpoint(tmp_path / "mine")
        updates = t.reporter.updates
    assert [r["iter/current_iteration"] for r in metrics(tmp_path / "run")] == [1, 2, 3]
    with trainer(tmp_path / "whole", tiny_model, args={"num_iterations": 3}) as t:
        t.train()
    name = "final/agent_0/model.safetensors"
    assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "run" / name).read_bytes()
    with trainer(tmp_path / "run", tiny_model, args={"num_iterations": 3}, resume="auto") as t:
        t.load_checkpoint(tmp_path / "mine")
        assert str(updates) in t._resume


def test_frozen_agents_stay_and_still_count(tmp_path, tiny_model):
    """The ablation `train_agents`: the other's margin is part of the joint one, its weights do not move."""
    from safetensors.torch import load_file

    with trainer(tmp_path / "run", tiny_model, args={"train_agents": [0], "num_iterations": 1}) as t:
        t.train()
    start = load_file(tiny_model / "model.safetensors")
    moved, kept = (load_file(tmp_path / "run/final" / f"agent_{i}" / "model.safetensors") for i in range(2))
    assert all((kept[n] == start[n]).all() for n in start) and any((moved[n] != start[n]).any() for n in start)
    steps = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines() if "train/loss" in x]
    for row in steps:
        assert row["train/joint_margin"] == pytest.approx(row["train/margin/agent_0"] + row["train/margin/agent_1"])
        assert row["train/margin/agent_1"] != 0 and row["train/grad_norm/agent_1"] == 0


@pytest.mark.slow
def test_three_rounds_of_the_demo_model_against_its_own_past(tmp_path, demo_model, root):
    """The `explain` task with real vLLM engines: weights of older rounds come from disk."""
    import os
    import subprocess
    import sys

    words = [
        f"run.dir={tmp_path / 'run'}", "args.num_iterations=3", "task.train_limit=3", "args.preference_num_candidates=2",
        "args.max_new_tokens=[10,14]", "args.eval_num_samples=2", "args.preference_replay_sample_size=2", "rollout.engines=1",
        "run.checkpoint_interval=0",
    ]  # fmt: skip
    file = root / "launch/examples/iter_history.yaml"
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "comlrl_ds", "train", str(file), *words], cwd=root, env=environment,
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    rows = metrics(tmp_path / "run")
    current, compared = [hashes(r, "weights") for r in rows], [hashes(r, "comparator_weights") for r in rows]
    assert len({tuple(h) for h in current}) == 3 and compared == [current[0], current[0], current[1]]
    assert "win rate over initial" in done.stdout and "initial" in done.stdout
    for i in range(2):
        assert (tmp_path / "run/final" / f"agent_{i}" / "model.safetensors").exists()
