"""References such as package.module:attribute and file.py:attribute: what they resolve to, and what is wrong with others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from run_files import problems

from comlrl_ds.config.references import resolve


def test_references(tmp_path):
    (tmp_path / "mine.py").write_text("def score(a, b):\n    return 1.0\n\nclass Box:\n    inner = 5\n")
    assert resolve("os.path:join", "x", tmp_path) is os.path.join
    assert resolve("mine.py:score", "x", tmp_path)(1, 2) == 1.0
    assert resolve("mine.py:Box.inner", "x", tmp_path) == 5
    assert resolve(f"{tmp_path}/mine.py:Box", "x", Path("/")).inner == 5
    # One file is one module, however often and by whatever name it is mentioned.
    assert resolve("mine.py:Box", "x", tmp_path) is resolve(f"{tmp_path}/mine.py:Box", "x", tmp_path)


def test_a_file_is_looked_up_beside_the_run_file_first(tmp_path, monkeypatch):
    for name in ("beside", "here"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "which.py").write_text(f"where = {name!r}")
    (tmp_path / "here" / "only.py").write_text("where = 'working directory'")
    monkeypatch.chdir(tmp_path / "here")
    assert resolve("which.py:where", "x", tmp_path / "beside") == "beside"
    assert resolve("only.py:where", "x", tmp_path / "beside") == "working directory"


@pytest.mark.parametrize(
    ("reference", "part"),
    [
        ("os.path", "names no object; write 'package.module:attribute'"),
        (":join", "names no object"),
        ("os.path:", "names no object"),
        ("no_such_package.part:x", "no module named 'no_such_package'"),
        ("comlrl_ds.tasks.explian:reward", "no module named 'comlrl_ds.tasks.explian'"),
        ("comlrl_ds.tasks.explain:rewrd", "did you mean 'reward'?"),
        ("comlrl_ds.tasks.explain:reward.x", "has no 'x'"),
        ("gone.py:x", "no file 'gone.py' (looked in "),
        ("broken.py:x", "ZeroDivisionError"),
        ("wordless.py:x", "SyntaxError"),
        ("needy.py:x", "no_such_package"),
        ("mine.py:scor", "did you mean 'score'?"),
        (".relative:x", "importing '.relative' failed"),
    ],
)
def test_wrong_references(tmp_path, reference, part):
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "wordless.py").write_text("def (")
    (tmp_path / "needy.py").write_text("import no_such_package")
    (tmp_path / "mine.py").write_text("def score(): ...")
    found = problems(lambda: resolve(reference, "task.reward_func", tmp_path))
    assert found.keys() == {"task.reward_func"}
    assert part in found["task.reward_func"]


def test_a_broken_file_can_be_mended_and_read_again(tmp_path):
    file = tmp_path / "mended.py"
    file.write_text("1 / 0")
    problems(lambda: resolve("mended.py:x", "task.dataset", tmp_path))
    file.write_text("x = 3")
    assert resolve("mended.py:x", "task.dataset", tmp_path) == 3
