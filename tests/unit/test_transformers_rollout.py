"""The engine of transformers: seeded draws, stop tokens, log-probs, and the weights that it is given."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from engine_requests import PLAIN, REQUESTS, request
from tiny_models import some_ids, token_scores, weights_on_disk
from transformers import LlamaForCausalLM

from comlrl_ds.rollout.base import PolicyWeights, Request, RolloutError, Sampling
from comlrl_ds.rollout.disk import tensors_on_disk
from comlrl_ds.rollout.transformers_rollout import SeededSampler, TransformersRollout


# --- the engine of transformers
@pytest.fixture(scope="module")
def engine(model_folders):
    return TransformersRollout(model_folders[0], dtype=torch.float32, batch_size=64)


def run(engine, requests, sampling=PLAIN):
    engine.submit(requests, sampling)
    done = {}
    while (part := engine.receive()) is not None:
        done.update(part)
    assert sorted(done) == list(range(len(requests)))
    return [done[k] for k in range(len(requests))]


def test_a_completion_depends_on_its_seed_alone(engine, model_folders):
    together = run(engine, REQUESTS)
    assert [run(engine, [r])[0] for r in REQUESTS] == together
    assert run(engine, REQUESTS[::-1]) == together[::-1]
    small = TransformersRollout(model_folders[0], dtype=torch.float32, batch_size=3)
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


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7, top_p=0.8, top_k=20), Sampling(0.0, min_new_tokens=5)])
def test_completions_say_how_probable_their_tokens_were(engine, sampling):
    """At temperature 1 over the whole vocabulary, however they were drawn; asking changes no draw."""
    requests = [request(seed, tokens=3 + seed % 8, stops=(2, 30)) for seed in range(12)]
    asked = run(engine, requests, replace(sampling, logprobs=True))
    silent = run(engine, requests, sampling)
    assert [c.ids for c in asked] == [c.ids for c in silent] and not any(c.logprobs for c in silent)
    for r, got in zip(requests, asked):
        expected = engine.prompt_logprobs([[*r.prompt, *got.ids]])[0][len(r.prompt) - 1 :]
        assert got.logprobs == pytest.approx(expected, abs=1e-4)


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
    first, second = (TransformersRollout(f, dtype=torch.float32) for f in model_folders)
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
    assert first.prompt_logprobs(rows) == TransformersRollout(model_folders[0], dtype=torch.float32).prompt_logprobs(rows)


def test_only_the_head_changing_changes_the_answers(model_folders):
    engine = TransformersRollout(model_folders[0], dtype=torch.float32)
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
    engine = TransformersRollout(model_folders[0], dtype=torch.float32)
    tensors = dict(tensors_on_disk(model_folders[1]))
    change(tensors)
    with pytest.raises(RolloutError, match=f"weight sync of agent_1: {part}"):
        engine.sync_weights(PolicyWeights("agent_1", "agent_1@1", model_folders[1], lambda: tensors.items()))
    assert engine.held == model_folders[0]
