"""The comparator behind HTTP, against a server on loopback that checks what it is sent and misbehaves."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import pickle
import re
import socket
import struct
import threading
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime, formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch

from comlrl_ds.config.api_settings import APISettings, Scrubber, Secret
from comlrl_ds.config.errors import ConfigError
from comlrl_ds.preference import api_comparator
from comlrl_ds.preference.api_comparator import APIAnswer, APIComparator, APIFailure, ComparatorAPIError
from comlrl_ds.preference.api_formats import APIRequest, format_of, plain
from comlrl_ds.preference.api_transport import retry_after
from comlrl_ds.preference.journal import Journal
from comlrl_ds.rollout.base import Sampling

KEY = "sk-planted/key+0123456789"
SAMPLING = Sampling(temperature=0.5, top_p=0.9, top_k=40)
QUICK = {"backoff": 0.01, "timeout": 60.0, "max_failure_fraction": 1.0}
ITEM = {"id": 7, "prompt": "the tide é", "reference": "moon"}


@dataclass
class Call:
    """A request that reached the server."""

    path: str
    headers: dict[str, str]
    raw: bytes
    time: float
    connection: int

    @property
    def body(self):
        return json.loads(self.raw)


@dataclass
class Reply:
    """What the server does: waits, then answers, or breaks the connection."""

    status: int = 200
    content: object = None
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    reset: bool = False


class Server:
    """`script(call, number of the call)` says how each request is answered."""

    def __init__(self, script, host="127.0.0.1"):
        self.calls: list[Call] = []
        self.script, self.over, lock = script, threading.Event(), threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                raw = self.rfile.read(int(self.headers["content-length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                call = Call(self.path, headers, raw, time.monotonic(), self.client_address[1])
                with lock:
                    outer.calls.append(call)
                    number = len(outer.calls)
                reply = outer.script(call, number)
                outer.over.wait(reply.delay)
                if reply.reset:
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.connection.close()
                    self.close_connection = True
                    return
                content = reply.content if isinstance(reply.content, bytes) else json.dumps(reply.content).encode()
                try:
                    self.send_response(reply.status)
                    for name, value in (reply.headers | {"Content-Length": str(len(content))}).items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(content)
                except OSError:  # the client did not wait
                    self.close_connection = True

            do_GET = do_POST

            def log_message(self, *args):
                pass

            def finish(self):
                with contextlib.suppress(OSError, ValueError):
                    super().finish()

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

        self._server = Quiet((host, 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.host = f"{host}:{self._server.server_port}"
        self.url = f"http://{self.host}/v1"

    def close(self):
        self.over.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def serve(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    servers: list[Server] = []

    def start(script, host="127.0.0.1"):
        servers.append(Server(script, host))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def generic(texts):
    return Reply(content={"completions": texts})


def echo(call, number):
    """Answers of the generic format that name prompt and place."""
    return generic([f"{call.body['prompt']}/{j}" for j in range(call.body["num_return_sequences"])])


def request(index=0, agent=0, candidates=1, prompt=None, item=ITEM, limit=9):
    return APIRequest(index, item, agent, prompt or f"p{index}.{agent}", candidates, limit)


def ask(server, requests, *, sampling=SAMPLING, on_text=None, known=None, round=0, **settings):
    """(results by request, counters)."""
    with APIComparator(APISettings(url=server.url, **(QUICK | settings)), sampling, on_text) as comparator:
        results = dict(comparator.ask(requests, round=round, known=known))
    assert sorted(results) == list(range(len(requests)))
    return results, comparator.counters


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
    assert results[0] == APIAnswer(("p0.1/0", "p0.1/1", "p0.1/2"))


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
    assert format_of(settings, SAMPLING).read(answer) == texts


def test_a_task_becomes_json():
    value = {
        1: np.float32(0.5),
        "t": torch.ones(2, requires_grad=True),
        "n": float("nan"),
        "d": datetime(2026, 1, 2),
        "s": {2, 1},
    }
    assert plain(value) == {"1": 0.5, "t": [1.0, 1.0], "n": None, "d": "2026-01-02 00:00:00", "s": [1, 2]}


# --- what goes wrong


def test_case_31(serve):
    """500, then 429 with Retry-After 1, a time-out, malformed JSON, 200: one success after the right waits."""
    replies = [
        Reply(500, {"error": "x"}),
        Reply(429, {}, {"Retry-After": "1"}),
        Reply(delay=60, content={}),
        Reply(content=b"{'completions'"),
        generic(["fine"]),
    ]
    server = serve(lambda call, number: replies[number - 1])
    results, counters = ask(server, [request()], timeout=1.5)
    assert results == {0: APIAnswer(("fine",))}
    assert (counters.requests, counters.retries, counters.failures, counters.answers) == (5, 4, 0, 1)
    waits = [b.time - a.time for a, b in zip(server.calls, server.calls[1:])]
    assert waits[1] >= 1.0
    assert waits[2] >= 1.4
    assert len({c.raw for c in server.calls}) == 1


def failing_for(index, status=500):
    """A server that fails for ever on one task."""
    return lambda call, number: Reply(status, {}) if call.body["prompt"] == f"p{index}.0" else echo(call, number)


def test_case_31_a_permanent_500_drops_its_comparison_and_is_counted(serve):
    server = serve(failing_for(2))
    results, counters = ask(server, [request(k, candidates=2) for k in range(5)], max_failure_fraction=0.2, max_retries=2)
    failure = results.pop(2)
    assert isinstance(failure, APIFailure)
    assert (failure.candidates, failure.status, failure.attempts) == ((0, 1), 500, 3)
    assert failure.reason == "task 2, agent 0: HTTP 500: {} (tried 3 times)"
    assert results == {k: APIAnswer((f"p{k}.0/0", f"p{k}.0/1")) for k in (0, 1, 3, 4)}
    assert (counters.failures, counters.requests, counters.retries, counters.answers) == (1, 7, 2, 8)


def test_case_31_over_the_limit_the_asking_ends_with_one_clear_error(serve):
    server = serve(failing_for(2))
    with pytest.raises(ComparatorAPIError) as caught:
        ask(server, [request(k) for k in range(5)], max_failure_fraction=0.19, max_retries=1)
    assert str(caught.value) == (
        "1 of 5 answers of the comparator API failed, more than comparator_api_max_failure_fraction = 0.19 allows;"
        " the last: task 2, agent 0: HTTP 500: {} (tried 2 times)"
    )


def test_the_limit_counts_what_the_journal_has_too(serve):
    server = serve(failing_for(2))
    requests = [request(k) for k in range(5)]
    known = {(0, k, 0, 0): "old" for k in (0, 1, 3, 4)}
    results, _ = ask(server, requests, known=known, max_failure_fraction=0.2, max_retries=0)
    assert isinstance(results[2], APIFailure)


def test_a_server_that_refuses_everybody_is_left_alone(serve):
    server = serve(lambda call, number: Reply(401, {"error": "who are you?"}))
    with pytest.raises(ComparatorAPIError, match=r"^4 of 100 answers .* no other would do better; the last: .*HTTP 401"):
        ask(server, [request(k) for k in range(100)], concurrency=4, max_failure_fraction=0.5)
    assert len(server.calls) < 10


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 422])
def test_faults_of_ours_are_not_tried_again(serve, status):
    server = serve(lambda call, number: Reply(status, {"error": "no\n  way"}))
    results, counters = ask(server, [request()])
    assert results[0].reason == f'task 0, agent 0: HTTP {status}: {{"error": "no\\n way"}}'
    assert (len(server.calls), counters.retries, counters.failures) == (1, 0, 1)


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 529])
def test_faults_of_the_server_are_tried_again(serve, status):
    server = serve(lambda call, number: Reply(status, {}) if number < 3 else echo(call, number))
    results, counters = ask(server, [request()], max_retries=2)
    assert results[0].texts == ("p0.0/0",)
    assert (len(server.calls), counters.retries, counters.failures) == (3, 2, 0)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply(reset=True), r"Read\w*Error|RemoteProtocolError"),
        (Reply(delay=60, content={}), r"no answer within 1 s"),
        (Reply(content=b"<html>hello</html>"), "not JSON: <html>hello"),
        (Reply(content=b"\xff\xfe\x00"), "not JSON"),
        (Reply(content=b"[" * 100_000), "not JSON"),
        (generic([]), "0 answers instead of 2"),
        (generic(["only one"]), "1 answers instead of 2"),
        (generic(["", "second"]), "1 answers instead of 2"),
        (Reply(content=b"\x1f\x8bbroken", headers={"Content-Encoding": "gzip"}), "DecodingError"),
        (Reply(204, b""), "not JSON"),
    ],
    ids=["reset", "time-out", "html", "bytes", "deep", "empty", "fewer", "blank", "gzip", "204"],
)
def test_broken_answers_are_tried_again_and_never_scored(serve, reply, reason):
    texts, timeout = [], 1.0 if reply.delay else 60.0
    server = serve(lambda call, number: reply)
    results, counters = ask(
        server, [request(candidates=2)], max_retries=1, timeout=timeout, on_text=lambda *answer: texts.append(answer)
    )
    assert isinstance(results[0], APIFailure)
    assert re.search(reason, results[0].reason)
    assert (counters.requests, counters.retries, counters.failures, counters.answers, texts) == (2, 1, 1, 0, [])
    server.script = lambda call, number: reply if number == 3 else echo(call, number)
    assert ask(server, [request(candidates=2)], max_retries=1, timeout=timeout)[0][0].texts == ("p0.0/0", "p0.0/1")


def test_a_refused_connection_is_a_fault_of_that_request(serve):
    server = serve(echo)
    server.close()
    results, counters = ask(server, [request()], max_retries=1)
    assert "ConnectError" in results[0].reason
    assert counters.requests == 2


def test_a_part_of_the_candidates_can_fail(serve):
    def script(call, number):
        return Reply(400, {}) if number == 2 else Reply(content={"content": [{"type": "text", "text": str(number)}]})

    results, _ = ask(serve(script), [request(candidates=3)], format="anthropic", model="m", concurrency=1)
    assert results[0].texts == ("1", None, "3")
    assert [f.candidates for f in results[0].failures] == [(1,)]


def test_a_server_that_ignores_n_is_explained(serve):
    server = serve(lambda call, number: Reply(content={"choices": [{"text": "a"}]}))
    results, _ = ask(server, [request(candidates=4)], format="openai", model="m", max_retries=0)
    assert "1 answers instead of 4 (comparator_api_max_n_per_request: 1 asks" in results[0].reason


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_takes_the_key_to_another_host(serve, status):
    other = serve(echo, host="127.0.0.2")
    server = serve(lambda call, number: Reply(status, {}, {"Location": other.url}))
    results, _ = ask(server, [request()], key=KEY)
    assert f"HTTP {status} leads to another host, http://{other.host}" in results[0].reason
    assert (len(server.calls), other.calls) == (1, [])
    elsewhere = serve(echo)  # another port is another server
    server.script = lambda call, number: Reply(status, {}, {"Location": elsewhere.url})
    assert elsewhere.host in ask(server, [request()], key=KEY)[0][0].reason
    assert elsewhere.calls == []


def test_a_redirect_within_the_server_is_followed_where_it_keeps_the_method(serve):
    def to_slash(status):
        return lambda call, number: echo(call, number) if call.path == "/v1/" else Reply(status, {}, {"Location": "/v1/"})

    server = serve(to_slash(308))
    results, _ = ask(server, [request()], key=KEY)
    assert results[0].texts == ("p0.0/0",)
    assert [c.headers["authorization"] for c in server.calls] == [f"Bearer {KEY}"] * 2
    server.script = to_slash(302)
    assert "HTTP 302 leads to /v1/; write that in comparator_api_url" in ask(server, [request()])[0][0].reason
    server.script = lambda call, number: Reply(307, {}, {"Location": "/v1"})
    assert "HTTP 307" in ask(server, [request()])[0][0].reason


def test_what_retry_after_asks_for():
    now = datetime(2026, 3, 1, 12, tzinfo=UTC)
    assert retry_after("2.5", 0) == 2.5
    assert retry_after(format_datetime(now + timedelta(seconds=90), usegmt=True), now.timestamp()) == 90
    assert retry_after(format_datetime(now - timedelta(seconds=90), usegmt=True), now.timestamp()) == 0
    assert retry_after("-3", 0) == 0
    assert [retry_after(v, 0) for v in (None, "", "soon", "inf", "nan")] == [None] * 5


def test_waits_follow_a_date_but_never_exceed_the_bound(serve):
    def wait(header, **settings):
        server = serve(lambda call, number: Reply(503, {}, {"Retry-After": header()}) if number == 1 else echo(call, number))
        ask(server, [request()], **settings)
        return server.calls[1].time - server.calls[0].time

    assert wait(lambda: formatdate(time.time() + 2, usegmt=True)) >= 0.5  # dates have whole seconds
    assert 0.2 <= wait(lambda: "3600", max_wait=0.2) < 60
    assert wait(lambda: "0", backoff=0.4) >= 0.2


def test_back_off_doubles(serve):
    server = serve(lambda call, number: Reply(500, {}))
    ask(server, [request()], backoff=0.08, max_retries=3)
    waits = [b.time - a.time for a, b in zip(server.calls, server.calls[1:])]
    assert all(w >= 0.04 * 2**k for k, w in enumerate(waits))


# --- money and time


def test_answers_are_journaled_when_they_arrive_and_never_asked_for_again(serve, tmp_path):
    held = threading.Event()

    def script(call, number):
        if call.body["prompt"] == "p3.1":
            held.wait(60)
        return echo(call, number)

    server = serve(script)
    requests = [request(k, agent, candidates=2) for k in range(4) for agent in range(2)]
    file = tmp_path / "journal.jsonl"

    def lines():
        return [json.loads(line) for line in file.read_text().splitlines()]

    with Journal(file) as journal:

        def on_text(round, item, agent, candidate, text):
            journal.append("api", round=round, item=item, agent=agent, candidate=candidate, text=text)

        with APIComparator(APISettings(url=server.url, **QUICK), SAMPLING, on_text) as comparator:
            asking = comparator.ask(requests, round=5)
            # Nobody takes an answer out of the iterator, and one has not come yet.
            end = time.monotonic() + 60
            while len(lines()) < 14 and time.monotonic() < end:
                time.sleep(0.01)
            kept = lines()
            held.set()
            first = dict(asking)
    assert len(kept) == 14
    assert len(lines()) == 16
    known = {(line["round"], line["item"], line["agent"], line["candidate"]): line["text"] for line in kept}
    del known[5, 0, 0, 1]
    server.calls.clear()
    asked = []
    again, counters = ask(server, requests, round=5, known=known, on_text=lambda *answer: asked.append(answer[:4]))
    assert sorted((c.body["prompt"], c.body["num_return_sequences"]) for c in server.calls) == [("p0.0", 1), ("p3.1", 2)]
    assert sorted(asked) == [(5, 0, 0, 1), (5, 3, 1, 0), (5, 3, 1, 1)]
    assert (counters.known, counters.answers) == (13, 3)
    assert again[7] == first[7]
    assert again[0].texts == ("p0.0/0", "p0.0/0")  # the second was asked for alone
    server.calls.clear()
    ask(server, requests, round=6, known=known)
    assert len(server.calls) == 8  # another round's answers are others


def test_an_error_of_the_journal_ends_the_asking(serve):
    def on_text(*answer):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        ask(serve(echo), [request(k) for k in range(50)], on_text=on_text, concurrency=2)


def test_requests_run_side_by_side_over_few_connections(serve):
    def slow(call, number):
        reply = echo(call, number)
        reply.delay = 0.1
        return reply

    server = serve(slow)
    requests = [request(k) for k in range(32)]
    seconds = {}
    for concurrency in (1, 16):
        server.calls.clear()
        results, counters = ask(server, requests, concurrency=concurrency)
        assert [results[k].texts for k in range(32)] == [(f"p{k}.0/0",) for k in range(32)]
        assert len({c.connection for c in server.calls}) <= concurrency
        seconds[concurrency] = counters.seconds
    assert seconds[16] < seconds[1] / 3


def test_no_more_than_concurrency_requests_at_a_time(serve):
    lock, now, most = threading.Lock(), [0], [0]

    def script(call, number):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.1)
        with lock:
            now[0] -= 1
        return echo(call, number)

    ask(serve(script), [request(k) for k in range(12)], concurrency=3)
    assert most[0] == 3


def test_closing_early_sends_nothing_more_and_keeps_what_was_on_its_way(serve):
    def script(call, number):
        reply = echo(call, number)
        reply.delay = 0.2
        return reply

    server, texts = serve(script), []
    settings = APISettings(url=server.url, **(QUICK | {"concurrency": 4}))
    with APIComparator(settings, SAMPLING, lambda *answer: texts.append(answer)) as comparator:
        asking = comparator.ask([request(k) for k in range(100)])
        next(asking)
        with pytest.raises(RuntimeError, match="still asking"):
            comparator.ask([request()])
        asking.close()
        assert list(asking) == []
        assert len(texts) == len(server.calls) < 100
        assert len(dict(comparator.ask([request()]))) == 1  # and it can be asked again


def test_closing_does_not_wait_for_a_back_off(serve, monkeypatch):
    monkeypatch.setattr(api_comparator, "GRACE_SECONDS", 60.0)
    server = serve(lambda call, number: Reply(500, {}))
    with APIComparator(APISettings(url=server.url, **(QUICK | {"backoff": 200.0, "max_wait": 200.0})), SAMPLING) as comparator:
        asking = comparator.ask([request()])
        while not server.calls:
            time.sleep(0.01)
        started = time.monotonic()
        asking.close()
    assert time.monotonic() - started < 30
    assert not any(t.name == "comparator-api" for t in threading.enumerate())


# --- keys


def forms(key):
    return (key, key.lower(), json.dumps(key)[1:-1], key.replace("/", "%2F").replace("+", "%2B"), key[:8])


def test_a_planted_key_is_shown_nowhere(serve, monkeypatch, caplog, capfd, tmp_path):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("PLANTED", KEY + "\n")
    header = "hdr-planted-9876543210"

    def script(call, number):
        """Echoes all that it was sent: in header, address and body, and in the completion itself."""
        assert call.headers["authorization"] == f"Bearer {KEY}"
        sent = f"{call.headers['authorization']} {call.headers['x-extra-token']}"
        seen = {"X-Echo": sent, "Set-Cookie": f"a={KEY}"}
        prompt = call.body["prompt"]
        if prompt == "p0.0":
            return Reply(401, {"error": sent}, seen)
        if prompt == "p1.0":
            return Reply(302, {}, seen | {"Location": f"/x/{KEY}"})
        if prompt == "p2.0":
            return Reply(200, f"no JSON, {' ' * 20}{'x' * 247} {sent}".encode(), seen)  # a cut falls into the key
        if prompt == "p3.0":
            return Reply(200, {"completions": [f"I was sent {sent}"]}, seen)
        return Reply(500, {"error": call.headers["x-extra-token"].upper() + KEY.upper()}, seen)

    server = serve(script)
    settings = APISettings(
        url=server.url + "?token=query-planted-5555", key_env="PLANTED", headers={"X-Extra-Token": header},
        **(QUICK | {"max_retries": 0, "max_failure_fraction": 0.9}),
    )  # fmt: skip
    results = {}
    with (
        Journal(tmp_path / "journal.jsonl") as journal,
        APIComparator(
            settings, SAMPLING, lambda r, i, a, c, text: journal.append("api", round=r, item=i, candidate=c, text=text)
        ) as comparator,
        pytest.raises(ComparatorAPIError) as caught,
    ):
        results |= dict(comparator.ask([request(k) for k in range(4)]))
        for result in comparator.ask([request(4)]):
            results[4] = result
    assert len(server.calls) == 5
    shown = [
        str(caught.value), repr(caught.value), repr(results), repr(settings), str(vars(settings)), repr(asdict(settings)),
        repr(comparator.__dict__), caplog.text, *capfd.readouterr(), (tmp_path / "journal.jsonl").read_text(),
        *(repr(r.__dict__) for r in caplog.records),
    ]  # fmt: skip
    assert (
        "401" in repr(results) and "receive_response_headers" in caplog.text and "I was sent" in shown[-1 - len(caplog.records)]
    )
    for text in shown:
        assert not [f for f in forms(KEY) if f in text]
    for text in (str(caught.value), repr(results), repr(settings), caplog.text):
        assert header not in text and "query-planted" not in text
    assert KEY.encode() not in pickle.dumps(settings)


def test_closing_takes_the_filters_off_the_loggers(serve):
    loggers = [logging.getLogger(name) for name in ("httpx", "httpcore.http11")]
    before = [list(log.filters) for log in loggers]
    with APIComparator(APISettings(url=serve(echo).url, key=KEY, **QUICK), SAMPLING) as comparator:
        list(comparator.ask([request()]))
        assert [len(log.filters) for log in loggers] == [len(b) + 1 for b in before]
    assert [list(log.filters) for log in loggers] == before


def test_a_secret_shows_and_stores_nothing():
    secret = Secret(KEY)
    assert secret.reveal() == copy.deepcopy(secret).reveal() == copy.copy(secret).reveal() == KEY
    assert KEY not in f"{secret} {secret!r}"
    stored = pickle.dumps(secret)
    assert KEY.encode() not in stored
    with pytest.raises(RuntimeError, match="read it from the environment again"):
        pickle.loads(stored).reveal()
    with pytest.raises(TypeError):
        json.dumps(secret)


def test_scrubbing_knows_how_a_secret_may_be_written():
    scrub = Scrubber(['a/"b+c', "a/"])
    assert scrub('x a/"b+c y a/\\"b+c z a%2F%22b%2Bc A/"B+C') == "x *** y *** z *** ***"
    assert Scrubber([])("a") == Scrubber([""])("a") == "a"


def test_the_key_is_read_once_and_a_literal_one_wins(serve, monkeypatch):
    monkeypatch.setenv("PLANTED", "from-the-environment")
    server = serve(echo)
    with APIComparator(APISettings(url=server.url, key_env="PLANTED", **QUICK), SAMPLING) as comparator:
        monkeypatch.delenv("PLANTED")
        list(comparator.ask([request()]))
    ask(server, [request()], key="literal", key_env="PLANTED")
    assert [c.headers["authorization"] for c in server.calls] == ["Bearer from-the-environment", "Bearer literal"]


def test_an_unencrypted_key_to_another_machine_is_warned_of(caplog):
    for url, warned in (("http://api.invalid/v1", True), ("https://api.invalid/v1", False), ("http://127.0.0.1:1/v1", False)):
        caplog.clear()
        settings = APISettings(url=url, format="openai", model="m", key=KEY, **(QUICK | {"timeout": 0.01, "max_retries": 0}))
        comparator = APIComparator(settings, SAMPLING)
        comparator._tell_what_is_sent([request()])
        assert any("unencrypted" in r.message for r in caplog.records) == warned


# --- settings


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"format": "anthropc"}, "comparator_api_format: unknown format 'anthropc'; did you mean 'anthropic'?"),
        ({"format": "codx"}, "comparator_api_format: unknown format 'codx'; did you mean 'codex'?"),
        ({"key_env": "UNSET_KEY"}, "comparator_api_key_env: the environment variable 'UNSET_KEY' is not set"),
        ({"key_env": "sk-a-key"}, "comparator_api_key_env: is not the name of an environment variable"),
        ({"key": " "}, "comparator_api_key: is empty"),
        ({"key": "a\nb"}, "comparator_api_key: the key holds characters that no header can carry"),
        ({"key_header": "a b"}, "comparator_api_key_header: 'a b' is not a header's name"),
        ({"key_prefix": "a\nb"}, "comparator_api_key_prefix: 'a\\nb' holds"),
        ({"headers": {"X-A": "b\r\nX-C: d"}}, "comparator_api_headers.X-A: write a text of one line"),
        ({"headers": {"X A": "b"}}, "comparator_api_headers: 'X A' is not a header's name"),
        ({"url": None, "format": "messages", "model": "m"}, "comparator_api_url: required with comparator_policy 'api', e.g. https://api.a"),
        ({"url": None}, "comparator_api_url: required with comparator_policy 'api'"),
        ({"url": "file:///etc/passwd"}, "comparator_api_url: not a URL of a server"),
        ({"url": "http://host:99999999/"}, "comparator_api_url: not a URL of a server"),
        ({"url": "https://me:secret@host/v1"}, "comparator_api_url: holds a user name or password"),
        ({"format": "openai"}, "comparator_api_model: the format 'openai' needs one"),
        ({"extra_body": {"a": float("nan")}}, "comparator_api_extra_body: is not JSON"),
        ({"extra_body": {"a": {1}}}, "comparator_api_extra_body: is not JSON"),
        ({"item_fields": "prompt"}, "comparator_api_item_fields: write a list: [prompt]"),
        ({"format": "chat", "model": "m", "item_fields": ["a"]}, "comparator_api_item_fields: the format 'openai' sends"),
        ({"max_n_per_request": 0}, "comparator_api_max_n_per_request: must be a whole number of at least 1, got 0"),
        ({"concurrency": True}, "comparator_api_concurrency: must be a whole number of at least 1, got True"),
        ({"max_retries": -1}, "comparator_api_max_retries: must be a whole number of at least 0, got -1"),
        ({"timeout": 0}, "comparator_api_timeout: must be a number above 0, got 0"),
        ({"backoff": float("inf")}, "comparator_api_backoff: must be ≥ 0, got inf"),
        ({"max_wait": "1"}, "comparator_api_max_wait: must be ≥ 0, got '1'"),
        ({"max_failure_fraction": 1.5}, "comparator_api_max_failure_fraction: is a share: write 0 to 1, got 1.5"),
    ],
)  # fmt: skip
def test_settings_that_are_refused(settings, problem, monkeypatch):
    monkeypatch.delenv("UNSET_KEY", raising=False)
    with pytest.raises(ConfigError) as caught:
        APISettings(**({"url": "http://127.0.0.1/v1"} | settings)).check_credential()
    assert len(caught.value.problems) == 1
    assert str(caught.value).startswith(problem)
    assert "secret" not in str(caught.value) and "sk-a-key" not in str(caught.value)


def test_all_problems_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        APISettings(format="x", concurrency=0)
    assert [p.path for p in caught.value.problems] == [
        "comparator_api_format", "comparator_api_url", "comparator_api_concurrency",
    ]  # fmt: skip


def test_a_server_that_needs_no_model_can_be_asked_without_one(serve):
    server = serve(lambda call, number: Reply(content={"choices": [{"text": "a"}]}))
    ask(server, [request()], format="openai", extra_body={"model": None})
    assert "model" not in server.calls[0].body
