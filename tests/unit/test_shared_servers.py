"""A sync of a server that others use, too: paused, drained, its cache dropped, and always at work again afterwards."""

from __future__ import annotations

import time

import pytest
import torch
from api_server import Reply

from comlrl_ds.rollout import engine_server, http_calls
from comlrl_ds.rollout.base import PolicyWeights, RolloutError
from comlrl_ds.rollout.engine_server import VLLMServer
from comlrl_ds.rollout.host_sender import HostSender, send_to_all
from comlrl_ds.rollout.http_calls import HTTPCalls
from comlrl_ds.rollout.http_rollout import HTTPRollout
from comlrl_ds.rollout.outbox import Outbox

TENSORS = {"embed.weight": torch.ones(4, 4), "head.weight": torch.ones(2)}
PAUSE = "/pause?mode=wait&clear_cache=false"


def script(refusals=0, without=(), broken=(), slow=(), counters=()):
    """vLLM's server as far as a sync goes.

    Args:
        refusals: of the first resets. without: paths that it does not have. broken, slow: paths that fail, or are not answered.
        counters: open requests, one number for each time that they are asked for.
    """
    state = {"version": "default", "refusals": refusals, "counters": list(counters)}

    def answer(call, number):
        path = call.path.partition("?")[0]
        if path in without:
            return Reply(404)
        if path in broken:
            return Reply(500, {"error": "no"})
        if path in slow:
            return Reply(content={}, delay=30)
        if path == "/finish_weight_update":
            state["version"] = call.body["weight_version"]
        if path == "/update_weight_version":
            state["version"] = call.body["new_version"]
        if path == "/weight_info":
            return Reply(content={"weight_version": state["version"]})
        if path == "/reset_prefix_cache":
            state["refusals"] -= 1
            return Reply(content={"success": state["refusals"] < 0})
        if path == "/metrics":
            count = state["counters"].pop(0)
            text = f'# HELP x\nvllm:num_requests_running{{engine="0"}} {count}.0\nvllm:num_requests_waiting{{engine="0"}} 0.0\n'
            return Reply(content=text.encode())
        return Reply(content={})

    answer.state = state
    return answer


def sync(servers, timeout_s=5.0, tensors=None):
    outbox = Outbox()
    senders = [HostSender(HTTPCalls(f"http://{s.host}", timeout_s), "nowhere", chunk_bytes=1) for s in servers]
    try:
        return send_to_all(senders, "agent_1 (actor.1)", "agent_1@1", (tensors or TENSORS).items(), outbox)
    finally:
        outbox.close()


def paths(server):
    return [call.path for call in server.calls]


def test_a_sync_pauses_drains_and_resumes_and_tries_again_while_the_cache_is_held(serve):
    server = serve(script(refusals=2))
    sync([server])
    assert paths(server) == [
        PAUSE, "/start_weight_update", "/update_weights", "/update_weights", "/finish_weight_update",
        *["/reset_prefix_cache"] * 3, "/resume", "/weight_info",
    ]  # fmt: skip


def test_a_cache_that_is_held_for_good_is_an_error_with_role_engine_and_last_parameter(serve):
    servers = [serve(script(refusals=0 if k == 2 else 10**6)) for k in range(4)]
    started = time.monotonic()
    with pytest.raises(RolloutError) as caught:
        sync(servers, timeout_s=1.0)
    assert 1.0 - 0.3 < time.monotonic() - started < 4.0
    said = str(caught.value)
    assert said.startswith(
        f"weight sync of agent_1 (actor.1): the engine at http://{servers[0].host} refuses to drop the prompts"
    )
    assert said.endswith("waited 1 s (rollout.timeout_s), the last parameter sent being head.weight")
    assert all(paths(s).count("/resume") == 1 for s in servers)


