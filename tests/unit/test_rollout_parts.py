"""The pieces of rollouts: child environment, scheduling, weight transfer, the seeded engine, the pool."""

from __future__ import annotations

import itertools
import json
import math
import mmap
import os
from collections import Counter

import pytest
import tiny_models
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import some_ids, token_scores, weights_on_disk
from transformers import LlamaForCausalLM

from comlrl_ds.config import RolloutConfig
from comlrl_ds.rollout.base import PolicyWeights, Request, RolloutError, Sampling
from comlrl_ds.rollout.disk import shape_of, tensors_on_disk
from comlrl_ds.rollout.environment import engine_environment
from comlrl_ds.rollout.host_sender import HostSender
from comlrl_ds.rollout.pool import RolloutPool
from comlrl_ds.rollout.schedule import schedule
from comlrl_ds.rollout.start import Engines, cores, engine_count, max_model_len, model_limits, threads_per_engine
from comlrl_ds.rollout.transformers_engine import SeededSampler, TransformersEngine
from comlrl_ds.rollout.vllm_server import Server

# --- the child's environment
LAUNCHER = {
    "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500", "CROSS_RANK": "0", "LOCAL_SIZE": "4", "TORCHELASTIC_RUN_ID": "x",
    "OMPI_COMM_WORLD_RANK": "3", "SLURM_PROCID": "3",
    "DS_ACCELERATOR": "cpu",
}  # fmt: skip
SECRETS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "WANDB_API_KEY", "GITHUB_TOKEN")
KEPT = {"HF_HOME": "/hub", "HF_TOKEN": "hub", "PATH": "/bin", "HOME": "/root", "HTTPS_PROXY": "p", "LD_LIBRARY_PATH": "/lib"}


def test_the_child_sees_neither_the_launcher_nor_secrets():
    parent = LAUNCHER | dict.fromkeys(SECRETS, "secret") | KEPT | {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "OMP_NUM_THREADS": "8"}
    before = dict(parent)
    child = engine_environment(parent, threads=1, devices=["2"])
    assert not (LAUNCHER.keys() | set(SECRETS)) & child.keys()
    assert "secret" not in child.values()
    assert KEPT.items() <= child.items()
    assert child["CUDA_VISIBLE_DEVICES"] == "2"
    assert child["OMP_NUM_THREADS"] == "1"
    assert parent == before


