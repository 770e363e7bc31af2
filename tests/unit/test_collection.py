"""Sampling with a real engine: what samples depend on, what the journal keeps, and an oracle that raises."""

from __future__ import annotations

import math

import pytest
import tiny_models
import torch
from sampled_items import collected, strict_json
from tiny_models import merging_tokenizer, weights_on_disk

from comlrl_ds.maths.packing import pack
from comlrl_ds.maths.seeds import seed_of
from comlrl_ds.preference.collection import JointSampler
from comlrl_ds.preference.journal import Journal
from comlrl_ds.preference.oracle import INVALID, Oracle, OracleError
from comlrl_ds.preference.prompts import JointPrompt, Prompt
from comlrl_ds.preference.teams import Team
from comlrl_ds.rollout.base import Sampling
from comlrl_ds.rollout.disk import shape_of
from comlrl_ds.rollout.pool import RolloutPool
from comlrl_ds.rollout.transformers_rollout import TransformersRollout


def joint_prompts(count, agents=2):
    return [
        JointPrompt(k, {"prompt": "p"}, tuple(Prompt(f"w{3 + k}", (1, 3 + k, 20 + i)) for i in range(agents)))
        for k in range(count)
    ]


def sampler_of(folders, reward, *, tokenizers=None, limits=(5, 7), chunk_items=None, on_error="raise", seed=3, engines=1):
    tokenizers = tokenizers or [tiny_models.word_tokenizer()] * 2
    pool = RolloutPool(
        [TransformersRollout(folders[k % len(folders)], dtype=torch.float32) for k in range(engines)], shape_of
    )  # fmt: skip
    policies = {f"agent_{k}": weights_on_disk(f"agent_{k}", folder) for k, folder in enumerate(folders)}
    stops = [() if t.eos_token_id is None else (t.eos_token_id,) for t in tokenizers]
    team = Team(tokenizers, list(limits), stops)
    sampler = JointSampler(
        pool, team, Oracle(reward, 2), run_seed=seed, oracle_on_error=on_error, chunk_items=chunk_items
    )  # fmt: skip

    def sample(prompts, *, stream="target", round=1, candidates=3, **rest):
        return sampler.sample(prompts, policies, Sampling(1.0), stream=stream, round=round, candidates=candidates, **rest)

    return sampler, sample


def ids_of(sampled):
    return {
        (s.joint.index, i, j): c.ids for s in sampled for i, row in enumerate(s.completions) for j, c in enumerate(row)
    }  # fmt: skip


def word_count(a, b):
    return len(a[0].split()) + 0.1 * len(set(b[0].split()))


def test_samples_do_not_depend_on_chunks_engines_or_the_other_tasks(model_folders):
    prompts = joint_prompts(4)
    _, sample = sampler_of(model_folders, word_count)
    reference = ids_of(sample(prompts))
    assert len(set(reference.values())) > 20  # of 24; seeds differ
    _, chunked = sampler_of(model_folders, word_count, chunk_items=1)
    assert ids_of(chunked(prompts)) == reference
    _, spread = sampler_of(model_folders, word_count, engines=2)
    assert ids_of(spread(prompts)) == reference
    _, reversed_order = sampler_of(model_folders, word_count)
    assert ids_of(reversed_order(prompts[::-1])) == reference
    assert ids_of(sample(prompts[2:])) == {k: v for k, v in reference.items() if k[0] >= 2}
    # More candidates extend what was there; another stream, round or run shares nothing by design.
    assert reference.items() <= ids_of(sample(prompts, candidates=4)).items()
    for changed in ({"stream": "comparator"}, {"stream": "eval"}, {"round": 2}):
        assert ids_of(sample(prompts, **changed)) != reference
    _, other = sampler_of(model_folders, word_count, seed=4)
    assert ids_of(other(prompts)) != reference


def test_limits_order_texts_and_scores(model_folders):
    told = []
    _, sample = sampler_of(model_folders, word_count)
    sampled = sample(joint_prompts(3)[::-1], progress=lambda *numbers: told.append(numbers))
    assert [s.joint.index for s in sampled] == [2, 1, 0]
    tokenizer = tiny_models.word_tokenizer()
    for s in sampled:
        for agent, limit in enumerate((5, 7)):
            assert all(1 <= len(c.ids) <= limit for c in s.completions[agent])
            assert s.texts[agent] == [
                tokenizer.decode([t for t in c.ids if t != 2])
                for c in s.completions[agent]  # 2 is the stop token
            ]
        assert s.values == [word_count([a], [b]) for a, b in zip(*s.texts)]
    assert sum(items for items, _ in told) == 3
    assert sum(tokens for _, tokens in told) == sum(len(ids) for ids in ids_of(sampled).values())


