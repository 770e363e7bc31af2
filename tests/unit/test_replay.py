"""Which stored pairs a round trains on: weights, draws, cycling, defaults, refusals."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comlrl_ds.config.errors import ConfigError
from comlrl_ds.config.replay import REPLAY_ALIASES, ReplaySettings
from comlrl_ds.preference.replay import draw, eligible_rounds, sample_size, selection_weights, shares

ALL = ReplaySettings("all_history")


def decaying(decay, count=None):
    return ReplaySettings("lambda_decay", decay=decay, sample_size=count)


# --- weights
@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        (0, [1, 0, 0]),
        (0.0, [1, 0, 0]),
        (0.5, [4 / 7, 2 / 7, 1 / 7]),
        (0.8, [0.2 / 0.488, 0.16 / 0.488, 0.128 / 0.488]),
        (1, [1 / 3, 1 / 3, 1 / 3]),
        (1.0, [1 / 3, 1 / 3, 1 / 3]),
        (math.nextafter(1.0, 0), [1 / 3, 1 / 3, 1 / 3]),
    ],
)
def test_decay_weights(decay, expected):
    assert selection_weights(decaying(decay), 3) == pytest.approx(expected, abs=1e-15)


@given(st.floats(0, 0.999), st.integers(1, 300))
def test_decay_weights_are_the_pages_formula(decay, count):
    weights = selection_weights(decaying(decay), count)
    assert weights == pytest.approx([(1 - decay) * decay**a / (1 - decay**count) for a in range(count)], abs=1e-12)
    assert math.fsum(weights) == pytest.approx(1)


def test_other_historical_modes_weigh_rounds_alike():
    assert selection_weights(ALL, 4) == selection_weights(ReplaySettings("nearest_k", k=9), 4) == [0.25] * 4
    assert selection_weights(ALL, 0) == []


# --- what may be drawn
def test_eligible_rounds_are_the_newest_that_have_pairs():
    sizes = {1: 5, 2: 0, 3: 7, 4: 1, 5: 0, 6: 99}
    assert eligible_rounds(sizes, ALL, 5) == [4, 3, 1]
    assert eligible_rounds(sizes, ReplaySettings("nearest_k", k=2), 5) == [4, 3]
    assert eligible_rounds(sizes, ReplaySettings("nearest_k", k=9), 5) == [4, 3, 1]
    assert eligible_rounds(sizes, decaying(0.5), 3) == [3, 1]
    assert eligible_rounds(sizes, ReplaySettings(), 5) == []
    assert eligible_rounds(sizes, ReplaySettings(), 4) == [4]
    assert eligible_rounds({}, ALL, 1) == []


def test_the_default_sample_size():
    sizes = {1: 5, 2: 3, 3: 0}
    assert [sample_size(sizes, ALL, r) for r in (1, 2, 3)] == [5, 3, 3]
    assert sample_size(sizes, decaying(0.5, 256), 3) == 256
    assert sample_size({1: 0}, decaying(0.5, 256), 1) == 0
    assert [len(draw(sizes, ALL, 0, r)) for r in (1, 2, 3)] == [5, 3, 3]
    assert len(draw(sizes, decaying(0.8, 256), 0, 3)) == 256


def test_current_is_the_whole_round_in_order():
    assert draw({1: 5, 2: 3}, ReplaySettings(), 7, 2) == [(2, 0), (2, 1), (2, 2)]
    assert draw({1: 5, 2: 0}, ReplaySettings(k=1), 7, 2) == []


def test_without_any_pair_nothing_is_drawn():
    assert draw({1: 0, 2: 0}, decaying(0.5, 10), 0, 2) == []


# --- draws
@pytest.mark.parametrize("decay", [0, 0.5, 0.8, 1])
def test_draws_follow_the_weights_whatever_the_sizes(decay):
    sizes, count = {1: 1000, 2: 10, 3: 0, 4: 200, 5: 3}, 40_000
    found = shares(draw(sizes, decaying(decay, count), 11, 5))
    rounds = [5, 4, 2, 1]  # newest first
    total = sum(decay**a for a in range(4))
    for age, r in enumerate(rounds):
        p = decay**age / total
        assert found.get(r, 0.0) == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / count))
    assert set(found) == (set(rounds) if decay else {5})


def test_draws_of_the_equal_modes_follow_one_over_k():
    sizes, count = {1: 1, 2: 100, 3: 7}, 40_000
    tolerance = 4 * math.sqrt(0.25 / count)
    assert shares(draw(sizes, ReplaySettings("all_history", sample_size=count), 0, 3)) == pytest.approx(
        {1: 1 / 3, 2: 1 / 3, 3: 1 / 3}, abs=tolerance
    )
    nearest = draw(sizes, ReplaySettings("nearest_k", k=2, sample_size=count), 0, 3)
    assert shares(nearest) == pytest.approx({2: 0.5, 3: 0.5}, abs=tolerance)


SETTINGS = st.one_of(
    st.builds(decaying, st.floats(0, 1), st.integers(1, 60)),
    st.builds(lambda k, n: ReplaySettings("nearest_k", k=k, sample_size=n), st.integers(1, 4), st.integers(1, 60)),
    st.builds(lambda n: ReplaySettings("all_history", sample_size=n), st.integers(1, 60) | st.none()),
)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), SETTINGS, st.integers(0, 9))
def test_a_round_is_repeated_only_once_it_is_used_up(listed, settings, seed):
    sizes = dict(enumerate(listed, 1))
    drawn = draw(sizes, settings, seed, len(listed))
    assert len(drawn) == sample_size(sizes, settings, len(listed))
    counts = Counter(drawn)
    for r in {r for r, _ in drawn}:
        times = [counts[r, k] for k in range(sizes[r])]
        assert max(times) - min(times) <= 1
        assert sum(times) == sum(n for (round, _), n in counts.items() if round == r)  # no index beyond the round


def test_oversampling_one_round_cycles_through_it():
    drawn = draw({1: 3}, decaying(0.5, 8), 0, 1)
    assert sorted(Counter(drawn).values()) == [2, 3, 3]
    assert drawn != sorted(drawn)


def test_which_records_remain_after_whole_copies_is_drawn_evenly():
    # 1 of 4 is drawn a second time; over 4000 seeds each about 1000 times.
    second = Counter()
    for seed in range(4000):
        second += Counter(key for key, n in Counter(draw({1: 4}, decaying(0, 5), seed, 1)).items() if n == 2)
    assert set(second) == {(1, k) for k in range(4)}
    assert max(abs(n - 1000) for n in second.values()) < 4 * math.sqrt(4000 * 0.25 * 0.75)


def test_the_whole_draw_is_shuffled():
    drawn = draw({1: 500, 2: 500}, ReplaySettings("all_history", sample_size=400), 3, 2)
    firsts = [r for r, _ in drawn]
    changes = sum(a != b for a, b in itertools.pairwise(firsts))
    assert 150 < changes < 250  # 2 · ½ · ½ · 399 ≈ 200; sorted by round there would be 1


def test_a_draw_depends_on_seed_and_round_alone():
    sizes = {1: 50, 2: 60, 3: 70}
    settings = decaying(0.8, 40)
    again = draw(dict(reversed(sizes.items())), settings, 5, 3)
    assert draw(sizes, settings, 5, 3) == again
    assert draw(sizes, settings, 6, 3) != again
    # Another round that may draw from the same sets draws otherwise.
    assert draw(sizes | {4: 0}, settings, 5, 4) != again
    # What later rounds left in a folder changes nothing.
    assert draw(sizes | {4: 9}, settings, 5, 3) == again


def test_a_draw_is_the_same_everywhere_and_always():
    assert draw({1: 4, 2: 0, 3: 2}, decaying(0.5, 8), 1, 3) == [(3, 1), (3, 0), (3, 1), (3, 0), (1, 3), (1, 1), (3, 0), (3, 1)]


def test_shares():
    assert shares([(2, 0), (1, 5), (2, 1), (2, 0)]) == {1: 0.25, 2: 0.75}
    assert list(shares([(2, 0), (1, 5)])) == [1, 2]
    assert shares([]) == {}


# --- settings
@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({"sample_size": 5}, ["sample_size"]),
        ({"decay": 0.5}, ["lambda"]),
        ({"decay": 0.0}, ["lambda"]),
        ({"k": 2}, ["k"]),
        ({"k": 0}, ["k"]),
        ({"k": True}, ["k"]),
        ({"k": 2, "decay": 0.5, "sample_size": 5}, ["k", "lambda", "sample_size"]),
        ({"mode": "nearest_k"}, ["k"]),
        ({"mode": "nearest_k", "k": 0}, ["k"]),
        ({"mode": "nearest_k", "k": 1.5}, ["k"]),
        ({"mode": "nearest_k", "k": True}, ["k"]),
        ({"mode": "nearest_k", "k": 2, "decay": 0.5}, ["lambda"]),
        ({"mode": "all_history", "k": 1}, ["k"]),
        ({"mode": "all_history", "decay": 1.0}, ["lambda"]),
        ({"mode": "all_history", "sample_size": 0}, ["sample_size"]),
        ({"mode": "all_history", "sample_size": 2.0}, ["sample_size"]),
        ({"mode": "lambda_decay"}, ["lambda"]),
        ({"mode": "lambda_decay", "decay": -0.1}, ["lambda"]),
        ({"mode": "lambda_decay", "decay": 1.1}, ["lambda"]),
        ({"mode": "lambda_decay", "decay": math.nan}, ["lambda"]),
        ({"mode": "lambda_decay", "decay": True}, ["lambda"]),
        ({"mode": "lambda_decay", "decay": "0.5"}, ["lambda"]),
        ({"mode": "lambda_decay", "decay": 0.5, "k": 1}, ["k"]),
        ({"mode": "nearest"}, ["mode"]),
        ({"mode": None}, ["mode"]),
    ],
)
def test_settings_that_are_refused(settings, fields):
    with pytest.raises(ConfigError) as error:
        ReplaySettings(**settings)
    assert [p.path for p in error.value.problems] == [f"preference_replay_{field}" for field in fields]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"k": 1},
        {"mode": "nearest_k", "k": 1},
        {"mode": "nearest_k", "k": 3, "sample_size": 1},
        {"mode": "all_history"},
        {"mode": "lambda_decay", "decay": 0},
        {"mode": "lambda_decay", "decay": 1, "sample_size": 256},
    ],
)
def test_settings_that_are_taken(settings):
    assert ReplaySettings(**settings).mode == settings.get("mode", "current")


@pytest.mark.parametrize(("alias", "mode"), REPLAY_ALIASES.items())
def test_aliases(alias, mode):
    more = {"nearest_k": {"k": 2}, "lambda_decay": {"decay": 0.5}}.get(mode, {})
    assert ReplaySettings(f" {alias.upper()} ", **more) == ReplaySettings(mode, **more)


def test_the_aliases_are_the_peers():
    assert sorted(REPLAY_ALIASES) == sorted(["latest", "new", "recent_k", "last_k", "k", "lambda", "td_lambda", "td-lambda"])


def test_a_near_miss_is_named():
    with pytest.raises(ConfigError, match="did you mean 'lambda_decay'"):
        ReplaySettings("lambda_decoy")