def test_devices_and_threads_of_the_child():
    assert engine_environment({}, threads=None, devices=["4", "GPU-uuid"])["CUDA_VISIBLE_DEVICES"] == "4,GPU-uuid"
    on_cpu = engine_environment({"CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "6"}, threads=None, devices=[])
    assert (on_cpu["CUDA_VISIBLE_DEVICES"], on_cpu["OMP_NUM_THREADS"]) == ("", "6")
    assert all(isinstance(value, str) for value in on_cpu.values())
    assert engine_environment({"VLLM_LOGGING_LEVEL": "INFO"}, threads=1, devices=[])["VLLM_LOGGING_LEVEL"] == "INFO"


# --- who samples what
@st.composite
def workloads(draw):
    engines = draw(st.integers(1, 4))
    keys = [f"key{k}" for k in range(draw(st.integers(1, 4)))]
    requests = draw(st.lists(st.sampled_from(keys), max_size=60))
    return (
        draw(st.lists(st.floats(1, 200), min_size=len(requests), max_size=len(requests))),
        requests,
        draw(st.lists(st.sampled_from([*keys, "other"]), min_size=engines, max_size=engines)),
        {key: sorted(draw(st.sets(st.integers(0, engines - 1), min_size=1))) for key in keys},
        draw(st.sampled_from([0.0, 1.0, 50.0, 400.0])),
    )


def engine_load(segments, costs, held, swap_cost):
    return sum(costs[k] for s in segments for k in s.indices) + swap_cost * sum(s.key != held for s in segments)


@given(workloads())
def test_a_schedule_gives_every_request_once_to_an_engine_that_can(work):
    _, keys, held, serves, _ = work
    plan = schedule(*work)
    assert len(plan) == len(held)
    assert sorted(k for segments in plan for s in segments for k in s.indices) == list(range(len(keys)))
    for engine, segments in enumerate(plan):
        assert len({s.key for s in segments}) == len(segments)
        for place, segment in enumerate(segments):
            assert segment.indices
            assert engine in serves[segment.key]
            assert all(keys[k] == segment.key for k in segment.indices)
            assert segment.indices == sorted(segment.indices)
            assert place == 0 or segment.key != held[engine]  # what an engine holds already comes first


@given(workloads())
def test_a_schedule_is_never_worse_than_one_engine(work):
    costs, keys, held, serves, swap_cost = work
    loads = [engine_load(segments, costs, h, swap_cost) for segments, h in zip(schedule(*work), held)]
    for engine, holds in enumerate(held):
        if all(engine in serves[key] for key in set(keys)):
            alone = sum(costs) + swap_cost * sum(key != holds for key in set(keys))
            assert max(loads) <= alone * (1 + 1e-9)


@pytest.mark.parametrize("engines", [2, 3, 4, 8])
def test_equal_work_is_spread_evenly(engines):
    count = 80
    plan = schedule([10.0] * count, ["a"] * count, ["a"] * engines, {"a": list(range(engines))}, 400.0)
    loads = [10.0 * sum(len(s.indices) for s in segments) for segments in plan]
    assert max(loads) <= 1.25 * sum(loads) / engines + 10.0


def test_weights_are_swapped_only_where_it_pays():
    two = {"a": [0, 1], "b": [0, 1]}
    # Each engine keeps what it holds.
    plan = schedule([10.0] * 6, list("ababab"), ["a", "b"], two, 400.0)
    assert [[(s.key, s.indices) for s in segments] for segments in plan] == [[("a", [0, 2, 4])], [("b", [1, 3, 5])]]
    # 60 tokens of work do not pay for a swap of 400; 6000 do.
    assert [len(s) for s in schedule([10.0] * 6, ["a"] * 6, ["a", "b"], two, 400.0)] == [1, 0]
    assert [len(s) for s in schedule([1000.0] * 6, ["a"] * 6, ["a", "b"], two, 400.0)] == [1, 1]


def test_a_key_that_no_engine_serves_is_refused():
    with pytest.raises(ValueError, match="no engine can serve the weights 'b'"):
        schedule([1.0], ["b"], ["a"], {"b": []}, 1.0)


# --- weights to an engine in another process
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


# --- models on disk
def test_shapes_of_folders(tmp_path, model_folders):
    assert shape_of(model_folders[0]) == shape_of(model_folders[1])
    wider = tiny_models.save(tmp_path / "wider", tiny_models.llama(0, vocab=80, layers=1))
    deeper = tiny_models.save(tmp_path / "deeper", tiny_models.llama(0, layers=2))
    low = tiny_models.save(tmp_path / "low", tiny_models.llama(0, layers=1).bfloat16())
    assert len({shape_of(f) for f in (model_folders[0], wider, deeper)}) == 3
    assert shape_of(low) == shape_of(model_folders[0])  # an engine converts what it is given
    assert shape_of("some/repository") == "some/repository"


def test_tensors_on_disk_come_in_a_fixed_order_whatever_the_files(tmp_path):
    lm = tiny_models.llama(0)
    lm.save_pretrained(tmp_path / "one")
    lm.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    one, many = dict(tensors_on_disk(str(tmp_path / "one"))), dict(tensors_on_disk(str(tmp_path / "many")))
    assert one.keys() == many.keys() == dict(lm.named_parameters()).keys()
    assert all(torch.equal(one[name], p) and torch.equal(many[name], p) for name, p in lm.named_parameters())
    assert [n for n, _ in tensors_on_disk(str(tmp_path / "many"))] == [n for n, _ in tensors_on_disk(str(tmp_path / "many"))]


# --- sizes
def test_engine_sizes(model_folders, tmp_path):
    folder = model_folders[0]
    assert model_limits(folder) == (256, tiny_models.VOCAB)
    assert max_model_len(RolloutConfig(), folder) == 256
    assert max_model_len(RolloutConfig(max_model_len=100), folder) == 100
    gpt2 = tiny_models.save(tmp_path / "gpt2", tiny_models.gpt2(positions=32))
    assert max_model_len(RolloutConfig(max_model_len=100), gpt2) == 32
    assert engine_count(RolloutConfig(engines=3), "cpu", 1) == 3
    assert engine_count(RolloutConfig(engines=1), "cpu", 2) == 2  # every architecture needs one
    assert engine_count(RolloutConfig(backend="transformers"), "cpu", 2) == 2
    assert engine_count(RolloutConfig(), "cuda", 1) == 1
    assert engine_count(RolloutConfig(), "cpu", 1) == min(8, cores())
    assert engine_count(RolloutConfig(threads=10_000), "cpu", 1) == 1
    assert threads_per_engine(RolloutConfig(threads=3), 2) == 3
    assert threads_per_engine(RolloutConfig(), 1) == cores()
    assert threads_per_engine(RolloutConfig(), 10_000) == 1


def test_engines_of_a_run_start_with_the_weights_that_are_needed(model_folders, tmp_path):
    other = tiny_models.save(tmp_path / "gpt2", tiny_models.gpt2(layers=1))
    config = RolloutConfig(backend="transformers", engines=3)
    engines = Engines(config, [*model_folders, other], device="cpu", dtype="float32")
    pool = engines.pool()
    assert [e.held for e in pool.engines] == [model_folders[0], other, model_folders[1]]
    assert engines.pool() is pool
    assert engines.usage() == []
    engines.shutdown()


# --- the engine of transformers
@pytest.fixture(scope="module")
def engine(model_folders):
    return TransformersEngine(model_folders[0], dtype=torch.float32, batch_size=64)


PLAIN = Sampling(1.0)


def run(engine, requests, sampling=PLAIN):
    engine.submit(requests, sampling)
    done = {}
    while (part := engine.receive()) is not None:
        done.update(part)
    assert sorted(done) == list(range(len(requests)))
    return [done[k] for k in range(len(requests))]


def request(seed, prompt=None, tokens=8, stops=()):
    return Request("agent_0", tuple(prompt or some_ids(seed, 2 + seed % 7)), tokens, seed, stops)


REQUESTS = [request(seed, tokens=3 + seed % 6, stops=(2, 5)) for seed in range(16)]


def test_a_completion_depends_on_its_seed_alone(engine, model_folders):
    together = run(engine, REQUESTS)
    assert [run(engine, [r])[0] for r in REQUESTS] == together
    assert run(engine, REQUESTS[::-1]) == together[::-1]
    small = TransformersEngine(model_folders[0], dtype=torch.float32, batch_size=3)
    assert run(small, REQUESTS) == together
    assert run(engine, [request(0, [7, 8], 30), request(1, [7, 8], 30)])[0] != run(engine, [request(1, [7, 8], 30)])[0]
    assert all(c.version == model_folders[0] for c in together)


@torch.no_grad()
def by_hand(folder, r, temperature=1.0):
    """The reference: the model's own forward over an unpadded row, and a seeded draw for each token in turn."""
    lm = LlamaForCausalLM.from_pretrained(folder).eval()
    row, generator = list(r.prompt), torch.Generator().manual_seed(r.seed)
    for _ in range(r.max_new_tokens):
        logits = lm(input_ids=torch.tensor([row])).logits[0, -1]
        if temperature:
            logits = logits / temperature - torch.log(-torch.log(torch.rand(len(logits), generator=generator)))
        row.append(int(logits.argmax()))
        if row[-1] in r.stop_ids:
            break
    return tuple(row[len(r.prompt) :])


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_batch_equals_sampling_one_token_after_the_other(engine, model_folders, temperature):
    requests = [request(seed, tokens=6, stops=(2, 30)) for seed in range(5)]
    for r, got in zip(requests, run(engine, requests, Sampling(temperature))):
        assert got.ids == by_hand(model_folders[0], r, temperature)


def test_a_stop_token_ends_a_completion_and_belongs_to_it(engine, model_folders):
    requests = [request(seed, tokens=12, stops=tuple(range(3, 15))) for seed in range(12)]
    completions = run(engine, requests)
    for r, got in zip(requests, completions):
        assert got.ids == by_hand(model_folders[0], r)
        assert got.finish_reason == ("stop" if got.ids[-1] in r.stop_ids else "length")
    assert {c.finish_reason for c in completions} == {"stop", "length"}


def test_only_the_stop_ids_end_a_completion(engine, model_folders):
    # What ends a completion is said in the request, for every tokenizer alike; the model's own EOS is 2.
    requests = [request(seed, tokens=12) for seed in range(12)]
    expected = [by_hand(model_folders[0], r) for r in requests]
    assert any(2 in ids[:-1] for ids in expected)
    assert [c.ids for c in run(engine, requests)] == expected


def test_a_stop_token_of_another_request_does_not_end_this_one(engine, model_folders):
    first = request(0, [9, 10], 12, stops=(2,))
    expected = by_hand(model_folders[0], first)
    assert len(expected) > 4
    other = request(1, [9, 10], 12, stops=(expected[3],))
    assert run(engine, [first, other])[0].ids == expected


def test_no_stop_token_comes_before_min_new_tokens(engine):
    stops = tuple(range(3, 40))
    requests = [request(seed, tokens=3 + seed % 8, stops=stops) for seed in range(24)]
    for r, got in zip(requests, run(engine, requests, Sampling(1.0, min_new_tokens=5))):
        least = min(5, r.max_new_tokens)
        assert len(got.ids) >= least
        assert not set(got.ids[:least]) & set(stops)
        assert len(got.ids) <= r.max_new_tokens
    assert min(len(c.ids) for c in run(engine, requests, Sampling(1.0))) == 1


def test_one_submission_at_a_time(engine):
    engine.submit([request(0)], Sampling())
    with pytest.raises(RolloutError, match="still being generated"):
        engine.submit([request(1)], Sampling())
    assert engine.receive() is not None
    assert engine.receive() is None


LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 1.5, -3.0])