def journal_lines(file):
    return [strict_json(line) for line in file.read_text().splitlines()]


def test_the_journal_holds_every_completion_and_score(model_folders, tmp_path):
    def reward(a, b):
        return math.nan if "w5" in a[0] else word_count(a, b)

    _, sample = sampler_of(model_folders, reward)
    with Journal(tmp_path / "j.jsonl") as journal:
        sampled = sample(joint_prompts(2), journal=journal, round=4)
    lines = journal_lines(tmp_path / "j.jsonl")
    completions = [line for line in lines if line["kind"] == "completion"]
    assert {(c["item"], c["agent"], c["candidate"]): tuple(c["ids"]) for c in completions} == ids_of(sampled)
    assert len(completions) == 2 * 2 * 3
    for line in completions:
        key = (line["item"], line["agent"], line["candidate"])
        assert line["seed"] == seed_of(3, "target", 4, *key)
        assert (line["stream"], line["round"], line["finish"] in ("stop", "length")) == ("target", 4, True)
        assert line["version"] == model_folders[line["agent"]]
    scores = {(s["item"], s["candidate"]): (s["raw"], s["value"]) for s in lines if s["kind"] == "score"}
    expected = {
        (s.joint.index, j): (None, None) if math.isnan(x) else (x, x) for s in sampled for j, x in enumerate(s.values)
    }  # fmt: skip
    assert scores == expected


def test_trained_ids_are_the_sampled_ones_also_where_the_text_tokenises_differently(tmp_path):
    tokenizer = merging_tokenizer()
    ab, c, a, bc = (tokenizer.convert_tokens_to_ids(t) for t in ("ab", "c", "a", "bc"))
    assert tokenizer("abc")["input_ids"] == [a, bc]
    assert tokenizer.decode([ab, c]) == "abc"
    folder = tiny_models.save(tmp_path / "model", tiny_models.llama(0, vocab=len(tokenizer), layers=1), tokenizer)
    _, sample = sampler_of([folder, folder], lambda x, y: len(x[0]) + len(y[0]) / 100, tokenizers=[tokenizer] * 2)
    prompts = [JointPrompt(k, {}, (Prompt("a", (2,)), Prompt("b", (3, 2)))) for k in range(4)]
    with Journal(tmp_path / "j.jsonl") as journal:
        sampled = sample(prompts, candidates=4, journal=journal)
    journaled = {
        (x["item"], x["agent"], x["candidate"]): tuple(x["ids"])
        for x in journal_lines(tmp_path / "j.jsonl")
        if x["kind"] == "completion"
    }
    pairs = collected(sampled).pairs
    changed = 0
    for pair in pairs:
        for agent, tokens in enumerate(pair.tokens):
            for ids, candidate, text in (
                (tokens.winner, pair.winner, pair.winner_completions[agent]),
                (tokens.loser, pair.loser, pair.loser_completions[agent]),
            ):
                assert tuple(ids) == journaled[pair.item, agent, candidate]
                changed += list(ids) != tokenizer(text)["input_ids"]
                targets = pack([tokens.group(True)], "shared").target.tolist()
                assert targets == [*tokens.winner, *tokens.loser]
    assert changed > len(pairs)  # most differ with a vocabulary this small: the test can fail


def failing(after, calls):
    def reward(a, b):
        calls.append((a, b))
        if len(calls) > after:
            raise KeyError("gone")
        return float(len(calls))

    return reward


@pytest.mark.parametrize("after", [3, 4, 7])
def test_an_oracle_that_raises_ends_the_run_with_everything_scored_kept(model_folders, tmp_path, after):
    calls = []
    _, sample = sampler_of(model_folders, failing(after, calls))
    with (
        Journal(tmp_path / "j.jsonl") as journal,
        pytest.raises(OracleError, match=f"task {after // 3}: the reward function .* raised KeyError"),
    ):
        sample(joint_prompts(4), journal=journal)
    # A call may cost money: also the answers for the failing task's first candidates are kept.
    scores = [line["value"] for line in journal_lines(tmp_path / "j.jsonl") if line["kind"] == "score"]
    assert scores == [float(k) for k in range(1, after + 1)]


def test_an_oracle_that_raises_may_be_counted_instead(model_folders):
    sampler, sample = sampler_of(model_folders, failing(4, []), on_error="invalid")
    sampled = sample(joint_prompts(3))
    assert sampler.oracle_errors == 5
    scores = [s for item in sampled for s in item.scores]
    assert [s.valid for s in scores] == [True] * 4 + [False] * 5
    assert all(s is INVALID for s in scores[4:])
