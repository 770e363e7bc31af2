"""vLLM's own HTTP server, started as a user would, as the rollout engine of a run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading

import httpx
import pytest
import torch
import yaml
from engines import policy_of, start_engine
from test_command_line import metrics, run, run_file
from test_rollout import everything, requests
from tiny import save_tiny_model, tiny_lm

from comlrl_ds.cluster.channel import hear, tell
from comlrl_ds.rollout.base import PolicyWeights, RolloutError, Sampling
from comlrl_ds.rollout.disk import shape_of
from comlrl_ds.rollout.engine_settings import probe_rows
from comlrl_ds.rollout.host_sender import HostSender
from comlrl_ds.rollout.http_rollout import HTTPRollout
from comlrl_ds.rollout.pool import RolloutPool


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(url, model folder, process)."""
    folder = tmp_path_factory.mktemp("server")
    model = save_tiny_model(folder / "model", 3)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    environment = dict(os.environ) | {
        "VLLM_SERVER_DEV_MODE": "1", "VLLM_PLUGINS": "comlrl_ds", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    command = [
        sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "256",
        "--block-size", "32", "--kv-cache-memory-bytes", str(64 << 20), "--no-enable-chunked-prefill",
        "--max-num-batched-tokens", "8192", "--generation-config", "vllm",
        "--weight-transfer-config", json.dumps({"backend": "host"}),
    ]  # fmt: skip
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    yield f"http://127.0.0.1:{port}", model, process
    os.killpg(process.pid, 9)  # the processes that it started are of its session
    process.wait()


@pytest.fixture(scope="module")
def engine(server):
    url, model, process = server
    made = HTTPRollout(url, [str(model)], index=0, start_timeout_s=240, timeout_s=60, probe=probe_rows(320))
    made.wait_ready()
    assert process.poll() is None
    yield made
    made.shutdown()


def test_a_server_samples_what_an_engine_child_samples(server, engine):
    _, model, _ = server
    child = start_engine(model, "float32")
    child.wait_ready()
    policies = {f"agent_{i}": PolicyWeights(f"agent_{i}", str(model), str(model)) for i in range(2)}
    try:
        assert everything(RolloutPool([engine], shape_of), policies) == everything(RolloutPool([child], shape_of), policies)
        scores = [logprobs(RolloutPool([e], shape_of), policies) for e in (engine, child)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-4) and len(scores[0]) > 100
        interrupted_and_synced(child, model)
    finally:
        child.shutdown()


def interrupted_and_synced(child, model):
    """A peer that leaves in the middle of its submission leaves nothing behind that a sync stumbles over."""
    peer = child.address.connect("", 10)
    sampling = Sampling(1.0).as_dict()
    wired = [
        {"prompt": list(range(3, 70)), "max_new_tokens": 8 if k == 0 else 150, "seed": k, "stop_ids": []} for k in range(6)
    ]
    tell(peer, ["generate", {"requests": wired, "sampling": sampling}])
    hear(peer)
    peer.close()
    lm = tiny_lm(8)
    child.sync_weights(policy_of(lm, "agent_0", 1, model))
    row = list(range(3, 60))
    with torch.no_grad():
        expected = lm(torch.tensor([row])).logits[0].log_softmax(-1)
    got = child.prompt_logprobs([row])[0]
    assert max(abs(x - float(expected[k, row[k + 1]])) for k, x in enumerate(got)) < 1e-3


def logprobs(pool, policies) -> list[float]:
    """Of every sampled token, request by request."""
    got = dict(pool.generate(requests(), policies, Sampling(0.8, top_k=30, logprobs=True)))
    assert all(len(c.logprobs) == len(c.ids) for c in got.values())
    return [x for k in range(len(got)) for x in got[k].logprobs]


def test_a_server_takes_weights(server, engine):
    _, model, _ = server
    lm = tiny_lm(8)
    rows = [[5, 6, 7, 8, 9], [300, 2, 17]]
    before = engine.prompt_logprobs(rows)
    report = engine.sync_weights(policy_of(lm, "agent_0", 4, model))
    assert report.bytes == sum(p.nbytes for p in lm.parameters()) and engine.held == "agent_0@4"
    assert engine.calls.version() == "agent_0@4"
    after = engine.prompt_logprobs(rows)
    with torch.no_grad():
        z = [lm(torch.tensor([r])).logits[0].log_softmax(-1) for r in rows]
    expected = [[float(y[k, r[k + 1]]) for k in range(len(r) - 1)] for y, r in zip(z, rows)]
    gaps = [abs(x - y) for a, b in zip(after, expected) for x, y in zip(a, b)]
    assert max(gaps) < 1e-3 and before != after


def test_a_sync_waits_for_the_requests_of_other_clients_and_lets_new_ones_go_afterwards(server, engine):
    """Requests of four other clients never stop: none fails, and none is computed by half a model."""
    url, model, process = server
    over, failed, versions = threading.Event(), [], []

    def client(k: int) -> None:
        prompt, served = list(range(3 + k, 43 + k)), engine.calls.served()["id"]
        with httpx.Client(timeout=120) as other:
            while not over.is_set():
                body = {"model": served, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
                answer = other.post(f"{url}/v1/completions", json=body)
                choice = answer.json().get("choices", [{}])[0]
                if answer.is_error or choice.get("finish_reason") != "length":
                    failed.append(answer.text)
                versions.append(choice.get("text"))

    threads = [threading.Thread(target=client, args=(k,), daemon=True) for k in range(4)]
    for thread in threads:
        thread.start()
    try:
        for version, seed in ((5, 9), (6, 10), (7, 11)):
            lm = tiny_lm(seed)
            engine.sync_weights(policy_of(lm, "agent_0", version, model))
            # Long enough to be cached; what was cached with the weights before must not be continued.
            rows = [list(range(3, 43)) * 3, list(range(4, 44))]
            after = engine.prompt_logprobs(rows)
            with torch.no_grad():
                z = [lm(torch.tensor([r])).logits[0].log_softmax(-1) for r in rows]
            gaps = [abs(x - float(y[k, r[k + 1]])) for a, y, r in zip(after, z, rows) for k, x in enumerate(a)]
            assert max(gaps) < 1e-3
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
    assert not failed and len(set(versions)) > 4 and process.poll() is None and not engine.calls.is_paused()


def test_a_sync_that_fails_leaves_the_server_at_work_with_a_version_of_its_own(server, engine):
    url, model, _ = server
    lm = tiny_lm(8)

    def broken():
        yield from list(lm.named_parameters())[:5]
        raise ZeroDivisionError

    for chunk_bytes in (1, 1 << 30):  # some layers were sent, or none
        sender = HostSender(engine.calls, str(model), chunk_bytes)
        with pytest.raises(ZeroDivisionError):
            sender.send(PolicyWeights("agent_0", "agent_0@8", str(model), broken))
        sender.close()
        assert not engine.calls.is_paused() and "unfinished" in engine.calls.version()
        assert all(x < 0 for row in engine.prompt_logprobs([[5, 6, 7, 8, 9]]) for x in row)
    # What the server cannot take ends the sync, too, and not the server.
    sender = HostSender(engine.calls, str(model))
    wrong = [("model.embed_tokens.weight", torch.ones(3, 3)), ("model.norm.weight", torch.ones(3))]
    with pytest.raises(RolloutError, match=rf"{url}: 500 .*, the last parameter sent being model\.norm\.weight$"):
        sender.send(PolicyWeights("agent_0", "agent_0@9", str(model), lambda: iter(wrong)))
    sender.close()
    engine.manifest = None  # the next run's
    test_a_server_takes_weights(server, engine)


def test_a_run_trains_with_a_server_and_leaves_it_running(server, engine, tmp_path):
    url, model, process = server
    # The server holds weights of the test before, which the run must not take for those of its folder.
    file = run_file(tmp_path, model, rollout={"urls": [url], "max_model_len": 256})
    done = run("train", str(file), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = metrics(tmp_path)
    assert any("rollout/sync_bytes" in r for r in rows) and rows[-1]["rollout/logprob_gap"] < 1e-3
    assert process.poll() is None
    plain = yaml.safe_load(file.read_text())
    (tmp_path / "child").mkdir()
    file = run_file(tmp_path / "child", model, rollout={"max_model_len": 256, "engines": 1, "kv_cache_bytes": 64 << 20})
    assert plain["run"]["seed"] == yaml.safe_load(file.read_text())["run"]["seed"]
    assert run("train", str(file), cwd=tmp_path).returncode == 0
    rounds = [(tmp_path / name / "preference_replay/iteration_0001.json").read_text() for name in ("run", "child/run")]
    assert rounds[0] == rounds[1]


def test_a_server_with_another_model_is_refused(server, tiny_model):
    url, _, _ = server
    other = HTTPRollout(url, [str(tiny_model)], index=0, start_timeout_s=10)
    with pytest.raises(RolloutError, match=r"serves .*; start it with "):
        other.wait_ready()
    other.shutdown()


def test_a_server_that_died_ends_the_run_with_its_address(server, engine):
    url, model, process = server
    os.killpg(process.pid, 9)
    process.wait()
    policies = {f"agent_{i}": PolicyWeights(f"agent_{i}", engine.held, str(model)) for i in range(2)}
    with pytest.raises(RolloutError, match=url):
        everything(RolloutPool([engine], shape_of), policies)
