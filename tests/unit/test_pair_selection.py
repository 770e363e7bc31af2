"""From the scores of a task's candidates to pairs, and from tasks to the pairs of a round."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampled_items import collected, sampled_item

from comlrl_ds.preference.pairs import InvalidScoresError
from comlrl_ds.preference.records import make_pair
from comlrl_ds.preference.selection import count_ties, select_pairs

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
