"""The text that a reward model reads, and what of it goes where it is too long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_tokenizer

from comlrl_ds.preference.joint_text import JointText, critic_text, reward_text, shortened


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def test_the_texts():
    lines = reward_text(["p one", "p two"], ["r one", "r two"]).split("\n\n")
    assert lines[1:] == [
        "Agent 1 prompt:\np one", "Agent 1 response:\nr one", "Agent 2 prompt:\np two", "Agent 2 response:\nr two",
    ]  # fmt: skip
    assert critic_text(["a", "b"]) == "[Agent 0] a\n\n[Agent 1] b"
    assert critic_text(["a"], ["x"]) == "[Agent 0] a\n\n[Joint action]\n\n[Agent 0 action]\nx"
    with pytest.raises(ValueError):
        reward_text(["a"], ["x", "y"])


@given(st.lists(st.lists(st.integers(0, 9), max_size=12), min_size=1, max_size=4), st.integers(0, 30))
def test_the_longest_parts_are_shortened_to_one_length(parts, room):
    kept = shortened(parts, room)
    assert sum(map(len, kept)) == min(room, sum(map(len, parts)))
    assert all(part[len(part) - len(k) :] == k for part, k in zip(parts, kept))
    cut = [len(k) for part, k in zip(parts, kept) if len(k) < len(part)]
    assert not cut or max(cut) - min(cut) <= 1
    assert all(len(k) <= min(cut) + 1 for k in kept if cut)


def test_prompts_are_cut_before_responses_and_both_are_counted(tokenizer):
    prompts, winner, loser = ["Topic: the tide. " * 12, "Be brief."], ["It rises.", "Water"], ["It falls.", "Water"]
    whole = JointText(tokenizer)
    full = len(whole.ids(prompts, winner))
    assert whole.cut == 0
    text = JointText(tokenizer, full - 40)
    ids = text.ids(prompts, winner)
    assert len(ids) <= full - 40 and (text.cut, text.cut_responses) == (1, 0)
    decoded = tokenizer.decode(list(ids))
    assert "It rises." in decoded and "Water" in decoded and "Be brief." in decoded  # the longest prompt lost, from its start
    assert decoded.count("tide") < 12
    # Where no prompt is left the responses lose their ends, and what differs early still differs.
    least = len(whole.ids(["", ""], winner))
    short = JointText(tokenizer, least - 6)
    one, other = short.ids(prompts, winner), short.ids(prompts, loser)
    assert len(one) <= least - 6 and short.cut_responses == 2 and one != other


@given(
    st.lists(st.tuples(st.text(max_size=40), st.text(max_size=20), st.text(max_size=20)), min_size=1, max_size=3),
    st.integers(0, 60),
)
def test_responses_stay_whole_while_prompts_can_be_cut(tokenizer, agents, room):
    """W14: for every text, also one whose characters are several tokens: winner and loser stay as unlike as they were."""
    prompts, *sides = map(list, zip(*agents))
    limit = room + max(len(JointText(tokenizer).ids([""] * len(prompts), side)) for side in sides)
    text = JointText(tokenizer, limit)
    found = [text.ids(prompts, side) for side in sides]
    whole = [tokenizer(reward_text(prompts, side))["input_ids"] for side in sides]
    assert (text.cut, text.cut_responses) == (sum(len(ids) > limit for ids in whole), 0)
    for ids, responses in zip(found, sides):
        assert len(ids) <= limit
        kept = tokenizer.decode(list(ids))
        assert all(f"Agent {k} response:\n{response}" in kept for k, response in enumerate(responses, 1))
        assert kept.endswith(responses[-1])
    assert (found[0] == found[1]) == (sides[0] == sides[1])


def test_what_fits_stays_as_it_is(tokenizer):
    text = JointText(tokenizer, 500)
    assert text.ids(["p"], ["r"]) == tuple(tokenizer(reward_text(["p"], ["r"]))["input_ids"]) and text.cut == 0
