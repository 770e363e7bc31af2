"""A run file under the deepspeed launcher, as `deepspeed --module comlrl_ds train …`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import yaml

from launch import free_port


def test_the_launcher_starts_a_run_and_refuses_ranks_without_a_place(tmp_path, tiny_model, root):
    content = {
        "trainer": "madpo",
        "agents": [{"model": str(tiny_model)}] * 2,
        "task": {
            "dataset": "tasks_for_tests:items",
            "reward_func": "tasks_for_tests:letters",
            "formatters": "tasks_for_tests:text",
        },
        "args": {"preference_num_candidates": 2, "preference_pairs_per_sample": 1, "max_new_tokens": 4, "num_train_epochs": 1},
        "rollout": {"backend": "transformers", "max_model_len": 64},
        "run": {"dir": str(tmp_path / "run")},
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(content))
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = dict(os.environ) | {"PATH": paths, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root / "tests" / "e2e")}

    def launch(ranks: int) -> subprocess.CompletedProcess[str]:
        command = ["deepspeed", "--num_gpus", str(ranks), "--master_port", str(free_port()), "--module", "comlrl_ds", "train"]
        return subprocess.run(
            [*command, str(file)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
        )

    refused = launch(2)
    assert refused.returncode != 0 and "started with 2 ranks" in refused.stderr + refused.stdout
    assert not (tmp_path / "run").exists()
    done = launch(1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "final" / "agent_1" / "model.safetensors").is_file()
