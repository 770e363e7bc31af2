"""From sampled and scored candidates to pairs, round files and the journal."""

from __future__ import annotations

import itertools
import json
import math
import random

import pytest
import tiny_models
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny_models import completion, merging_tokenizer, weights_on_disk

from comlrl_ds.maths.packing import pack
from comlrl_ds.maths.seeds import seed_of
from comlrl_ds.preference.collection import InvalidScoresError, JointSampler, SampledItem, Team, pairs_from
from comlrl_ds.preference.evaluation import evaluation_of, write_samples
from comlrl_ds.preference.journal import Journal
from comlrl_ds.preference.oracle import INVALID, Oracle, OracleError, Score
from comlrl_ds.preference.prompts import JointPrompt, Prompt
from comlrl_ds.preference.records import make_pair, write_atomically, write_round
from comlrl_ds.preference.selection import count_ties, select_pairs
from comlrl_ds.rollout.base import Sampling
from comlrl_ds.rollout.disk import shape_of
from comlrl_ds.rollout.pool import RolloutPool
from comlrl_ds.rollout.transformers_engine import TransformersEngine

scores_of_a_task = st.lists(
    st.one_of(st.sampled_from([0.0, 1.0, 2.0, math.nan, math.inf, -math.inf]), st.floats(-5, 5)), min_size=2, max_size=9
)


def ordered_pairs(scores):
    """Every (winner, loser) by trial, in order of the indices."""
    usable = [k for k, s in enumerate(scores) if s - s == 0]  # NaN and infinities fail this
    return [(w, lo) for w in usable for lo in usable if scores[w] > scores[lo]]


# --- selection
@given(scores_of_a_task, st.one_of(st.none(), st.integers(1, 12)))
def test_every_mode_against_brute_force(scores, cap):
    every = ordered_pairs(scores)
    size = len(every) if cap is None else min(cap, len(every))
    assert select_pairs(scores, "all", None, random.Random(0)) == every
    gaps = select_pairs(scores, "reward_gap", cap, random.Random(0))
    assert gaps == sorted(every, key=lambda p: (-(scores[p[0]] - scores[p[1]]), p))[:size]
    drawn = select_pairs(scores, "random", cap, random.Random(5))
    assert len(drawn) == len(set(drawn)) == size
    assert set(drawn) <= set(every)
    assert drawn == select_pairs(scores, "random", cap, random.Random(5))


@given(scores_of_a_task)
def test_ties_are_unordered_and_finite(scores):
    finite = [k for k, s in enumerate(scores) if s - s == 0]
    assert count_ties(scores) == len([(i, j) for i in finite for j in finite if i < j and scores[i] == scores[j]])
    # Every two finite candidates make either a pair or a tie.
    assert count_ties(scores) + len(ordered_pairs(scores)) == math.comb(len(finite), 2)


def test_random_selection_depends_on_its_seed_and_reaches_every_pair():
    scores = [0.0, 1.0, 2.0, 3.0]
    drawn = [tuple(select_pairs(scores, "random", 1, random.Random(seed))) for seed in range(200)]
    assert {pair for (pair,) in drawn} == set(ordered_pairs(scores))


def test_equal_gaps_keep_the_order_of_the_candidates():
    assert select_pairs([1.0, 0.0, 1.0, 0.0], "reward_gap", None, random.Random(0)) == [(0, 1), (0, 3), (2, 1), (2, 3)]
    assert select_pairs([0.0, 3.0, 1.0], "reward_gap", 2, random.Random(0)) == [(1, 0), (1, 2)]


# --- pairs of a round
def sampled_item(values, *, index=0, agents=2, raws=None):
    """A task whose completions differ in every agent and candidate; NaN stands for an invalid score."""
    prompts = tuple(Prompt(f"prompt {index}.{i} é", (1, 10 + i, 20 + index)) for i in range(agents))
    item = SampledItem(
        JointPrompt(index, {"prompt": "p"}, prompts),
        [
            [completion([30 + i, 40 + k] + [50] * k, "stop" if k % 2 else "length") for k in range(len(values))]
            for i in range(agents)
        ],
    )
    item.texts = [[f"answer {i}.{k} ü" for k in range(len(values))] for i in range(agents)]
    item.scores = [Score(v if raws is None else raws[k], v) for k, v in enumerate(values)]
    return item


