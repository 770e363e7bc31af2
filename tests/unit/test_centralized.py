"""One model for every agent: the joint prompt, and the joint text split into responses."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comlrl_ds.config.errors import ConfigError
from comlrl_ds.preference.centralized import (
    CentralizedComparatorAdapter,
    CentralizedComparatorParseError,
    TaggedCentralizedComparatorAdapter,
    check_adapter,
    joint_prompt,
    parse_joint,
)
from comlrl_ds.preference.prompts import PromptError

TAGGED = TaggedCentralizedComparatorAdapter()


def parse(text, num_agents=2):
    return TAGGED.parse_completion(text, {}, num_agents)


def adapter(build=lambda item, prompts: "joint", parse=lambda text, item, n: ["a"] * n):
    return SimpleNamespace(build_prompt=build, parse_completion=parse)


def raising(error):
    def method(*_):
        raise error

    return method


# --- the tagged prompt
def test_the_prompt_of_two_agents():
    blocks = TAGGED.build_prompt({"prompt": "unused"}, ["Explain $x$.\nBriefly.", "Explain {y} <b>.\n"]).split("\n\n")
    assert len(blocks) == 4
    assert "2 agents" in blocks[0]
    assert "separate output" in blocks[0]
    assert "never merge" in blocks[0] and "no commentary" in blocks[0]
    assert blocks[1] == "Prompt of agent 0:\nExplain $x$.\nBriefly."
    # The agent's own prompt stays as it is, also its last line break.
    assert blocks[2] == "Prompt of agent 1:\nExplain {y} <b>."
    assert "exactly one section per agent" in blocks[3]
    assert blocks[3].lstrip("\n").split("\n")[1:] == [
        "<agent_0>", "...", "</agent_0>", "<agent_1>", "...", "</agent_1>",
    ]  # fmt: skip


@pytest.mark.parametrize(("n", "words"), [(1, "1 agent."), (3, "3 agents."), (11, "11 agents.")])
def test_every_agent_is_named_once(n, words):
    prompt = TAGGED.build_prompt({}, [f"task of {i}" for i in range(n)])
    assert f"team of {words}" in prompt
    for i in range(n):
        for part in (f"Prompt of agent {i}:\ntask of {i}\n\n", f"\n<agent_{i}>\n...\n</agent_{i}>"):
            assert prompt.count(part) == 1
    assert f"agent_{n}" not in prompt and f"agent {n}:" not in prompt
    assert prompt.endswith(f"</agent_{n - 1}>")


# --- the tagged parser
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<agent_0>a</agent_0><agent_1>b</agent_1>", ["a", "b"]),
        ("Sure!\n<agent_0>\n a b \n</agent_0>\nand\n<agent_1>\tb\n</agent_1> done", ["a b", "b"]),
        ("<agent_1>b</agent_1><agent_0>a</agent_0>", ["a", "b"]),  # in any order
        ("<AGENT_0>a</Agent_0><aGeNt_1>b</AGENT_1>", ["a", "b"]),
        ("< agent_0 >a< / agent_0 ><\tagent_1\n>b</ agent_1>", ["a", "b"]),
        ("<agent_0>first\n\nsecond</agent_0><agent_1>b</agent_1>", ["first\n\nsecond", "b"]),
        ("<agent_0>a</agent_0><agent_0>late</agent_0><agent_1>b</agent_1>", ["a", "b"]),  # the first section counts
        ("<agent_0>a</agent_0> trailing </agent_0><agent_1>b</agent_1>", ["a", "b"]),  # up to the first closing tag
        ("</agent_0><agent_0>a</agent_0></agent_1><agent_1>b</agent_1>", ["a", "b"]),  # a closing tag before its opening
        ("<agent_0><agent_0>a</agent_0><agent_1>b</agent_1>", ["<agent_0>a", "b"]),  # from the first opening tag
        ("<agent_0>a <agent_1>b</agent_1> c</agent_0>", ["a <agent_1>b</agent_1> c", "b"]),
        ("<agent_0>a <agent_1> b</agent_0> c</agent_1>", ["a <agent_1> b", "b</agent_0> c"]),
        ("<agent_0>x < 3 > y <b>z</b></agent_0><agent_1><<agent_2></agent_1>", ["x < 3 > y <b>z</b>", "<<agent_2>"]),
        ("<<agent_0>a<</agent_0><agent_1>b</agent_1>", ["a<", "b"]),
        # Missing: never opened, never closed, another's closing tag, broken tags.
        ("<agent_0>a</agent_0>", ["a", ""]),
        ("<agent_0>a</agent_0><agent_1>b", ["a", ""]),
        ("<agent_0>a</agent_1><agent_1>b</agent_1>", ["", "b"]),
        ("<agent_0>a</agent_0><agent_1>b</agent 1><agent1>c</agent1>", ["a", ""]),
        ("<agent_0>a</agent_0><agent_ 1>b</agent_1><agent_-1>b</agent_-1>", ["a", ""]),
        ("<agent_0>a</agent_0><agent_1 x>b</agent_1><agent_١>b</agent_١>", ["a", ""]),
        ("<agent_0></agent_0>", ["", ""]),  # an empty section is a section
        ("<agent_0> \n </agent_0><agent_1>b</agent_1>", ["", "b"]),
    ],
)
def test_sections(text, expected):
    assert parse(text) == expected


def test_agents_with_more_than_one_digit():
    text = "<agent_10>ten</agent_10><agent_01>no</agent_01><agent_1>one</agent_1></agent_10><agent_11>eleven</agent_11>"
    assert parse(text, 11) == ["", "one", *[""] * 8, "ten"]
    assert parse(text, 2) == ["", "one"]
    assert parse("<agent_1>one</agent_10></agent_1>") == ["", "one</agent_10>"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain",
        "<agent_0>open",
        "</agent_0>a<agent_0>",
        "<agent_2>c</agent_2>",  # of no agent of the two
        "<agent_00>a</agent_00>",
        "<agent_" + "9" * 5000 + ">a</agent_" + "9" * 5000 + ">",  # more digits than int() takes
        "<agent>a</agent>",
    ],
)
def test_a_text_without_any_section(text):
    with pytest.raises(CentralizedComparatorParseError, match=r"<agent_i> … </agent_i> with i from 0 to 1") as caught:
        parse(text)
    assert f"{len(text)} characters" in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert parse_joint(TAGGED, text, {}, 2, "task 0") is None


PIECES = ["<agent_0>", "</agent_0>", "< AGENT_1 >", "< / agent_1>", "<agent_10>", "</agent_10>", "<", "/", ">", " ", "a", "\n"]


@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
def test_sections_against_a_pattern_per_agent(text):
    patterns = [rf"(?is)<\s*agent_{i}\s*>(.*?)<\s*/\s*agent_{i}\s*>" for i in range(2)]
    matches = [re.search(p, text) for p in patterns]
    if any(matches):
        assert parse(text) == [m[1].strip() if m else "" for m in matches]
    else:
        assert parse_joint(TAGGED, text, {}, 2, "task 0") is None


@given(st.lists(st.text(st.characters(exclude_characters="<"), max_size=20), min_size=1, max_size=12))
def test_an_answer_in_the_asked_form_comes_back(responses):
    text = "".join(f"<agent_{i}>\n{r}\n</agent_{i}>\n" for i, r in enumerate(responses))
    assert parse(text, len(responses)) == [r.strip() for r in responses]


@pytest.mark.parametrize(
    "unit",
    [
        "<agent_0>",
        "</agent_0>",
        "<",
        " ",
        "< ",
        "< /",
        "<agent_",
        "0",
        "<agent_0 ",
        "<agent_0><agent_1>",
        "<agent_0></agent_1>",
    ],
)
@pytest.mark.parametrize("head", ["", "<", "< /", "<agent_", "<agent_0", "<agent_0>"])
def test_hostile_texts_take_linear_time(head, unit):
    text = head + unit * (1_000_000 // len(unit))
    begin = time.process_time()
    closed = (head, unit) == ("<agent_0>", "</agent_0>")
    assert parse_joint(TAGGED, text, {}, 2, "task 0") == (["", ""] if closed else None)
    assert time.process_time() - begin < 5  # some 0.1 s; a quadratic scan takes minutes


# --- what a user may give
def test_the_default_adapter():
    assert type(check_adapter(None)) is TaggedCentralizedComparatorAdapter
    assert isinstance(TAGGED, CentralizedComparatorAdapter)
    mine = adapter()
    assert check_adapter(mine) is mine
    assert isinstance(mine, CentralizedComparatorAdapter)
    assert not isinstance(SimpleNamespace(build_prompt=len), CentralizedComparatorAdapter)


@pytest.mark.parametrize(
    ("given_adapter", "named", "not_named"),
    [
        (SimpleNamespace(build_prompt=len), ["no callable parse_completion;"], "no callable build_prompt"),
        (SimpleNamespace(parse_completion=len), ["no callable build_prompt;"], "no callable parse_completion"),
        (SimpleNamespace(build_prompt="text", parse_completion=len), ["no callable build_prompt;"], "callable parse"),
        ("tagged", ["'tagged'", "no callable build_prompt and no callable parse_completion;", "or None"], "?"),
        (False, ["False", "no callable build_prompt"], "?"),
    ],
)
def test_an_adapter_without_its_methods(given_adapter, named, not_named):
    with pytest.raises(TypeError) as caught:
        check_adapter(given_adapter)
    message = str(caught.value)
    assert message.startswith("centralized_comparator_adapter: ")
    assert all(part in message for part in named)
    assert not_named not in message


def test_a_long_value_is_shortened_in_the_error():
    with pytest.raises(TypeError) as caught:
        check_adapter("x" * 5000)
    assert len(str(caught.value)) < 400


# --- the joint prompt of an adapter
def test_the_adapter_gets_the_task_and_the_prompts():
    seen = []
    item = {"prompt": "p"}
    assert joint_prompt(adapter(build=lambda *a: seen.append(a) or " joint\n"), item, ["a", "b"], "task 3") == " joint\n"
    assert seen == [(item, ["a", "b"])]
    assert joint_prompt(TAGGED, item, ["a", "b"], "task 3") == TAGGED.build_prompt(item, ["a", "b"])


@pytest.mark.parametrize(
    ("result", "shown"),
    [(None, "NoneType"), (["joint"], "list"), (b"joint", "bytes"), ("", "a blank string"), (" \n\t", "a blank string")],
)
def test_a_prompt_that_is_none(result, shown):
    with pytest.raises(PromptError) as caught:
        joint_prompt(adapter(build=lambda *_: result), {}, ["a"], "task 3")
    assert str(caught.value) == (
        f"task 3: centralized_comparator_adapter.build_prompt returned {shown};"
        " return the joint prompt, a string that is not blank"
    )


def test_an_adapter_that_raises_on_the_prompt():
    error = KeyError("title")
    with pytest.raises(
        PromptError, match=r"^task 3: the centralized_comparator_adapter.build_prompt .*raised KeyError: 'title'"
    ) as caught:
        joint_prompt(adapter(build=raising(error)), {}, ["a"], "task 3")
    assert caught.value.__cause__ is error


# --- the responses of an adapter
def test_the_adapter_gets_the_text_the_task_and_the_number():
    seen = []
    item = {"prompt": "p"}
    found = parse_joint(adapter(parse=lambda *a: seen.append(a) or ("a", "")), "text", item, 2, "task 3")
    assert found == ["a", ""] and type(found) is list
    assert seen == [("text", item, 2)]
    assert parse_joint(TAGGED, "<agent_1>b</agent_1>", item, 2, "task 3") == ["", "b"]


def test_an_adapter_that_finds_nothing():
    assert parse_joint(adapter(parse=raising(CentralizedComparatorParseError("nothing"))), "text", {}, 2, "task 3") is None


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ("ab", "str"),  # as long as there are agents
        (b"ab", "bytes"),
        (None, "NoneType"),
        ({"0": "a", "1": "b"}, "dict"),
        ((c for c in "ab"), "generator"),
        ([], "0 responses for 2 agents"),
        (["a"], "1 responses for 2 agents"),
        (["a", "b", "c"], "3 responses for 2 agents"),
        (["a", None], "NoneType for agent 1"),
        ([b"a", 5], "bytes for agent 0"),
    ],
)
def test_responses_of_the_wrong_kind(result, shown):
    with pytest.raises(ConfigError) as caught:
        parse_joint(adapter(parse=lambda *_: result), "text", {}, 2, "task 3")
    assert str(caught.value) == (
        f"centralized_comparator_adapter: task 3: parse_completion returned {shown}; return a list of 2 strings, one per agent"
    )
    assert caught.value.problems[0].path == "centralized_comparator_adapter"


@pytest.mark.parametrize("error", [ValueError("bad"), IndexError("bad"), RuntimeError("bad")])
def test_an_adapter_that_raises_on_the_text(error):
    with pytest.raises(ConfigError) as caught:
        parse_joint(adapter(parse=raising(error)), "text", {}, 2, "task 3")
    assert caught.value.problems[0].path == "centralized_comparator_adapter"
    assert "task 3: the centralized_comparator_adapter.parse_completion" in str(caught.value)
    assert f"raised {type(error).__name__}: bad (" in str(caught.value)
    assert "raise CentralizedComparatorParseError" in str(caught.value)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("call", [joint_prompt, parse_joint])
def test_an_interrupt_passes(call):
    broken = adapter(build=raising(KeyboardInterrupt()), parse=raising(KeyboardInterrupt()))
    arguments = ({}, ["a"], "task 3") if call is joint_prompt else ("text", {}, 2, "task 3")
    with pytest.raises(KeyboardInterrupt):
        call(broken, *arguments)