def draws(count, sampling, logits=LOGITS, first_seed=0):
    """First tokens of `count` seeds."""
    requests = [Request("a", (1,), 4, first_seed + seed) for seed in range(count)]
    sampler = SeededSampler(requests, sampling, 1, [0] * count)
    scores = sampler(torch.ones(count, 1, dtype=torch.long), logits.repeat(count, 1))
    return scores.argmax(-1).tolist()


# χ² at a probability of 0.001, by degrees of freedom.
CRITICAL = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32}


@pytest.mark.parametrize(
    ("sampling", "support"),
    [
        (Sampling(1.0), range(8)),
        (Sampling(0.6), range(8)),
        (Sampling(1.7), range(8)),
        (Sampling(1.0, top_k=3), [0, 6, 1]),
        # Probabilities 0.405, 0.245, 0.149, 0.090, …: the token that crosses top_p stays, and 0.799 is short of 0.8.
        (Sampling(1.0, top_p=0.6), [0, 6]),
        (Sampling(1.0, top_p=0.8), [0, 6, 1, 2]),
        (Sampling(1.0, top_p=0.8, top_k=2), [0, 6]),
        (Sampling(0.5, top_p=0.6), [0]),
    ],
    ids=str,
)
def test_draws_follow_the_tempered_distribution_on_its_support(sampling, support):
    count = 4000
    counts = Counter(draws(count, sampling))
    kept = torch.full_like(LOGITS, -torch.inf)
    kept[list(support)] = LOGITS[list(support)] / sampling.temperature
    expected = {k: count * p for k, p in enumerate(kept.double().softmax(-1).tolist()) if p > 0}
    assert counts.keys() <= set(support)
    rare = [k for k, e in expected.items() if e < 5]  # χ² wants at least 5 expected: the rest is one bin
    bins = [(counts[k], e) for k, e in expected.items() if e >= 5]
    if rare:
        bins.append((sum(counts[k] for k in rare), sum(expected[k] for k in rare)))
    statistic = sum((c - e) ** 2 / e for c, e in bins)
    assert statistic < CRITICAL.get(len(bins) - 1, 1e-9)