def collected(items, mode="all", cap=None, fraction=1.0, seed=0, round=1):
    return pairs_from(items, mode=mode, cap=cap, run_seed=seed, round=round, max_invalid_fraction=fraction)


def test_a_pair_holds_both_joint_responses():
    item = sampled_item([1.0, 4.0, 2.0], raws=[10.0, 40.0, 20.0], index=6)
    pair = make_pair(item, 1, 2)
    assert pair.prompts == ["prompt 6.0 é", "prompt 6.1 é"]
    assert pair.winner_completions == ["answer 0.1 ü", "answer 1.1 ü"]
    assert pair.loser_completions == ["answer 0.2 ü", "answer 1.2 ü"]
    assert (pair.winner_reward, pair.loser_reward, pair.raw_rewards) == (4.0, 2.0, [40.0, 20.0])
    assert (pair.target_raw_reward, pair.comparator_raw_reward) == (None, None)
    assert (pair.item, pair.winner, pair.loser) == (6, 1, 2)
    assert [tuple(map(tuple, (t.prompt, t.winner, t.loser))) for t in pair.tokens] == [
        ((1, 10, 26), (30, 41, 50), (30, 42, 50, 50)),
        ((1, 11, 26), (31, 41, 50), (31, 42, 50, 50)),
    ]


def test_the_candidate_mean_is_over_every_finite_score_of_the_task():
    # Index 3 is invalid by its raw score although the processed one is finite.
    item = sampled_item([1.0, 4.0, math.nan, 100.0], raws=[1.0, 4.0, 2.0, math.inf])
    (pair,) = collected([item]).pairs
    assert pair.candidate_reward_mean == 2.5
    assert (pair.winner, pair.loser) == (1, 0)


def test_a_round_counts_ties_and_invalid_scores():
    items = [sampled_item([1.0, 1.0, 2.0]), sampled_item([3.0, math.nan, 3.0], index=1), sampled_item([0.0, 5.0], index=2)]
    got = collected(items)
    assert (got.ties, got.invalid, got.scores) == (2, 1, 8)
    assert [(p.item, p.winner, p.loser) for p in got.pairs] == [(0, 2, 0), (0, 2, 1), (2, 1, 0)]
    assert got.score_mean == pytest.approx((1 + 1 + 2 + 3 + 3 + 0 + 5) / 7)
    # Winners are candidates 2, 2, 1 and losers 0, 1, 0, of 2 + candidate tokens.
    assert got.lengths("winner") == pytest.approx([11 / 3, 11 / 3])
    assert got.lengths("loser") == pytest.approx([7 / 3, 7 / 3])


def test_the_cap_is_per_task_and_random_pairs_follow_from_the_runs_seed():
    items = [sampled_item([0.0, 1.0, 2.0, 3.0, 4.0], index=k) for k in range(6)]

    def kept(**settings):
        return [(p.item, p.winner, p.loser) for p in collected(items, "random", 2, **settings).pairs]

    assert [item for item, _, _ in kept()] == [k for k in range(6) for _ in range(2)]
    assert kept(seed=3) == kept(seed=3)
    assert kept(seed=3) != kept(seed=4)
    assert kept(round=1) != kept(round=2)
    # A task's draw does not depend on the tasks beside it.
    assert [k for k in kept() if k[0] == 5] == [
        (p.item, p.winner, p.loser) for p in collected(items[5:], "random", 2).pairs
    ]  # fmt: skip


def test_too_many_invalid_scores_end_the_run_naming_the_first_task():
    items = [sampled_item([1.0, 2.0], index=8), sampled_item([math.nan, math.inf], index=9)]
    assert len(collected(items, fraction=0.5).pairs) == 1
    with pytest.raises(InvalidScoresError, match=r"2 of 4 oracle scores .*task 9.*max_invalid_fraction = 0.49"):
        collected(items, fraction=0.49)
    none = collected([])
    assert (none.pairs, none.scores) == ([], 0)
    assert math.isnan(none.score_mean)


