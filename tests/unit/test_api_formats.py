"""What is sent to a comparator behind HTTP in each format, and what is read from its answers."""

from __future__ import annotations

import json
from datetime import datetime

import numpy as np
import pytest
import torch
from api_server import ITEM, KEY, QUICK, SAMPLING, Reply, ask, echo, request

from comlrl_ds.config.api_settings import APISettings
from comlrl_ds.config.errors import ConfigError
from comlrl_ds.preference.api_comparator import APIAnswer, APIComparator
from comlrl_ds.preference.api_formats import Answer, format_of, plain
from comlrl_ds.rollout.base import Sampling

# --- formats: bodies, headers, reading


def test_the_generic_body(serve):
    server = serve(echo)
    results, _ = ask(server, [request(agent=1, candidates=3)], key=KEY, headers={"X-Team": "blue"})
    (call,) = server.calls
    assert call.path == "/v1"
    assert call.body == {
        "prompt": "p0.1",
        "agent_idx": 1,
        "num_return_sequences": 3,
        "max_new_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "batch_item": ITEM,
    }
    assert call.raw.isascii()
    assert call.headers["content-type"] == "application/json"
    assert call.headers["authorization"] == f"Bearer {KEY}"
    assert call.headers["x-team"] == "blue"
    assert results[0] == APIAnswer(tuple(Answer(f"p0.1/{k}") for k in range(3)))


def test_the_generic_format_sends_null_a_model_the_named_fields_and_extras(serve, caplog):
    server = serve(echo)
    ask(
        server, [request()], sampling=Sampling(1.0, 1.0, None), model="m", item_fields=["prompt", "id"],
        extra_body={"temperature": 0, "stop": None},
    )  # fmt: skip
    body = server.calls[0].body
    assert (body["top_k"], body["model"], body["temperature"], body["stop"]) == (None, "m", 0, None)
    assert body["batch_item"] == {"prompt": "the tide é", "id": 7}
    assert next(r.message for r in caplog.records if "sent these fields" in r.message).endswith("of each task: prompt, id")


def test_the_first_send_of_the_generic_format_says_what_it_sends(serve, caplog):
    server = serve(echo)
    with APIComparator(APISettings(url=server.url, **QUICK), SAMPLING) as comparator:
        for _ in range(2):
            list(comparator.ask([request()]))
    told = [r.message for r in caplog.records if "sent these fields" in r.message]
    assert len(told) == 1
    assert "id, prompt, reference" in told[0] and "comparator_api_item_fields" in told[0]


def test_an_item_field_that_a_task_lacks_is_named_before_anything_is_sent(serve):
    server = serve(echo)
    with pytest.raises(ConfigError, match=r"comparator_api_item_fields: task 3 has no field 'promt'; did you mean 'prompt'\?"):
        ask(server, [request(3)], item_fields=["promt"])
    assert not server.calls


def test_the_openai_body_and_how_many_it_asks_for(serve):
    def script(call, number):
        return Reply(content={"choices": [{"message": {"content": f"{number}.{j}"}} for j in range(call.body["n"])]})

    server = serve(script)
    results, _ = ask(server, [request(candidates=5)], format="Chat ", model="m", max_n_per_request=2, concurrency=1)
    assert server.calls[0].body == {
        "model": "m",
        "messages": [{"role": "user", "content": "p0.0"}],
        "n": 2,
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
    }
    assert [c.body["n"] for c in server.calls] == [2, 2, 1]
    assert results[0].texts == ("1.0", "1.1", "2.0", "2.1", "3.0")
    assert "authorization" not in server.calls[0].headers
    server.calls.clear()
    ask(server, [request(candidates=5)], format="openai", model="m")
    assert [c.body["n"] for c in server.calls] == [5]
    server.calls.clear()
    ask(server, [request(candidates=3)], format="openai", model="deepseek-chat")
    assert [c.body["n"] for c in server.calls] == [1, 1, 1]
    server.calls.clear()
    ask(server, [request()], format="openai", model="m", extra_body={"max_tokens": None, "max_completion_tokens": 4})
    assert server.calls[0].body.keys() == {"model", "messages", "n", "max_completion_tokens", "temperature", "top_p"}


def test_the_anthropic_body_and_headers(serve):
    blocks = [{"type": "thinking", "thinking": "no"}, {"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    server = serve(lambda call, number: Reply(content={"content": blocks}))
    results, counters = ask(server, [request(candidates=3)], format="anthropic", model="m", key=KEY)
    assert len(server.calls) == counters.requests == 3
    assert server.calls[0].body == {
        "model": "m",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "p0.0"}],
        "temperature": 0.5,
    }
    headers = server.calls[0].headers
    assert (headers["x-api-key"], headers["anthropic-version"]) == (KEY, "2023-06-01")
    assert "authorization" not in headers
    assert results[0].texts == ("one two",) * 3
    server.calls.clear()
    ask(server, [request()], format="messages", model="m", key=KEY, headers={"Anthropic-Version": "2"}, key_header="X-K",
        key_prefix="Token")  # fmt: skip
    headers = server.calls[0].headers
    assert (headers["x-k"], headers["anthropic-version"]) == (f"Token {KEY}", "2")


