"""Which engine samples which requests, with which weights."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comlrl_ds.rollout.schedule import schedule


@st.composite
def workloads(draw):
    engines = draw(st.integers(1, 4))
    keys = [f"key{k}" for k in range(draw(st.integers(1, 4)))]
    requests = draw(st.lists(st.sampled_from(keys), max_size=60))
    return (
        draw(st.lists(st.floats(1, 200), min_size=len(requests), max_size=len(requests))),
        requests,
        draw(st.lists(st.sampled_from([*keys, "other"]), min_size=engines, max_size=engines)),
        {key: sorted(draw(st.sets(st.integers(0, engines - 1), min_size=1))) for key in keys},
        draw(st.sampled_from([0.0, 1.0, 50.0, 400.0])),
    )


def engine_load(segments, costs, held, swap_cost):
    return sum(costs[k] for s in segments for k in s.indices) + swap_cost * sum(s.key != held for s in segments)


@given(workloads())
def test_a_schedule_gives_every_request_once_to_an_engine_that_can(work):
    _, keys, held, serves, _ = work
    plan = schedule(*work)
    assert len(plan) == len(held)
    assert sorted(k for segments in plan for s in segments for k in s.indices) == list(range(len(keys)))
    for engine, segments in enumerate(plan):
        assert len({s.key for s in segments}) == len(segments)
        for place, segment in enumerate(segments):
            assert segment.indices
            assert engine in serves[segment.key]
            assert all(keys[k] == segment.key for k in segment.indices)
            assert segment.indices == sorted(segment.indices)
            assert place == 0 or segment.key != held[engine]  # what an engine holds already comes first


@given(workloads())
def test_a_schedule_is_never_worse_than_one_engine(work):
    costs, keys, held, serves, swap_cost = work
    loads = [engine_load(segments, costs, h, swap_cost) for segments, h in zip(schedule(*work), held)]
    for engine, holds in enumerate(held):
        if all(engine in serves[key] for key in set(keys)):
            alone = sum(costs) + swap_cost * sum(key != holds for key in set(keys))
            assert max(loads) <= alone * (1 + 1e-9)


@pytest.mark.parametrize("engines", [2, 3, 4, 8])
def test_equal_work_is_spread_evenly(engines):
    count = 80
    plan = schedule([10.0] * count, ["a"] * count, ["a"] * engines, {"a": list(range(engines))}, 400.0)
    loads = [10.0 * sum(len(s.indices) for s in segments) for segments in plan]
    assert max(loads) <= 1.25 * sum(loads) / engines + 10.0


def test_weights_are_swapped_only_where_it_pays():
    two = {"a": [0, 1], "b": [0, 1]}
    # Each engine keeps what it holds.
    plan = schedule([10.0] * 6, list("ababab"), ["a", "b"], two, 400.0)
    assert [[(s.key, s.indices) for s in segments] for segments in plan] == [[("a", [0, 2, 4])], [("b", [1, 3, 5])]]
    # 60 tokens of work do not pay for a swap of 400; 6000 do.
    assert [len(s) for s in schedule([10.0] * 6, ["a"] * 6, ["a", "b"], two, 400.0)] == [1, 0]
    assert [len(s) for s in schedule([1000.0] * 6, ["a"] * 6, ["a", "b"], two, 400.0)] == [1, 1]


def test_a_key_that_no_engine_serves_is_refused():
    with pytest.raises(ValueError, match="no engine can serve the weights 'b'"):
        schedule([1.0], ["b"], ["a"], {"b": []}, 1.0)