# --- files
def strict_json(text):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


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
        with pytest.raises(ValueError, match="JSON"):
            journal.append("score", item=3, value=math.nan)
    with Journal(tmp_path / "deep" / "journal.jsonl") as journal:
        journal.append("completion", ids=(1, 2))
    assert [strict_json(line) for line in (tmp_path / "deep" / "journal.jsonl").read_text().splitlines()] == [
        {"kind": "score", "item": 1, "value": None, "text": "é\n"},
        {"kind": "score", "item": 2, "value": 0.5},
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


# --- sampling with a real engine
def joint_prompts(count, agents=2):
    return [
        JointPrompt(k, {"prompt": "p"}, tuple(Prompt(f"w{3 + k}", (1, 3 + k, 20 + i)) for i in range(agents)))
        for k in range(count)
    ]


def sampler_of(folders, reward, *, tokenizers=None, limits=(5, 7), chunk_items=None, on_error="raise", seed=3, engines=1):
    tokenizers = tokenizers or [tiny_models.word_tokenizer()] * 2
    pool = RolloutPool(
        [TransformersEngine(folders[k % len(folders)], dtype=torch.float32) for k in range(engines)], shape_of
    )  # fmt: skip
    policies = {f"agent_{k}": weights_on_disk(f"agent_{k}", folder) for k, folder in enumerate(folders)}
    stops = [() if t.eos_token_id is None else (t.eos_token_id,) for t in tokenizers]
    team = Team(tokenizers, list(limits), stops)
    sampler = JointSampler(
        pool, team, Oracle(reward, 2), run_seed=seed, oracle_on_error=on_error, chunk_items=chunk_items
    )  # fmt: skip

    def sample(prompts, *, stream="target", round=1, candidates=3, **rest):
        return sampler.sample(prompts, policies, Sampling(1.0), stream=stream, round=round, candidates=candidates, **rest)

    return sampler, sample


def ids_of(sampled):
    return {
        (s.joint.index, i, j): c.ids for s in sampled for i, row in enumerate(s.completions) for j, c in enumerate(row)
    }  # fmt: skip


def word_count(a, b):
    return len(a[0].split()) + 0.1 * len(set(b[0].split()))


def test_samples_do_not_depend_on_chunks_engines_or_the_other_tasks(model_folders):
    prompts = joint_prompts(4)
    _, sample = sampler_of(model_folders, word_count)
    reference = ids_of(sample(prompts))
    assert len(set(reference.values())) > 20  # of 24; seeds differ
    _, chunked = sampler_of(model_folders, word_count, chunk_items=1)
    assert ids_of(chunked(prompts)) == reference
    _, spread = sampler_of(model_folders, word_count, engines=2)
    assert ids_of(spread(prompts)) == reference
    _, reversed_order = sampler_of(model_folders, word_count)
    assert ids_of(reversed_order(prompts[::-1])) == reference
    assert ids_of(sample(prompts[2:])) == {k: v for k, v in reference.items() if k[0] >= 2}
    # More candidates extend what was there; another stream, round or run shares nothing by design.
    assert reference.items() <= ids_of(sample(prompts, candidates=4)).items()
    for changed in ({"stream": "comparator"}, {"stream": "eval"}, {"round": 2}):
        assert ids_of(sample(prompts, **changed)) != reference
    _, other = sampler_of(model_folders, word_count, seed=4)
    assert ids_of(other(prompts)) != reference


def test_limits_order_texts_and_scores(model_folders):
    told = []
    _, sample = sampler_of(model_folders, word_count)
    sampled = sample(joint_prompts(3)[::-1], progress=lambda *numbers: told.append(numbers))
    assert [s.joint.index for s in sampled] == [2, 1, 0]
    tokenizer = tiny_models.word_tokenizer()
    for s in sampled:
        for agent, limit in enumerate((5, 7)):
            assert all(1 <= len(c.ids) <= limit for c in s.completions[agent])
            assert s.texts[agent] == [tokenizer.decode(list(c.ids), skip_special_tokens=True) for c in s.completions[agent]]
        assert s.values == [word_count([a], [b]) for a, b in zip(*s.texts)]
    assert sum(items for items, _ in told) == 3
    assert sum(tokens for _, tokens in told) == sum(len(ids) for ids in ids_of(sampled).values())


def journal_lines(file):
    return [strict_json(line) for line in file.read_text().splitlines()]


def test_the_journal_holds_every_completion_and_score(model_folders, tmp_path):
    def reward(a, b):
        return math.nan if "w5" in a[0] else word_count(a, b)

    _, sample = sampler_of(model_folders, reward)
    with Journal(tmp_path / "j.jsonl") as journal:
        sampled = sample(joint_prompts(2), journal=journal, round=4)
    lines = journal_lines(tmp_path / "j.jsonl")
    completions = [line for line in lines if line["kind"] == "completion"]
    assert {(c["item"], c["agent"], c["candidate"]): tuple(c["ids"]) for c in completions} == ids_of(sampled)
    assert len(completions) == 2 * 2 * 3
    for line in completions:
        key = (line["item"], line["agent"], line["candidate"])
        assert line["seed"] == seed_of(3, "target", 4, *key)
        assert (line["stream"], line["round"], line["finish"] in ("stop", "length")) == ("target", 4, True)
        assert line["version"] == model_folders[line["agent"]]
    scores = {(s["item"], s["candidate"]): (s["raw"], s["value"]) for s in lines if s["kind"] == "score"}
    expected = {
        (s.joint.index, j): (None, None) if math.isnan(x) else (x, x) for s in sampled for j, x in enumerate(s.values)
    }  # fmt: skip
    assert scores == expected


def test_trained_ids_are_the_sampled_ones_also_where_the_text_tokenises_differently(tmp_path):
    tokenizer = merging_tokenizer()
    ab, c, a, bc = (tokenizer.convert_tokens_to_ids(t) for t in ("ab", "c", "a", "bc"))
    assert tokenizer("abc")["input_ids"] == [a, bc]
    assert tokenizer.decode([ab, c]) == "abc"
    folder = tiny_models.save(tmp_path / "model", tiny_models.llama(0, vocab=len(tokenizer), layers=1), tokenizer)
    _, sample = sampler_of([folder, folder], lambda x, y: len(x[0]) + len(y[0]) / 100, tokenizers=[tokenizer] * 2)
    prompts = [JointPrompt(k, {}, (Prompt("a", (2,)), Prompt("b", (3, 2)))) for k in range(4)]
    with Journal(tmp_path / "j.jsonl") as journal:
        sampled = sample(prompts, candidates=4, journal=journal)
    journaled = {
        (x["item"], x["agent"], x["candidate"]): tuple(x["ids"])
        for x in journal_lines(tmp_path / "j.jsonl")
        if x["kind"] == "completion"
    }
    pairs = collected(sampled).pairs
    changed = 0
    for pair in pairs:
        for agent, tokens in enumerate(pair.tokens):
            for ids, candidate, text in (
                (tokens.winner, pair.winner, pair.winner_completions[agent]),
                (tokens.loser, pair.loser, pair.loser_completions[agent]),
            ):
                assert tuple(ids) == journaled[pair.item, agent, candidate]
                changed += list(ids) != tokenizer(text)["input_ids"]
                targets = pack([tokens], score_last_token=True).target.tolist()
                assert targets == [*tokens.winner, *tokens.loser]
    assert changed > len(pairs)  # most differ with a vocabulary this small: the test can fail


def failing(after, calls):
    def reward(a, b):
        calls.append((a, b))
        if len(calls) > after:
            raise KeyError("gone")
        return float(len(calls))

    return reward


@pytest.mark.parametrize("after", [3, 4, 7])
def test_an_oracle_that_raises_ends_the_run_with_everything_scored_kept(model_folders, tmp_path, after):
    calls = []
    _, sample = sampler_of(model_folders, failing(after, calls))
    with Journal(tmp_path / "j.jsonl") as journal, pytest.raises(OracleError, match=f"task {after // 3}: KeyError"):
        sample(joint_prompts(4), journal=journal)
    # A call may cost money: also the answers for the failing task's first candidates are kept.
    scores = [line["value"] for line in journal_lines(tmp_path / "j.jsonl") if line["kind"] == "score"]
    assert scores == [float(k) for k in range(1, after + 1)]


def test_an_oracle_that_raises_may_be_counted_instead(model_folders):
    sampler, sample = sampler_of(model_folders, failing(4, []), on_error="invalid")
    sampled = sample(joint_prompts(3))
    assert sampler.oracle_errors == 5
    scores = [s for item in sampled for s in item.scores]
    assert [s.valid for s in scores] == [True] * 4 + [False] * 5
    assert all(s is INVALID for s in scores[4:])
