"""Whatever is raised, wherever: one line that names what and where, an exit code, and the traceback in a file."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
import tiny_models
from run_files import GOOD, written
from test_command_line_errors import runnable

from comlrl_ds.cli import main
from comlrl_ds.config.environment import switched_on
from comlrl_ds.config.errors import ConfigError
from comlrl_ds.preference.journal import Journal
from comlrl_ds.runs.failure import failure_line, without_secrets, write_traceback, writing
from comlrl_ds.runs.files import write_atomically

TASKS = """
class Tasks(list):
    def __getitem__(self, k):
        raise {error}

def broken(*a, **k):
    raise {error}

def reward(a, b):
    return [1.0]

train = [{{'prompt': 'w3 w4'}}]
tasks = Tasks(train)
"""


@pytest.fixture
def folders(tmp_path):
    tokenizer = tiny_models.word_tokenizer()
    return [tiny_models.save(tmp_path / f"m{k}", tiny_models.llama(k, layers=1), tokenizer) for k in range(2)]


@pytest.mark.parametrize("error", ["KeyError('x')", "TypeError('x')", "IndexError('x')", "AssertionError()", "SystemExit(0)"])
def test_user_code_that_raises_ends_in_a_line_with_function_file_and_place(tmp_path, folders, capsys, error):
    (tmp_path / "tasks.py").write_text(TASKS.format(error=error))
    kind = error.partition("(")[0]
    for override, names in (
        ("task.dataset=tasks.py:broken", ["task.dataset", "dataset broken (tasks.py, line 6)"]),
        ("task.dataset=tasks.py:tasks", ["task.dataset", "task 0", "Tasks.__getitem__ (tasks.py"]),
        ("task.formatters=tasks.py:broken", ["task.dataset", "task 0, agent 0", "formatter broken (tasks.py, line 6)"]),
    ):
        assert main(["plan", str(runnable(tmp_path, folders)), override]) == 2
        err = capsys.readouterr().err
        (line,) = [x for x in err.splitlines()[1:] if kind in x]
        assert all(name in line for name in names) and "Traceback" not in err, err


@pytest.mark.parametrize("text", ["def broken(:\n", "import nothing_of_this_name\n", "1 / 0\n", "raise SystemExit(0)\n"])
def test_a_module_that_cannot_be_imported_is_named_with_its_line(tmp_path, folders, capsys, text):
    (tmp_path / "tasks.py").write_text(text)
    assert main(["plan", str(runnable(tmp_path, folders))]) == 2
    err = capsys.readouterr().err
    assert "tasks.py" in err and "Traceback" not in err and "line 1" in err, err


@pytest.mark.parametrize(
    "error", [KeyError("x"), IndexError("list index"), AssertionError(), RecursionError("deep"), TypeError("no")]
)
def test_an_unforeseen_error_is_one_line_that_names_the_file_with_its_traceback(tmp_path, capsys, monkeypatch, error):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr("comlrl_ds.planning.plan.plan_run", fails)
    monkeypatch.delenv("COMLRL_DS_TRACEBACK", raising=False)
    assert main(["plan", str(written(tmp_path, GOOD))]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith(f"comlrl-ds: {type(error).__name__}")
    file = re.search(r"the traceback is in (\S+)", err)[1]
    text = Path(file).read_text()
    assert "Traceback (most recent call last)" in text and type(error).__name__ in text and "in fails" in text
    os.unlink(file)
    monkeypatch.setenv("COMLRL_DS_TRACEBACK", "1")
    main(["plan", str(written(tmp_path, GOOD))])
    assert "Traceback" in capsys.readouterr().err


def test_a_run_keeps_its_traceback_in_its_folder_without_keys(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "sk-planted-0123456789")
    try:
        raise KeyError("sk-planted-0123456789")
    except KeyError as error:
        assert write_traceback(error, tmp_path) == tmp_path / "error.txt"
        assert "planted" not in (tmp_path / "error.txt").read_text() and "planted" not in failure_line(error)
    assert without_secrets("a sk-planted-0123456789") == "a <MY_API_KEY>"


@pytest.mark.parametrize(
    ("value", "on"), [("1", True), ("true", True), ("ON", True), ("0", False), ("false", False), ("", False), ("no", False)]
)
def test_a_switch_in_the_environment_is_on_or_off(value, on):
    assert switched_on("X", {"X": value}) is on
    assert switched_on("X", {}) is False
    with pytest.raises(ConfigError, match=r"X: is 'maybe' in the environment; write 1 or 0"):
        switched_on("X", {"X": "maybe"})


# --- disks
@pytest.fixture
def full_disk(tmp_path):
    """A folder on a file system of 64 KiB."""
    import subprocess

    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a small file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_named_with_the_file(full_disk):
    old = full_disk / "state.json"
    write_atomically(old, b"whole")
    for write, file in (
        (lambda: write_atomically(old, b"x" * 100_000), old),
        (lambda: _fill_journal(full_disk / "journal.jsonl"), full_disk / "journal.jsonl"),
        (lambda: _save_tensors(full_disk / "model"), full_disk / "model"),
    ):
        with pytest.raises(OSError) as caught:
            write()
        assert caught.value.errno == errno.ENOSPC
        assert failure_line(caught.value) == f"no space left on device: {file}; free some, and the same command resumes the run"
    assert old.read_bytes() == b"whole"
    assert not list(full_disk.glob(".*.tmp"))


def _fill_journal(file):
    with Journal(file) as journal:
        while True:
            journal.append("completion", ids=list(range(1000)))


def _save_tensors(folder):
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    with writing(folder):
        save_file({"w": torch.zeros(100_000)}, folder / "model.safetensors")


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError) as caught:
        write_atomically(tmp_path / "file" / "state.json", b"x")
    assert "state.json" in failure_line(caught.value)


# --- run files
@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("trainer: madpo\ntrainer: marlhf\n", "'trainer' stands twice, line 2"),
        ("args:\n  dpo_beta: 1\n  dpo_beta: 2\n", "'dpo_beta' stands twice, line 3"),
        ("a:\n\t- b\n", "not YAML"),
        ("", "must be a mapping"),
        ("- a\n", "must be a mapping"),
        ("[" * 5000, "not YAML"),
        ("a: &x {b: 1}\nc: *y\n", "not YAML"),
        ("\x00", "not YAML"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_run_file_is_a_line(tmp_path, capsys, text, part):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert main(["plan", str(file)]) == 2
    err = capsys.readouterr().err
    assert part in err and "Traceback" not in err, err


def test_files_that_cannot_be_read_are_a_line(tmp_path, capsys):
    (tmp_path / "latin.yaml").write_bytes("trainer: madpö".encode("latin-1"))
    for name in ("latin.yaml", "missing.yaml", "."):
        assert main(["plan", str(tmp_path / name)]) == 2
        assert "Traceback" not in capsys.readouterr().err
