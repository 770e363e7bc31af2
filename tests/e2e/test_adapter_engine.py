"""A real vLLM engine that holds its base once and adapters beside it, against the same models in transformers."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from engines import policy_of, start_engine
from marlhf_runs import rows
from test_lora import ADAPTER_BYTES, live, madpo
from test_weight_sync import ROWS, largest_gap, trainer_logprobs
from tiny import save_tiny_model, tiny_lm

from comlrl_ds.config.errors import ConfigError
from comlrl_ds.config.lora import LoraSettings
from comlrl_ds.engines.lora import add_lora, save_adapter
from comlrl_ds.rollout.adapters import adapter_on_disk
from comlrl_ds.rollout.base import PolicyWeights, Request, RolloutError, Sampling
from comlrl_ds.rollout.engine_settings import AdapterRoom

ENDINGS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ROOM = AdapterRoom(6, ENDINGS, 3)


def adapted(base, folder, seed: int, **settings):
    """(a model with an adapter of its own numbers, the same on disk)"""
    lm = tiny_lm(3)
    add_lora(lm, LoraSettings(**settings), source=str(base), seed=seed, dropout=False)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in lm.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.randn(p.shape, generator=generator) / 10)
    state = {n.replace(".default", ""): p.detach() for n, p in lm.named_parameters() if "lora_" in n}
    save_adapter(lm.lora_config, state, folder)
    return lm, str(folder)


def policy(base, name: str, version: int, folder: str) -> PolicyWeights:
    return PolicyWeights(name, f"{name}@{version}", str(base), partial(adapter_on_disk, folder), base=str(base))


def sampled(engine) -> list[tuple[int, ...]]:
    engine.submit([Request("agent_0", tuple(ROWS[0]), 6, k) for k in range(4)], Sampling(1.0, logprobs=True))
    done = {}
    while (part := engine.receive()) is not None:
        done.update(part)
    for completion in done.values():
        whole = engine.prompt_logprobs([[*ROWS[0], *completion.ids]])[0][len(ROWS[0]) - 1 :]
        assert completion.logprobs == pytest.approx(whole, abs=1e-3)  # the same adapter sampled
    return [done[k].ids for k in range(4)]


@pytest.fixture(scope="module")
def synced(tmp_path_factory):
    """What the engine says after each of several syncs, and what transformers says of the same weights."""
    folder = tmp_path_factory.mktemp("adapters")
    base = save_tiny_model(folder / "base", 3)
    engine = start_engine(base, "float32", adapters=ROOM)
    engine.wait_ready()
    kinds = {
        ("agent_0", 1): {"r": 4, "lora_alpha": 16},
        ("agent_1", 1): {"r": 6, "rank_pattern": {"q_proj": 2}, "use_rslora": True},
        ("agent_0", 2): {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "down_proj"]},
        ("agent_1", 2): {"r": 4},
    }
    gaps, ids, samples, bytes_sent = [], [], [], []
    try:
        unchanged = engine.prompt_logprobs(ROWS)
        gaps.append(largest_gap(unchanged, trainer_logprobs(tiny_lm(3), ROWS)))
        for seed, ((name, version), settings) in enumerate(kinds.items()):
            lm, place = adapted(base, folder / f"adapter-{seed}", seed, **settings)
            report = engine.sync_weights(policy(base, name, version, place))
            got = engine.prompt_logprobs(ROWS)
            gaps.append(largest_gap(got, trainer_logprobs(lm, ROWS)))
            assert got != unchanged
            ids.append(engine.calls.call("adapters"))
            samples.append(sampled(engine))
            layers = sum("lora_A" in n for n, _ in lm.named_parameters())
            bytes_sent.append((report.bytes, 4 * (layers + sum(p.numel() for n, p in lm.named_parameters() if "lora_" in n))))
        engine.takes_adapters = True
        assert engine.sync_weights(PolicyWeights("agent_1", str(base), str(base))).bytes == 0
        assert engine.prompt_logprobs(ROWS) == unchanged
        with pytest.raises(RolloutError, match=r"whole weights.*rollout\.lora: merge"):
            engine.sync_weights(policy_of(tiny_lm(4), "agent_0", 9, base))
    finally:
        engine.shutdown()
    return gaps, ids, samples, bytes_sent


def test_adapters_count_as_in_transformers(synced):
    """Other ranks, scalings and layers than the adapter before."""
    gaps, *_ = synced
    assert len(gaps) == 5 and max(gaps) < 1e-3


def test_every_version_has_an_id_of_its_own_and_the_oldest_makes_room(synced):
    """CASES 17."""
    _, ids, *_ = synced
    assert ids[2] == {"agent_0@1": 1, "agent_1@1": 2, "agent_0@2": 3}
    assert ids[3] == {"agent_1@1": 2, "agent_0@2": 3, "agent_1@2": 4}


def test_each_adapter_samples_for_itself_and_is_all_that_is_sent(synced):
    *_, samples, sent = synced
    assert len({tuple(s) for s in samples}) == len(samples)
    assert all(bytes_sent == expected for bytes_sent, expected in sent)


def test_rounds_sample_with_adapters(tmp_path, tiny_model):
    """History: the start policies are the base alone, later ones adapters of their own beside the agents'."""
    args = {"num_iterations": 2, "comparator_policy": "history", "comparator_num_candidates": 4}
    rollout = {"lora": "adapter", "engines": 1, "max_model_len": 128, "kv_cache_bytes": 64 << 20}
    with madpo(tmp_path / "run", tiny_model, rounds=True, args=args, rollout=rollout) as t:
        t.train()
        assert len(t.session.pool().engines[0].calls.call("adapters")) > 1
        said = [t.session.pool().prompt_logprobs(p, ROWS) for p in t.session.policies().values()]
        trained = [live(t, i, ROWS) for i in range(2)]
    assert max(largest_gap(a, b) for a, b in zip(said, trained)) < 1e-3
    assert rows(tmp_path / "run", "rollout/logprob_gap")[-1]["rollout/logprob_gap"] < 1e-4
    sent = {row["rollout/sync_bytes"] for row in rows(tmp_path / "run", "rollout/sync_bytes")}
    assert sent == {0, ADAPTER_BYTES}


def test_what_holds_no_adapters_is_said_at_once(tmp_path, tiny_model):
    for more, why in [
        ({"rollout": {"backend": "transformers", "lora": "adapter"}}, "only vLLM engines"),
        ({"lora": [{"r": 4}, None], "rollout": {"lora": "adapter"}}, "agent 1 has no lora"),
        ({"lora": {"r": 1024}, "rollout": {"lora": "adapter"}}, "rank 1024"),
    ]:
        with pytest.raises(ConfigError, match=rf"rollout\.lora: 'adapter' is impossible: .*{why}"):
            madpo(tmp_path / "run", tiny_model, **more)