def test_successive_draws_of_a_row_are_independent_and_greedy_needs_no_seed():
    requests = [Request("a", (1,), 4, seed) for seed in range(3000)]
    sampler = SeededSampler(requests, Sampling(1.0), 1, [0] * 3000)
    ids = torch.ones(3000, 1, dtype=torch.long)
    first, second = (sampler(ids, LOGITS.repeat(3000, 1)).argmax(-1) for _ in range(2))
    p = LOGITS.double().softmax(-1)
    both = p.square().sum().item()
    same = (first == second).double().mean().item()
    assert abs(same - both) < 4 * math.sqrt(both * (1 - both) / 3000)
    assert set(draws(20, Sampling(0.0))) == {0}


def test_ties_at_the_edge_of_top_k_are_all_kept():
    tied = torch.tensor([1.0, 1.0, 1.0, 0.0])
    assert {2, 1, 0} >= set(draws(200, Sampling(1.0, top_k=3), tied)) > {0}


def test_the_engines_log_probs_are_the_models(engine, model_folders):
    lm = LlamaForCausalLM.from_pretrained(model_folders[0]).eval()
    rows = [some_ids(1, 9), some_ids(2, 2), some_ids(3, 17)]
    with torch.no_grad():
        for row, got in zip(rows, engine.prompt_logprobs(rows)):
            assert got == pytest.approx(token_scores(lm, row[:1], row[1:]).tolist(), abs=1e-4)


