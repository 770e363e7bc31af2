"""A run over two machines, by launch/multinode.sh, the real deepspeed launcher, pdsh and ssh."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from two_nodes import Pair, finish, one_process, two_nodes, wait_for, why_not

START_S = 240  # imports of 3 ranks and 2 engines, on few and busy cores


@pytest.fixture(scope="module")
def pair(root, tmp_path_factory) -> Iterator[Pair]:
    if reason := why_not(root):
        pytest.skip(reason)
    with two_nodes(tmp_path_factory.mktemp("nodes"), root) as made:
        yield made


@pytest.fixture
def python_path(root: Path) -> str:
    return os.pathsep.join([str(root / "tests"), str(root / "tests" / "e2e")])


def run_file(folder: Path, model: Path, **args) -> Path:
    content = {
        "trainer": "madpo",
        "agents": [{"model": str(model)}] * 2,
        "task": {
            "dataset": "tasks_for_tests:items",
            "reward_func": "tasks_for_tests:letters",
            "formatters": ["tasks_for_tests:chat", "tasks_for_tests:text"],
        },
        "args": {
            "preference_num_candidates": 4, "preference_pairs_per_sample": 2, "max_new_tokens": [12, 8], "temperature": 1.0,
            "top_p": 1.0, "top_k": None, "num_train_epochs": 1, "train_batch_size": 4, "agent_learning_rate": 1e-3, **args,
        },
        "dtype": "float32",
        "rollout": {"backend": "transformers", "max_model_len": 128},
        "run": {"seed": 5},
    }  # fmt: skip
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def placement(pair: Pair, root: Path) -> list[str]:
    """Settings: actor.0 on the first machine's two ranks, actor.1 on the second's, and an engine on each.

    The first engine takes the agent with the longer answers, the first, whose weights then come from the other machine; and
    so do the second's.
    """
    first, _ = pair.nodes
    groups = {"left": {first.address: [0, 1]}, "right": [2]}
    roles = {
        "actor.0": {"group": "left", "deepspeed": str(root / "ds_configs" / "zero3.json")},
        "actor.1": {"group": "right", "deepspeed": str(root / "ds_configs" / "zero1.json")},
        "rollout": {"group": ["right", "left"]},
    }
    return [f"placement={json.dumps({'groups': groups, 'roles': roles})}", "rollout.engines=2"]


def rows(folder: Path) -> list[dict]:
    file = folder / "metrics.jsonl"
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]


def column(folder: Path, name: str) -> list[float]:
    return [row[name] for row in rows(folder) if name in row]


def test_two_machines_learn_what_one_process_learns(pair, root, tiny_model, tmp_path, python_path):
    file = run_file(tmp_path, tiny_model, eval_interval=2, eval_num_samples=4)
    content = yaml.safe_load(file.read_text())
    content["task"]["eval_dataset"] = "tasks_for_tests:items"
    file.write_text(yaml.safe_dump(content))
    two, one = tmp_path / "on two machines", tmp_path / "one"
    before = [node.received() for node in pair.nodes]
    process = pair.launch(str(file), f"run.dir={two}", *placement(pair, root), cwd=tmp_path, python_path=python_path)
    code, output = finish(process, START_S + 120)
    received = [node.received() - start for node, start in zip(pair.nodes, before)]
    assert code == 0, output[-6000:]
    assert not pair.left()
    lines = output.splitlines()
    assert any(line.startswith("+ env ") and "--master_addr 10.77.0.1" in line for line in lines)
    for agent in ("agent_0", "agent_1"):  # the second is written by the second machine
        assert (two / "final" / agent / "model.safetensors").is_file()
    sizes = column(two, "rollout/sync_bytes")
    assert len(sizes) == 4 and min(received) > sum(sizes) / 2, (sizes, received)
    one_process(file, f"run.dir={one}", cwd=tmp_path, python_path=python_path, timeout=START_S)
    pairs = [(d / "preference_replay" / "iteration_0001.json").read_bytes() for d in (two, one)]
    assert pairs[0] == pairs[1]
    losses = column(one, "train/loss")
    assert len(losses) > 2
    assert column(two, "train/loss") == pytest.approx(losses, abs=1e-4, rel=0)


def test_the_death_of_the_second_machine_s_rank_ends_the_first_s(pair, root, tiny_model, tmp_path, python_path):
    file = run_file(tmp_path, tiny_model, num_train_epochs=100000)
    where = tmp_path / "run"
    process = pair.launch(str(file), f"run.dir={where}", *placement(pair, root), cwd=tmp_path, python_path=python_path)
    wait_for(lambda: len(column(where, "train/loss")) > 2, process, START_S)
    _, second = pair.nodes
    os.kill(second.process_of_rank(2), signal.SIGKILL)
    killed = time.monotonic()
    code, output = finish(process, 30)
    while pair.left() and time.monotonic() < killed + 30:
        time.sleep(0.1)
    print(f"ended {time.monotonic() - killed:.1f} s after the kill")
    assert code != 0 and not pair.left()
    said = [line for line in output.splitlines() if "comlrl-ds:" in line]
    assert len(said) == 1, output[-6000:]
    assert f"rank 2 on {second.name} ended without a word" in said[0]
