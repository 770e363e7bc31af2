"""Whole runs through the command line: a tiny model with transformers rollouts, and the demo model with vLLM."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

HERE = Path(__file__).parent


def run(*words: str, cwd: Path, timeout: float = 500) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "2", "PYTHONPATH": str(HERE), "COLUMNS": "200"}
    command = [sys.executable, "-W", "ignore", "-m", "comlrl_ds", *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout, check=False)


def run_file(folder: Path, model: Path, **changes) -> Path:
    """A run of two tiny agents; `changes` are section__name=value."""
    content = {
        "trainer": "madpo",
        "agents": [{"model": str(model)}, {"model": str(model)}],
        "task": {
            "dataset": "tasks_for_tests:items", "eval_dataset": "tasks_for_tests:items",
            "reward_func": "tasks_for_tests:letters", "formatters": ["tasks_for_tests:chat", "tasks_for_tests:text"],
        },
        "args": {
            "preference_num_candidates": 4, "preference_pairs_per_sample": 2, "max_new_tokens": [8, 12], "temperature": 1.0,
            "top_p": 1.0, "top_k": None, "num_train_epochs": 1, "train_batch_size": 4, "agent_learning_rate": 1e-3,
            "eval_interval": 2, "eval_num_samples": 4,
        },
        "dtype": "float32",
        "rollout": {"backend": "transformers", "max_model_len": 128},
        "run": {"dir": str(folder / "run"), "seed": 5},
    }  # fmt: skip
    for name, value in changes.items():
        section, _, key = name.partition("__")
        if key:
            content[section][key] = value
        else:
            content[section] = value
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def trained(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    file = run_file(folder, tiny_model)
    done = run("train", "--local_rank=0", str(file), cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder, file, done


def test_a_run_leaves_what_the_page_says(trained, tiny_model):
    folder, _, done = trained
    run_dir = folder / "run"
    names = {p.relative_to(run_dir).as_posix() for p in run_dir.rglob("*") if p.is_file()}
    assert {"config.yaml", "metrics.jsonl", "preference_replay/iteration_0001.json", "preference_replay/journal_0001.jsonl",
            "preference_replay/iteration_0001.ids.safetensors", "samples/eval_000000.json", "samples/eval_000002.json",
            "final/agent_0/model.safetensors", "final/agent_1/tokenizer.json"} <= names  # fmt: skip
    rows = metrics(folder)
    steps = [r for r in rows if "train/loss" in r]
    assert len(steps) == 4 and [r["update"] for r in steps] == [1, 2, 3, 4]
    assert [r["env_step"] for r in steps] == [8, 16, 24, 32]
    assert [r["update"] for r in rows if "eval/n" in r] == [0, 2, 4]
    assert any("rollout/logprob_gap" in r and r["rollout/logprob_gap"] < 1e-3 for r in rows)
    pairs = json.loads((run_dir / "preference_replay/iteration_0001.json").read_text())["pairs"]
    means = {p["candidate_reward_mean"] for p in pairs}
    assert all(min(means) <= r["turn_1/reward_mean"] <= max(means) for r in steps)
    assert "gain (paired)" in done.stdout


def test_the_exported_agents_load_in_transformers_and_have_moved(trained, tiny_model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = trained[0] / "run" / "final"
    before = weights(tiny_model)
    for name in ("agent_0", "agent_1"):
        lm, info = AutoModelForCausalLM.from_pretrained(folder / name, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"] and lm.config.use_cache
        assert lm.get_output_embeddings().weight is lm.get_input_embeddings().weight
        assert AutoTokenizer.from_pretrained(folder / name).chat_template
        after = weights(folder / name)
        assert after.keys() == before.keys()
        assert all(not torch.equal(after[n], before[n]) for n in before)
    assert any(not torch.equal(weights(folder / "agent_0")[n], weights(folder / "agent_1")[n]) for n in before)


def test_evaluate_reads_the_trained_agents_and_repeats_itself(trained, tmp_path):
    """The exported agents answer as the live ones did after the last update, twice the same."""
    folder, file, _ = trained
    last = (folder / "run" / "samples" / "eval_000004.json").read_bytes()
    for k in range(2):
        target = tmp_path / f"eval{k}"
        done = run("evaluate", str(file), f"run.dir={target}", "--policy", str(folder / "run" / "final"), cwd=folder)
        assert done.returncode == 0, done.stderr
        assert "mean" in done.stdout
        assert (target / "samples" / "eval_000000.json").read_bytes() == last


def test_the_same_run_again_gives_the_same_weights_and_evaluation_changes_nothing(trained, tiny_model, tmp_path):
    folder, _, _ = trained
    file = run_file(tmp_path, tiny_model)
    done = run("train", str(file), "args.eval_interval=0", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("agent_0", "agent_1"):
        first, second = weights(folder / "run" / "final" / name), weights(tmp_path / "run" / "final" / name)
        assert all(torch.equal(first[n], second[n]) for n in first)
    assert not any("eval/n" in r for r in metrics(tmp_path))


def test_a_folder_with_a_run_is_gone_on_with_or_refused(trained):
    folder, file, _ = trained
    before = weights(folder / "run" / "final" / "agent_0")
    again = run("train", str(file), cwd=folder)
    assert again.returncode == 0 and "this run is complete" in again.stdout, again.stderr
    refused = run("train", str(file), "--resume", "never", cwd=folder)
    assert refused.returncode == 2 and "already holds a run" in refused.stderr
    other = run("train", str(file), "args.dpo_beta=0.3", cwd=folder)
    assert other.returncode == 2 and "args.dpo_beta: is 0.3, but 0.1 in" in other.stderr
    after = weights(folder / "run" / "final" / "agent_0")
    assert all(torch.equal(before[n], after[n]) for n in before)


def test_plan_shows_the_run_and_loads_nothing(trained, tmp_path):
    folder, file, _ = trained
    done = run("plan", str(file), f"run.dir={tmp_path / 'x'}", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "no problems" in done.stdout
    assert re.search(r"actor\.1 +│ all +│ +2 │ float32", done.stdout), done.stdout
    assert not (tmp_path / "x").exists()


def test_no_pair_ends_well_and_leaves_the_policies(tiny_model, tmp_path):
    file = run_file(tmp_path, tiny_model)
    done = run("train", str(file), "task.reward_func=tasks_for_tests:constant", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "no pair of different scores" in done.stdout
    assert not (tmp_path / "run" / "final").exists()
    assert json.loads((tmp_path / "run/preference_replay/iteration_0001.json").read_text()) == {
        "iteration": 1, "num_pairs": 0, "pairs": [],
    }  # fmt: skip


def test_invalid_scores_are_counted_and_never_paired(tiny_model, tmp_path):
    file = run_file(tmp_path, tiny_model)
    oracle = "task.reward_func=tasks_for_tests:sometimes_nan"
    done = run("train", str(file), oracle, "args.max_invalid_fraction=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    counted = next(r for r in metrics(tmp_path) if "collect/pairs" in r)["collect/invalid_scores"]
    journal = [json.loads(x) for x in (tmp_path / "run/preference_replay/journal_0001.jsonl").read_text().splitlines()]
    assert counted == sum(x["kind"] == "score" and x["value"] is None for x in journal) > 0
    text = (tmp_path / "run/preference_replay/iteration_0001.json").read_text()
    assert "NaN" not in text and json.loads(text)["num_pairs"] > 0


def test_too_many_invalid_scores_end_the_run(tiny_model, tmp_path):
    done = run("train", str(run_file(tmp_path, tiny_model)), "task.reward_func=tasks_for_tests:always_nan", cwd=tmp_path)
    assert done.returncode == 1
    assert "32 of 32 oracle scores are NaN or infinite" in done.stderr and "Traceback" not in done.stderr


def test_an_oracle_that_raises_is_named_and_its_scores_are_kept(tiny_model, tmp_path):
    file = run_file(tmp_path, tiny_model)
    done = run("train", str(file), "task.reward_func=tasks_for_tests:fails_on_lighthouse", cwd=tmp_path)
    assert done.returncode == 1
    assert (
        "task 1: the reward function fails_on_lighthouse" in done.stderr and "raised KeyError: 'no score for it'" in done.stderr
    )
    journal = [json.loads(x) for x in (tmp_path / "run/preference_replay/journal_0001.jsonl").read_text().splitlines()]
    # Its prompts are the longest, so it is sampled and scored last: everything else is on disk.
    assert sum(x["kind"] == "completion" for x in journal) == 8 * 2 * 4
    assert {x["item"] for x in journal if x["kind"] == "score"} == {0, 2, 3, 4, 5, 6, 7}
    counted = run("train", str(file), "task.reward_func=tasks_for_tests:fails_on_lighthouse", "args.oracle_on_error=invalid",
                  f"run.dir={tmp_path / 'again'}", cwd=tmp_path)  # fmt: skip
    assert counted.returncode == 0, counted.stderr
    assert '"collect/oracle_errors": 4' in (tmp_path / "again" / "metrics.jsonl").read_text()


def test_an_over_long_prompt_ends_the_run_by_default(tiny_model, tmp_path):
    file = run_file(tmp_path, tiny_model)
    narrow = "rollout.max_model_len=24"
    done = run("train", str(file), narrow, cwd=tmp_path)
    assert done.returncode == 2 and re.search(r"task \d+, agent \d: the prompt has \d+ tokens", done.stderr)
    assert not (tmp_path / "run").exists()


# --- with vLLM
@pytest.fixture(scope="module")
def demo_run(demo_model, tmp_path_factory, root):
    """The quickstart's run file with fewer tasks."""
    folder = tmp_path_factory.mktemp("demo")
    file = root / "launch" / "examples" / "quickstart.yaml"
    small = [
        "task.train_limit=4", "args.preference_num_candidates=4", "args.max_new_tokens=[24,48]", "args.train_batch_size=2",
        "args.eval_num_samples=3", "args.eval_samples_per_item=1",
    ]  # fmt: skip
    done = run("train", str(file), f"run.dir={folder / 'run'}", *small, cwd=root)
    assert done.returncode == 0, done.stderr
    return folder, done


