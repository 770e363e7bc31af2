"""Real vLLM engines behind the pool: seeds, sharing, swapping, and what happens when a process dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest
import torch
from engines import policy_of, start_engine
from tiny import save_tiny_model, tiny_lm

from comlrl_ds.maths.seeds import seed_of
from comlrl_ds.rollout.base import PolicyWeights, Request, RolloutError, Sampling
from comlrl_ds.rollout.disk import shape_of
from comlrl_ds.rollout.pool import RolloutPool
from comlrl_ds.rollout.transformers_rollout import TransformersRollout

SAMPLING = Sampling(temperature=1.0)
ITEMS, CANDIDATES = 4, 4


def requests() -> list[Request]:
    prompt = lambda t, i: tuple((5 + 11 * t + 3 * i + k) % 320 for k in range(9 + t))  # noqa: E731
    return [
        Request(f"agent_{i}", prompt(t, i), 12, seed_of(7, "target", 1, t, i, j), (2,))
        for t in range(ITEMS)
        for i in range(2)
        for j in range(CANDIDATES)
    ]


def everything(pool: RolloutPool, policies) -> list[tuple[int, ...]]:
    got = dict(pool.generate(requests(), policies, SAMPLING))
    assert len(got) == len(requests())
    return [got[k].ids for k in range(len(got))]


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    folder = save_tiny_model(tmp_path_factory.mktemp("rollout") / "base", 3)
    started = [start_engine(folder, "float32") for _ in range(2)]
    for engine in started:
        engine.wait_ready()
    yield folder, started
    for engine in started:
        engine.shutdown()


@pytest.fixture(scope="module")
def shared(engines):
    """The same requests with equal weights on one engine, on two, and by transformers."""
    folder, started = engines
    policies = {f"agent_{i}": PolicyWeights(f"agent_{i}", str(folder), str(folder)) for i in range(2)}
    pools = {"one": started[:1], "two": started, "transformers": [TransformersRollout(str(folder), dtype=torch.float32)]}
    return {name: everything(RolloutPool(members, shape_of), policies) for name, members in pools.items()}


def test_samples_do_not_depend_on_the_number_of_engines(shared):
    assert shared["one"] == shared["two"]


def test_candidates_of_an_item_differ(shared):
    for start in range(0, len(shared["one"]), CANDIDATES):
        assert len(set(shared["one"][start : start + CANDIDATES])) > 1


def test_completions_end_with_their_stop_token_or_are_full_length(shared):
    for name in ("one", "transformers"):
        for ids in shared[name]:
            assert (len(ids) == 12 and 2 not in ids[:-1]) or (ids[-1] == 2 and 2 not in ids[:-1])


def test_agents_with_different_weights_share_an_engine_by_swapping(engines):
    """One engine that swaps gives what two engines give, and the versions say whose weights sampled what."""
    folder, started = engines
    lms = [tiny_lm(40 + i) for i in range(2)]
    policies = {f"agent_{i}": policy_of(lm, f"agent_{i}", 5, folder) for i, lm in enumerate(lms)}
    syncs = []
    pool = RolloutPool(started, shape_of, on_sync=lambda policy, engine, report: syncs.append((policy.key, engine, report)))
    both = everything(pool, policies)
    assert {key for key, _, _ in syncs} == {"agent_0@5", "agent_1@5"}
    assert all(report.bytes == sum(p.nbytes for p in lms[0].parameters()) for _, _, report in syncs)
    single = dict(RolloutPool(started[:1], shape_of).generate(requests(), policies, SAMPLING))
    assert [single[k].ids for k in range(len(single))] == both
    assert {single[k].version for k in range(len(single)) if requests()[k].policy == "agent_1"} == {"agent_1@5"}
    # Back to what is on disk, through the same way.
    again = {f"agent_{i}": PolicyWeights(f"agent_{i}", str(folder), str(folder)) for i in range(2)}
    assert everything(RolloutPool(started[:1], shape_of), again) == everything(RolloutPool(started, shape_of), again)


def test_logprobs_and_greedy_tokens_agree_with_transformers(engines):
    folder, started = engines
    policy = PolicyWeights("agent_0", str(folder), str(folder))
    reference = TransformersRollout(str(folder), dtype=torch.float32)
    rows = [list(r.prompt) for r in requests()[::8]]
    ours, theirs = RolloutPool(started, shape_of).prompt_logprobs(policy, rows), reference.prompt_logprobs(rows)
    assert max(abs(x - y) for a, b in zip(ours, theirs) for x, y in zip(a, b)) < 1e-3
    greedy = Sampling(temperature=0)
    pools = [RolloutPool([e], shape_of) for e in (started[0], reference)]
    got = [dict(pool.generate(requests()[::8], {"agent_0": policy}, greedy)) for pool in pools]
    assert [got[0][k].ids for k in range(4)] == [got[1][k].ids for k in range(4)]


def test_completions_say_how_probable_their_tokens_were(engines):
    """At temperature 1 over the whole vocabulary, by vLLM as by transformers; asking changes no draw."""
    folder, started = engines
    policies = {f"agent_{i}": PolicyWeights(f"agent_{i}", str(folder), str(folder)) for i in range(2)}
    asked = Sampling(0.8, top_p=0.9, top_k=30, logprobs=True)
    pool = RolloutPool(started, shape_of)
    got = dict(pool.generate(requests(), policies, asked))
    silent = dict(pool.generate(requests(), policies, replace(asked, logprobs=False)))
    assert {k: c.ids for k, c in got.items()} == {k: c.ids for k, c in silent.items()} and not silent[0].logprobs
    reference = TransformersRollout(str(folder), dtype=torch.float32)
    for k, r in enumerate(requests()):
        expected = reference.prompt_logprobs([[*r.prompt, *got[k].ids]])[0][len(r.prompt) - 1 :]
        assert got[k].logprobs == pytest.approx(expected, abs=1e-3)


def test_a_least_length_holds_against_stop_tokens(engines):
    folder, started = engines
    policies = {f"agent_{i}": PolicyWeights(f"agent_{i}", str(folder), str(folder)) for i in range(2)}
    sampling = Sampling(temperature=1.0, min_new_tokens=12)
    got = RolloutPool(started, shape_of).generate(requests(), policies, sampling)
    assert {len(c.ids) for _, c in got} == {12}


def test_a_dead_engine_ends_generation_with_its_signal(engines, tmp_path):
    folder, _ = engines
    engine = start_engine(folder, "float32", probe=False)
    engine.wait_ready()
    engine.submit([Request("agent_0", (5, 6, 7), 200, k) for k in range(32)], SAMPLING)
    engine.child.process.kill()
    with pytest.raises(RolloutError, match="ended by signal 9"):
        while engine.receive() is not None:
            pass
    engine.shutdown()


def test_a_silent_engine_ends_generation_with_a_message(engines):
    folder, _ = engines
    engine = start_engine(folder, "float32", probe=False)
    engine.wait_ready()
    os.kill(engine.child.process.pid, signal.SIGSTOP)
    pool = RolloutPool([engine], shape_of, timeout_s=2)
    policies = {f"agent_{i}": PolicyWeights(f"agent_{i}", str(folder), str(folder)) for i in range(2)}
    with pytest.raises(RolloutError, match="no engine has answered for 2 s"):
        everything(pool, policies)
    engine.child.process.kill()
    engine.shutdown()


def test_an_engine_that_cannot_start_says_so(tmp_path, engines):
    folder, _ = engines
    engine = start_engine(folder, "no_such_dtype")
    with pytest.raises(RolloutError, match=r"start failed|exit code"):
        engine.wait_ready()
    engine.shutdown()


PARENT = """
import sys, time
sys.path[:0] = [{tests!r}, {here!r}]
from pathlib import Path
from engines import start_engine
engine = start_engine(Path({folder!r}), "float32")
print(engine.child.process.pid, flush=True)
if {wait}:
    engine.wait_ready()
    print("ready", flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("wait", [False, True])
def test_no_engine_outlives_a_killed_trainer(engines, root, wait):
    folder, _ = engines
    here = root / "tests" / "e2e"
    program = PARENT.format(tests=str(here.parent), here=str(here), folder=str(folder), wait=wait)
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    child = int(parent.stdout.readline())
    if wait:
        assert parent.stdout.readline().strip() == "ready"
    else:
        time.sleep(1.0)  # it is importing vLLM now
    family = [child, *(p.pid for p in psutil.Process(child).children(recursive=True))]
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    end = time.monotonic() + 10
    while any(alive(pid) for pid in family) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in family)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
