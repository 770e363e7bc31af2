"""The spread of raw rewards: bins, edges, files and metrics."""

from __future__ import annotations

import itertools
import json
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from comlrl_ds.config.errors import ConfigError
from comlrl_ds.preference.distributions import (
    bin_edges,
    check_reward_range,
    distribution_content,
    distribution_metrics,
    distribution_of,
    write_distribution,
)

NONE = [0] * 16


def reward(*_):
    return 0.0


def with_range(value):
    def scored(*_):
        return 0.0

    scored.reward_range = value
    return scored


def counts(**bins):
    """counts(b3=2) is 16 zeros but for 2 in bin 3."""
    row = [0] * 16
    for name, count in bins.items():
        row[int(name[1:])] = count
    return row


# --- the range
@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ((0.0, 3.0), (0.0, 3.0)),
        ([-1, 1], (-1.0, 1.0)),
        ((np.float32(0.5), np.int64(2)), (0.5, 2.0)),
        ((Fraction(-1, 4), 0), (-0.25, 0.0)),
        ((-8e307, 8e307), (-8e307, 8e307)),
        ((0.0, 5e-324), (0.0, 5e-324)),
    ],
)
def test_ranges(written, expected):
    found = check_reward_range(with_range(written))
    assert found == expected
    assert [type(x) for x in found] == [float, float]


@pytest.mark.parametrize(
    "written",
    [
        (1.0, 1.0),
        (1.0, 0.0),
        (2**53, 2**53 + 1),  # the same float
        (0.0, math.inf),
        (-math.inf, 0.0),
        (math.nan, 1.0),
        (0.0, math.nan),
        (0, 10**400),
        (-1.7e308, 1.7e308),  # no float is as wide
        (False, True),
        ("0", "1"),
        "01",
        (None, 1.0),
        (0.0,),
        (0.0, 1.0, 2.0),
        (),
        {0.0, 1.0},
        {0.0: 1, 1.0: 2},
        5.0,
        (0.0, 1j),
    ],
)
def test_refused_ranges(written):
    with pytest.raises(ConfigError) as caught:
        check_reward_range(with_range(written))
    (problem,) = caught.value.problems
    assert problem.path == "log_reward_distribution"
    assert "needs reward_func.reward_range = (lo, hi), two finite numbers with lo < hi" in problem.message
    assert f"but it is {repr(written)[:80]}; set it on the reward function" in problem.message


@pytest.mark.parametrize("function", [reward, with_range(None), None])
def test_a_function_without_a_range(function):
    with pytest.raises(ConfigError, match=r"^log_reward_distribution: needs .*, but it is not set; set it on .* or leave"):
        check_reward_range(function)


# --- bins
def test_edges():
    assert bin_edges((0.0, 16.0)) == list(range(17))
    assert bin_edges((-1.0, 1.0), 4) == [-1.0, -0.5, 0.0, 0.5, 1.0]
    assert bin_edges((0.0, 3.0)) == [k * 0.1875 for k in range(17)]


@given(st.floats(-1e300, 1e300), st.floats(-1e300, 1e300))
def test_edges_are_in_order_and_end_at_the_range(low, high):
    if low > high:
        low, high = high, low
    edges = bin_edges((low, high))
    assert len(edges) == 17 and edges == sorted(edges)
    assert (edges[0], edges[-1]) == (low, high)


def test_edges_of_a_range_of_two_neighbouring_floats():
    low, high = 0.1, math.nextafter(0.1, 1)
    assert set(bin_edges((low, high))) == {low, high}
    found = distribution_of([low, high, 5.0, -5.0], (low, high))["counts"]
    assert sum(found) == 4 and found[15] == 2


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (0.0, 0),
        (0.999, 0),
        (1.0, 1),  # an edge belongs to the bin above it
        (math.nextafter(1.0, 0), 0),
        (8.0, 8),
        (14.5, 14),
        (15.0, 15),
        (16.0, 15),  # the last bin has both its edges
        (math.nextafter(16.0, 0), 15),
        (16.5, 15),
        (1e308, 15),
        (-0.5, 0),
        (-1e308, 0),
        (7, 7),
    ],
)
def test_the_bin_of_a_reward(value, where):
    found = distribution_of([value], (0.0, 16.0))
    assert found["counts"] == counts(**{f"b{where}": 1})
    assert (found["sample_count"], found["mean"], found["raw_rewards"]) == (1, value, [value])  # not clipped


def test_a_distribution_by_hand():
    rewards = [0.0, 3.0, math.nan, 1.5, 4.5, math.inf, -1.0, -math.inf, 1.5]
    # Bins of 3 / 16 = 0.1875: 1.5 is the lower edge of bin 8; 4.5 counts as 3, -1 as 0. Mean 9.5 / 6 of what is finite.
    assert distribution_of(rewards, (0.0, 3.0)) == {
        "sample_count": 6,
        "mean": pytest.approx(9.5 / 6, rel=1e-15),
        "counts": counts(b0=2, b8=2, b15=2),
        "raw_rewards": [0.0, 3.0, 1.5, 4.5, -1.0, 1.5],
    }


def test_a_range_below_zero_and_another_number_of_bins():
    assert distribution_of([-1.0, -0.51, -0.5, 0.0, 0.99, 1.0], (-1.0, 1.0), bins=4)["counts"] == [2, 1, 1, 2]
    assert distribution_of([-1.0, 0.3, 1.0], (-1.0, 1.0), bins=1)["counts"] == [3]


