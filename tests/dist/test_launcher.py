"""Run files and scripts under the deepspeed launcher give what one process gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from launch import free_port
from reference import relative

PLACEMENT = {
    "groups": {"left": [0, 1], "right": [2]},
    "roles": {"actor.0": {"group": "left", "deepspeed": "zero3.json"}, "actor.1": {"group": "right", "deepspeed": "zero1.json"},
              "rollout": ["right", "left"]},
}  # fmt: skip


def run_file(folder: Path, model: Path, **sections) -> Path:
    content = {
        "trainer": "madpo",
        "agents": [{"model": str(model)}] * 2,
        "task": {"dataset": "tasks_for_tests:items", "eval_dataset": "tasks_for_tests:items",
                 "reward_func": "tasks_for_tests:letters", "formatters": ["tasks_for_tests:chat", "tasks_for_tests:text"]},
        "args": {"preference_num_candidates": 4, "preference_pairs_per_sample": 1, "max_new_tokens": [8, 12], "top_p": 1.0,
                 "temperature": 1.0, "top_k": None, "num_train_epochs": 1, "train_batch_size": 3, "agent_learning_rate": 1e-3,
                 "eval_interval": 2, "eval_num_samples": 5},
        "dtype": "float32",
        "rollout": {"backend": "transformers", "max_model_len": 128},
        "run": {"seed": 5},
    } | sections  # fmt: skip
    folder.mkdir(exist_ok=True)
    for name in ("zero1", "zero3"):
        sharding = {"stage": int(name[-1]), "reduce_bucket_size": 100_000}
        (folder / f"{name}.json").write_text(json.dumps({"zero_optimization": sharding}))
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def environment(root: Path) -> dict[str, str]:
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return dict(os.environ) | {
        "PATH": paths, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(root / "tests" / "e2e"),
    }  # fmt: skip


def launched(ranks: int, *words: str, root: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The real launcher; one rank is plain python."""
    start = ["deepspeed", "--num_gpus", str(ranks), "--master_port", str(free_port())]
    if ranks == 1:
        start = [sys.executable]
        words = ("-m", *words[1:]) if words[0] == "--module" else words
    return subprocess.run(
        [*start, *words], cwd=cwd, env=environment(root), capture_output=True, text=True, timeout=280, check=False
    )


def read(run: Path) -> tuple[list[dict], str, list[str]]:
    """(metrics, the pairs' file, the evaluations' files)"""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    samples = [file.read_text() for file in sorted((run / "samples").glob("*.json"))]
    return rows, (run / "preference_replay" / "iteration_0001.json").read_text(), samples


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_model, root):
    """The same run in one process, on two ranks without a placement, and on three with one and real vLLM engines."""
    folder = tmp_path_factory.mktemp("runs")
    vllm = {"max_model_len": 128, "kv_cache_bytes": 64 << 20, "engines": 2}
    ways = {
        "one": (1, {}), "two": (2, {}), "three-vllm": (3, {"placement": PLACEMENT, "rollout": vllm}),
        "one-vllm": (1, {"rollout": vllm | {"engines": 1}}),
    }  # fmt: skip
    found = {}
    for name, (ranks, sections) in ways.items():
        file = run_file(folder / name, tiny_model, **sections)
        words = ("--module", "comlrl_ds", "train", str(file), f"run.dir={folder / name / 'run'}")
        done = launched(ranks, *words, root=root, cwd=folder)
        assert done.returncode == 0, (name, done.stdout[-3000:], done.stderr[-3000:])
        found[name] = (folder / name / "run", done, *read(folder / name / "run"))
    return found


@pytest.mark.parametrize(("one", "many"), [("one", "two"), ("one-vllm", "three-vllm")])
def test_pairs_rewards_and_losses_are_those_of_one_process(runs, one, many):
    (_, _, rows, pairs, samples), (_, _, others, other_pairs, other_samples) = runs[one], runs[many]
    assert pairs == other_pairs
    # Before training the weights are the same; later they differ by rounding, which may turn a sampled token.
    assert samples[0] == other_samples[0] and len(samples) == len(other_samples)
    losses, other_losses = ([r["train/loss"] for r in x if "train/loss" in r] for x in (rows, others))
    assert len(losses) == 3 and losses == pytest.approx(other_losses, abs=1e-4)
    for key in ("collect/reward_mean", "collect/pairs"):
        assert [r[key] for r in rows if key in r] == [r[key] for r in others if key in r]


