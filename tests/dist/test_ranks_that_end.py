"""A rank that is killed or stopped ends all ranks, with one line that names it, and leaves nothing behind.

Ranks: 0 the main one with actor.0, 1 with actor.1, 2 hosts the rollout engine, 3 idles.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from launch import HERE, free_port

PLACEMENT = {
    "groups": {"left": [0], "right": [1], "sampling": [2], "spare": [3]},
    "roles": {"actor.0": "left", "actor.1": "right", "rollout": "sampling"},
}


def run_file(folder: Path, model: Path, stall: int) -> Path:
    content = {
        "trainer": "madpo",
        "agents": [{"model": str(model)}] * 2,
        "task": {"dataset": "tasks_for_tests:items", "eval_dataset": "tasks_for_tests:items",
                 "reward_func": "tasks_for_tests:letters", "formatters": "tasks_for_tests:text"},
        "args": {"preference_num_candidates": 4, "max_new_tokens": 8, "num_train_epochs": 2, "train_batch_size": 4,
                 "temperature": 1.0, "eval_interval": 2, "eval_num_samples": 4},
        "dtype": "float32",
        "placement": PLACEMENT,
        "rollout": {"backend": "transformers", "max_model_len": 64},
        "run": {"dir": str(folder / "run"), "stall_timeout_s": stall},
    }  # fmt: skip
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


class Launch:
    """A run under the real launcher, in a session of its own, whose processes carry a mark in their environment."""

    def __init__(self, folder: Path, model: Path, stall: int = 600) -> None:
        self.marks, self.mark, self.log = folder / "marks", f"comlrl-test-{folder.name}-{os.getpid()}", folder / "log"
        self.marks.mkdir()
        environment = dict(os.environ) | {
            "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PHASES": str(self.marks),
            "TORCH_EXTENSIONS_DIR": str(folder / "ext"), "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent / 'e2e'}",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "RUN_MARK": self.mark,
        }  # fmt: skip
        command = ["deepspeed", "--num_gpus", "4", "--master_port", str(free_port()), "--no_local_rank", "--module",
                   "phased_entry", "train", str(run_file(folder, model, stall))]  # fmt: skip
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait_for(self, mark: str, seconds: float = 150) -> None:
        end = time.monotonic() + seconds
        while not (self.marks / mark).exists():
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()[-3000:]
            time.sleep(0.1)

    def signal(self, rank: int, number: int) -> None:
        os.kill(int((self.marks / f"rank_{rank}").read_text()), number)

    def end(self, seconds: float) -> tuple[int, list[str]]:
        """(exit code, lines of comlrl-ds), when nothing of the run is left; fails after `seconds`."""
        end = time.monotonic() + seconds
        while (left := self.left()) and time.monotonic() < end:
            time.sleep(0.2)
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.startswith("comlrl-ds:")]
        assert not left, (left, lines)
        return self.process.wait(5), lines

    def left(self) -> list[str]:
        """Processes of the run that are still there, engine children included."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("RUN_MARK") == self.mark:
                    found.append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def clean_up(self) -> None:
        for entry in self.left():
            os.kill(int(entry.split()[0]), signal.SIGKILL)


@pytest.fixture
def launched(tmp_path, tiny_model):
    made = []

    def make(**options) -> Launch:
        made.append(Launch(tmp_path, tiny_model, **options))
        return made[-1]

    yield make
    for launch in made:
        launch.clean_up()


@pytest.mark.parametrize(
    ("phase", "rank", "says"),
    [
        ("collecting", 2, "rank 2 on "),  # the engine's
        pytest.param("collecting", 3, "rank 3 on ", marks=pytest.mark.slow),  # idle
        ("syncing", 1, "rank 1 on "),  # the sender
        ("training", 1, "rank 1 on "),
        ("training", 0, "the main rank on "),
    ],
)
def test_a_killed_rank_ends_all_within_30_seconds(launched, phase, rank, says):
    launch = launched()
    launch.wait_for(phase)
    launch.signal(rank, signal.SIGKILL)
    code, lines = launch.end(30)
    assert code != 0
    assert len(lines) == 1 and says in lines[0] and "ended without a word" in lines[0], lines


@pytest.mark.parametrize(
    ("rank", "says"), [pytest.param(1, "rank 1 on ", marks=pytest.mark.slow), (0, "the main rank on ")]
)  # fmt: skip
def test_a_stopped_rank_ends_all_after_the_stall_timeout(launched, rank, says):
    launch = launched(stall=15)
    launch.wait_for("training")
    started = time.monotonic()
    launch.signal(rank, signal.SIGSTOP)
    # DeepSpeed's launcher gives a stopped process 30 s to follow its SIGTERM before it kills it.
    code, lines = launch.end(15 + 30 + 30)
    assert time.monotonic() - started > 13
    assert code != 0
    assert len(lines) == 1 and says in lines[0] and "has not been heard of for 1" in lines[0], lines
