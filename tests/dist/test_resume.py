"""A run that is killed, and started again by the same command, ends as one that was not: bit for bit, nothing sampled twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml

from launch import HERE, free_port
from test_launcher import PLACEMENT, environment, run_file

# Each start of one run ends at its point: mid-collection, before the first update, within an epoch, and before its checkpoint
# counts. The third start of an iterative run begins within the second round.
KILLS = ["collecting:70", "updating:5"]
ROUND_KILLS = ["collecting:70", "updating:1", "collecting:30", "updating:5", "saving:1"]


def start(folder: Path, file: Path, ranks: int, root: Path, kill: str = "", *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m"]
    if ranks > 1:
        command = ["deepspeed", "--num_gpus", str(ranks), "--master_port", str(free_port()), "--no_local_rank", "--module"]
    paths = os.pathsep.join([str(HERE), str(HERE.parent / "e2e")])
    variables = environment(root) | {"KILL_AT": kill, "PYTHONPATH": paths}
    return subprocess.run(
        [*command, "killing_entry", "train", str(file), f"run.dir={folder / 'run'}", *words], cwd=folder, env=variables,
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip


ITERATIVE = {
    "num_iterations": 2, "comparator_policy": "history", "preference_replay_mode": "lambda_decay",
    "preference_replay_lambda": 0.5, "num_train_epochs": 2, "eval_interval": 3,
}  # fmt: skip


MARLHF = {
    "reward_learning_rate": 1e-3, "reward_train_batch_size": 4, "rollout_buffer_size": 3, "num_train_epochs": 2,
    "preference_pairs_per_sample": 2, "reference_kl_enabled": True, "num_generations": 3,
}  # fmt: skip
# Right after the reward fit, and in the middle of policy learning.
LEARNING_KILLS = ["learning:1", "learning:5"]


def prepared(folder: Path, model: Path, ranks: int, trainer: str = "madpo") -> Path:
    sections = {"placement": PLACEMENT} if ranks > 1 else {}
    file = run_file(folder, model, **sections)
    content = yaml.safe_load(file.read_text())
    content["trainer"] = trainer
    content["args"] |= {"madpo_iter": ITERATIVE, "marlhf": MARLHF}.get(trainer, {"num_train_epochs": 3})
    file.write_text(yaml.safe_dump(content))
    return file


def end_state(folder: Path) -> tuple[dict[str, torch.Tensor], list[dict], dict[str, str]]:
    """(weights of all agents, metrics without times, pairs and samples)"""
    from safetensors.torch import load_file

    run = folder / "run"
    weights = {}
    for agent in ("agent_0", "agent_1"):
        weights |= {f"{agent}.{n}": t for n, t in load_file(run / "final" / agent / "model.safetensors").items()}
    timed = ("time", "seconds", "_s", "overlap", "bytes")
    rows = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = {k: v for k, v in json.loads(line).items() if not any(part in k for part in timed)}
        # Syncs depend on what engines held when the run was started.
        rows += [row] if len(row) > 2 else []
    files = [*run.glob("samples/*.json"), *run.glob("preference_replay/iteration_*.json")]
    return weights, rows, {f.name: f.read_text() for f in files}


def journal(folder: Path) -> Counter:
    files = sorted(folder.glob("run/preference_replay/journal_*.jsonl"))
    lines = [json.loads(x) for file in files for x in file.read_text().splitlines()]
    keys = ("kind", "stream", "round", "item", "agent", "candidate")
    return Counter(tuple(x.get(k) for k in keys) for x in lines)


def assert_same_end(one: Path, other: Path) -> None:
    (weights, rows, files), (others, other_rows, other_files) = end_state(one), end_state(other)
    assert weights.keys() == others.keys() and all(torch.equal(weights[n], others[n]) for n in weights)
    assert files == other_files
    assert rows == other_rows
    # Every completion and score once: nothing was sampled, or scored, again.
    assert journal(one) == journal(other) and set(journal(other).values()) == {1}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tiny_model, root):
    """The uninterrupted run, by number of ranks and trainer."""
    made: dict[tuple[int, str], Path] = {}

    def get(ranks: int, trainer: str = "madpo") -> Path:
        if (ranks, trainer) not in made:
            folder = made[ranks, trainer] = tmp_path_factory.mktemp(f"whole{ranks}{trainer}")
            done = start(folder, prepared(folder, tiny_model, ranks, trainer), ranks, root)
            assert done.returncode == 0, done.stderr[-3000:]
        return made[ranks, trainer]

    return get


def test_a_killed_process_goes_on(whole, tmp_path, tiny_model, root):
    file = prepared(tmp_path, tiny_model, 1)
    for kill in KILLS:
        assert start(tmp_path, file, 1, root, kill).returncode == -9, kill
    done = start(tmp_path, file, 1, root)
    assert done.returncode == 0 and "going on from update 3 of 9" in done.stdout, done.stdout + done.stderr
    assert_same_end(whole(1), tmp_path)
    assert "this run is complete" in start(tmp_path, file, 1, root).stdout


@pytest.mark.parametrize(
    ("ranks", "kills"),
    [(1, ROUND_KILLS), pytest.param(3, ROUND_KILLS, marks=pytest.mark.slow)],
    ids=["1", "3"],
)  # fmt: skip
def test_an_iterative_run_goes_on_after_every_kill(whole, tmp_path, tiny_model, root, ranks, kills):
    """Against older policies, trained on all rounds: round files, policies and draws are those of the whole run, too."""
    file = prepared(tmp_path, tiny_model, ranks, "madpo_iter")
    for kill in kills:
        killed = start(tmp_path, file, ranks, root, kill)
        assert killed.returncode == -9 if ranks == 1 else killed.returncode != 0, kill
    done = start(tmp_path, file, ranks, root)
    assert done.returncode == 0 and "going on from update" in done.stdout, done.stdout + done.stderr
    assert_same_end(whole(ranks, "madpo_iter"), tmp_path)
    rows = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [r["iter/current_iteration"] for r in rows if "iter/current_iteration" in r] == [1, 2]
    # CASES 17: versions go on above those before the kill.
    updates = next(r["update"] for r in rows if "iter/drift/agent_0" in r)
    lines = [json.loads(x) for x in (tmp_path / "run/preference_replay/journal_0002.jsonl").read_text().splitlines()]
    versions = {(x["stream"], x["version"]) for x in lines if x["kind"] == "completion"}
    assert {v for stream, v in versions if stream == "target"} == {f"agent_{i}@{updates}" for i in range(2)}
    assert {v for stream, v in versions if stream == "comparator"} == {str(tiny_model)}


def test_a_killed_marlhf_run_goes_on(whole, tmp_path, tiny_model, root):
    """The reward model that was fitted is not fitted again, and no rollout is sampled again."""
    file = prepared(tmp_path, tiny_model, 1, "marlhf")
    for kill in LEARNING_KILLS:
        assert start(tmp_path, file, 1, root, kill).returncode == -9, kill
    done = start(tmp_path, file, 1, root)
    assert done.returncode == 0 and "going on from update 3 of 6" in done.stdout, done.stdout + done.stderr
    assert_same_end(whole(1, "marlhf"), tmp_path)
    fits = [x for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines() if "reward/accuracy" in x]
    assert len(fits) == 1
    heads = [run / "run/final/reward_model/scalar_head.safetensors" for run in (tmp_path, whole(1, "marlhf"))]
    assert heads[0].read_bytes() == heads[1].read_bytes()


def test_checkpoints_that_are_damaged_or_of_another_placement(whole, tmp_path, tiny_model, root):
    """CASES 25: auto takes the older one and says so; naming the damaged one is one clear line."""
    file = prepared(tmp_path, tiny_model, 1)
    assert start(tmp_path, file, 1, root, "updating:8").returncode == -9
    newest = tmp_path / "run" / "checkpoints" / "checkpoint-000006"
    largest = max((f for f in newest.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    named = start(tmp_path, file, 1, root, "", "--resume", str(newest))
    lines = [line for line in named.stderr.splitlines() if "damaged" in line]
    assert named.returncode == 2 and len(lines) == 1 and largest.name in lines[0] and "Traceback" not in named.stderr
    refused = start(tmp_path, file, 1, root, "", "--resume", "never")
    assert refused.returncode == 2 and "already holds a run" in refused.stderr
    other = start(tmp_path, file, 1, root, "", "deepspeed=zero3.json")
    assert other.returncode == 2 and "deepspeed" in other.stderr
    done = start(tmp_path, file, 1, root)
    assert done.returncode == 0, done.stderr
    assert "skipped: " in done.stdout and "checkpoint-000006 is damaged" in done.stdout
    assert "going on from update 3 of 9" in done.stdout
    assert_same_end(whole(1), tmp_path)
