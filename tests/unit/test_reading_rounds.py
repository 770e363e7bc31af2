"""Round files read back: the same pairs, only what was drawn, and whose they are."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from round_folders import EOS, TEAM, every, item_of, some_items, write
from tiny_models import completion, merging_tokenizer, word_tokenizer

from comlrl_ds.config.errors import ConfigError
from comlrl_ds.config.replay import ReplaySettings
from comlrl_ds.preference.replay import draw
from comlrl_ds.preference.round_checks import RoundFileError
from comlrl_ds.preference.round_files import RoundFolder, claim_folder, foreign_rounds, free_folder, owner_of


# --- what comes back
def test_a_round_comes_back_as_it_was(tmp_path):
    pairs = write(tmp_path)
    folder = RoundFolder(tmp_path, TEAM)
    assert len(pairs) == 4
    assert folder.sizes([1]) == {1: 4}
    assert folder.sampled(1) == pairs
    replayed = folder.replayed([(1, 3), (1, 0), (1, 3)])
    assert replayed.pairs == [pairs[3], pairs[0], pairs[3]]
    assert replayed.changed == 0


def test_rounds_are_found_and_empty_ones_have_no_pairs(tmp_path):
    write(tmp_path, 12)
    write(tmp_path, 2, [])
    write(tmp_path, 10_000, [item_of(3, [[[20]], [[20]]], [1.0])])  # a task, no pair
    (tmp_path / "journal.jsonl").write_text("")
    folder = RoundFolder(tmp_path, TEAM)
    assert folder.rounds() == [2, 12, 10_000]
    assert folder.sizes(folder.rounds()) == {2: 0, 12: 4, 10_000: 0}
    assert folder.sampled(2) == folder.sampled(10_000) == []
    assert folder.replayed([]).pairs == []
    assert RoundFolder(tmp_path / "none", TEAM).rounds() == []


def test_history_is_trained_on_as_it_was_sampled(tmp_path):
    team = [merging_tokenizer()] * 2
    merged = item_of(0, [[[6, 4, 1], [2]], [[2, 1], [3]]], [1.0, 0.0], team, "a")  # its text gives [a, bc]
    pairs = write(tmp_path, 1, [merged], team)
    replayed = RoundFolder(tmp_path, team).replayed([(1, 0)])
    assert (replayed.pairs, replayed.changed) == (pairs, 0)


def test_special_tokens_within_an_answer_stay_in_its_text_and_its_ids(tmp_path):
    marked = word_tokenizer()
    marked.add_special_tokens({"additional_special_tokens": ["w40", "w41"]})
    pairs = write(tmp_path, 1, [item_of(0, [[[40, 20, 41, 21, EOS], [22]]] * 2, [1.0, 0.0], [marked] * 2)], [marked] * 2)
    assert pairs[0].winner_completions == ["w40 w20 w41 w21"] * 2
    folder = RoundFolder(tmp_path, [marked] * 2)
    assert folder.replayed([(1, 0)]).pairs == folder.sampled(1) == pairs


def test_ids_of_another_tokenizer_are_made_anew_and_never_taken_for_the_rounds_own(tmp_path):
    pairs = write(tmp_path, 1, [item_of(0, [[[20, 21, EOS], [22]], [[20], [21]]], [1.0, 0.0])])
    other = word_tokenizer(70)
    other.add_special_tokens({"eos_token": "w60"})
    folder = RoundFolder(tmp_path, [other, TEAM[1]])
    replayed = folder.replayed([(1, 0)])
    assert replayed.changed == 1
    assert replayed.pairs[0].tokens[0].winner == (20, 21, 60)  # its own stop token
    assert replayed.pairs[0].tokens[1] == pairs[0].tokens[1]
    with pytest.raises(RoundFileError, match="another tokenizer than agent 0's"):
        folder.sampled(1)


def test_pairs_of_another_tokenizer_are_tokenised_anew_and_the_changed_ones_counted(tmp_path):
    # "ab"+"c" was sampled as [ab, c]; the text "abc" is [a, bc].
    team = [merging_tokenizer()] * 2
    changed = item_of(0, [[[6, 4, 1], [2]], [[2, 1], [3]]], [1.0, 0.0], team, "a")
    cut = item_of(1, [[[2], [6, 4]], [[2], [3]]], [1.0, 0.0], team, "a")
    same = item_of(2, [[[2, 1], [3]], [[2], [3]]], [1.0, 0.0], team, "a")
    pairs = write(tmp_path, 1, [changed, cut, same])  # with the marks of another team's tokenizers
    folder = RoundFolder(tmp_path, team)
    replayed = folder.replayed([(1, 2), (1, 0), (1, 1), (1, 0)])
    assert replayed.changed == 3
    assert replayed.pairs[0].tokens == pairs[2].tokens
    assert replayed.pairs[1].tokens[0].winner == (2, 5, 1)  # the stop token again
    assert replayed.pairs[1].tokens[1] == pairs[0].tokens[1]
    assert replayed.pairs[2].tokens[0].loser == (2, 5)  # none where the answer was cut


def test_a_stop_token_that_stands_in_the_text_is_not_doubled(tmp_path):
    item = item_of(0, [[[20, 9], [21, EOS]], [[20], [21]]], [1.0, 0.0])
    item.completions[0][0] = completion([20, 9], "stop")  # a team may stop at w9, which is no special token
    pairs = write(tmp_path, 1, [item])
    replayed = RoundFolder(tmp_path, TEAM).replayed([(1, 0)])
    assert (replayed.pairs, replayed.changed) == (pairs, 0)


def test_an_answer_that_was_empty_when_sampled_is_no_damage(tmp_path):
    pairs = write(tmp_path, 1, [item_of(0, [[[20], [EOS]], [[20], [0]]], [1.0, 0.0])])
    assert pairs[0].loser_completions == ["", "<unk>"]
    folder = RoundFolder(tmp_path, TEAM)
    assert folder.sampled(1) == pairs
    replayed = folder.replayed([(1, 0)])
    assert replayed.changed == 0
    assert [t.loser for t in replayed.pairs[0].tokens] == [(EOS,), (0,)]


def test_ids_that_were_made_from_the_text_are_taken(tmp_path):
    # A comparator's text need not be what the agent's tokenizer decodes: here the double blank is lost.
    item = item_of(0, [[[20, 21, EOS], [21]], [[20], [21]]], [1.0, 0.0])
    item.texts[0][0] = "w20  w21"
    pairs = write(tmp_path, 1, [item])
    folder = RoundFolder(tmp_path, TEAM)
    assert folder.sampled(1) == folder.replayed([(1, 0)]).pairs == pairs


@pytest.mark.parametrize("indent", [None, 2])
def test_records_are_found_in_any_json_layout(tmp_path, indent):
    pairs = write(tmp_path)
    file = tmp_path / "iteration_0001.json"
    content = json.loads(file.read_text())
    content = {"note": [{"pairs": "é]"}], "pairs": content.pop("pairs"), **content}
    content["pairs"][1]["note"] = '}],"é'
    file.write_text(" " + json.dumps(content, indent=indent, ensure_ascii=False) + "\n")
    folder = RoundFolder(tmp_path, TEAM)
    assert folder.replayed(every(folder)).pairs == pairs
    file.write_text('{"pairs": [{}], ' + file.read_text().strip()[1:])  # JSON's rule: of two, the last counts
    assert folder.replayed(every(folder)).pairs == pairs


# --- only what is needed is read
@pytest.fixture
def reads(monkeypatch):
    """Bytes read through `os.pread` by file ending, and the files checked whole."""
    found = {"json": 0, "index": 0, "safetensors": 0, "whole": []}
    pread, read_bytes = os.pread, Path.read_bytes

    def counted(fd, length, at):
        data = pread(fd, length, at)
        found[os.readlink(f"/proc/self/fd/{fd}").rsplit(".", 1)[1]] += len(data)
        return data

    def whole(file):
        found["whole"].append(file.name)
        return read_bytes(file)

    monkeypatch.setattr(os, "pread", counted)
    monkeypatch.setattr(Path, "read_bytes", whole)
    return found


def read_by_process():
    """Bytes that this process has asked the system for, however it did."""
    with open("/proc/self/io", "rb", buffering=0) as f:
        return int(f.read(64).split()[1])


@pytest.fixture(scope="module")
def long_history(tmp_path_factory):
    """200 rounds of 200 pairs: 20 tasks of 5 candidates each."""
    folder = tmp_path_factory.mktemp("history")
    rows = [[[20 + k, 30 + k, 3 + i] * 4 + [EOS] for k in range(5)] for i in range(2)]
    pairs = write(folder, 1, [item_of(n, rows, [0.0, 1.0, 2.0, 3.0, 4.0]) for n in range(20)])
    assert len(pairs) == 200
    for name in ("json", "ids.safetensors"):
        first = folder / f"iteration_0001.{name}"
        for r in range(2, 201):
            data = first.read_bytes()
            if name == "json":
                data = data.replace(b'{"iteration":1,', b'{"iteration":%d,' % r, 1)
            (folder / f"iteration_{r:04d}.{name}").write_bytes(data)
    files = RoundFolder(folder, TEAM)
    assert sum(files.make_index(r) for r in range(1, 201)) == 40_000
    return folder, pairs


def test_a_draw_from_a_long_history_reads_the_drawn_records_only(long_history, reads):
    path, pairs = long_history
    stored = sum(f.stat().st_size for f in path.iterdir())
    before = read_by_process()
    folder = RoundFolder(path, TEAM)
    sizes = folder.sizes(range(1, 201))
    drawn = draw(sizes, ReplaySettings("all_history", sample_size=60), 0, 200)
    replayed = folder.replayed(drawn)
    in_all = read_by_process() - before
    assert [p.winner_completions for p in replayed.pairs] == [pairs[k].winner_completions for _, k in drawn]
    record = lambda pair: len(json.dumps(pair.record(), ensure_ascii=False, separators=(",", ":")).encode())  # noqa: E731
    ids = lambda pair: sum(4 * (len(t.prompt) + len(t.winner) + len(t.loser)) for t in pair.tokens)  # noqa: E731
    assert len(set(drawn)) == 60
    assert reads["whole"] == []
    assert reads["json"] == sum(record(pairs[k]) for _, k in drawn)
    rounds = len({r for r, _ in drawn})
    # The head of each ids file says whose ids they are.
    head = 8 + int.from_bytes((path / "iteration_0001.ids.safetensors").read_bytes()[:8], "little")
    assert reads["safetensors"] == sum(ids(pairs[k]) for _, k in drawn) + rounds * head
    assert reads["index"] == 64 * (200 + rounds) + 60 * 8 * (5 + 8 * 2)
    counted = reads["json"] + reads["index"] + reads["safetensors"]
    assert counted < stored / 100
    assert counted <= in_all < counted + 4096


def test_a_cycled_draw_reads_a_record_once(long_history, reads):
    folder = RoundFolder(long_history[0], TEAM)
    once = len(folder.replayed([(5, 3)]).pairs), reads["json"]
    assert len(folder.replayed([(5, 3)] * 10).pairs) == 10
    assert reads["json"] == 2 * once[1]


# --- the index
def test_an_index_is_made_once(tmp_path, reads):
    write(tmp_path)
    assert RoundFolder(tmp_path, TEAM).sizes([1]) == {1: 4}
    assert reads["whole"] == ["iteration_0001.json", "iteration_0001.ids.safetensors"]
    assert RoundFolder(tmp_path, TEAM).sizes([1]) == {1: 4}
    assert len(reads["whole"]) == 2


def no_index(file):
    file.unlink()


def empty(file):
    file.write_bytes(b"")


def cut(file):
    file.write_bytes(file.read_bytes()[:-8])


def longer(file):
    file.write_bytes(file.read_bytes() + bytes(8))


def nonsense_places(file):
    data = file.read_bytes()
    file.write_bytes(data[:64] + b"\x7f" * (len(data) - 64))


def shifted_places(file):
    data = bytearray(file.read_bytes())
    data[64] += 1
    file.write_bytes(data)


def another_round(file):
    data = bytearray(file.read_bytes())
    data[8] += 1
    file.write_bytes(data)


@pytest.mark.parametrize("spoil", [no_index, empty, cut, longer, nonsense_places, shifted_places, another_round])
def test_an_index_that_does_not_fit_is_made_anew(tmp_path, spoil):
    pairs = write(tmp_path)
    folder = RoundFolder(tmp_path, TEAM)
    folder.make_index(1)
    index = tmp_path / "iteration_0001.index"
    whole = index.read_bytes()
    spoil(index)
    assert folder.replayed(every(folder)).pairs == pairs
    assert index.read_bytes() == whole


def test_a_round_that_is_written_anew_is_indexed_anew(tmp_path):
    write(tmp_path)
    folder = RoundFolder(tmp_path, TEAM)
    folder.make_index(1)
    for name in ("json", "ids.safetensors"):
        os.utime(tmp_path / f"iteration_0001.{name}", ns=(1, 1))
    assert folder.sizes([1]) == {1: 4}
    pairs = write(tmp_path, 1, some_items()[:1])
    assert folder.sizes([1]) == {1: 2}
    assert folder.sampled(1) == pairs


def test_a_copied_folder_reads_the_same(tmp_path):
    pairs = write(tmp_path / "a")
    RoundFolder(tmp_path / "a", TEAM).make_index(1)
    shutil.copytree(tmp_path / "a", tmp_path / "b", copy_function=shutil.copyfile)
    assert RoundFolder(tmp_path / "b", TEAM).sampled(1) == pairs


def test_a_record_that_is_not_there_is_refused(tmp_path):
    write(tmp_path)
    for number in (4, -1):
        with pytest.raises(ValueError, match="has 4 pairs"):
            RoundFolder(tmp_path, TEAM).replayed([(1, number)])


# --- whose a folder is
def test_a_folder_belongs_to_the_run_that_claimed_it(tmp_path):
    folder = tmp_path / "new" / "replay"
    assert foreign_rounds(folder, "a") == []
    claim_folder(folder, "a")
    claim_folder(folder, "a")
    write(folder, 2)
    assert owner_of(folder) == "a"
    assert foreign_rounds(folder, "a") == []
    assert free_folder(folder, "a") == folder
    names = ["iteration_0002.ids.safetensors", "iteration_0002.json"]
    assert [f.name for f in foreign_rounds(folder, "b")] == names
    with pytest.raises(ConfigError, match=r"preference_replay_dir: .*earlier run \(iteration_0002"):
        claim_folder(folder, "b")
    assert owner_of(folder) == "a"


def test_rounds_in_an_unclaimed_folder_are_an_earlier_runs(tmp_path):
    write(tmp_path)
    before = {f.name: f.read_bytes() for f in tmp_path.iterdir()}
    assert len(foreign_rounds(tmp_path, "a")) == 2
    with pytest.raises(ConfigError, match="preference_replay_dir"):
        claim_folder(tmp_path, "a")
    assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == before


def test_a_run_finds_its_sub_folder_again(tmp_path):
    write(tmp_path)
    own = free_folder(tmp_path, "a")
    assert own == tmp_path / "run_a"
    claim_folder(own, "a")
    write(own)
    for f in tmp_path.glob("iteration_*"):
        f.unlink()
    assert free_folder(tmp_path, "a") == own
    assert free_folder(tmp_path, "b") == tmp_path


@pytest.mark.parametrize("note", ["", "{", "[]", '{"run_id": 3}', '{"run_id": "other"}'])
def test_a_claimed_folder_without_rounds_is_anothers_too(tmp_path, note):
    (tmp_path / "owner.json").write_text(note)
    assert free_folder(tmp_path, "a") == tmp_path / "run_a"
    with pytest.raises(ConfigError, match="belongs to another run"):
        claim_folder(tmp_path, "a")