# --- giving the engine other weights
def test_a_synced_engine_equals_one_that_was_loaded_from_the_same_weights(model_folders):
    first, second = (TransformersEngine(f, dtype=torch.float32) for f in model_folders)
    rows = [some_ids(1, 9), some_ids(2, 5)]
    assert first.prompt_logprobs(rows) != second.prompt_logprobs(rows)
    report = first.sync_weights(weights_on_disk("agent_1", model_folders[1]))
    assert first.prompt_logprobs(rows) == second.prompt_logprobs(rows)
    assert run(first, REQUESTS) == run(second, REQUESTS)
    assert first.held == model_folders[1]
    assert report.bytes == sum(p.numel() * 4 for p in LlamaForCausalLM.from_pretrained(model_folders[1]).parameters())
    # And weights that a trainer has in memory, under a version of their own.
    live = LlamaForCausalLM.from_pretrained(model_folders[0])
    first.sync_weights(PolicyWeights("agent_0", "agent_0@3", model_folders[0], live.named_parameters))
    assert first.held == "agent_0@3"
    assert first.prompt_logprobs(rows) == TransformersEngine(model_folders[0], dtype=torch.float32).prompt_logprobs(rows)


def test_only_the_head_changing_changes_the_answers(model_folders):
    engine = TransformersEngine(model_folders[0], dtype=torch.float32)
    live = LlamaForCausalLM.from_pretrained(model_folders[0])
    before = run(engine, [request(1, [7, 8])], Sampling(0.0))
    live.lm_head.weight.data.neg_()
    engine.sync_weights(PolicyWeights("agent_0", "agent_0@1", model_folders[0], live.named_parameters))
    assert run(engine, [request(1, [7, 8])], Sampling(0.0)) != before


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda t: t.update({"model.extra": torch.ones(2)}), "the engine has no model.extra"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), r"model.norm.weight has shape \(3,\), not \(64,\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused(model_folders, change, part):
    engine = TransformersEngine(model_folders[0], dtype=torch.float32)
    tensors = dict(tensors_on_disk(model_folders[1]))
    change(tensors)
    with pytest.raises(RolloutError, match=f"weight sync of agent_1: {part}"):
        engine.sync_weights(PolicyWeights("agent_1", "agent_1@1", model_folders[1], lambda: tensors.items()))
    assert engine.held == model_folders[0]


# --- several engines
def pool_of(folders, on_sync=None):
    return RolloutPool([TransformersEngine(f, dtype=torch.float32, batch_size=8) for f in folders], shape_of, 60, on_sync)


