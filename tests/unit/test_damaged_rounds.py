"""Damaged round files: every damage is one error that names file, record and field."""

from __future__ import annotations

import json
import os

import pytest
import torch
from round_folders import TEAM, write
from safetensors.torch import load_file, save_file

from comlrl_ds.preference.round_files import RoundFileError, RoundFolder


def spoiled(value, *path):
    """Sets a place of the file's content; no value removes it."""

    def spoil(content):
        at = content
        for key in path[:-1]:
            at = at[key]
        if value is spoiled:
            del at[path[-1]]
        else:
            at[path[-1]] = value

    return spoil


def in_record(field, value=spoiled, *inside, names=None):
    names = names or ".".join(map(str, (field, *inside)))
    return pytest.param(spoiled(value, "pairs", 2, field, *inside), 2, names, id=f"{names}={value if value != spoiled else ''}")


DAMAGE = [
    pytest.param(spoiled({}, "pairs"), None, "pairs", id="pairs is an object"),
    pytest.param(spoiled(spoiled, "pairs"), None, "pairs", id="no pairs"),
    pytest.param(spoiled(3, "num_pairs"), None, "num_pairs", id="num_pairs"),
    pytest.param(spoiled(spoiled, "num_pairs"), None, "num_pairs", id="no num_pairs"),
    pytest.param(spoiled(2, "iteration"), None, "iteration", id="iteration"),
    pytest.param(spoiled(True, "iteration"), None, "iteration", id="iteration is no number"),
    pytest.param(spoiled("record", "pairs", 2), 2, None, id="a record is a text"),
    *(in_record(f) for f in (
        "prompts", "winner_completions", "loser_completions", "winner_reward", "loser_reward", "candidate_reward_mean",
        "raw_rewards", "target_raw_reward", "comparator_raw_reward",
    )),
    *(in_record(f, "text") for f in ("prompts", "winner_completions", "loser_completions", "winner_reward", "raw_rewards")),
    *(in_record(f, spoiled, 1, names=f) for f in ("prompts", "winner_completions", "loser_completions", "raw_rewards")),
    *(in_record(f, ["w3"] * 3) for f in ("prompts", "winner_completions", "loser_completions")),
    *(in_record(f, v, 1) for f in ("prompts", "winner_completions", "loser_completions") for v in (None, 3, "\ud800")),
    *(in_record(f, "", 1) for f in ("winner_completions", "loser_completions")),
    *(in_record(f, v) for f in ("winner_reward", "loser_reward", "candidate_reward_mean")
      for v in (None, True, float("nan"), float("inf"), 10**400, [1.0])),
    in_record("raw_rewards", [1.0, float("nan")]),
    in_record("raw_rewards", [1.0, 2.0, 3.0]),
    in_record("target_raw_reward", float("nan")),
    in_record("comparator_raw_reward", "0"),
    in_record("target_raw_reward", 1.0, names="comparator_raw_reward"),
    in_record("comparator_raw_reward", 1.0, names="target_raw_reward"),
    in_record("winner_reward", 0.5),
]  # fmt: skip


