"""The command line before anything runs: what `plan` checks, and how it says what is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from run_files import GOOD, written

from comlrl_ds.cli import main

BROKEN = GOOD.replace("1e-5", "-1") + "  dpo_bta: 2\n"


def test_plan_of_a_broken_file(tmp_path, capsys):
    file = written(tmp_path, BROKEN)
    assert main(["plan", str(file)]) == 2
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert lines[0] == "comlrl-ds: 2 problems"
    assert {line.strip().split(":")[0] for line in lines[1:]} == {"args.agent_learning_rate", "args.dpo_bta"}
    assert len(lines) == 3


def test_plan_says_one_line_per_problem_of_any_section(tmp_path, capsys):
    text = GOOD.replace("{model: b}", "{modle: b}") + "rollout: {backend: vlm, engines: 0}\nrun: {seed: -1}\n"
    assert main(["plan", str(written(tmp_path, text))]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "comlrl-ds: 5 problems"
    places = ["agents.1.model", "agents.1.modle", "rollout.backend", "rollout.engines", "run.seed"]
    assert sorted(line.split(": ")[0] for line in lines[1:]) == [f"  {place}" for place in places]


def test_plan_of_a_broken_file_loads_nothing(tmp_path):
    code = (
        "import sys; from comlrl_ds.cli import main; code = main(sys.argv[1:]);"
        "print(*sorted({'torch', 'transformers', 'vllm', 'deepspeed'} & sys.modules.keys())); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "plan", str(written(tmp_path, BROKEN))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stdout) == (2, "\n")
    assert len(done.stderr.splitlines()) == 3
    assert list(tmp_path.iterdir()) == [tmp_path / "run.yaml"]


@pytest.mark.parametrize("place", [0, 1, 2, 3])
@pytest.mark.parametrize("word", ["--local_rank=3", "--local-rank=0"])
def test_the_launchers_rank_is_accepted_anywhere(tmp_path, capsys, place, word):
    words = ["plan", str(written(tmp_path, GOOD)), "args.dpo_bta=1"]
    assert main([*words[:place], word, *words[place:]]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "comlrl-ds: 1 problem",
        "  args.dpo_bta: unknown setting; did you mean 'dpo_beta'?",
    ]


def runnable(tmp_path: Path, folders: list[str], extra: str = "") -> Path:
    return written(
        tmp_path,
        f"""
trainer: madpo
agents:
  - {{model: {folders[0]}}}
  - {{model: {folders[1]}}}
task: {{dataset: "tasks.py:train", reward_func: "tasks.py:reward"}}
args: {{max_new_tokens: 8, agent_learning_rate: 1e-5}}
rollout: {{backend: transformers}}
run: {{dir: {tmp_path}/out}}
{extra}""",
    )


@pytest.fixture
def tasks(tmp_path):
    (tmp_path / "tasks.py").write_text(
        "train = [{'prompt': 'w3 w4'}]\ndef reward(a, b):\n    return [0.0]\ndef one(a, b, c, d, e):\n    return 0\n"
    )
    return tmp_path


def test_plan_of_a_good_file_says_what_would_run_and_writes_nothing(tasks, model_folders, capsys):
    assert main(["plan", str(runnable(tasks, model_folders))]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "no problems" in out
    assert "up to 8 new tokens" in out
    assert not (tasks / "out").exists()


def test_numbers_of_an_inline_deepspeed_section_are_numbers(tasks, model_folders, capsys):
    # The same 1e-5 in two places of one file must be the same number.
    extra = "deepspeed: {zero_optimization: {stage: 1}, optimizer: {type: AdamW, params: {lr: 1e-5}}}"
    assert main(["plan", str(runnable(tasks, model_folders, extra))]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "path", "part"),
    [
        ("agents.1.model=./nowhere", "agents.1.model", "no folder './nowhere'"),
        ("task.reward_func=tasks.py:rewrd", "task.reward_func", "did you mean 'reward'?"),
        ("task.reward_func=tasks.py:one", "task.reward_func", "takes 5 positional arguments; for 2 agents write 2"),
        ("task.reward_func=tasks.py:train", "task.reward_func", "is not callable"),
        ("task.dataset=os:sep", "task.dataset", "but task 0 is str"),
        ("task.dataset=os:getpid", "task.dataset", "it must give a sequence of mappings"),
        ("task.formatters=[os.path:join]", "task.formatters", "1 formatters for 2 agents"),
        ("args.max_new_tokens=100000", "args.max_new_tokens", "leave no room for a prompt"),
        ("deepspeed=nowhere.json", "deepspeed", "no file 'nowhere.json'"),
        ("args.agent_devices=cuda:7", "args.agent_devices", "is not in this launch"),
    ],
)
def test_plan_checks_what_the_file_names(tasks, model_folders, capsys, override, path, part):
    assert main(["plan", str(runnable(tasks, model_folders)), override]) == 2
    lines = [line.strip() for line in capsys.readouterr().err.splitlines()[1:]]
    assert any(line.startswith(f"{path}: ") and part in line for line in lines), lines
    assert not (tasks / "out").exists()


def test_a_folder_that_holds_another_run_is_refused(tasks, model_folders, capsys):
    (tasks / "out").mkdir()
    (tasks / "out" / "config.yaml").write_text("trainer: madpo")
    file = str(runnable(tasks, model_folders))
    assert main(["train", file, "--resume", "never"]) == 2
    assert "run.dir: " in capsys.readouterr().err
    assert main(["train", file]) == 2  # it would go on with a run, but not with this one
    assert "args.dpo_beta: is 0.1, but None in" in capsys.readouterr().err
    assert list((tasks / "out").iterdir()) == [tasks / "out" / "config.yaml"]
