"""The comparator behind HTTP against a server that misbehaves: faults, retries, limits, money and time."""

from __future__ import annotations

import json
import re
import threading
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime, formatdate

import pytest
from api_server import KEY, QUICK, SAMPLING, Reply, ask, echo, generic, request

from comlrl_ds.config.api_settings import APISettings
from comlrl_ds.preference import api_comparator
from comlrl_ds.preference.api_comparator import APIAnswer, APIComparator, APIFailure, ComparatorAPIError
from comlrl_ds.preference.api_formats import Answer
from comlrl_ds.preference.api_transport import retry_after
from comlrl_ds.preference.journal import Journal

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
    assert results == {0: APIAnswer((Answer("fine"),))}
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
    assert results == {k: APIAnswer((Answer(f"p{k}.0/0"), Answer(f"p{k}.0/1"))) for k in (0, 1, 3, 4)}
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
    known = {(0, k, 0, 0): Answer("old") for k in (0, 1, 3, 4)}
    results, _ = ask(server, requests, known=known, max_failure_fraction=0.2, max_retries=0)
    assert isinstance(results[2], APIFailure)


def test_a_server_that_refuses_everybody_is_left_alone(serve):
    server = serve(lambda call, number: Reply(401, {"error": "who are you?"}))
    with pytest.raises(ComparatorAPIError, match=r"^4 of 100 answers .* no other would do better; the last: .*HTTP 401"):
        ask(server, [request(k) for k in range(100)], concurrency=4, max_failure_fraction=0.5)
    assert len(server.calls) < 10


@pytest.mark.parametrize("status", [401, 402, 403, 404])
@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"key_env": "MY_JUDGE_KEY"}, "; check the key in MY_JUDGE_KEY"),
        ({"key": "abc-123"}, "; check the key in comparator_api_key"),
        ({}, "; no key was sent: write the name of its environment variable in comparator_api_key_env"),
    ],
)
def test_a_refused_key_is_named_by_where_it_stands(serve, monkeypatch, status, given, remedy):
    monkeypatch.setenv("MY_JUDGE_KEY", "abc-123")
    server = serve(lambda call, number: Reply(status, {"error": "no"}))
    with pytest.raises(ComparatorAPIError) as caught:
        ask(server, [request()], max_failure_fraction=0.0, max_retries=0, **given)
    assert str(caught.value).endswith(f'HTTP {status}: {{"error": "no"}}' + (remedy if status != 404 else ""))
    assert "abc-123" not in str(caught.value)


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
        server, [request(candidates=2)], max_retries=1, timeout=timeout, on_answer=lambda *answer: texts.append(answer)
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

        def on_answer(round, item, agent, candidate, answer):
            journal.append("api", round=round, item=item, agent=agent, candidate=candidate, text=answer.text)

        with APIComparator(APISettings(url=server.url, **QUICK), SAMPLING, on_answer) as comparator:
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
    known = {(line["round"], line["item"], line["agent"], line["candidate"]): Answer(line["text"]) for line in kept}
    del known[5, 0, 0, 1]
    server.calls.clear()
    asked = []
    again, counters = ask(server, requests, round=5, known=known, on_answer=lambda *answer: asked.append(answer[:4]))
    assert sorted((c.body["prompt"], c.body["num_return_sequences"]) for c in server.calls) == [("p0.0", 1), ("p3.1", 2)]
    assert sorted(asked) == [(5, 0, 0, 1), (5, 3, 1, 0), (5, 3, 1, 1)]
    assert (counters.known, counters.answers) == (13, 3)
    assert again[7] == first[7]
    assert again[0].texts == ("p0.0/0", "p0.0/0")  # the second was asked for alone
    server.calls.clear()
    ask(server, requests, round=6, known=known)
    assert len(server.calls) == 8  # another round's answers are others


def test_an_error_of_the_journal_ends_the_asking(serve):
    def on_answer(*answer):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        ask(serve(echo), [request(k) for k in range(50)], on_answer=on_answer, concurrency=2)


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