def generate(pool, requests, policies, sampling=PLAIN):
    got = list(pool.generate(requests, {p.name: p for p in policies}, sampling))
    assert sorted(k for k, _ in got) == list(range(len(requests)))
    return [completion for _, completion in sorted(got, key=lambda kc: kc[0])]


def test_a_pool_gives_the_same_samples_with_any_number_of_engines(model_folders):
    policies = [weights_on_disk(f"agent_{k}", f) for k, f in enumerate(model_folders)]
    requests = [
        Request(f"agent_{agent}", tuple(some_ids(item, 5)), 6, 1000 * item + 10 * agent + candidate, (2,))
        for item, agent, candidate in itertools.product(range(4), range(2), range(4))
    ]
    syncs = []
    two = pool_of(model_folders, lambda policy, engine, report: syncs.append((policy.key, engine)))
    reference = generate(two, requests, policies)
    assert syncs == []  # each engine holds one of the two policies already
    assert {c.version for c in reference} == set(model_folders)
    assert two.generated_tokens == sum(len(c.ids) for c in reference)
    one = pool_of(model_folders[:1], lambda policy, engine, report: syncs.append((policy.key, engine)))
    assert generate(one, requests, policies) == reference
    assert syncs == [(model_folders[1], 0)]
    # The engine now holds the second policy; the first comes back, exactly.
    assert generate(one, requests, policies) == reference
    assert list(two.generate([], {}, Sampling())) == []


def test_policies_that_share_weights_share_an_engine_and_a_pass(model_folders):
    shared = [weights_on_disk(f"agent_{k}", model_folders[0]) for k in range(2)]
    syncs = []
    pool = pool_of(model_folders[:1], lambda *args: syncs.append(args))
    requests = [Request(f"agent_{k % 2}", (7, 8), 4, k) for k in range(6)]
    completions = generate(pool, requests, shared)
    assert syncs == []
    assert {c.version for c in completions} == {model_folders[0]}


def test_a_trained_policy_is_synced_before_it_samples(model_folders):
    live = LlamaForCausalLM.from_pretrained(model_folders[1])
    trained = PolicyWeights("agent_0", "agent_0@5", model_folders[0], live.named_parameters)
    pool = pool_of(model_folders)
    reference = generate(pool_of(model_folders[1:]), REQUESTS, [weights_on_disk("agent_0", model_folders[1])])
    got = generate(pool, REQUESTS, [trained])
    assert [c.ids for c in got] == [c.ids for c in reference]
    assert {c.version for c in got} == {"agent_0@5"}
    assert "agent_0@5" in [e.held for e in pool.engines]


def test_an_engine_takes_weights_of_its_own_architecture_only(model_folders, tmp_path):
    other = tiny_models.save(tmp_path / "gpt2", tiny_models.gpt2(layers=1))
    pool = pool_of([*model_folders, other])
    assert pool.engines_for(weights_on_disk("agent_0", model_folders[1])) == [0, 1]
    assert pool.engines_for(weights_on_disk("agent_0", other)) == [2]
    foreign = tiny_models.save(tmp_path / "deep", tiny_models.llama(0, layers=2))
    with pytest.raises(RolloutError, match="no engine has the architecture of agent_9"):
        generate(pool, [Request("agent_9", (7,), 2, 0)], [weights_on_disk("agent_9", foreign)])


def test_a_pools_log_probs_come_from_an_engine_with_the_policys_weights(model_folders):
    syncs = []
    pool = pool_of(model_folders, lambda policy, engine, report: syncs.append((policy.name, engine)))
    rows = [some_ids(1, 6)]
    for k, folder in enumerate(model_folders):
        lm = LlamaForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            expected = token_scores(lm, rows[0][:1], rows[0][1:]).tolist()
        assert pool.prompt_logprobs(weights_on_disk(f"agent_{k}", folder), rows)[0] == pytest.approx(expected, abs=1e-4)
    assert syncs == []
    live = LlamaForCausalLM.from_pretrained(model_folders[1])
    pool.prompt_logprobs(PolicyWeights("agent_0", "agent_0@1", model_folders[0], live.named_parameters), rows)
    assert syncs == [("agent_0", 0)]
    pool.shutdown()
    pool.shutdown()
