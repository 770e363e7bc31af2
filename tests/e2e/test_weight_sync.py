"""A synced engine is the same as a fresh engine that loads the same weights from disk, bit for bit.

Log-prob gaps between trainer and engine cannot show this in bf16: a correct sync can read worse than a stale engine.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from engines import fresh_logprobs, policy_of, start_engine
from tiny import save_tiny_model, tiny_lm

from comlrl_ds.config.lora import LoraSettings
from comlrl_ds.engines.lora import add_lora, save_adapter
from comlrl_ds.rollout.adapters import adapter_on_disk
from comlrl_ds.rollout.agreement import Reference, check_agreement
from comlrl_ds.rollout.base import PolicyWeights, Request, RolloutError, Sampling

ROWS = [[(3 + 7 * k + 13 * r) % 320 for k in range(20 + 5 * r)] for r in range(4)]
CASES = [("bfloat16", True), ("bfloat16", False), ("float32", True), ("float32", False)]
CHANGES = {"small": 2e-5, "large": 5e-2}


def changed(lm, size: float, seed: int):
    """A copy with every weight moved by up to `size`, relative to its scale, the head and the norms included."""
    moved = copy.deepcopy(lm)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in moved.parameters():
            noise = torch.rand(p.shape, generator=generator) * 2 - 1
            p.copy_((p.float() * (1 + size * noise)).to(p.dtype) + (size * noise).to(p.dtype))
    return moved


def with_adapter(lm, base: Path, folder: Path):
    """(a policy that is an adapter of r = 4 on the model in `base`, that model with the adapter in it by hand in fp32)"""
    wrapped = copy.deepcopy(lm)
    add_lora(wrapped, LoraSettings(r=4, lora_alpha=16), source=str(base), seed=1, dropout=False)
    state = {n.replace(".default", ""): p.detach() for n, p in wrapped.named_parameters() if "lora_" in n}
    generator = torch.Generator().manual_seed(2)
    state = {n: t if "lora_A" in n else (torch.randn(t.shape, generator=generator) / 20).to(t.dtype) for n, t in state.items()}
    save_adapter(wrapped.lora_config, state, folder)
    moved = copy.deepcopy(lm)
    with torch.no_grad():
        for name, p in moved.named_parameters():
            layer = name.removesuffix(".weight")
            if f"{layer}.lora_A.weight" in state:
                a, b = (state[f"{layer}.lora_{part}.weight"].float() for part in "AB")
                p.copy_((p.float() + 4 * (b @ a)).to(p.dtype))
    policy = PolicyWeights("agent_0", str(folder), str(base), partial(adapter_on_disk, str(folder)), base=str(base))
    return policy, moved


def trainer_logprobs(lm, rows):
    with torch.no_grad():
        out = [lm(torch.tensor([r])).logits[0].float().log_softmax(-1) for r in rows]
    return [[float(z[k, r[k + 1]]) for k in range(len(r) - 1)] for z, r in zip(out, rows)]


def largest_gap(a, b) -> float:
    return max(abs(x - y) for p, q in zip(a, b) for x, y in zip(p, q))


@pytest.fixture(scope="module")
def synced(tmp_path_factory):
    """For every case: log-probs at the base, after each change, and back at the base; with the models on disk."""
    folder = tmp_path_factory.mktemp("sync")
    results, on_disk = {}, []
    for start in range(0, len(CASES), 2):  # two engines at a time: there are two cores
        pair = CASES[start : start + 2]
        engines = {}
        for dtype, tied in pair:
            base = folder / f"{dtype}-{tied}"
            save_tiny_model(base, 3, tied=tied, dtype=dtype)
            engines[dtype, tied] = start_engine(base, dtype), base
        for (dtype, tied), (engine, base) in engines.items():
            lm = tiny_lm(3, tied=tied).to(getattr(torch, dtype))
            engine.wait_ready()
            got = {"base": engine.prompt_logprobs(ROWS)}
            models = {"base": lm} | {name: changed(lm, size, 5) for name, size in CHANGES.items()}
            for version, name in enumerate([*CHANGES, "base"], 1):
                engine.sync_weights(policy_of(models[name], "agent_0", version, base))
                got["back" if name == "base" else name] = engine.prompt_logprobs(ROWS)
                assert engine.prompt_logprobs(ROWS) == got["back" if name == "base" else name]
            policy, models["adapter"] = with_adapter(lm, base, folder / f"{dtype}-{tied}-lora")
            report = engine.sync_weights(policy)
            assert report.bytes == sum(t.nbytes for _, t in policy.tensors()) < 0.3 * sum(p.nbytes for p in lm.parameters())
            got["adapter"] = engine.prompt_logprobs(ROWS)
            engine.sync_weights(policy_of(lm, "agent_0", 7, base))  # whole weights after an adapter
            got["whole again"] = engine.prompt_logprobs(ROWS)
            if not tied:
                head_only = copy.deepcopy(lm)
                with torch.no_grad():
                    head_only.lm_head.weight.copy_(lm.lm_head.weight.flip(0))
                before = greedy(engine)
                engine.sync_weights(policy_of(head_only, "agent_0", 9, base))
                got["greedy"] = before, greedy(engine)
                models["head_only"] = head_only
                got["head_only"] = engine.prompt_logprobs(ROWS)
            for name, model in models.items():
                target = folder / f"{dtype}-{tied}-{name}"
                model.save_pretrained(target)
                on_disk.append((dtype, tied, name, target, model))
            results[dtype, tied] = got
            engine.shutdown()
    fresh = fresh_logprobs([(path, dtype) for dtype, _, _, path, _ in on_disk], ROWS)
    return results, {(d, t, n): (f, m) for (d, t, n, _, m), f in zip(on_disk, fresh)}


def greedy(engine) -> tuple[int, ...]:
    engine.submit([Request("agent_0", tuple(ROWS[0]), 6, 0)], Sampling(temperature=0))
    done = []
    while (part := engine.receive()) is not None:
        done += part
    return done[0][1].ids


@pytest.mark.parametrize(("dtype", "tied"), CASES)
@pytest.mark.parametrize("name", ["base", *CHANGES, "adapter"])
def test_synced_equals_fresh_from_disk(synced, dtype, tied, name):
    results, fresh = synced
    assert results[dtype, tied][name] == fresh[dtype, tied, name][0]
    if name != "base":
        assert results[dtype, tied][name] != results[dtype, tied]["base"]


@pytest.mark.parametrize(("dtype", "tied"), CASES)
def test_syncing_the_old_weights_back_restores_them(synced, dtype, tied):
    results, _ = synced
    assert results[dtype, tied]["back"] == results[dtype, tied]["whole again"] == results[dtype, tied]["base"]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["base", *CHANGES, "adapter"])
def test_engine_agrees_with_the_trainer_in_fp32(synced, tied, name):
    results, fresh = synced
    assert largest_gap(results["float32", tied][name], trainer_logprobs(fresh["float32", tied, name][1], ROWS)) < 1e-3


@pytest.mark.parametrize(("dtype", "tied"), CASES)
def test_correct_syncs_are_within_the_bound_of_their_type_and_in_float32_stale_engines_are_not(synced, dtype, tied):
    results, fresh = synced
    for name in ("base", *CHANGES, "adapter"):
        reference = Reference(trainer_logprobs(fresh[dtype, tied, name][1], ROWS), dtype)
        judge = partial(check_agreement, "agent_0", "engine 0", reference=reference, dtype=dtype, layers=2, on_cpu=True)
        judge(results[dtype, tied][name])
        if name != "base" and (dtype == "float32" or name == "large"):
            with pytest.raises(RolloutError, match=f"and {dtype} explains"):
                judge(results[dtype, tied]["base"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_change_of_the_untied_head_alone_arrives(synced, dtype):
    results, fresh = synced
    got = results[dtype, False]
    assert got["greedy"][0] != got["greedy"][1]
    assert got["head_only"] == fresh[dtype, False, "head_only"][0]


def test_incomplete_and_ineffective_syncs_are_refused(tmp_path):
    """Missing tensors are named by the engine, and an engine that answers as before is caught by its probe."""
    base = save_tiny_model(tmp_path / "base", 3)
    engine = start_engine(base, "float32")
    engine.wait_ready()
    try:
        lm = tiny_lm(3)
        whole = [(n, p.detach()) for n, p in lm.named_parameters()]
        engine.sync_weights(policy_of(lm, "agent_0", 1, base))
        # A transfer that delivers other tensors than it was given: the engine keeps its weights, and the probe shows it.
        outbox = engine._sender.outbox
        real = outbox.fill
        outbox.fill = lambda tensors: real([(n, dict(whole)[n]) for n, _ in tensors])
        with pytest.raises(RolloutError, match="answers as before"):
            engine.sync_weights(policy_of(tiny_lm(4), "agent_0", 2, base))
        outbox.fill = real
        incomplete = policy_of(lm, "agent_0", 3, base)
        incomplete.tensors = lambda: (x for x in whole if x[0] != "model.layers.1.mlp.down_proj.weight")
        engine.manifest = None  # so that not our own comparison with the last sync, but the engine finds it
        with pytest.raises(RolloutError, match=r"without new values.*down_proj"):
            engine.sync_weights(incomplete)
    finally:
        engine.shutdown()
