"""W&B and TensorBoard: what is asked for is started, what it gets, and what is refused."""

from __future__ import annotations

import pytest
import yaml
from wandb_files import offline_runs

from comlrl_ds.config import ConfigError, MADPOConfig
from comlrl_ds.config.run_file import load_run_file
from comlrl_ds.config.trackers import WandbConfig, read_wandb
from comlrl_ds.trainers.preference import MADPOTrainer

WANDB = {
    "project": "tides", "entity": "team", "run_name": "third", "tags": ["a", "b"],
    "config_sections": {"dataset": {"name": "sea", "type": "qa"}, "output": {"verbose": False}},
}  # fmt: skip


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")


def trainer(folder, model_folders, **changes):
    args = {"preference_num_candidates": 3, "preference_pairs_per_sample": 1, "max_new_tokens": 4, "num_train_epochs": 2}
    basic = {
        "agents": model_folders, "train_dataset": [{"prompt": f"w{k}"} for k in range(3, 7)], "run_dir": folder / "run",
        "reward_func": lambda a, b: len(set(a[0])) + 0.1 * len(b[0]),
        "rollout": {"backend": "transformers", "dtype": "float32"},
        "eval_dataset": [{"prompt": "w9"}],
        "args": MADPOConfig(**args, train_batch_size=2, eval_interval=2, logging_steps=4, eval_num_samples=1),
    }  # fmt: skip
    return MADPOTrainer(**(basic | changes))


def refused(message, call):
    with pytest.raises(ConfigError) as caught:
        call()
    assert str(caught.value) == message


def test_both_trackers_by_report_to_alone_and_a_closed_run_goes_on(tmp_path, model_folders):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    arguments = {"train_dataset": None, "report_to": ["tensorboard", "wandb", "wandb"], "verbose": False}
    with trainer(tmp_path, model_folders, **arguments) as t:
        t._evaluate_and_report("first")
        t.close()
        t._evaluate_and_report("second")
    first, second = offline_runs(tmp_path / "run")
    assert first.run.run_id == second.run.run_id
    rewards = [[r[name] for r in run.rows if (name := "eval/turn_1/reward_mean") in r] for run in (first, second)]
    assert len(rewards[0]) == 1 and rewards[0] == rewards[1]
    read = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    read.Reload()
    assert len(read.Scalars("eval/turn_1/reward_mean")) == 2


def test_tensorboard_alone_starts_no_wandb(tmp_path, model_folders):
    with trainer(tmp_path, model_folders, train_dataset=None, report_to="tensorboard", verbose=False) as t:
        t._evaluate_and_report("first")
    assert list((tmp_path / "run/tensorboard").glob("events.*")) and not (tmp_path / "run/wandb").exists()


def test_a_run_of_the_users_own_is_used_and_stays_open(tmp_path, model_folders):
    import wandb

    mine = wandb.init(project="mine", dir=str(tmp_path), settings=wandb.Settings(silent=True))
    try:
        with trainer(tmp_path, model_folders, train_dataset=None, wandb_config=WANDB) as t:
            t._evaluate_and_report("first")
        assert wandb.run is mine
        mine.log({"after": 1.0})
    finally:
        mine.finish()
    (run,) = offline_runs(tmp_path)
    assert [sorted(row)[:2] for row in run.rows if "after" in row] and any("eval/turn_1/reward_mean" in row for row in run.rows)


def test_wandb_that_cannot_start_ends_in_a_line_before_anything_is_loaded(tmp_path, model_folders, monkeypatch):
    import wandb

    wandb.teardown()  # its settings are read from the environment once
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    with trainer(tmp_path, model_folders, wandb_config=WANDB) as t:
        with pytest.raises(ConfigError, match=r"^wandb: W&B could not be started \(.*\); log in with `wandb login`, or set"):
            t.train()
        assert t._session is None
    wandb.teardown()


# --- what may be written
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("mlflow", "report_to.0: 'mlflow' is not one of 'tensorboard' or 'wandb'"),
        (["tensorboard", "tensorbord"], "report_to.1: 'tensorbord' is not one of 'tensorboard' or 'wandb'"),
        (5, "report_to: input should be a valid list, got 5"),
    ],
)
def test_unknown_trackers_are_the_same_error_from_python_and_from_a_file(tmp_path, model_folders, given, message):
    refused(message, lambda: trainer(tmp_path, model_folders, report_to=given))
    content = {
        "trainer": "madpo", "agents": [{"model": model_folders[0]}] * 2, "run": {"report_to": given},
        "task": {"dataset": "comlrl_ds.tasks.explain:train_items", "reward_func": "comlrl_ds.tasks.explain:reward"},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    refused(f"run.{message}", lambda: load_run_file(tmp_path / "run.yaml"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": -1}, "seed: input should be greater than or equal to 0, got -1"),
        ({"checkpoint_interval": -2}, "checkpoint_interval: input should be greater than or equal to 0, got -2"),
        ({"checkpoint_total_limit": 0}, "checkpoint_total_limit: input should be greater than or equal to 1, got 0"),
        ({"stall_timeout_s": 0}, "stall_timeout_s: input should be greater than 0, got 0"),
        ({"wandb_config": {"projct": "x"}}, "wandb_config.projct: unknown setting; did you mean 'project'?"),
        ({"wandb_config": "tides"}, "wandb_config: is a str; give a dict such as {'project': …}"),
        ({"wandb_config": {"tags": "a"}}, "wandb_config.tags: input should be a valid list, got 'a'"),
    ],
)
def test_arguments_of_a_run_are_checked_as_a_files_are(tmp_path, model_folders, settings, message):
    refused(message, lambda: trainer(tmp_path, model_folders, **settings))


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_missing_package_is_a_line_that_names_the_extra(tmp_path, model_folders, monkeypatch, name):
    monkeypatch.setattr("comlrl_ds.config.trackers.find_spec", lambda package: None if package == name else object())
    message = f"report_to: {name} is not installed; pip install 'comlrl-ds[{name}]', or leave it out"
    refused(message, lambda: trainer(tmp_path, model_folders, report_to=["tensorboard", "wandb"]))
    if name == "wandb":
        refused(message, lambda: trainer(tmp_path, model_folders, wandb_config={}))


def test_the_output_folder_and_the_verbosity_of_wandb_settings():
    assert read_wandb(None) is None
    assert WandbConfig(dir="c").run_dir == "c" and WandbConfig().run_dir is None and WandbConfig().verbose
    sections = {"output": {"base_dir": "b", "verbose": False}}
    found = read_wandb({"dir": "c", "config_sections": sections})
    assert found.run_dir == "b" and not found.verbose
    assert read_wandb({"output_dir": "a", "dir": "c", "config_sections": sections}).run_dir == "a"


def test_wandb_from_a_run_file(tmp_path, model_folders):
    content = {
        "trainer": "madpo", "agents": [{"model": model_folders[0]}] * 2,
        "run": {"report_to": "wandb", "wandb": {"project": "tides", "output_dir": str(tmp_path / "out")}},
        "task": {"dataset": "comlrl_ds.tasks.explain:train_items", "reward_func": "comlrl_ds.tasks.explain:reward"},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    run = load_run_file(tmp_path / "run.yaml").run
    assert run.trackers == ["wandb"] and run.wandb.project == "tides" and run.dir == str(tmp_path / "out")