@pytest.mark.parametrize("rewards", [[], [math.nan], [math.inf, -math.inf]])
def test_nothing_finite(rewards):
    assert distribution_of(rewards, (0.0, 1.0)) == {"sample_count": 0, "mean": None, "counts": NONE, "raw_rewards": []}


def test_numbers_of_numpy_become_plain():
    found = distribution_of(np.array([0.25, 0.5], dtype=np.float32), (0.0, 1.0))
    assert found["raw_rewards"] == [0.25, 0.5] and {type(r) for r in found["raw_rewards"]} == {float}
    assert type(found["mean"]) is float


@given(st.lists(st.floats(-5, 5), max_size=40))
def test_counts_against_the_edges(rewards):
    edges = bin_edges((-2.0, 3.0))
    inner = [sum(low <= r < high for r in rewards) for low, high in itertools.pairwise(edges)]
    inner[0] += sum(r < -2 for r in rewards)
    inner[15] += sum(r >= 3 for r in rewards)
    assert distribution_of(rewards, (-2.0, 3.0))["counts"] == inner


# --- the file of a round
CANDIDATE = ([0.0, 1.0, math.nan], [0.5, 0.5])
SELECTED = ([1.0], [0.5])
EXPECTED = {
    "iteration": 3,
    "reward_min": 0.0,
    "reward_max": 1.0,
    "num_bins": 16,
    "bin_edges": [k / 16 for k in range(17)],
    "bin_centers": [(2 * k + 1) / 32 for k in range(16)],
    "candidate": {
        "target": {"sample_count": 2, "mean": 0.5, "counts": counts(b0=1, b15=1), "raw_rewards": [0.0, 1.0]},
        "comparator": {"sample_count": 2, "mean": 0.5, "counts": counts(b8=2), "raw_rewards": [0.5, 0.5]},
    },
    "selected": {
        "target": {"sample_count": 1, "mean": 1.0, "counts": counts(b15=1), "raw_rewards": [1.0]},
        "comparator": {"sample_count": 1, "mean": 0.5, "counts": counts(b8=1), "raw_rewards": [0.5]},
    },
}


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


def test_the_file_of_a_round(tmp_path):
    folder = tmp_path / "run" / "reward_distributions"
    file = write_distribution(folder, 3, (0.0, 1.0), candidate=CANDIDATE, selected=SELECTED)
    assert file == folder / "iteration_0003.json"
    assert json.loads(file.read_bytes(), parse_constant=refuse) == EXPECTED
    assert [f.name for f in folder.iterdir()] == ["iteration_0003.json"]  # nothing half-written is left
    assert distribution_content(3, (0.0, 1.0), candidate=CANDIDATE, selected=SELECTED) == EXPECTED


def test_a_round_done_again_replaces_its_file(tmp_path):
    write_distribution(tmp_path, 12345, (0.0, 1.0), candidate=([0.1], []), selected=([], []))
    file = write_distribution(tmp_path, 12345, (0.0, 1.0), candidate=([], []), selected=([], []))
    assert file.name == "iteration_12345.json"
    content = json.loads(file.read_bytes())
    assert content["candidate"] == content["selected"]
    assert content["candidate"]["target"] == {"sample_count": 0, "mean": None, "counts": NONE, "raw_rewards": []}


def test_a_crash_leaves_the_earlier_file(tmp_path, monkeypatch):
    write = {"candidate": CANDIDATE, "selected": SELECTED}
    file = write_distribution(tmp_path, 3, (0.0, 1.0), **write)

    def crash(*_):
        raise OSError("no space")

    monkeypatch.setattr("comlrl_ds.runs.files.os.replace", crash)
    with pytest.raises(OSError, match="no space"):
        write_distribution(tmp_path, 3, (0.0, 2.0), **write)
    assert json.loads(file.read_bytes()) == EXPECTED


# --- metrics
def test_metrics():
    assert distribution_metrics(EXPECTED) == {
        "iter/reward_distribution/current_iteration": 3,
        "iter/reward_distribution/target_sample_count": 2,
        "iter/reward_distribution/comparator_sample_count": 2,
        "iter/reward_distribution/target_mean": 0.5,
        "iter/reward_distribution/comparator_mean": 0.5,
        "iter/selected_reward_distribution/current_iteration": 3,
        "iter/selected_reward_distribution/pair_count": 1,
        "iter/selected_reward_distribution/target_sample_count": 1,
        "iter/selected_reward_distribution/comparator_sample_count": 1,
        "iter/selected_reward_distribution/target_mean": 1.0,
        "iter/selected_reward_distribution/comparator_mean": 0.5,
    }
    assert distribution_metrics(EXPECTED, pair_count=7)["iter/selected_reward_distribution/pair_count"] == 7
    assert distribution_metrics(EXPECTED, pair_count=0)["iter/selected_reward_distribution/pair_count"] == 0


def test_a_mean_of_nothing():
    found = distribution_metrics(distribution_content(1, (0.0, 1.0), candidate=([0.25], []), selected=([], [])))
    assert found["iter/reward_distribution/target_mean"] == 0.25
    nan = {name.removeprefix("iter/") for name, value in found.items() if math.isnan(value)}
    assert nan == {
        "reward_distribution/comparator_mean",
        "selected_reward_distribution/target_mean",
        "selected_reward_distribution/comparator_mean",
    }
    assert found["iter/selected_reward_distribution/pair_count"] == 0
