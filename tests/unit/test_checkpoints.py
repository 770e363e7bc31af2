"""Checkpoints count when they are whole, and not before; a journal gives back what was written, and no more."""

from __future__ import annotations

import json
import math

import pytest
import yaml

from comlrl_ds.config import ConfigError
from comlrl_ds.preference.journal import Journal, JournalError, read_journal
from comlrl_ds.runs.checkpoints import CheckpointError, CheckpointStore, check_hashes, hashed, read_checkpoint
from comlrl_ds.runs.run_dir import RunDir


def saved(store, number, text="x" * 100):
    folder = store.begin(number)
    for role in ("actor.0", "actor.1"):
        (folder / role).mkdir()
        (folder / role / "weights").write_text(f"{role} {text}")
    files = hashed(folder, "actor.0") | hashed(folder, "actor.1")
    return store.seal(folder, {"updates": number}, files)


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints", limit=2)


def test_the_newest_whole_one_is_found_and_the_oldest_go(store):
    assert store.newest() == (None, [])
    for number in (3, 12, 1000000, 999999):
        saved(store, number)
    assert [f.name for f in store.folders()] == ["checkpoint-1000000", "checkpoint-999999"]
    found, skipped = store.newest()
    assert found.state == {"updates": 1000000} and skipped == []
    assert set(found.files) == {"actor.0/weights", "actor.1/weights"}
    for role in ("actor.0", "actor.1"):
        check_hashes(found, role)


def test_a_save_that_was_cut_off_is_none_and_is_cleared_away(store):
    saved(store, 1)
    left = store.begin(2)
    (left / "half").write_text("…")
    assert store.newest()[0].folder.name == "checkpoint-000001"
    saved(store, 3)
    assert not left.exists()
    assert [f.name for f in store.folder.iterdir()] != [] and len(store.folders()) == 2


def test_the_same_update_may_be_saved_again(store):
    saved(store, 4, "first")
    assert "second" in (saved(store, 4, "second") / "actor.0" / "weights").read_text()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: (f / "actor.1" / "weights").write_text("short"), "actor.1/weights has 5 bytes, not 108"),
        (lambda f: (f / "actor.0" / "weights").unlink(), "actor.0/weights is missing"),
        (lambda f: (f / "manifest.json").unlink(), "has no manifest.json"),
        (lambda f: (f / "manifest.json").write_text("{"), "manifest.json is damaged"),
        (lambda f: (f / "manifest.json").write_text('{"state": {}}'), "manifest.json is damaged"),
        (lambda f: (f / "manifest.json").write_text('{"state": 3, "files": []}'), "manifest.json is damaged"),
    ],
)
def test_a_damaged_one_is_named_and_the_older_one_taken(store, damage, says):
    saved(store, 1)
    damage(saved(store, 2))
    with pytest.raises(CheckpointError, match=says.replace("(", r"\(")):
        read_checkpoint(store.folders()[0])
    found, skipped = store.newest()
    assert found.folder.name == "checkpoint-000001"
    assert len(skipped) == 1 and says in skipped[0] and "checkpoint-000002" in skipped[0]


def test_changed_content_of_the_same_size_shows_in_the_hash(store):
    folder = saved(store, 1)
    file = folder / "actor.1" / "weights"
    file.write_text(file.read_text().replace("x", "y", 1))
    found = read_checkpoint(folder)
    check_hashes(found, "actor.0")
    with pytest.raises(CheckpointError, match=r"content of actor.1/weights has changed"):
        check_hashes(found, "actor.1")


# --- the journal
COMPLETION = {
    "stream": "target", "round": 1, "item": 4, "agent": 0, "candidate": 2, "seed": 7, "of": "m", "ids": [3, 5],
    "finish": "stop", "version": "v",
}  # fmt: skip


def test_what_was_journaled_comes_back(tmp_path):
    file = tmp_path / "journal.jsonl"
    assert read_journal(file).completions == {}
    with Journal(file) as journal:
        journal.append("completion", **COMPLETION)
        journal.append("completion", **(COMPLETION | {"stream": "policy.0", "logprobs": (-0.1, -2.3000000000000003)}))
        journal.append("score", stream="target", round=1, item=4, candidate=2, of="j", by="f", raw=0.1, value=-3.5)
        journal.append("score", stream="target", round=1, item=4, candidate=3, raw=0.1, value=None)
    known = read_journal(file)
    seed, mark, completion = known.completions["target", 1, 4, 0, 2]
    assert (seed, mark) == (7, "m") and (completion.ids, completion.finish_reason, completion.version) == ((3, 5), "stop", "v")
    assert completion.logprobs == ()
    assert known.completions["policy.0", 1, 4, 0, 2][2].logprobs == (-0.1, -2.3000000000000003)
    (of, by, score), (*_, invalid) = known.scores["target", 1, 4, 2], known.scores["target", 1, 4, 3]
    assert (of, by) == ("j", "f")
    assert (score.raw, score.value) == (0.1, -3.5) and score.valid
    assert invalid.raw == 0.1 and math.isnan(invalid.value) and not invalid.valid


def test_a_line_that_a_crash_cut_off_is_dropped_and_does_not_spoil_the_next(tmp_path):
    file = tmp_path / "journal.jsonl"
    with Journal(file) as journal:
        journal.append("completion", **COMPLETION)
    whole = file.read_bytes()
    file.write_bytes(whole + whole[: len(whole) // 2])
    assert len(read_journal(file).completions) == 1
    with Journal(file) as journal:
        journal.append("completion", **(COMPLETION | {"candidate": 3}))
    assert set(read_journal(file).completions) == {("target", 1, 4, 0, 2), ("target", 1, 4, 0, 3)}
    assert all(json.loads(line) for line in file.read_text().splitlines())


def test_a_journal_that_somebody_changed_is_refused(tmp_path):
    file = tmp_path / "journal.jsonl"
    file.write_text('{"kind": "completion"}\n')
    with pytest.raises(JournalError, match=r"journal.jsonl, line 1"):
        read_journal(file)


# --- the folder of a run
def test_only_the_same_run_goes_on_in_a_folder(tmp_path):
    config = {"args": {"dpo_beta": 0.1, "max_new_tokens": [4, 8]}, "placement": None, "run": {"dir": "a", "seed": 1}}
    RunDir(tmp_path / "run").create(config)
    with pytest.raises(ConfigError, match="already holds a run"):
        RunDir(tmp_path / "run").check()
    again = RunDir(tmp_path / "run", resume=True)
    again.check()
    again.check_same(config | {"placement": {"groups": {"all": [0]}}, "run": {"dir": "b", "seed": 1}})
    with pytest.raises(ConfigError) as caught:
        again.check_same({"args": {"dpo_beta": 0.2, "max_new_tokens": [4, 9]}, "run": {"dir": "a", "seed": 2}})
    assert {p.path for p in caught.value.problems} == {"args.dpo_beta", "args.max_new_tokens", "run.seed"}
    assert "is 0.2, but 0.1 in" in str(caught.value)
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text()) == config