@pytest.mark.parametrize("read", ["index", "sizes", "sampled", "replayed"])
@pytest.mark.parametrize(("spoil", "record", "field"), DAMAGE)
def test_damage_is_named(tmp_path, spoil, record, field, read):
    write(tmp_path)
    file = tmp_path / "iteration_0001.json"
    folder = RoundFolder(tmp_path, TEAM)
    if read != "index":
        folder.make_index(1)  # an index made before the damage does not hide it
    content = json.loads(file.read_text())
    spoil(content)
    file.write_text(json.dumps(content))
    ways = {
        "index": lambda: folder.make_index(1),
        "sizes": lambda: folder.sizes([1]),
        "sampled": lambda: folder.sampled(1),
        "replayed": lambda: folder.replayed([(1, 0)]),
    }
    with pytest.raises(RoundFileError) as error:
        ways[read]()
    assert (error.value.file, error.value.record, error.value.field) == (file, record, field)
    assert str(file) in str(error.value)
    assert record is None or f"record {record}" in str(error.value)
    assert field is None or field in str(error.value)


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{", b'{"pairs": "\xff"}', b"[" * 100_000])
def test_what_is_no_round_file_is_refused(tmp_path, data):
    write(tmp_path)
    (tmp_path / "iteration_0001.json").write_bytes(data)
    with pytest.raises(RoundFileError, match=r"iteration_0001\.json: (is not JSON|holds)"):
        RoundFolder(tmp_path, TEAM).sizes([1])


def test_a_cut_file_is_refused_at_every_length(tmp_path):
    write(tmp_path)
    file = tmp_path / "iteration_0001.json"
    data = file.read_bytes()
    for length in range(0, len(data), 7):
        file.write_bytes(data[:length])
        with pytest.raises(RoundFileError, match="is not JSON"):
            RoundFolder(tmp_path, TEAM).make_index(1)


def test_a_team_of_another_size_is_refused(tmp_path):
    write(tmp_path)
    for size in (1, 3):
        with pytest.raises(RoundFileError, match=f"2 entries for {size} agents"):
            RoundFolder(tmp_path, (TEAM * 2)[:size]).sizes([1])


def test_damage_that_size_and_time_do_not_show_is_named_when_it_is_drawn(tmp_path):
    write(tmp_path)
    file = tmp_path / "iteration_0001.json"
    folder = RoundFolder(tmp_path, TEAM)
    folder.make_index(1)
    times = file.stat().st_mtime_ns
    data = file.read_bytes()
    at = data.rindex(b'"winner_reward":2.0') + len(b'"winner_reward":')
    file.write_bytes(data[:at] + b"NaN" + data[at + 3 :])
    os.utime(file, ns=(times, times))
    assert len(folder.replayed([(1, 0)]).pairs) == 1
    with pytest.raises(RoundFileError) as error:
        folder.replayed([(1, 3)])
    assert (error.value.file, error.value.record, error.value.field) == (file, 3, "winner_reward")


# --- the ids file
def put(name, value, *place):
    def spoil(tensors):
        tensors[name] = tensors[name].clone()
        tensors[name][place] = value

    return spoil


def change(name, how):
    def spoil(tensors):
        tensors[name] = how(tensors[name])

    return spoil


def no_answer(tensors):
    """Candidate 1 of the first task, which wins pair 0, has no token."""
    tensors["agent_1.completion_offsets"][1] = 3


IDS_DAMAGE = [
    *(pytest.param(lambda t, n=n: t.pop(n), None, n, id=f"no {n}") for n in (
        "items", "pairs", "agent_0.prompt_ids", "agent_1.prompt_offsets", "agent_1.completion_ids",
        "agent_0.completion_offsets", "agent_1.finish",
    )),
    pytest.param(change("pairs", lambda x: x[:3]), None, "pairs", id="fewer pairs"),
    pytest.param(change("pairs", lambda x: x.int()), None, "pairs", id="type"),
    pytest.param(change("pairs", torch.flatten), None, "pairs", id="shape"),
    pytest.param(put("pairs", 5, 2, 0), 2, "pairs", id="unknown task"),
    pytest.param(put("pairs", 3, 2, 1), 2, "pairs", id="unknown winner"),
    pytest.param(put("pairs", -1, 2, 2), 2, "pairs", id="unknown loser"),
    pytest.param(change("items", lambda x: x[:0]), None, "items", id="no task"),
    pytest.param(put("items", 7, 1), None, "items", id="a task twice"),
    pytest.param(change("agent_0.finish", lambda x: x[:5]), None, "agent_0.finish", id="finish is short"),
    pytest.param(change("agent_0.finish", lambda x: x[:4]), None, "agent_0.completion_offsets", id="fewer candidates"),
    pytest.param(put("agent_0.finish", 2, 0), None, "agent_0.finish", id="finish"),
    pytest.param(put("agent_0.prompt_offsets", 99, 2), None, "agent_0.prompt_offsets", id="beyond the ids"),
    pytest.param(put("agent_0.prompt_offsets", 1, 0), None, "agent_0.prompt_offsets", id="not from the first"),
    pytest.param(put("agent_0.completion_offsets", 0, 3), None, "agent_0.completion_offsets", id="backwards"),
    pytest.param(put("agent_1.completion_ids", -3, 0), None, "agent_1.completion_ids", id="negative"),
    pytest.param(put("agent_1.completion_offsets", 2, 2), 0, "agent_1.completion_ids", id="no token"),
    pytest.param(
        lambda t: t.update({f"agent_2.{n}": t[f"agent_1.{n}"] for n in ("finish", "prompt_ids")}), None, "agent_2.finish",
        id="one agent too many",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "record", "field"), IDS_DAMAGE)
def test_an_ids_file_that_contradicts_the_json_is_named(tmp_path, spoil, record, field):
    write(tmp_path)
    file = tmp_path / "iteration_0001.ids.safetensors"
    folder = RoundFolder(tmp_path, TEAM)
    folder.make_index(1)
    tensors = load_file(file)
    spoil(tensors)
    save_file({name: t.clone() for name, t in tensors.items()}, file)
    with pytest.raises(RoundFileError) as error:
        folder.replayed([(1, 0)])
    assert (error.value.file, error.value.record, error.value.field) == (file, record, field)


@pytest.mark.parametrize("read", [lambda f: f.sampled(1), lambda f: f.replayed([(1, 0)])], ids=["sampled", "replayed"])
def test_ids_of_another_text_are_refused(tmp_path, read):
    write(tmp_path)
    file = tmp_path / "iteration_0001.ids.safetensors"
    tensors = load_file(file)
    assert tensors["agent_1.completion_ids"][2] == 21  # begins candidate 1 of the first task, which wins pair 0
    tensors["agent_1.completion_ids"][2] = 22
    save_file(tensors, file)
    with pytest.raises(RoundFileError, match="not the text of the ids") as error:
        read(RoundFolder(tmp_path, TEAM))
    assert error.value.record == 0
    assert error.value.field == "winner_completions.1"


@pytest.mark.parametrize("data", [b"", b"x" * 100, None])
def test_an_ids_file_that_is_none_is_refused(tmp_path, data):
    write(tmp_path)
    file = tmp_path / "iteration_0001.ids.safetensors"
    file.unlink()
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(RoundFileError, match=r"ids\.safetensors: is (missing|not a safetensors file)"):
        RoundFolder(tmp_path, TEAM).sizes([1])


def test_a_missing_round_is_refused(tmp_path):
    with pytest.raises(RoundFileError, match=r"iteration_0009\.json: is missing"):
        RoundFolder(tmp_path, TEAM).sizes([9])
