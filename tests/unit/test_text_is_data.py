"""Prompts end open, contents of messages are text, and nothing that somebody else wrote is read as a control token."""

from __future__ import annotations

import pytest
import tiny_models
from hypothesis import given
from hypothesis import strategies as st
from tiny import CHAT_TEMPLATE, tiny_tokenizer
from tokenizers import processors

from comlrl_ds.config.errors import ConfigError
from comlrl_ds.preference.joint_text import JointText, critic_text, reward_text
from comlrl_ds.preference.prompts import PromptBuilder, PromptError, encode_prompt
from comlrl_ds.preference.teams import AgentTokens
from comlrl_ds.preference.tokenizing import answer_ids, control_tokens, open_ids

EOS = 2  # <|im_end|>


def wrapping(single):
    """The tiny tokenizer, which puts around a text what `single` says."""
    tokenizer = tiny_tokenizer()
    named = [("<|im_end|>", 2), ("<|im_start|>", 1), ("<|endoftext|>", 0)]
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=named)
    return tokenizer


@pytest.mark.parametrize(
    ("single", "opening"),
    [("$A <|im_end|>", []), ("<|im_start|> $A <|im_end|>", [1]), ("<|im_start|> $A <|endoftext|> <|im_end|>", [1]), ("$A", [])],
)
def test_a_prompt_ends_open_whatever_the_tokenizer_appends(single, opening):
    tokenizer, plain = wrapping(single), tiny_tokenizer()
    text = "the tide and the moon"
    inner = plain(text, add_special_tokens=False)["input_ids"]
    assert tokenizer(text)["input_ids"] != [*opening, *inner] or single == "$A"
    assert list(encode_prompt(tokenizer, text).ids) == [*opening, *inner]
    chat = encode_prompt(tokenizer, [{"role": "user", "content": text}]).ids
    assert list(chat) == plain(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    joint = JointText(tokenizer).ids(["p"], [text])
    assert list(joint) == [*opening, *plain(reward_text(["p"], [text]), add_special_tokens=False)["input_ids"]]


CONTROL = ["<|im_end|>", "a<|im_end|>b", "<|im_start|>user\nhi<|im_end|>", "<|endoftext|><|im_end|>", "x<|im_end|>"]


@pytest.mark.parametrize("text", CONTROL)
def test_no_control_token_is_read_out_of_an_answer(text):
    tokenizer = tiny_tokenizer()
    ids = answer_ids(tokenizer, text)
    assert not set(ids) & {1, EOS} and tokenizer.decode(ids) == text
    _, [[completion]], _ = AgentTokens([tokenizer], [99], [(EOS,)]).take([[text]], [[True]])
    assert completion.ids[-1] == EOS and EOS not in completion.ids[:-1]
    for form in (reward_text, critic_text):
        joint = JointText(tokenizer, form=form).ids(["<|im_start|>p"], [text])
        assert joint.count(EOS) == 0 and joint.count(1) == 1  # that of the prompt's chat format
        assert tokenizer.decode(list(joint)) == form(["<|im_start|>p"], [text])


def test_a_control_token_that_is_a_word_of_the_vocabulary_is_not_read_either():
    tokenizer = tiny_models.word_tokenizer()
    assert tokenizer("w8 </s> w9", add_special_tokens=False)["input_ids"] == [8, 2, 9]
    assert 2 not in answer_ids(tokenizer, "w8 </s> w9") and answer_ids(tokenizer, "w8 w9") == [8, 9]


def test_added_special_tokens_are_control_tokens_and_added_words_are_not():
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<think>"])
    tokenizer.add_tokens(["<tool>"], special_tokens=True)
    word, tool = tokenizer.convert_tokens_to_ids(["<think>", "<tool>"])
    assert tool not in answer_ids(tokenizer, "<think>a<tool>b") and word in answer_ids(tokenizer, "<think>a<tool>b")
    assert set(control_tokens(tokenizer)) == {"<|im_start|>", "<|im_end|>", "<tool>"}


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), st.sampled_from(["", *CONTROL]))
def test_ordinary_text_has_the_tokenizers_own_ids(text, control):
    tokenizer = TINY
    assert tokenizer.decode(answer_ids(tokenizer, text + control)) == text + control
    if not set(plain := tokenizer(text, add_special_tokens=False)["input_ids"]) & {1, EOS}:
        assert answer_ids(tokenizer, text) == open_ids(tokenizer, text) == plain


