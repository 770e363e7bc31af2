"""Where the seed of a run comes from: the user, torch's generator, or the run that is resumed."""

from __future__ import annotations

import json

import pytest
import torch
import yaml

from comlrl_ds.config import ConfigError, MADPOConfig
from comlrl_ds.config.run_file import load_run_file
from comlrl_ds.trainers.preference import MADPOTrainer


def trainer(folder, model_folders, **changes):
    basic = {
        "agents": model_folders, "eval_dataset": [{"prompt": "w3"}, {"prompt": "w4"}], "reward_func": lambda a, b: 1.0,
        "args": MADPOConfig(max_new_tokens=6, temperature=1.0, top_p=1.0), "verbose": False,
        "rollout": {"backend": "transformers", "dtype": "float32"}, "run_dir": folder,
    }  # fmt: skip
    return MADPOTrainer(**(basic | changes))


def recorded(folder):
    return yaml.safe_load((folder / "config.yaml").read_text())["run"]["seed"]


@pytest.mark.parametrize(
    ("torch_seed", "seed"), [(0, 0), (41, 41), (2**63 - 1, 2**63 - 1), (2**63, 0), (2**64 - 3, 2**63 - 3), (-3, 2**63 - 3)]
)
def test_without_a_seed_it_is_torchs_in_the_range_of_seeds(tmp_path, model_folders, torch_seed, seed):
    torch.manual_seed(torch_seed)
    torch.rand(3)  # what was drawn since does not matter
    assert trainer(tmp_path / "run", model_folders).seed == seed
    assert trainer(tmp_path / "run", model_folders, seed=5).seed == 5
    assert trainer(tmp_path / "run", model_folders, seed=0).seed == 0


def test_torchs_seed_decides_the_run_as_the_argument_does(tmp_path, model_folders, capsys):
    samples = {}
    for name, torch_seed, given in (("a", 7, {}), ("b", 8, {}), ("c", 8, {"seed": 7})):
        torch.manual_seed(torch_seed)
        with trainer(tmp_path / name, model_folders, verbose=True, **given) as t:
            torch.manual_seed(99)  # read by the constructor
            t.evaluate()
        samples[name] = json.loads((tmp_path / name / "samples/eval_000000.json").read_text())
    assert samples["a"] == samples["c"] != samples["b"]
    assert [recorded(tmp_path / name) for name in "abc"] == [7, 8, 7]
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("seed ")]
    assert said == ["seed 7 (from torch.initial_seed())", "seed 8 (from torch.initial_seed())", "seed 7 (given)"]


def test_a_resumed_run_keeps_its_seed_and_refuses_another(tmp_path, model_folders, capsys):
    run = tmp_path / "run"
    torch.manual_seed(11)
    with trainer(run, model_folders) as t:
        t.evaluate()
    before = (run / "samples/eval_000000.json").read_bytes()
    torch.manual_seed(12)
    with trainer(run, model_folders, resume="auto", verbose=True) as t:
        assert t.seed == 11
        t.evaluate()
    assert "seed 11 (the resumed run's)" in capsys.readouterr().out
    assert (run / "samples/eval_000000.json").read_bytes() == before and recorded(run) == 11
    assert trainer(run, model_folders, resume="auto", seed=11).seed == 11
    with pytest.raises(ConfigError, match=r"run.seed: is 12, but 11 in "):
        trainer(run, model_folders, resume="auto", seed=12)
    assert trainer(tmp_path / "new", model_folders, resume="auto").seed == 12  # nothing there to resume


def test_a_run_file_without_a_seed_has_seed_0(tmp_path, model_folders):
    torch.manual_seed(13)
    content = {
        "trainer": "madpo", "agents": [{"model": model_folders[0]}] * 2, "run": {"dir": str(tmp_path / "run")},
        "task": {"dataset": "comlrl_ds.tasks.explain:train_items", "reward_func": "comlrl_ds.tasks.explain:reward"},
        "rollout": {"backend": "transformers"}, "args": {"max_new_tokens": 8},
    }  # fmt: skip
    content["task"]["formatters"] = str(tmp_path / "plain.py") + ":words"
    (tmp_path / "plain.py").write_text("def words(item): return 'w3'\n")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    from comlrl_ds.trainers.from_file import build_trainer

    assert build_trainer(load_run_file(tmp_path / "run.yaml"), tmp_path / "run.yaml", verbose=False).seed == 0
