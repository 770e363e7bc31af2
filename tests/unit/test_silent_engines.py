"""Engines that never answer: each wait is bounded, whatever their number, and the error says who, what and how far."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import time
from multiprocessing import Pipe

import pytest
import torch

from comlrl_ds.cluster.launch import this_identity
from comlrl_ds.rollout.base import PolicyWeights, RolloutError
from comlrl_ds.rollout.engine_client import WeightCalls
from comlrl_ds.rollout.engine_process import END_S, EngineAddress, EngineProcess
from comlrl_ds.rollout.host_sender import HostSender, send_to_all
from comlrl_ds.rollout.outbox import Outbox
from comlrl_ds.rollout.transfer import Target, send_live

TENSORS = {"embed.weight": torch.ones(4, 4), "layer.weight": torch.ones(3), "head.weight": torch.ones(2)}


class Actor:
    """As much of an actor as a sync takes."""

    name, rank, dtype = "actor.1", 0, "float32"

    def named_weights(self, dtype=None):
        return iter(TENSORS.items())

    def weight_shapes(self):
        return [(n, tuple(t.shape)) for n, t in TENSORS.items()]

    def token_logprobs(self, rows):
        return []


class FallsSilent:
    """Takes so many updates, and then the real client waits on a connection whose other end says nothing."""

    def __init__(self, name: str, updates: int, timeout_s: float) -> None:
        self._here, self._there = Pipe()
        self._left = updates
        self._calls = WeightCalls(name, self._here, timeout_s, lambda: "closed its connection")

    def start_weight_update(self):
        pass

    def update_weights(self, update_info):
        self._left -= 1
        if self._left < 0:
            self._calls.update_weights(update_info)

    def finish_weight_update(self, version):
        return self._calls.finish_weight_update(version)


@pytest.mark.parametrize(
    ("updates", "far"),
    [(0, "the last parameter sent being embed.weight"), (1, "the last parameter sent being layer.weight"),
     (3, "the last parameter sent being head.weight")],
)  # fmt: skip
def test_a_sync_that_is_not_answered_names_policy_engine_and_last_parameter_after_one_time_out(updates, far):
    clients = [FallsSilent(f"engine {k} for base", updates, 0.5) for k in range(4)]
    senders = [HostSender(client, "nowhere", chunk_bytes=1) for client in clients]
    outbox, started = Outbox(), time.monotonic()
    with pytest.raises(RolloutError) as caught:
        send_to_all(senders, "agent_1 (actor.1)", "agent_1@1", TENSORS.items(), outbox)
    assert time.monotonic() - started < 1.5
    outbox.close()
    said = "weight sync of agent_1 (actor.1): engine 0 for base has not answered for 0 s (rollout.timeout_s), "
    assert str(caught.value) == said + far


def test_engines_that_do_not_even_greet_cost_one_time_out_together():
    """The kernel takes connections for them, as for a stopped process; nobody ever reads."""
    deaf, targets = [], []
    for index in range(3):
        name = f"\0silent-{os.getpid()}-{secrets.token_hex(4)}"
        deaf.append(socket.socket(socket.AF_UNIX))
        deaf[-1].bind(name)
        deaf[-1].listen(4)
        address = EngineAddress(name, 0, secrets.token_hex(8), "", this_identity(), "base", index)
        targets.append(Target(address, None, 1.0).as_plain())
    started = time.monotonic()
    said = (
        r"^weight sync of agent_1 \(actor\.1\): engine \d for base cannot be reached: it has not answered for 1 s, before any"
    )
    with pytest.raises(RolloutError, match=said):
        send_live(Actor(), "agent_1", "agent_1@1", "float32", targets)
    assert time.monotonic() - started < 2.5
    for one in deaf:
        one.close()


def test_stopped_children_end_together():
    children = []
    for _ in range(3):
        settings = {"backend": "transformers", "llm": {"model": "nowhere", "dtype": "float32", "device": "cpu"}}
        children.append(EngineProcess(settings, dict(os.environ)))
        os.kill(children[-1].process.pid, signal.SIGSTOP)
    started = time.monotonic()
    for child in children:
        child.ask_to_end()
    for child in children:
        child.shutdown()
    assert time.monotonic() - started < END_S + 1
    assert {child.process.returncode for child in children} == {-signal.SIGKILL}


def test_a_policy_sent_by_one_engine_is_named_without_a_role():
    sender = HostSender(FallsSilent("the engine for base", 0, 0.1), "nowhere")
    with pytest.raises(RolloutError, match=r"^weight sync of agent_0: the engine for base has not answered .* head\.weight$"):
        sender.send(PolicyWeights("agent_0", "agent_0@1", "nowhere", TENSORS.items))
    sender.close()