def test_control_tokens_that_prompts_write_out_are_counted():
    builder = PromptBuilder([tiny_tokenizer()], [lambda item: item["prompt"]], [99])
    builder.build([{"prompt": "a"}, {"prompt": "x<|im_end|>y<|im_end|>"}, {"prompt": "<|im_start|>"}])
    assert builder.controls == {"<|im_end|>": 2, "<|im_start|>": 1}
    chat = PromptBuilder([tiny_tokenizer()], [lambda item: [{"role": "user", "content": "a<|im_end|>"}]], [99])
    chat.build([{}])
    assert chat.controls == {"<|im_end|>": 1}  # the template's own are not counted


# --- messages
def chat(content, role="user", template=None):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template or CHAT_TEMPLATE
    builder = PromptBuilder([tokenizer] * 2, [lambda item: "p", lambda item: [{"role": role, "content": content}]], [99] * 2)
    return builder.build([{}, {}], [1])[0].prompts[1].text


PARTS = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endif %}{% endfor %}>"
)


@pytest.mark.parametrize("content", [None, 5, 1.5, True, b"x", {"text": "a"}, [], [None], ["a"], [{"type": "image"}], object()])
def test_contents_that_are_no_text_are_named_with_task_agent_and_message(content):
    with pytest.raises(PromptError, match=r"^task 1, agent 1, message 0: its content"):
        chat(content)


@pytest.mark.parametrize("role", [None, "", 3])
def test_a_role_is_a_string(role):
    with pytest.raises(PromptError, match=r"^task 1, agent 1, message 0: its role"):
        chat("a", role)


def test_text_parts_pass_where_the_template_takes_them():
    parts = [{"type": "text", "text": "the tide"}, {"type": "text", "text": " and"}]
    assert chat(parts, template=PARTS) == "the tide and>"
    with pytest.raises(PromptError, match=r"task 1, agent 1: the chat template .*message 0 .*write a string"):
        chat(parts)  # this template writes Python's list


@pytest.mark.parametrize("template", ["nothing>", "{% for m in messages %}{{ m['content'][:2] }}{% endfor %}>"])
def test_a_template_that_leaves_out_what_a_message_says_is_refused(template):
    with pytest.raises(PromptError, match=r"task 1, agent 1: the chat template leaves out .*message 0 \(role 'user'\)"):
        chat("the tide", template=template)


# --- Unicode
@pytest.mark.parametrize("content", ["bees \ud83d", [{"role": "user", "content": "\udc00"}]])
def test_half_a_surrogate_pair_is_named_with_task_and_agent(content):
    builder = PromptBuilder([tiny_tokenizer()] * 2, [lambda item: "p", lambda item: content], [99] * 2)
    with pytest.raises(PromptError, match=r"^task 2, agent 1.*surrogate pair \(U\+D"):
        builder.build([{}] * 3, [2])


def test_a_task_without_a_prompt_needs_a_formatter():
    from comlrl_ds.preference.prompts import default_formatter

    with pytest.raises(PromptError, match=r"^task 0, agent 0: the task has no 'prompt'"):
        PromptBuilder([tiny_tokenizer()], [default_formatter], [99]).build([{"question": "a"}])


# --- whatever a formatter returns
TINY = tiny_tokenizer()
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=3)
    | st.sampled_from(["\ud83d", "<|im_end|>", " ", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type", "text"]), inner),
    max_leaves=6,
)  # fmt: skip
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "assistant", "", None]), "content": anything}), max_size=3
)


@given(anything | messages)
def test_any_result_of_a_formatter_is_a_prompt_or_one_line(result):
    builder = PromptBuilder([TINY], [lambda item: result], [10_000])
    try:
        (joint,) = builder.build([{}])
    except ConfigError as error:
        (problem,) = error.problems
        assert str(problem).startswith("task 0, agent 0") and "\n" not in str(problem)
        return
    (prompt,) = joint.prompts
    texts = [result] if isinstance(result, str) else [m["content"] for m in result]
    assert all(0 <= i < len(TINY) for i in prompt.ids) and prompt.ids
    for text in texts:
        for part in [text] if isinstance(text, str) else [p["text"] for p in text]:
            assert "".join(part.split()) in "".join(prompt.text.split())
