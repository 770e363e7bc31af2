"""What is written of a round: its pairs, the sampled ids, the journal, and an evaluation's samples."""

from __future__ import annotations

import itertools
import math

from safetensors.torch import load_file
from sampled_items import collected, sampled_item, strict_json

from comlrl_ds.preference.evaluation import evaluation_of, write_samples
from comlrl_ds.preference.journal import Journal
from comlrl_ds.preference.records import write_round
from comlrl_ds.runs.files import write_atomically

NINE = [
    "prompts", "winner_completions", "loser_completions", "winner_reward", "loser_reward", "candidate_reward_mean",
    "raw_rewards", "target_raw_reward", "comparator_raw_reward",
]  # fmt: skip


def test_a_round_file_has_the_pages_format(tmp_path):
    items = [sampled_item([1.0, 3.0, math.nan], index=4), sampled_item([0.5, 0.25, 0.125], index=7)]
    pairs = collected(items).pairs
    file = write_round(tmp_path / "replay", 3, pairs, items)
    assert file == tmp_path / "replay" / "iteration_0003.json"
    text = file.read_text(encoding="utf-8")
    content = strict_json(text)
    assert list(content) == ["iteration", "num_pairs", "pairs"]
    assert (content["iteration"], content["num_pairs"]) == (3, 4)
    assert all(list(record) == NINE for record in content["pairs"])
    first = content["pairs"][0]
    assert first == {
        "prompts": ["prompt 4.0 é", "prompt 4.1 é"],
        "winner_completions": ["answer 0.1 ü", "answer 1.1 ü"],
        "loser_completions": ["answer 0.0 ü", "answer 1.0 ü"],
        "winner_reward": 3.0,
        "loser_reward": 1.0,
        "candidate_reward_mean": 2.0,
        "raw_rewards": [3.0, 1.0],
        "target_raw_reward": None,
        "comparator_raw_reward": None,
    }
    assert "é" in text
    assert "\n" not in text
    assert {f.name for f in (tmp_path / "replay").iterdir()} == {"iteration_0003.json", "iteration_0003.ids.safetensors"}


def test_the_ids_file_gives_back_what_was_sampled(tmp_path):
    items = [sampled_item([1.0, 3.0, math.nan], index=4), sampled_item([0.5, 0.25, 0.125], index=7)]
    pairs = collected(items).pairs
    write_round(tmp_path, 1, pairs, items)
    stored = load_file(tmp_path / "iteration_0001.ids.safetensors")
    assert stored["items"].tolist() == [4, 7]
    assert stored["pairs"].tolist() == [[4, 1, 0], [7, 0, 1], [7, 0, 2], [7, 1, 2]]
    for agent in range(2):

        def rows(kind, agent=agent):
            flat, offsets = stored[f"agent_{agent}.{kind}_ids"].tolist(), stored[f"agent_{agent}.{kind}_offsets"].tolist()
            assert (offsets[0], offsets[-1]) == (0, len(flat))
            return [tuple(flat[a:b]) for a, b in itertools.pairwise(offsets)]

        assert rows("prompt") == [item.joint.prompts[agent].ids for item in items]
        completions = [c for item in items for c in item.completions[agent]]
        assert rows("completion") == [c.ids for c in completions]
        assert stored[f"agent_{agent}.finish"].tolist() == [int(c.finish_reason == "stop") for c in completions]
        # With it a resumed round trains on the same tokens.
        for number, (task, winner, loser) in enumerate(stored["pairs"].tolist()):
            row = 3 * stored["items"].tolist().index(task)
            tokens = pairs[number].tokens[agent]
            assert (rows("completion")[row + winner], rows("completion")[row + loser]) == (tokens.winner, tokens.loser)


def test_an_empty_round_is_written_too(tmp_path):
    assert strict_json(write_round(tmp_path, 1, [], []).read_text()) == {"iteration": 1, "num_pairs": 0, "pairs": []}
    assert load_file(tmp_path / "iteration_0001.ids.safetensors")["pairs"].shape == (0, 3)
    items = [sampled_item([1.0, 1.0])]
    write_round(tmp_path, 2, [], items)
    assert load_file(tmp_path / "iteration_0002.ids.safetensors")["items"].tolist() == [0]


def test_a_text_that_is_no_unicode_does_not_lose_the_round(tmp_path):
    item = sampled_item([1.0, 2.0])
    item.texts[0][1] = "broken \ud800 emoji"
    content = strict_json(write_round(tmp_path, 1, collected([item]).pairs, [item]).read_text(encoding="utf-8"))
    assert content["pairs"][0]["winner_completions"][0] == "broken ? emoji"


def test_an_atomic_write_replaces_and_leaves_nothing_beside(tmp_path):
    file = tmp_path / "f"
    write_atomically(file, b"old")
    write_atomically(file, b"new")
    assert file.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [file]


def test_journal_lines(tmp_path):
    with Journal(tmp_path / "deep" / "journal.jsonl") as journal:
        journal.append("score", item=1, value=None, text="é\n")
        journal.append("score", item=2, value=0.5)
        journal.append("completion", logprobs=(-0.5, math.nan), more={"x": math.inf})  # of an engine with a broken weight
    with Journal(tmp_path / "deep" / "journal.jsonl") as journal:
        journal.append("completion", ids=(1, 2))
    assert [strict_json(line) for line in (tmp_path / "deep" / "journal.jsonl").read_text().splitlines()] == [
        {"kind": "score", "item": 1, "value": None, "text": "é\n"},
        {"kind": "score", "item": 2, "value": 0.5},
        {"kind": "completion", "logprobs": [-0.5, None], "more": {"x": None}},
        {"kind": "completion", "ids": [1, 2]},
    ]


def test_what_was_journaled_survives_the_death_of_the_process(tmp_path):
    # Only what has left the process does; a page cache keeps it where the machine lives on.
    journal = Journal(tmp_path / "journal.jsonl")
    journal.append("score", item=1)
    assert (tmp_path / "journal.jsonl").read_text().count("\n") == 1
    journal.sync()


# --- evaluation
def test_an_evaluation_leaves_invalid_scores_out(tmp_path):
    items = [
        sampled_item([1.0, math.nan, 3.0], index=5),
        sampled_item([math.inf, math.nan], index=6),
        sampled_item([4.0, 9.0], index=7, raws=[4.0, math.nan]),
    ]
    evaluation = evaluation_of(items)
    assert evaluation.items == [5, 7]
    assert evaluation.rewards == [[1.0, 3.0], [4.0]]
    assert evaluation.mean == 3.0
    write_samples(tmp_path / "samples" / "eval.json", items)
    content = strict_json((tmp_path / "samples" / "eval.json").read_text())
    assert [s["reward"] for s in content[0]["samples"]] == [1.0, None, 3.0]
    assert content[1]["samples"][0] == {"completions": ["answer 0.0 ü", "answer 1.0 ü"], "reward": None}
