"""Policies of earlier rounds, and the folder of a run: whole or not there, kept while needed, nobody else's."""

from __future__ import annotations

import os
import shutil

import pytest

from comlrl_ds.runs import files
from comlrl_ds.runs.policies import PolicyFolders
from comlrl_ds.runs.run_dir import RunDir


def tree(folder):
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def writer(text="weights", names=("agent_0/model.safetensors", "agent_1/model.safetensors", "note")):
    def write(folder):
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(f"{text} {name}")

    return write


def written(text="weights"):
    return {n: f"{text} {n}".encode() for n in ("agent_0/model.safetensors", "agent_1/model.safetensors", "note")}


def failing(folder):
    writer("half")(folder)
    raise OSError("no space left on device")


def names(folder):
    return sorted(f.name for f in folder.iterdir())


@pytest.fixture
def folders(tmp_path):
    return PolicyFolders(tmp_path / "policy_checkpoints")


def test_names_are_the_peers(folders):
    assert [folders.path(k).name for k in (-3, -1, 0, 1, 12, 12345)] == [
        "initial", "initial", "iteration_0000", "iteration_0001", "iteration_0012", "iteration_12345",
    ]  # fmt: skip
    assert folders.path(0).parent == folders.folder


@pytest.mark.parametrize("index", [-1, 0, 7])
def test_what_was_written_is_there_and_nothing_else(folders, index):
    assert folders.save(index, writer()) == folders.path(index)
    assert names(folders.folder) == [folders.path(index).name]
    assert tree(folders.path(index)) == written()


def test_while_it_is_written_nothing_has_its_name(folders):
    seen = []

    def write(folder):
        writer()(folder)
        seen.append((folders.path(2).exists(), folder.parent == folders.folder, folder.name.startswith(".")))

    folders.save(2, write)
    # Beside its place, so that putting it there is one rename.
    assert seen == [(False, True, True)]


def test_every_file_is_on_disk_before_its_folder_has_its_name(folders, monkeypatch):
    steps, sync, put = [], files.sync, os.replace
    monkeypatch.setattr(files, "sync", lambda path: (steps.append(path.name), sync(path)))
    monkeypatch.setattr(files.os, "replace", lambda old, new: (steps.append("replace"), put(old, new)))
    folders.save(0, writer())
    assert sorted(steps[:3]) == ["model.safetensors", "model.safetensors", "note"]
    assert steps[3:] == ["replace", "policy_checkpoints"]


def test_a_writer_that_fails_leaves_nothing_of_that_name(folders):
    folders.save(0, writer())
    with pytest.raises(OSError, match="no space"):
        folders.save(1, failing)
    assert not folders.path(1).exists()
    assert tree(folders.path(0)) == written()
    folders.save(1, writer("again"))
    assert names(folders.folder) == ["iteration_0000", "iteration_0001"]
    assert tree(folders.path(1)) == written("again")


def test_a_writer_that_fails_leaves_what_was_there(folders):
    folders.save(1, writer("old", ["agent_0/model.safetensors", "gone"]))
    before = tree(folders.path(1))
    with pytest.raises(OSError, match="no space"):
        folders.save(1, failing)
    assert tree(folders.path(1)) == before
    folders.save(1, writer("new"))
    assert tree(folders.path(1)) == written("new")  # nothing of the old one is mixed in
    assert names(folders.folder) == ["iteration_0001"]


@pytest.mark.parametrize("index", [0, 5])
def test_what_a_killed_run_left_half_written_is_removed(folders, index):
    """Of the same round or of another: resuming may begin earlier."""

    def killed(folder):
        writer("half", ["agent_0/half", "stale"])(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        folders.save(5, killed)
    folders.save(index, writer())
    assert names(folders.folder) == [folders.path(index).name]
    assert tree(folders.path(index)) == written()


def test_a_kill_between_the_old_and_the_new_leaves_no_half_one(folders, monkeypatch):
    """Replaced folders are whole or away at every step."""
    folders.save(1, writer("old"))
    remove = shutil.rmtree

    def killed(path, *args, **kwargs):
        (path / "note").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        folders.save(1, writer("new"))
    monkeypatch.setattr(shutil, "rmtree", remove)
    found = tree(folders.path(1)) if folders.path(1).exists() else None
    assert found in (None, written("old"), written("new"))


def test_old_rounds_go_and_the_rest_stays(folders):
    for index in (-1, 0, 1, 2, 10):
        folders.save(index, writer(str(index)))
    others = ["owner.json", "iteration_0000.txt", "my iteration_0000"]
    for name in others:
        (folders.folder / name).write_text("mine")
    folders.drop_before(2)
    assert names(folders.folder) == sorted(["initial", "iteration_0002", "iteration_0010", *others])
    assert tree(folders.path(2)) == written("2")
    folders.drop_before(-1)
    assert folders.path(2).exists()
    folders.drop_before(3)
    assert names(folders.folder) == sorted(["initial", "iteration_0010", *others])


def test_nothing_to_drop(folders):
    folders.drop_before(4)
    assert not folders.folder.exists()


# --- the folder of a run
def test_a_runs_name_is_its_own_and_stays(tmp_path):
    first = RunDir(tmp_path / "a" / "b").run_id
    assert first.isalnum() and len(first) >= 8
    assert RunDir(tmp_path / "a" / "b", resume=True).run_id == first
    found = {RunDir(tmp_path / str(k)).run_id for k in range(20)}
    assert len(found) == 20 and first not in found
    assert names(tmp_path / "a" / "b") == ["run_id"]  # that alone is no run
    assert not RunDir(tmp_path / "a" / "b").holds_run


def test_a_runs_name_outlives_its_configuration(tmp_path):
    run = RunDir(tmp_path / "a")
    name = run.run_id
    run.create({"x": 1})
    assert run.run_id == RunDir(tmp_path / "a", resume=True).run_id == name


def test_how_far_a_run_is_complete(tmp_path):
    run = RunDir(tmp_path)
    assert (run.complete, run.complete_to(1), run.complete_to(0)) == (False, False, False)
    run.mark_complete(3)
    assert run.complete
    assert [run.complete_to(k) for k in (1, 2, 3, 4)] == [True, True, True, False]
    run.mark_complete(12)
    assert [run.complete_to(k) for k in (3, 12, 13)] == [True, True, False]


def test_a_run_without_rounds_is_one_round(tmp_path):
    run = RunDir(tmp_path)
    run.mark_complete()
    assert [run.complete_to(k) for k in (1, 2)] == [True, False]
    (tmp_path / "complete").write_text("")  # as earlier versions marked it
    assert [run.complete_to(k) for k in (1, 2)] == [True, False]
