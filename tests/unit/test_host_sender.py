"""Weights to an engine in another process: every tensor, what changed, what is refused, and what a cache must forget."""

from __future__ import annotations

import json
import math
import mmap
import os

import pytest
import tiny_models
import torch
from tiny_models import weights_on_disk
from transformers import LlamaForCausalLM

from comlrl_ds.rollout.base import PolicyWeights, RolloutError
from comlrl_ds.rollout.engine_server import VLLMServer as Server
from comlrl_ds.rollout.host_sender import HostSender


class Receiver:
    """An engine's half as far as the wire goes: maps the file at the path that it is told, and copies the tensors out."""

    def __init__(self, version=None):
        self.calls, self.tensors, self.paths, self.version = [], {}, set(), version

    def start_weight_update(self):
        self.calls.append("start")
        self.tensors = {}

    def update_weights(self, update_info):
        self.calls.append("update")
        json.dumps(update_info)  # only plain types can travel
        self.paths.add(update_info["path"])
        with open(update_info["path"], "r+b") as file, mmap.mmap(file.fileno(), 0) as shared:
            data = bytes(shared)
        for name, dtype, shape, offset in update_info["tensors"]:
            count = math.prod(shape)
            flat = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype), count=count, offset=offset)
            self.tensors[name] = flat.reshape(shape).clone()

    def finish_weight_update(self, version):
        self.calls.append("finish")
        return {"version": self.version or version, "probe": [[-1.0]]}


def policy_of(tensors, key="agent_0@1"):
    return PolicyWeights("agent_0", key, "nowhere", lambda: iter(list(tensors.items())))


@pytest.fixture
def senders():
    made = []

    def make(receiver, chunk_bytes=1 << 20, source="nowhere"):
        made.append(HostSender(receiver, source, chunk_bytes))
        return made[-1]

    yield make
    for sender in made:
        sender.close()


def random_tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(7, 5, generator=generator),
        "norm.weight": torch.randn(5, generator=generator).bfloat16(),
        "transposed": torch.randn(4, 6, generator=generator).T,
        "half": torch.randn(3, 3, generator=generator).half(),
        "scalar": torch.tensor(2.5),
        "ids": torch.randint(0, 99, (9,), generator=generator),
        "bytes": torch.randint(0, 255, (13,), generator=generator).to(torch.uint8),
        "double": torch.randn(2, 2, generator=generator, dtype=torch.float64),
    }


@pytest.mark.parametrize("chunk_bytes", [1, 100, 1 << 20], ids=["one-tensor", "several", "everything"])
def test_an_engine_gets_every_tensor_with_its_values(senders, chunk_bytes):
    receiver, tensors = Receiver(), random_tensors()
    report, probe = senders(receiver, chunk_bytes).send(policy_of(tensors))
    assert list(receiver.tensors) == list(tensors)
    for name, tensor in tensors.items():
        assert receiver.tensors[name].dtype == tensor.dtype
        assert torch.equal(receiver.tensors[name], tensor)
    updates = receiver.calls.count("update")
    assert receiver.calls == ["start", *["update"] * updates, "finish"]
    if chunk_bytes != 100:
        assert updates == (8 if chunk_bytes == 1 else 1)
    assert probe == [[-1.0]]
    assert report.bytes == sum(t.numel() * t.element_size() for t in tensors.values())


