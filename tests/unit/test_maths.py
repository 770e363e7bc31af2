"""Losses, seeds, masks and the joint plan of a batch against closed forms and exhaustive checks."""

from __future__ import annotations

import hashlib
import itertools
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comlrl_ds.maths.logprobs import additive_mask, sum_by_side
from comlrl_ds.maths.losses import madpo_terms
from comlrl_ds.maths.packing import PairTokens, plan_micro_steps, row_length
from comlrl_ds.maths.seeds import generator_of, seed_of


# --- losses
@pytest.mark.parametrize("agents", [1, 2, 3])
@pytest.mark.parametrize("eta", [0.1, 1.0, 2.5])
def test_slope_is_the_derivative_of_the_loss_for_every_agent(agents, eta):
    generator = torch.Generator().manual_seed(agents)
    margins = (20 * torch.randn(agents, 9, dtype=torch.float64, generator=generator)).requires_grad_()
    terms = madpo_terms(margins.detach(), eta)
    # Plain form of the page, log(1 + e^(−ηΔ)), apart from the library's logsigmoid.
    reference = torch.log1p(torch.exp(-eta * margins.sum(0)))
    reference.sum().backward()
    assert torch.allclose(terms.loss, reference.detach(), rtol=0, atol=1e-12)
    for agent in range(agents):
        assert torch.allclose(terms.slope, margins.grad[agent], rtol=0, atol=1e-12)


def test_terms_by_hand():
    terms = madpo_terms(torch.tensor([[1.0, -4.0], [2.0, 1.0]], dtype=torch.float64), 0.5)
    assert terms.joint_margin.tolist() == [3.0, -3.0]
    assert terms.loss.tolist() == pytest.approx([math.log(1 + math.exp(-1.5)), math.log(1 + math.exp(1.5))], abs=1e-15)
    assert terms.slope.tolist() == pytest.approx([-0.5 / (1 + math.exp(1.5)), -0.5 / (1 + math.exp(-1.5))], abs=1e-15)


def test_far_margins_neither_overflow_nor_vanish():
    terms = madpo_terms(torch.tensor([[-1e5, 1e5]], dtype=torch.float64), 0.1)
    assert terms.loss.tolist() == [1e4, 0.0]
    assert terms.slope.tolist() == [-0.1, 0.0]


def test_margins_need_agents_and_pairs():
    with pytest.raises(ValueError, match=r"\[agents, pairs\].*\(3,\)"):
        madpo_terms(torch.zeros(3), 0.1)