@pytest.mark.parametrize("path", ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update"])
def test_servers_that_fall_silent_cost_one_time_out_together_and_all_are_resumed(serve, path, monkeypatch):
    monkeypatch.setattr(http_calls, "ABANDON_S", 1.0)
    servers = [serve(script(slow=[path] if k else ())) for k in range(3)]
    started = time.monotonic()
    with pytest.raises(
        RolloutError, match=r"^weight sync of agent_1 \(actor\.1\): the engine at .* \(rollout.timeout_s\), "
    ) as caught:
        sync(servers, timeout_s=1.0)
    assert time.monotonic() - started < 4.0
    early = path in ("/pause", "/start_weight_update")
    last = {"/update_weights": "embed", "/finish_weight_update": "head"}.get(path)
    assert str(caught.value).endswith(
        "before any parameter was sent" if early else f"the last parameter sent being {last}.weight"
    )
    assert all("/resume" in paths(s) for s in servers)


def test_a_sync_that_fails_on_one_server_ends_on_all_and_leaves_versions_that_no_run_takes_for_its_own(serve, tmp_path):
    scripts = [script(), script(broken=["/update_weights"])]
    servers = [serve(s) for s in scripts]
    with pytest.raises(RolloutError, match=rf"{servers[1].host}: 500 .*, the last parameter sent being embed\.weight$"):
        sync(servers)
    for server, state in zip(servers, (s.state for s in scripts)):
        assert paths(server)[-1] == "/resume" and "unfinished" in state["version"]
        engine = HTTPRollout(f"http://{server.host}", [str(tmp_path)], index=0)
        engine.calls.served = lambda: {"root": str(tmp_path), "max_model_len": 8}
        engine.wait_ready()
        assert engine.held != str(tmp_path) and "unfinished" in engine.held
        engine.shutdown()


def test_tensors_that_cannot_be_sent_leave_no_server_paused(serve):
    server = serve(script())
    with pytest.raises(RolloutError, match="is empty; was it gathered"):
        sync([server], tensors={"a": torch.ones(2), "b": torch.ones(0)})
    assert paths(server)[-1] == "/resume"
    with pytest.raises(ZeroDivisionError):
        sync([server], tensors=type("Failing", (), {"items": lambda self: (1 / 0 for _ in range(1))})())
    assert paths(server)[-1] == "/resume"


def test_a_server_that_cannot_be_resumed_is_named_with_what_to_do(serve):
    server = serve(script(broken=["/update_weights", "/resume"]))
    with pytest.raises(
        RolloutError, match=rf"http://{server.host} stays paused \(.*500.*\); send POST /resume to it, or restart it$"
    ):
        sync([server])


def test_a_server_without_pause_is_awaited_by_its_counters(serve):
    server = serve(script(without=["/pause"], counters=[2, 1, 0]))
    sync([server])
    assert paths(server)[:5] == [PAUSE, *["/metrics"] * 3, "/start_weight_update"] and "/resume" not in paths(server)
    busy = serve(script(without=["/pause"], counters=[3] * 100))
    with pytest.raises(RolloutError, match=r"still has 3 open requests after 1 s \(rollout\.timeout_s\), before any parameter"):
        sync([busy], timeout_s=0.6)
    assert "/start_weight_update" not in paths(busy)
    sync([serve(script(without=["/pause", "/metrics"]))])


def test_a_version_of_another_folder_is_not_taken_for_the_folder_that_a_server_was_started_with(serve, tmp_path):
    for version, same in (("default", True), ("/another/folder", False), ("agent_0@3", False), (str(tmp_path), False)):
        known = script()
        known.state["version"] = version
        engine = HTTPRollout(f"http://{serve(known).host}", [str(tmp_path)], index=0)
        engine.calls.served = lambda: {"root": str(tmp_path), "max_model_len": 8}
        engine.wait_ready()
        assert (engine.held == str(tmp_path)) is same
        engine.shutdown()


def test_a_server_that_stays_paused_is_said_at_the_start(serve, tmp_path):
    server = serve(lambda call, number: Reply(content={"is_paused": True}))
    engine = HTTPRollout(f"http://{server.host}", [str(tmp_path)], index=0, start_timeout_s=0.1)
    engine.calls.served = lambda: {"root": str(tmp_path), "max_model_len": 8}
    with pytest.raises(RolloutError, match="is paused; send POST /resume to it, or restart it"):
        engine.wait_ready()
    engine.shutdown()


class HoldingLLM:
    """As much of an LLM as refuses to drop its cache so many times."""

    def __init__(self, refusals):
        self.refusals, self.version = refusals, "old"

    def finish_weight_update(self, version):
        self.version = version

    def get_weight_version(self):
        return self.version

    def reset_prefix_cache(self):
        self.refusals -= 1
        return self.refusals < 0


def test_a_child_tries_again_and_gives_up(monkeypatch):
    monkeypatch.setattr(engine_server, "RESET_S", 0.3)
    server = VLLMServer.__new__(VLLMServer)
    server.llm, server.probe_rows = HoldingLLM(3), []
    assert server.finish_weight_update(print, "agent_0@1") == {"version": "agent_0@1", "probe": []}
    assert server.llm.refusals == -1
    server.llm = HoldingLLM(10**6)
    with pytest.raises(RuntimeError, match="refuses to drop the prompts that it cached with its previous weights"):
        server.finish_weight_update(print, "agent_0@2")


def test_an_adapter_too_is_sent_to_a_paused_server(serve):
    server = serve(script())
    sender = HostSender(HTTPCalls(f"http://{server.host}", 5.0), "nowhere")
    sender.send(PolicyWeights("agent_0", "agent_0@1", "nowhere", TENSORS.items))
    sender.close()
    assert paths(server)[0] == PAUSE and "/resume" in paths(server)
