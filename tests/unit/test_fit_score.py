"""What a fit of the reward model says of itself."""

from __future__ import annotations

import math

import pytest

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