def test_a_whole_model_arrives(senders, model_folders):
    receiver = Receiver()
    report, _ = senders(receiver, 10_000).send(weights_on_disk("agent_0", model_folders[0]))
    model = LlamaForCausalLM.from_pretrained(model_folders[0])
    expected = dict(model.named_parameters())
    assert "lm_head.weight" in expected  # untied: a head that stays behind would answer with the old weights
    assert receiver.tensors.keys() == expected.keys()
    assert all(torch.equal(receiver.tensors[name], p) for name, p in expected.items())
    assert report.bytes == sum(p.numel() * 4 for p in expected.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_sync_is_compared_with_the_weights_that_the_engine_started_with(senders, model_folders, dtype):
    # The engine was started from a folder, so weights of that folder change nothing, whatever type they travel in.
    live = LlamaForCausalLM.from_pretrained(model_folders[0]).to(dtype)
    for folder, changed in ((model_folders[0], {"lm_head.weight"}), (model_folders[1], None)):
        sender = senders(Receiver(), source=folder)
        sender.send(PolicyWeights("agent_0", "agent_0@1", model_folders[0], live.named_parameters))
        names = [name for name, _ in live.named_parameters()]
        if changed is None:
            # Norms of fresh models are all ones: the same in both folders.
            assert sender.changed_share() == sum("norm" not in name for name in names) / len(names)
        else:
            assert sender.changed_share() == 0.0
            one = senders(Receiver(), source=folder)
            tensors = {n: p.detach() + (0.5 if n in changed else 0.0) for n, p in live.named_parameters()}
            one.send(policy_of(tensors))
            assert one.changed_share() == 1 / len(names)


def test_a_tied_head_travels_once(senders, tmp_path):
    folder = tiny_models.save(tmp_path / "tied", tiny_models.llama(0, layers=1, tied=True))
    receiver = Receiver()
    senders(receiver).send(weights_on_disk("agent_0", folder))
    assert "lm_head.weight" not in receiver.tensors
    assert receiver.tensors.keys() == dict(LlamaForCausalLM.from_pretrained(folder).named_parameters()).keys()


def test_a_second_sync_sends_everything_again_and_knows_what_changed(senders):
    receiver, tensors = Receiver(), random_tensors()
    sender = senders(receiver)
    sender.send(policy_of(tensors))
    tensors["embed.weight"] = tensors["embed.weight"] + 1e-6
    tensors["ids"] = tensors["ids"] + 1
    sender.send(policy_of(tensors, "agent_0@2"))
    assert sender.changed_share() == 2 / 8
    assert all(torch.equal(receiver.tensors[name], tensor) for name, tensor in tensors.items())
    sender.send(policy_of(tensors, "agent_0@3"))
    assert sender.changed_share() == 0.0
    # Another policy of the same shapes may take the engine over.
    sender.send(policy_of(random_tensors(1), "agent_1@1"))
    assert sender.changed_share() == 7 / 8  # the scalar is the same
    assert torch.equal(receiver.tensors["embed.weight"], random_tensors(1)["embed.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("norm.weight"), r"norm\.weight was \(5,\) in the sync before, now missing"),
        (lambda t: t.update(new=torch.ones(2)), r"new was absent in the sync before, now \(2,\)"),
        (lambda t: t.update(half=torch.ones(9).half()), r"half was \(3, 3\) in the sync before, now \(9,\)"),
        (lambda t: t.update(half=torch.ones(0)), "half is empty; was it gathered"),
        (lambda t: t.pop("scalar"), r"scalar was .*now missing"),
    ],
)
def test_a_second_sync_of_other_names_or_shapes_is_refused(senders, change, message):
    receiver, tensors = Receiver(), random_tensors()
    sender = senders(receiver)
    sender.send(policy_of(tensors))
    change(tensors)
    with pytest.raises(RolloutError, match=f"weight sync of agent_0: {message}"):
        sender.send(policy_of(tensors, "agent_0@2"))
    # The engine was not told that the new version is complete.
    assert receiver.calls.count("finish") == 1


def test_a_first_sync_must_hold_something(senders):
    with pytest.raises(RolloutError, match="is empty; was it gathered"):
        senders(Receiver()).send(policy_of({"a": torch.ones(3), "b": torch.empty(0)}))
    with pytest.raises(RolloutError, match="no tensors"):
        senders(Receiver()).send(policy_of({}))


def test_an_engine_that_reports_another_version_is_refused(senders):
    with pytest.raises(RolloutError, match="sent version 'agent_0@1', the engine reports 'agent_0@0'"):
        senders(Receiver(version="agent_0@0")).send(policy_of(random_tensors()))


def test_a_sender_frees_its_memory_file(senders):
    receiver = Receiver()
    sender = senders(receiver)
    sender.send(policy_of(random_tensors()))
    (path,) = receiver.paths
    assert os.path.exists(path)
    sender.close()
    sender.close()
    assert not os.path.exists(path)


class CachingLLM:
    """As much of an LLM as answers from a prefix cache that only `reset_prefix_cache` clears."""

    def __init__(self):
        self.weights, self.cache = "old", {}

    def answer(self, row):
        return self.cache.setdefault(tuple(row), f"{self.weights}: {row}")

    def finish_weight_update(self, version):
        self.weights = version

    def get_weight_version(self):
        return self.weights

    def reset_prefix_cache(self):
        self.cache.clear()


def test_cached_prompts_do_not_outlive_the_weights_that_computed_them():
    server = Server.__new__(Server)
    server.llm, server.probe_rows = CachingLLM(), [[1, 2]]
    server.logprobs = lambda say, rows: [server.llm.answer(row) for row in rows]
    assert server.llm.answer([1, 2]) == "old: [1, 2]"
    assert server.llm.answer([3]) == "old: [3]"
    reply = server.finish_weight_update(print, "agent_0@1")
    # Both the probe that verifies the sync and every later prompt are computed with the new weights.
    assert reply == {"version": "agent_0@1", "probe": ["agent_0@1: [1, 2]"]}
    assert server.llm.answer([3]) == "agent_0@1: [3]"
