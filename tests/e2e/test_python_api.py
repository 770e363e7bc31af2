"""What a script that uses the library gets: trackers, seeds, trained agents."""

from __future__ import annotations

import pytest
import torch
import yaml
from test_trainer_api import rows, trainer
from wandb_files import offline_runs


def test_wandb_gets_the_metrics_the_settings_and_nothing_else_is_started(tmp_path, tiny_model, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    settings = {
        "project": "tides", "entity": "team", "run_name": "third", "tags": ["a", "b"],
        "config_sections": {"dataset": {"name": "sea", "type": "qa"}, "output": {"verbose": False}},
    }  # fmt: skip
    args = {"num_train_epochs": 2, "train_batch_size": 3, "eval_interval": 2, "logging_steps": 8, "eval_num_samples": 1}
    with trainer(tmp_path, tiny_model, wandb_config=settings, args=args) as t:
        t.train()
    (run,) = offline_runs(tmp_path / "run")
    assert (run.run.project, run.run.entity, run.run.display_name) == ("tides", "team", "third")
    assert list(run.run.tags) == ["a", "b"] and run.run.run_id == t.run_dir.run_id
    assert run.config["dataset_name"] == "sea" and run.config["dataset_type"] == "qa"
    assert run.config["agent_learning_rate"] == 1e-3 and run.config["trainer"] == "madpo" and run.config["model_name"]
    assert not (tmp_path / "run" / "tensorboard").exists()
    # Every line of metrics.jsonl is in a row at the same step, but for the steps between those that show.
    written = rows(tmp_path)
    places = [row["env_step"] for row in written if "train/loss" in row]
    shown = [row for row in run.rows if "train/loss" in row]
    distant = [n for before, n in zip([0, *places], places) if before // 8 != n // 8]
    assert [row["env_step"] for row in shown] == distant and len(distant) > 2
    of_step = {row["env_step"]: row for row in written if "train/loss" in row}
    for row in shown:
        same = of_step[row["env_step"]]
        assert all(row[k] == pytest.approx(v) for k, v in same.items() if k not in ("update", "time") and v is not None)
    names = {name for row in run.rows for name in row}
    wanted = {name for row in written for name in row} - {"update", "time"}
    assert names == wanted and {"eval/turn_1/reward_mean", "turn_1/reward_mean", "collect/pairs", "train/loss"} <= names


def test_a_trainer_without_a_folder_takes_the_seed_of_the_run_that_it_resumes(tmp_path, tiny_model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(3)
    with trainer(tmp_path, tiny_model, seed=None, args={"num_train_epochs": 2}) as t:
        t.train()
    (checkpoint,) = (tmp_path / "run/checkpoints").glob("checkpoint-*")
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["run"]["seed"] == 3
    torch.manual_seed(4)
    with trainer(tmp_path, tiny_model, seed=None, args={"num_train_epochs": 2}, run_dir=None) as t:
        assert t.seed == 4
        t.train(resume_from_checkpoint=str(checkpoint))
        assert t.seed == 3 and t.run_dir.path == tmp_path / "run"
    assert not (tmp_path / "runs").exists()