# --- seeds
@pytest.mark.parametrize(
    ("key", "text", "digest"),
    [
        # `printf text | b2sum -l 64`: the values that every machine and every later version must give.
        ((0, "target", 1, 0, 0, 0), b"(0, 'target', 1, 0, 0, 0)", "aca0790fcc24c913"),
        ((7, "eval", 0, 63, 1, 2), b"(7, 'eval', 0, 63, 1, 2)", "853e03c458513879"),
        ((1, "order", 1, 0), b"(1, 'order', 1, 0)", "76fd831e9afa788c"),
    ],
)
def test_seeds_are_stable(key, text, digest):
    assert hashlib.blake2b(text, digest_size=8).hexdigest() == digest
    assert seed_of(*key) == int(digest, 16) // 2
    assert generator_of(*key).random() == random.Random(int(digest, 16) // 2).random()


def test_seeds_fit_a_signed_64_bit_integer():
    assert all(0 <= seed_of(0, "target", k) < 2**63 for k in range(200))


def test_every_part_of_the_key_counts():
    keys = itertools.product((0, 1), ("target", "comparator", "eval"), (0, 1, 2), range(4), range(3), range(5))
    seeds = [seed_of(*key) for key in keys]
    assert len(set(seeds)) == 2 * 3 * 3 * 4 * 3 * 5


def test_neighbouring_numbers_of_a_key_cannot_be_confused():
    # A hash of joined text would give 1, 23 and 12, 3 the same seed.
    assert len({seed_of(0, "target", 1, 23), seed_of(0, "target", 12, 3), seed_of(0, "target", 123)}) == 3


def test_no_two_candidates_of_an_item_share_a_seed():
    for item in range(4):
        seeds = [seed_of(3, "target", 1, item, agent, candidate) for agent in range(2) for candidate in range(80)]
        assert len(set(seeds)) == len(seeds)


# --- masks and sums
def test_additive_mask():
    visible = torch.tensor([[[True, False], [True, True]]])
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        mask = additive_mask(visible, dtype)
        assert mask.shape == (1, 1, 2, 2)
        assert mask.dtype == dtype
        assert mask[0, 0].tolist() == [[0.0, torch.finfo(dtype).min], [0.0, 0.0]]
        # Eager attention adds it to scores of any size: the hidden key must not come back.
        weights = (torch.tensor([[30.0, -30.0]], dtype=dtype) + mask[0, 0, :1]).softmax(-1)
        assert weights[0].tolist() == [1.0, 0.0]
    assert visible.tolist() == [[[True, False], [True, True]]]


def test_sum_by_side_sums_and_leaves_empty_sides_at_zero():
    logprobs = torch.tensor([-1.0, -2.0, -4.0, -8.0])
    assert sum_by_side(logprobs, torch.tensor([3, 0, 3, 0]), 6).tolist() == [-10.0, 0.0, 0.0, -5.0, 0.0, 0.0]
    assert sum_by_side(logprobs[:0], torch.tensor([], dtype=torch.long), 4).tolist() == [0.0] * 4


# --- the joint plan
lengths = st.integers(1, 3).flatmap(
    lambda agents: st.lists(st.lists(st.integers(1, 300), min_size=agents, max_size=agents), min_size=1, max_size=25)
)


@given(lengths, st.integers(1, 1200), st.one_of(st.none(), st.integers(1, 6)), st.sampled_from([1, 2]))
def test_plan_covers_the_batch_within_its_bounds(lengths, max_tokens, max_pairs, rows_per_pair):
    plan = plan_micro_steps(lengths, max_tokens, max_pairs, rows_per_pair)
    assert sorted(k for micro in plan for k in micro) == list(range(len(lengths)))
    assert all(plan)
    for micro in plan:
        assert max_pairs is None or len(micro) <= max_pairs
        # Rows are padded to the longest: what counts is the worst agent's rectangle, unless a pair is alone.
        for agent in range(len(lengths[0])):
            padded = max(lengths[k][agent] for k in micro) * len(micro) * rows_per_pair
            assert padded <= max_tokens or len(micro) == 1


@given(lengths, st.integers(1, 1200))
def test_plan_opens_a_micro_step_only_where_the_last_is_full(lengths, max_tokens):
    plan = plan_micro_steps(lengths, max_tokens)
    for micro, following in itertools.pairwise(plan):
        grown = [*micro, following[0]]
        assert max(max(lengths[k][i] for k in grown) * len(grown) for i in range(len(lengths[0]))) > max_tokens


def test_plan_by_hand():
    # Agent 1's fourth pair is over the budget by itself; it still trains, alone.
    assert plan_micro_steps([[10, 12], [10, 10], [11, 9], [5, 900]], 36) == [[1, 2, 0], [3]]
    assert plan_micro_steps([[10, 12], [10, 10], [11, 9], [5, 900]], 36, rows_per_pair=2) == [[1], [2], [0], [3]]
    assert plan_micro_steps([[1]] * 5, 100, max_pairs=2) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(("last", "expected"), [(False, 3 + 4 - 1 - 1 + 2 - 1 - 1), (True, 3 + 4 - 1 + 2 - 1)])
def test_row_length_counts_what_is_put_in(last, expected):
    # Of n scored tokens the last is only predicted, never an input; the default scores one token less.
    assert row_length(PairTokens([1, 1, 1], [4, 5, 6, 7], [8, 9]).group(last)) == expected
    assert row_length(PairTokens([1, 1, 1], [4], [8]).group(False)) == 3
