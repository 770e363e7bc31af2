"""Several engines as one: the same samples with any number of them, and weights synced where they are needed."""

from __future__ import annotations

import itertools

import pytest
import tiny_models
import torch
from engine_requests import PLAIN, REQUESTS
from tiny_models import some_ids, token_scores, weights_on_disk
from transformers import LlamaForCausalLM

from comlrl_ds.rollout.base import PolicyWeights, Request, RolloutError, Sampling
from comlrl_ds.rollout.disk import shape_of
from comlrl_ds.rollout.pool import RolloutPool
from comlrl_ds.rollout.transformers_rollout import TransformersRollout


def pool_of(folders, on_sync=None):
    return RolloutPool([TransformersRollout(f, dtype=torch.float32, batch_size=8) for f in folders], shape_of, 60, on_sync)


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
    with pytest.raises(RolloutError, match="no engine takes agent_9"):
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


@pytest.mark.parametrize(("level", "resent"), [(1, False), (2, True)])
def test_weights_that_a_sleep_dropped_are_sent_again_before_the_next_sample(model_folders, level, resent):
    """CASES 49: level 2 drops weights, so all of them come again; level 1 keeps them, so none does."""
    from types import SimpleNamespace

    from comlrl_ds.config.run_file import RolloutConfig
    from comlrl_ds.rollout.start import Engines

    class GPUEngine(TransformersRollout):
        """Sleeps as vLLM does on a GPU."""

        takes_adapters = False

        def call(self, name, **options):
            if name == "sleep" and options["level"] == 2:
                with torch.no_grad():
                    for p in self._model.parameters():
                        p.zero_()

        @property
        def calls(self):
            return SimpleNamespace(call=self.call)

    engine = GPUEngine(model_folders[0], dtype=torch.float32)
    syncs = []
    pool = RolloutPool([engine], shape_of, 60, lambda policy, k, report: syncs.append(policy.key))
    policy = weights_on_disk("agent_0", model_folders[0])
    requests = [Request("agent_0", tuple(some_ids(1, 5)), 6, seed, ()) for seed in range(3)]
    before = generate(pool, requests, [policy])
    engines = object.__new__(Engines)  # what starts engines is not under test
    engines._sleepers, engines._asleep, engines._config = [engine], False, RolloutConfig(sleep_level=level)
    engines.sleep()
    engines.wake()
    assert [c.ids for c in generate(pool, requests, [policy])] == [c.ids for c in before]
    assert syncs == [policy.key] * resent
    # Of an engine with adapters the base is what is sure to be there.
    engine.takes_adapters, engine.held = True, "agent_0@3"
    engines.sleep()
    engines.wake()
    assert engine.held == engine.source
