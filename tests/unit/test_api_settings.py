"""Keys that nothing shows or stores, and settings that are refused."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from dataclasses import asdict

import pytest
from api_server import KEY, QUICK, SAMPLING, Reply, ask, echo, request

from comlrl_ds.config.api_settings import APISettings, Scrubber, Secret
from comlrl_ds.config.errors import ConfigError
from comlrl_ds.preference.api_comparator import APIComparator, ComparatorAPIError
from comlrl_ds.preference.journal import Journal

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