@pytest.mark.parametrize("name", ["two", "three-vllm"])
def test_five_evaluated_tasks_are_five_on_any_number_of_ranks(runs, name):
    """CASES 43."""
    one, many = (next(r for r in runs[k][2] if "eval/n" in r) for k in (name.replace("two", "one").replace("three", "one"), name))
    assert many["eval/n"] == one["eval/n"] == 5
    assert many["eval/turn_1/reward_mean"] == one["eval/turn_1/reward_mean"]


def test_the_trained_agents_are_those_of_one_process(runs, tiny_model):
    """‖Δθ − Δθ₁‖ / ‖Δθ₁‖ after three AdamW steps."""
    from safetensors.torch import load_file

    start = load_file(tiny_model / "model.safetensors")
    for one, many in (("one", "two"), ("one-vllm", "three-vllm")):
        for agent in ("agent_0", "agent_1"):
            files = [runs[k][0] / "final" / agent / "model.safetensors" for k in (one, many)]
            wanted, found = ({n: t - start[n] for n, t in load_file(file).items()} for file in files)
            assert relative(found, wanted) < 1e-3
            assert (files[1].parent / "tokenizer.json").exists()


def test_only_the_main_rank_speaks(runs):
    """Two ranks print what one prints."""
    for name in ("one", "two"):
        text = runs[name][1].stdout
        assert text.count("collected 8 tasks") == text.count("evaluation before") == text.count("gain (paired)") == 1


SCRIPT = """
import sys
from tasks_for_tests import items, letters, text
from comlrl_ds.trainers.preference import MADPOConfig, MADPOTrainer
args = MADPOConfig(num_agents=2, preference_num_candidates=4, preference_pairs_per_sample=1, max_new_tokens=8, top_p=1.0,
                   num_train_epochs=1, train_batch_size=4, eval_num_samples=4, eval_interval=0)
trainer = MADPOTrainer(agent_model=sys.argv[1], train_dataset=items(), eval_dataset=items(), reward_func=letters, formatters=text,
                       args=args, run_dir=sys.argv[2], verbose=False, model_config={"dtype": "float32"},
                       rollout={"backend": "transformers", "max_model_len": 64})
trainer.train()
result = trainer.evaluate()
trainer.save_model(sys.argv[2] + "/mine")
sys.stdout.write(f"EVAL {result['eval/n']}\\n")  # one write: two ranks share the stream
"""


def test_a_script_works_under_the_launcher_as_it_is(tmp_path, tiny_model, root):
    """Every rank runs it, and all get the same results; no close(), as users forget it."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    found = launched(2, "--no_local_rank", str(script), str(tiny_model), str(tmp_path / "run"), root=root, cwd=tmp_path)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
    assert found.stdout.count("EVAL 4") == 2
    assert (tmp_path / "run" / "mine" / "agent_1" / "model.safetensors").exists()


def test_a_mistake_ends_all_ranks_at_once_with_its_line(tmp_path, tiny_model, root):
    file = run_file(tmp_path / "x", tiny_model, placement=PLACEMENT | {"groups": {"left": [0, 1], "right": [1]}})
    started = time.monotonic()
    done = launched(3, "--module", "comlrl_ds", "train", str(file), root=root, cwd=tmp_path)
    assert done.returncode == 2 and time.monotonic() - started < 60
    lines = [line.strip() for line in done.stderr.splitlines() if "placement" in line]
    assert any("1" in line and "left" in line and "right" in line for line in lines), lines
    assert any("rank 2" in line for line in lines), lines
    assert "Traceback" not in done.stderr and len(lines) == len(set(lines))


def test_an_error_in_the_users_code_ends_all_ranks_with_its_line(tmp_path, tiny_model, root):
    file = run_file(tmp_path / "x", tiny_model)
    words = ("train", str(file), f"run.dir={tmp_path / 'run'}", "task.reward_func=tasks_for_tests:fails_on_lighthouse")
    done = launched(2, "--module", "comlrl_ds", *words, root=root, cwd=tmp_path)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("comlrl-ds:")]
    assert "task 1: the reward function fails_on_lighthouse" in lines[0] and "raised KeyError: 'no score for it'" in lines[0]
    assert "Traceback" not in done.stderr
    assert len(lines) == 1 and "error.txt" in lines[0], lines