def test_the_responses_body(serve):
    output = [
        {"type": "reasoning"},
        {"content": [{"type": "output_text", "text": "one "}, {"type": "refusal", "text": "no"}]},
        {"content": [{"type": "text", "text": "two"}]},
    ]
    server = serve(lambda call, number: Reply(content={"output": output}))
    results, _ = ask(server, [request(candidates=2)], format="codex", model="m", key=KEY, key_header="Api-Key", key_prefix="")
    assert [c.body for c in server.calls] == [{"model": "m", "input": "p0.0", "max_output_tokens": 9}] * 2
    assert server.calls[0].headers["api-key"] == KEY
    assert results[0].texts == ("one two", "one two")


def test_chat_messages_go_where_each_format_has_them():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]

    def body(name):
        settings = APISettings(url="http://127.0.0.1", format=name, model="m")
        return json.loads(format_of(settings, SAMPLING).build(request(prompt=messages), 1)[2])

    assert body("openai")["messages"] == body("openai_responses")["input"] == body("generic")["messages"] == messages
    assert body("generic")["prompt"] == "Be brief.\n\nHello"
    assert (body("anthropic")["system"], body("anthropic")["messages"]) == ("Be brief.", messages[1:])


@pytest.mark.parametrize(
    ("name", "answer", "texts"),
    [
        ("generic", {"completions": "one"}, ["one"]),
        ("generic", {"data": {"out": ["a", {"text": "b"}, {"completion": "c"}, {"message": {"content": "d"}}]}}, list("abcd")),
        ("generic", {"responses": [{"response": "a"}, {"content": [{"text": "b"}, {"text": "c"}]}]}, ["a", "bc"]),
        ("generic", {"choices": [{"text": "a"}, {"text": None}, {}, 5, "", "b"]}, ["a", "b"]),
        ("generic", {"data": {"out": []}, "completions": ["x"]}, []),
        ("generic", [1], []),
        ("openai", {"choices": [{"message": {"content": None}}, {"text": "a"}, {"message": {"content": "b"}}]}, ["a", "b"]),
        ("openai", {"choices": {"message": 1}}, []),
        ("anthropic", {"content": [{"type": "tool_use", "text": "a"}]}, []),
        ("anthropic", {"error": "overloaded"}, []),
        ("openai_responses", {"output": [{"content": [{"type": "output_text", "text": "\ud83d half"}]}]}, ["\ufffd half"]),
        ("openai_responses", {"output": None}, []),
    ],
)  # fmt: skip
def test_reading(name, answer, texts):
    settings = APISettings(url="http://127.0.0.1", format=name, model="m", response_field="data.out")
    assert format_of(settings, SAMPLING).read(answer) == [Answer(text) for text in texts]


CUT, WHOLE = Answer("a", False), Answer("a", True)


@pytest.mark.parametrize(
    ("name", "answer", "expected"),
    [
        ("generic", {"completions": [{"text": "a", "finish_reason": "length"}, {"text": "a", "finish_reason": "stop"}, "a"]},
         [CUT, WHOLE, WHOLE]),
        ("generic", {"completions": ["a", "a"], "finish_reasons": ["stop", "length"]}, [WHOLE, CUT]),
        ("generic", {"completions": "a", "stop_reason": "max_tokens"}, [CUT]),
        ("openai", {"choices": [{"message": {"content": "a"}, "finish_reason": r} for r in ("stop", "length", None)]},
         [WHOLE, CUT, WHOLE]),
        ("openai", {"choices": [{"text": "a", "finish_reason": "content_filter"}]}, [CUT]),
        ("openai", {"choices": [{"message": {"content": None}, "finish_reason": "length"}, {"text": "a"}]}, [WHOLE]),
        *[("anthropic", {"content": [{"type": "text", "text": "a"}], "stop_reason": r}, [want])
          for r, want in (("end_turn", WHOLE), ("stop_sequence", WHOLE), ("max_tokens", CUT), ("refusal", CUT),
                          ("model_context_window_exceeded", CUT), (None, WHOLE))],
        *[("openai_responses", {"output": [{"content": [{"type": "output_text", "text": "a"}]}], **more}, [want])
          for more, want in (({"status": "completed"}, WHOLE), ({}, WHOLE),
                             ({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, CUT),
                             ({"status": "completed", "incomplete_details": None}, WHOLE))],
    ],
)  # fmt: skip
def test_what_a_server_cut_off_is_not_a_finished_answer(name, answer, expected):
    settings = APISettings(url="http://127.0.0.1", format=name, model="m")
    assert format_of(settings, SAMPLING).read(answer) == expected


def test_a_task_becomes_json():
    value = {
        1: np.float32(0.5),
        "t": torch.ones(2, requires_grad=True),
        "n": float("nan"),
        "d": datetime(2026, 1, 2),
        "s": {2, 1},
    }
    assert plain(value) == {"1": 0.5, "t": [1.0, 1.0], "n": None, "d": "2026-01-02 00:00:00", "s": [1, 2]}
