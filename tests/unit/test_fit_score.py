"""What a fit of the reward model starts from, and what it says of itself."""

from __future__ import annotations

import math

import pytest
import torch

from comlrl_ds.engines.heads import make_head
from comlrl_ds.learners.scalar import fit_score


def test_accuracy_margin_and_loss_of_margins():
    score = fit_score([2.0, -1.0, 0.0, 3.0], [1.0, 1.0, 1.0, 1.0])
    assert (score.accuracy, score.margin, score.pairs) == (2.5 / 4, 1.0, 4)  # a tie is half right
    assert score.loss == pytest.approx(sum(math.log1p(math.exp(-m)) for m in (2.0, -1.0, 0.0, 3.0)) / 4)


def test_accuracy_by_the_gap_of_the_task_rewards():
    gaps = [0.9, 0.1, 0.5, 0.2, 0.8, 0.6]
    margins = [1.0, -1.0, 1.0, -1.0, 1.0, -1.0]  # right where the gap is 0.9, 0.8, 0.5; wrong at 0.6, 0.2, 0.1
    assert fit_score(margins, gaps).by_gap == (0.0, 0.5, 1.0)


def test_few_pairs_or_none():
    assert all(map(math.isnan, (*fit_score([], []).by_gap, fit_score([], []).loss, fit_score([], []).accuracy)))
    small, middle, large = fit_score([1.0, -1.0], [0.3, 0.2]).by_gap
    assert (small, middle) == (0.0, 1.0) and math.isnan(large)


@pytest.mark.parametrize("hidden_dim", [None, 32])
def test_first_values_are_near_zero(hidden_dim):
    """Of states as long as a language model's: entries of size 3."""
    states = 3 * torch.randn(200, 576, generator=torch.Generator().manual_seed(0))
    first, second = (make_head(576, seed, hidden_dim)(states).flatten() for seed in (1, 2))
    assert 0 < first.std() < 0.25 and abs(first.mean()) < 0.1
    assert torch.equal(first, make_head(576, 1, hidden_dim)(states).flatten()) and not torch.equal(first, second)
