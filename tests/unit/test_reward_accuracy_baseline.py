"""The length-only baseline of tests/benchmarks/reward_accuracy.py, on lengths whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.length_baseline import bradley_terry_fit, clustered, length_only, right

UNIT = "tokens"


def sides(seed: int, count: int, score) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Two random responses of two agents, 1 to 48 long; the one of the higher score wins."""
    lengths = np.random.default_rng(seed).integers(1, 49, (2, count, 2)).astype(float)
    first_wins = (score(lengths[0]) > score(lengths[1]))[:, None]
    return {UNIT: (np.where(first_wins, *lengths), np.where(first_wins, *lengths[::-1]))}


def accuracies(score) -> dict[str, float]:
    found = length_only(sides(1, 2400, score), sides(2, 1600, score))  # at a quarter of it one bound depends on the BLAS
    return {name.removeprefix(f"{UNIT}: "): float(marks.mean()) for name, marks in found.items()}


def test_each_feature_set_finds_the_rule_that_it_can_express():
    longer = accuracies(lambda n: n[:, 1] + 0.5 * n[:, 0])
    assert longer["n"] > 0.97 and longer["n, n²"] > 0.95
    ratio = accuracies(lambda n: np.log1p(n[:, 1]) - np.log1p(n[:, 0]))
    assert ratio["log n"] > 0.97 > ratio["n"]
    # The best second response is twice as long as the first, which no sum over agents knows.
    best = accuracies(lambda n: -np.abs(np.log1p(n[:, 1]) - np.log1p(n[:, 0]) - np.log(2)))
    assert best["quadratic in log n"] > 0.9 and best["log n"] < 0.75


def test_lengths_that_say_nothing_give_a_half():
    same = np.full((50, 2), 24.0)  # every response is as long as it may be
    for marks in length_only({UNIT: (same, same)}, {UNIT: (same, same)}).values():
        assert set(marks.tolist()) == {0.5}
    found = accuracies(lambda n: np.random.default_rng(int(n.sum())).normal(size=len(n)))  # has nothing to do with lengths
    assert all(0.4 < value < 0.6 for value in found.values()), found


def test_the_fit_is_the_minimum_of_bradley_terry():
    """One feature ±1 with a share q of wins: σ(w) = q without ridge; scale and features without a difference do not matter."""
    x = np.where(np.arange(100) < 80, 1.0, -1.0)[:, None]
    assert bradley_terry_fit(x, ridge=0.0) == pytest.approx([np.log(4)])
    wide = np.hstack([1000 * x, np.zeros((100, 1))])
    assert bradley_terry_fit(wide, ridge=1e-3) * [1000, 1] == pytest.approx([bradley_terry_fit(x, ridge=1e-3)[0], 0])
    ordered = bradley_terry_fit(np.abs(x))  # all wins one way: the ridge keeps it finite
    assert np.isfinite(ordered).all() and ordered[0] > 3
    assert bradley_terry_fit(np.zeros((0, 2))).tolist() == [0, 0]


def test_ties_count_half_and_errors_are_by_task():
    assert right(np.array([2.0, 0.0, -0.1])).tolist() == [1, 0.5, 0]
    values = np.array([1.0, 0, 1, 1, 0, 1])
    mean, error = clustered(values, np.arange(6))
    assert mean == pytest.approx(4 / 6) and error == pytest.approx(values.std(ddof=1) / np.sqrt(6))
    # A copy of every pair in its task adds nothing.
    assert clustered(np.repeat(values, 5), np.repeat(np.arange(6), 5)) == pytest.approx((mean, error))
    assert np.isnan(clustered(values, np.zeros(6))[1]) and np.isnan(clustered(values[:0], values[:0])[0])
