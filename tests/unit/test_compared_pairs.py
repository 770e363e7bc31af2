"""The team's responses against a comparator's: which are compared, which pairs are kept, and in whose tokens they are."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from round_folders import EOS, TEAM, item_of
from tiny_models import completion, word_tokenizer

from comlrl_ds.preference.centralized import TaggedCentralizedComparatorAdapter
from comlrl_ds.preference.collection import SampledItem
from comlrl_ds.preference.oracle import MISSING, Score
from comlrl_ds.preference.pairs import InvalidScoresError, compared_pairs
from comlrl_ds.preference.records import write_round
from comlrl_ds.preference.round_files import RoundFolder
from comlrl_ds.preference.selection import select_compared
from comlrl_ds.preference.teams import AgentTokens, JointTeam, Team

NAN, INF = math.nan, math.inf
MODES = ("comparator_reward", "reward_gap", "random", "all")

# --- selection
few = st.one_of(st.sampled_from([0.0, 1.0, 2.0]), st.floats(-5, 5))
comparisons = st.lists(st.tuples(few, few), max_size=8)


def selected(rows, mode, cap=None, seed=0):
    return select_compared([(j, a, b) for j, (a, b) in enumerate(rows)], mode, cap, random.Random(seed))


@given(comparisons, st.none() | st.integers(1, 10))
def test_every_mode_against_brute_force(rows, cap):
    decided = [j for j, (a, b) in enumerate(rows) if a > b or a < b]
    won = {j: rows[j][0] > rows[j][1] for j in decided}
    gap = {j: abs(rows[j][0] - rows[j][1]) for j in decided}

    def best_first(better):
        """Takes the first of the best again and again."""
        left, order = list(decided), []
        while left:
            best = left[0]
            for j in left[1:]:
                best = j if better(j, best) else best
            order.append((best, won[best]))
            left.remove(best)
        return order[:cap]

    def by_comparator(j, k):
        return rows[j][1] > rows[k][1] or (rows[j][1] == rows[k][1] and gap[j] > gap[k])

    assert selected(rows, "all", cap) == best_first(lambda j, k: False)
    assert selected(rows, "reward_gap", cap) == best_first(lambda j, k: gap[j] > gap[k])
    assert selected(rows, "comparator_reward", cap) == best_first(by_comparator)
    drawn = selected(rows, "random", cap, seed=5)
    assert len(drawn) == len(set(drawn)) == len(decided[:cap])
    assert all(won[j] is winner for j, winner in drawn)
    assert drawn == selected(rows, "random", cap, seed=5)


def test_the_comparators_best_come_first_whoever_won():
    rows = [(0.0, 3.0), (9.0, 3.0), (3.0, 3.0), (5.0, 4.0), (-3.0, 3.0), (0.0, 1.0)]
    # Comparator 4; then those of 3 by gap: 6 (index 1), 6 (index 4), 3 (index 0); the tie at index 2 never.
    assert selected(rows, "comparator_reward") == [(3, True), (1, True), (4, False), (0, False), (5, False)]
    assert selected(rows, "comparator_reward", 2) == [(3, True), (1, True)]
    assert selected(rows, "reward_gap", 3) == [(1, True), (4, False), (0, False)]
    assert selected(rows, "all") == [(0, False), (1, True), (3, True), (4, False), (5, False)]


def test_a_random_draw_reaches_every_comparison():
    assert {selected([(1.0, 0.0), (0.0, 1.0), (2.0, 2.0)], "random", 1, seed)[0] for seed in range(40)} == {
        (0, True), (1, False),
    }  # fmt: skip


# --- pairs of a round
def side(scores, index=0, first=20):
    """A task of two agents; None: no answer, a pair: (raw, processed), else the raw score is 100 above."""
    rows = [[[first + k, 10 + i, *([EOS] if k % 2 else [])] for k in range(len(scores))] for i in range(2)]
    item = item_of(index, rows, [0.0] * len(scores))
    item.scores = [
        MISSING if s is None else Score(*s) if isinstance(s, tuple) else Score(100 + s, s) for s in scores
    ]  # fmt: skip
    return item


def collect(*tasks, mode="all", cap=None, seed=0, round=1, fraction=1.0):
    """Each task: (the team's scores, the comparator's)."""
    ours = [side(a, k) for k, (a, _) in enumerate(tasks)]
    theirs = [side(b, k, 40) for k, (_, b) in enumerate(tasks)]
    return compared_pairs(ours, theirs, mode=mode, cap=cap, run_seed=seed, round=round, max_invalid_fraction=fraction)


def origins(got):
    return [(p.item, p.winner, p.loser) for p in got.pairs]


def test_a_pair_of_either_winner():
    won, lost = collect(([4.0, 1.0], [3.0, 2.5])).pairs
    assert won.prompts == lost.prompts == ["w5 w6 é"] * 2
    assert (won.winner_completions, won.loser_completions) == (["w20 w10", "w20 w11"], ["w40 w10", "w40 w11"])
    assert (lost.winner_completions, lost.loser_completions) == (["w41 w10", "w41 w11"], ["w21 w10", "w21 w11"])
    assert (won.winner_reward, won.loser_reward, won.raw_rewards) == (4.0, 3.0, [104.0, 103.0])
    assert (lost.winner_reward, lost.loser_reward, lost.raw_rewards) == (2.5, 1.0, [102.5, 101.0])
    assert (won.target_raw_reward, won.comparator_raw_reward) == (104.0, 103.0)
    assert (lost.target_raw_reward, lost.comparator_raw_reward) == (101.0, 102.5)
    assert won.candidate_reward_mean == lost.candidate_reward_mean == 10.5 / 4
    # The comparator's candidates 0 and 1 are 2 and 3.
    assert ((won.item, won.winner, won.loser), (lost.item, lost.winner, lost.loser)) == ((0, 0, 2), (0, 3, 1))
    assert [(tuple(t.winner), tuple(t.loser)) for t in lost.tokens] == [
        ((41, 10, EOS), (21, 10, EOS)), ((41, 11, EOS), (21, 11, EOS)),
    ]  # fmt: skip
    assert [tuple(t.prompt) for t in won.tokens] == [(1, 5, 6, 0), (5, 6, 0)]


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([1.0, 2.0, 9.0], [0.0, 3.0], [(0, 0, 3), (0, 4, 1)]),  # the team's third has no counterpart
        ([1.0, 2.0], [0.0, 3.0, 9.0], [(0, 0, 2), (0, 3, 1)]),
        ([5.0], [1.0, 2.0, 3.0], [(0, 0, 1)]),
    ],
)
def test_only_the_same_candidate_indices_are_compared(ours, theirs, expected):
    got = collect((ours, theirs))
    assert origins(got) == expected
    common = min(len(ours), len(theirs))
    assert {p.candidate_reward_mean for p in got.pairs} == {sum(ours[:common] + theirs[:common]) / (2 * common)}
    assert (got.compared, got.scores) == (common, len(ours) + len(theirs))


def test_the_mean_is_over_finite_scores_of_common_indices():
    # 1, 5 and 0 at indices 0 and 1; 70 has no counterpart. Index 2 is invalid by its raw score alone.
    (pair,) = collect(([1.0, 5.0, (INF, 50.0), 70.0], [0.0, NAN, (NAN, 3.0)])).pairs
    assert pair.candidate_reward_mean == 2.0


def test_the_mean_leaves_out_a_response_that_was_compared_with_nothing():
    got = collect(([1.0, 10.0], [0.0, None]))
    assert origins(got) == [(0, 0, 2)]
    assert got.pairs[0].candidate_reward_mean == 0.5


def test_a_round_counts_what_was_compared():
    got = collect(([1.0, 2.0, NAN, 4.0], [0.0, 2.0, 1.0, None]), ([0.0, None, None], [1.0, 1.0, None]))
    # Task 0: won, tie, invalid, missing; task 1: lost, missing, missing.
    assert (got.compared, got.wins, got.ties, got.missing, got.invalid) == (3, 1, 1, 3, 1)
    assert got.scores == 10  # 14 candidates, 4 without an answer
    assert got.score_mean == pytest.approx((1 + 2 + 4 + 0 + 2 + 1 + 0 + 1 + 1) / 9)
    assert origins(got) == [(0, 0, 4), (1, 3, 0)]
    assert [len(item.scores) for item in got.sampled] == [8, 6]


score = st.sampled_from([0.0, 1.0, 2.0, 0.5, NAN, INF, None])
both_sides = st.lists(st.tuples(st.lists(score, min_size=1, max_size=4), st.lists(score, min_size=1, max_size=4)), max_size=3)


@given(both_sides, st.sampled_from(MODES), st.none() | st.integers(1, 3))
def test_rounds_against_brute_force(tasks, mode, cap):
    def usable(s):
        return s is not None and math.isfinite(s)

    got = collect(*tasks, mode=mode, cap=cap)
    rows = [(t, j, a, b) for t, (ours, theirs) in enumerate(tasks) for j, (a, b) in enumerate(zip(ours, theirs))]
    finite = [r for r in rows if usable(r[2]) and usable(r[3])]
    answers = [s for ours, theirs in tasks for s in ours + theirs if s is not None]
    assert got.compared == len(finite)
    assert got.wins == sum(a > b for *_, a, b in finite)
    assert got.ties == sum(a == b for *_, a, b in finite)
    assert got.missing == sum(a is None or b is None for *_, a, b in rows)
    assert (got.scores, got.invalid) == (len(answers), sum(not math.isfinite(s) for s in answers))
    allowed = {
        (t, j, len(tasks[t][0]) + j) if a > b else (t, len(tasks[t][0]) + j, j): (max(a, b), min(a, b), a + 100, b + 100)
        for t, j, a, b in finite
        if a != b
    }
    kept = origins(got)
    for t in range(len(tasks)):
        possible = sum(key[0] == t for key in allowed)
        assert sum(key[0] == t for key in kept) == (possible if cap is None else min(cap, possible))
    assert len(set(kept)) == len(kept)
    assert [k[0] for k in kept] == sorted(k[0] for k in kept)
    for pair, key in zip(got.pairs, kept):
        rewards = (pair.winner_reward, pair.loser_reward, pair.target_raw_reward, pair.comparator_raw_reward)
        assert rewards == allowed[key]


def test_random_pairs_follow_from_seed_round_and_task():
    tasks = [([1.0, 2.0, 3.0, 4.0, 5.0], [0.0] * 5)] * 6

    def kept(**settings):
        return origins(collect(*tasks, mode="random", cap=2, **settings))

    assert kept(seed=3) == kept(seed=3)
    assert kept(seed=3) != kept(seed=4)
    assert kept(round=1) != kept(round=2)
    assert len({tuple(k[1] for k in kept() if k[0] == t) for t in range(6)}) > 1


def test_too_many_invalid_scores_end_the_run():
    # Missing answers are none of the oracle's scores: 1 of 3.
    task = ([1.0, NAN], [0.0, None])
    assert origins(collect(task, fraction=0.34)) == [(0, 0, 2)]
    with pytest.raises(InvalidScoresError, match=r"1 of 3 .*task 0.*max_invalid_fraction = 0.33"):
        collect(task, fraction=0.33)
    with pytest.raises(InvalidScoresError, match=r"1 of 6 .*task 1"):  # the comparator's, without a counterpart
        collect(([1.0], [0.0]), ([1.0], [0.0, 2.0, INF]), fraction=0)
    nothing = collect(([None], [None]), fraction=0)
    assert (nothing.pairs, nothing.scores, nothing.missing) == ([], 0, 1)


def test_tasks_of_both_sides_belong_together():
    with pytest.raises(ValueError, match="shorter"):
        compared_pairs([side([1.0])], [], mode="all", cap=None, run_seed=0, round=1, max_invalid_fraction=1.0)


# --- a comparator's answers in the agents' tokens
STOPS = [(EOS,), (60,)]
OTHER = word_tokenizer(adds_bos=False)
OTHER.add_special_tokens({"eos_token": "w60"})
AGENTS = Team([TEAM[0], OTHER], [9, 9], STOPS)
OUR_PROMPTS = item_of(3, [[[20]], [[20]]], [0.0]).joint


def tokens_of(team, **changes):
    return AgentTokens(team.tokenizers, changes.get("limits", team.token_limits), changes.get("stops", team.stop_ids))


def converted(texts, finished=None, tokens=None):
    """(texts, [[(ids, finish reason)]], answers that were cut)."""
    finished = finished or [[True] * len(row) for row in texts]
    kept, completions, cut = (tokens or tokens_of(AGENTS)).take(texts, finished)
    return kept, [[(c.ids, c.finish_reason) for c in row] for row in completions], cut


def test_other_tokens_are_made_from_the_texts():
    texts = [["w5 w6", "w7", "", "w8 </s>"], ["w5", "w7 x", "", "w9 w60"]]
    kept, completions, cut = converted(texts, [[True, False, True, True]] * 2)
    assert completions == [
        # No stop token where the answer was cut, and none that only the text of one stands for.
        [((5, 6, EOS), "stop"), ((7,), "length"), ((EOS,), "stop"), ((8, 0, 0, 0, 0, EOS), "stop")],
        [((5, 60), "stop"), ((7, 0), "length"), ((60,), "stop"), ((9, 0, 0, 0, 60), "stop")],
    ]
    assert (kept, cut) == (texts, 0)


def test_an_actor_that_writes_every_role_gets_the_whole_answer():
    agents = AgentTokens(TEAM[:1], [9], STOPS[:1])
    adapter = TaggedCentralizedComparatorAdapter()
    for whole, completions in ((True, [[(5, 6, EOS), (7,)]]), (False, [[(EOS,), (EOS,)]] * 2)):
        tokens = agents if whole else tokens_of(Team(TEAM, [9, 9], STOPS[:1] * 2))
        team = JointTeam([None], [9], [()], agents=tokens, roles=2, adapter=adapter, keep_unparsed=True, whole=whole)
        read = team.read_texts(OUR_PROMPTS, [["w5 w6", "w7"]], [[True, False]])
        assert [[c.ids for c in row] for row in read.completions] == completions
        assert (read.written, read.texts, read.unfinished) == ([["w5 w6", "w7"]], [["", ""], ["", ""]], 1)


def test_without_a_stop_token_an_empty_answer_is_any_token():
    _, completions, _ = converted([["w5", ""]] * 2, tokens=tokens_of(Team(TEAM, [9, 9], [(), ()])))
    assert completions == [[((5,), "stop"), ((0,), "stop")]] * 2


def test_of_several_stop_tokens_the_tokenizers_own_ends_an_answer():
    """Qwen2.5-Instruct: 151643 <|endoftext|> and 151645 <|im_end|> both stop; its answers end with the second."""
    for stops in ((EOS, 60), (1, EOS)):
        _, completions, _ = converted([["w5"]] * 2, tokens=tokens_of(Team(TEAM, [9, 9], [stops] * 2)))
        assert completions == [[((5, EOS), "stop")]] * 2


# --- the agents' limits
@pytest.mark.parametrize(
    ("text", "limit", "ids", "reason", "kept"),
    [
        ("w5 w6 w7", 4, (5, 6, 7, EOS), "stop", "w5 w6 w7"),  # three words and the stop token fit
        ("w5 w6 w7", 3, (5, 6, 7), "length", "w5 w6 w7"),  # an agent would have been stopped before its stop token
        ("w5 w6 w7 w8", 3, (5, 6, 7), "length", "w5 w6 w7"),
        (" ".join(["w5"] * 300), 20, (5,) * 20, "length", " ".join(["w5"] * 20)),
        ("", 1, (EOS,), "stop", ""),
    ],
)
def test_a_finished_text_is_cut_where_sampling_would_have_stopped(text, limit, ids, reason, kept):
    tokens = AgentTokens(TEAM[:1], [limit], STOPS[:1])
    texts, completions, cut = converted([[text]], tokens=tokens)
    assert (texts, completions, cut) == ([[kept]], [[(ids, reason)]], int(reason == "length"))


def test_what_a_server_cut_has_no_stop_token_and_is_cut_as_well():
    tokens = AgentTokens(TEAM[:1], [3], STOPS[:1])
    assert converted([["w5 w6"]], [[False]], tokens) == ([["w5 w6"]], [[((5, 6), "length")]], 0)
    assert converted([["w5 w6 w7 w8"]], [[False]], tokens) == ([["w5 w6 w7"]], [[((5, 6, 7), "length")]], 1)


def test_sections_of_a_joint_answer_are_cut_role_by_role():
    adapter = TaggedCentralizedComparatorAdapter()
    text = "<agent_0>w5 w6 w7</agent_0><agent_1>w8 w9</agent_1>"
    tokens = AgentTokens(TEAM, [2, 5], [(EOS,)] * 2)
    team = JointTeam([None], [9], [()], agents=tokens, roles=2, adapter=adapter)
    read = team.read_texts(OUR_PROMPTS, [[text]], [[True]])
    assert read.texts == [["w5 w6"], ["w8 w9"]] and read.written == [[text]]
    assert [[(c.ids, c.finish_reason) for c in row] for row in read.completions] == [
        [((5, 6), "length")], [((8, 9, EOS), "stop")],
    ]  # fmt: skip
    assert read.cut == 1


# --- such a round on disk
@pytest.mark.parametrize("mode", MODES)
def test_a_stored_round_gives_back_its_pairs(tmp_path, mode):
    ours = [side([1.0, 2.0, 0.3, NAN], 7), side([0.0, 5.0, 2.0, 1.0], 4)]
    written = [[["w30 ä w31", "", "w32"], ["w33", "w34", "w35  w36"]], [["w37", "w38", "w39"]] * 2]
    finished = [[[True] * 3] * 2, [[False, True, True]] * 2]
    writers = replace(AGENTS, agents=tokens_of(AGENTS))
    theirs = []
    for a, texts, ends, scores in zip(ours, written, finished, ([0.1, 9.0, 0.7], [1.0, None, 2.0])):
        item = SampledItem(a.joint, [])
        item.take(writers.read_texts(a.joint, texts, ends))
        item.scores = [MISSING if s is None else Score(s / 3, s) for s in scores]
        theirs.append(replace(item, completions=item.converted))
    got = compared_pairs(ours, theirs, mode=mode, cap=2, run_seed=0, round=1, max_invalid_fraction=1.0)
    assert len(got.pairs) == 3
    assert any(p.winner >= 4 for p in got.pairs)
    write_round(tmp_path, 1, got.pairs, got.sampled)
    folder = RoundFolder(tmp_path, AGENTS.tokenizers)
    assert folder.make_index(1) == 3
    assert folder.sampled(1) == got.pairs


same_sizes = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)).flatmap(
    lambda n: st.lists(st.tuples(*(st.lists(score, min_size=k, max_size=k) for k in n[:2])), min_size=n[2], max_size=n[2])
)


@given(same_sizes)  # a round asks every task for as many candidates
def test_any_round_gives_back_its_pairs(tmp_path_factory, tasks):
    folder = tmp_path_factory.mktemp("round")
    got = collect(*tasks)
    write_round(folder, 2, got.pairs, got.sampled)
    stored = RoundFolder(folder, TEAM)
    assert stored.make_index(2) == len(got.pairs)
    assert stored.sampled(2) == got.pairs


# --- who writes
def test_each_writer_writes_one_role():
    completions = [[completion([20, 21, EOS], "stop"), completion([22])], [completion([60], "stop"), completion([23, 0, 24])]]
    read = AGENTS.read(OUR_PROMPTS, completions)
    assert read.texts == read.written == [["w20 w21", "w22"], ["", "w23 <unk> w24"]]
    assert read.missing == frozenset()
    assert (AGENTS.size, AGENTS.name(1), Team(TEAM, [], [], ["a", "b"]).name(1)) == (2, "agent_1", "b")


JOINT_TEXTS = [
    "<agent_0>a</agent_0> <agent_1> b c\n</agent_1>",
    "no section",
    "<agent_1>only one</agent_1>",
    "<agent_0>never closed",
]


def joint_team(keep=False, roles=2):
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: JOINT_TEXTS[ids[0]])
    adapter = TaggedCentralizedComparatorAdapter()
    return JointTeam([tokenizer], [9], [(EOS,)], roles=roles, adapter=adapter, keep_unparsed=keep)


@pytest.mark.parametrize("keep", [False, True])
def test_one_writer_writes_every_role(keep):
    team = joint_team(keep)
    read = team.read(OUR_PROMPTS, [[completion([k]) for k in range(4)]])
    assert read.written == [JOINT_TEXTS]
    assert read.texts == [["a", "", "", ""], ["b c", "", "only one", ""]]
    assert read.missing == (frozenset() if keep else {1, 3})
    assert team.failures == [2]
    team.read(OUR_PROMPTS, [[completion([1]), completion([0])]])
    assert team.failures == [3]
    assert joint_team().failures == [0]  # every team counts its own


def test_texts_are_roles_by_candidates():
    read = joint_team(roles=3).read(OUR_PROMPTS, [[completion([0]), completion([2])]])
    assert read.texts == [["a", ""], ["b c", "only one"], ["", ""]]


@pytest.mark.parametrize("keep", [False, True])
def test_lost_answers_are_not_read(keep):
    team = joint_team(keep)
    written = [["", JOINT_TEXTS[0], JOINT_TEXTS[1], JOINT_TEXTS[2]]]
    read = team.read_texts(OUR_PROMPTS, written, [[True] * 4], lost=[0, 3])
    assert read.texts == [["", "a", "", ""], ["", "b c", "", ""]]
    assert read.missing == ({0, 3} if keep else {0, 2, 3})
    assert team.failures == [1]