def test_chat_prompts_with_pad_equal_to_eos_give_answers_and_pairs(demo_run, demo_model):
    """The peer takes the first pad id in the prompt for its end, finds every completion empty, and trains on nothing."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    folder, _ = demo_run
    pairs = json.loads((folder / "run/preference_replay/iteration_0001.json").read_text())["pairs"]
    assert len(pairs) >= 3
    for pair in pairs:
        assert all("<|im_end|>" in prompt for prompt in pair["prompts"])
    texts = [text for p in pairs for text in [*p["winner_completions"], *p["loser_completions"]]]
    assert sum(bool(text.strip()) for text in texts) >= 0.9 * len(texts)


def test_the_demo_run_trains_syncs_and_evaluates(demo_run):
    from comlrl_ds.engines.hardware import best_dtype

    folder, done = demo_run
    rows = metrics(folder)
    steps = [r for r in rows if "train/loss" in r]
    assert len(steps) == 2
    for r in steps:
        assert all(r[f"train/grad_norm/agent_{i}"] > 0 and r[f"train/lr/agent_{i}"] == 2e-5 for i in range(2))
    syncs = [r for r in rows if "rollout/sync_bytes" in r]
    size = 2 if best_dtype("cpu") == "bfloat16" else 4
    assert len(syncs) >= 2 and all(r["rollout/sync_bytes"] == 134_515_008 * size for r in syncs)
    assert next(r for r in rows if "rollout/logprob_gap" in r)["rollout/logprob_gap"] < 0.2
    assert {"before", "after"} <= set(done.stdout.split())
    assert not re.search(r"Traceback|Error", done.stdout + done.stderr)


def test_engines_that_die_end_the_run_with_one_line(tiny_model, tmp_path):
    file = run_file(tmp_path, tiny_model, rollout={"backend": "vllm", "max_model_len": 128, "engines": 1})
    oracle = "task.reward_func=tasks_for_tests:kills_engines"
    done = run("train", str(file), oracle, "args.collection_chunk_items=2", cwd=tmp_path)
    assert done.returncode == 1
    assert "ended by signal 9" in done.stderr and "Traceback" not in done.stderr
