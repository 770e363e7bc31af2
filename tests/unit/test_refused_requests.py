"""One request that an engine cannot answer costs one answer; the limit that is named is the one that limits."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from api_server import Reply
from tiny_models import weights_on_disk

from comlrl_ds.config.run_file import RolloutConfig
from comlrl_ds.preference.collection import JointSampler
from comlrl_ds.preference.journal import Journal, read_journal
from comlrl_ds.preference.oracle import Oracle
from comlrl_ds.preference.prompts import JointPrompt, Prompt, PromptBuilder, PromptError
from comlrl_ds.preference.teams import Team
from comlrl_ds.rollout.base import PolicyWeights, Request, RequestsRefused, RolloutError, Sampling
from comlrl_ds.rollout.disk import shape_of
from comlrl_ds.rollout.http_rollout import HTTPRollout
from comlrl_ds.rollout.pool import RolloutPool
from comlrl_ds.rollout.start import length_limit
from comlrl_ds.rollout.transformers_rollout import TransformersRollout


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A GPT-2 of 24 positions."""
    folder = tmp_path_factory.mktemp("short") / "gpt2"
    return tiny_models.save(folder, tiny_models.gpt2(positions=24, layers=1), tiny_models.word_tokenizer())


def requests_with_a_bad_one():
    """Eight requests, of which the sixth names a token that no model has."""
    prompts = [(7, 8, 9 + k) for k in range(8)]
    prompts[5] = (7, 8, 100_000)
    return [Request("agent_0", prompt, 4, k) for k, prompt in enumerate(prompts)]


def answers(pool, requests, policies):
    """(answers by request, the refusal)."""
    got = {}
    with pytest.raises(RequestsRefused) as caught:
        for k, completion in pool.generate(requests, policies, Sampling()):
            got[k] = completion
    return got, caught.value.refused


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_the_others_are_answered_and_the_engine_goes_on(model_folders, batch):
    pool = RolloutPool([TransformersRollout(model_folders[0], dtype=torch.float32, batch_size=batch)], shape_of)
    policies = {"agent_0": weights_on_disk("agent_0", model_folders[0])}
    listed = requests_with_a_bad_one()
    got, refused = answers(pool, listed, policies)
    good = [r for k, r in enumerate(listed) if k != 5]
    alone = [c for _, c in sorted(pool.generate(good, policies, Sampling()))]
    assert [c for _, c in sorted(got.items())] == alone and len(alone) == 7
    assert [k for k, _ in refused] == [5]


def test_the_run_names_task_agent_and_candidate_and_keeps_the_others(model_folders, tmp_path):
    tokenizer = tiny_models.word_tokenizer()
    pool = RolloutPool([TransformersRollout(model_folders[0], dtype=torch.float32)], shape_of)
    policies = {f"agent_{i}": weights_on_disk(f"agent_{i}", model_folders[0]) for i in range(2)}
    sampler = JointSampler(pool, Team([tokenizer] * 2, [4, 4], [(2,)] * 2), Oracle(lambda a, b: 1.0, 2), run_seed=1)
    prompts = [JointPrompt(k, {"prompt": "p"}, (Prompt("w7", (1, 7)), Prompt("w8", (1, 8)))) for k in range(3)]
    prompts[2] = JointPrompt(2, {"prompt": "p"}, (Prompt("w7", (1, 7)), Prompt("x", (1, 100_000))))
    with Journal(tmp_path / "j.jsonl") as journal, pytest.raises(RolloutError, match=r"2 of 12 .*task 2, agent_1, candidate 0"):
        sampler.sample(prompts, policies, Sampling(), stream="target", round=1, candidates=2, journal=journal)
    assert len(read_journal(tmp_path / "j.jsonl").completions) == 10


# --- servers of the user's
def served(limit, refuse=None):
    """vLLM's server as far as a generation goes. Args: limit, its max_model_len. refuse: a last prompt id that it refuses."""

    def script(call, number):
        if call.path == "/v1/models":
            return Reply(content={"data": [{"id": "m", "root": served.folder, "max_model_len": limit}]})
        if call.path == "/weight_info":
            return Reply(content={"weight_version": served.folder})
        if call.path != "/v1/completions":
            return Reply(content={})
        if call.body["prompt"][-1] == refuse:
            return Reply(400, {"message": "token id is out of vocabulary"})
        ids = [3] * call.body["max_tokens"]
        return Reply(content={"choices": [{"token_ids": ids, "finish_reason": "length"}]})

    return script


def http_pool(serve, folder, script):
    served.folder = folder
    server = serve(script)
    engine = HTTPRollout(f"http://{server.host}", [folder], index=0, start_timeout_s=20, timeout_s=20)
    engine.wait_ready()
    return server, RolloutPool([engine], shape_of), {"agent_0": PolicyWeights("agent_0", folder, folder)}


def test_a_server_that_refuses_one_prompt_loses_no_other(serve, short):
    _, pool, policies = http_pool(serve, short, served(24, refuse=100_000))
    listed = requests_with_a_bad_one()
    for _ in range(2):  # the second submission is as good as the first
        got, refused = answers(pool, listed, policies)
        assert sorted(got) == [0, 1, 2, 3, 4, 6, 7] and all(c.ids == (3,) * 4 for c in got.values())
        assert [k for k, _ in refused] == [5] and "out of vocabulary" in refused[0][1]
    pool.shutdown()


def test_a_request_beyond_a_servers_limit_names_that_limit(serve, short):
    server, pool, policies = http_pool(serve, short, served(10))
    got, refused = answers(pool, [Request("agent_0", (7,) * 6, 4, 0), Request("agent_0", (7,) * 7, 4, 1)], policies)
    assert sorted(got) == [0] and refused[0][0] == 1
    assert server.url.removesuffix("/v1") in refused[0][1] and "takes 10 tokens" in refused[0][1]
    assert "--max-model-len" in refused[0][1]
    assert sum(c.path == "/v1/completions" for c in server.calls) == 1
    pool.shutdown()


def test_prompts_are_measured_by_the_limit_that_limits(serve, short):
    served.folder = short
    url = f"http://{serve(served(10)).host}"
    tokenizer, text = tiny_models.word_tokenizer(), " ".join(["w7"] * 12)
    for config, limit, advice in (
        (RolloutConfig(urls=[url]), 10, f"start the server at {url} with a larger --max-model-len than 10"),
        (RolloutConfig(urls=[url], max_model_len=8), 8, "raise rollout.max_model_len"),
        (RolloutConfig(), 24, "take a model with more than 24 positions"),
        (RolloutConfig(urls=["http://127.0.0.1:9"], max_model_len=16), 16, "raise rollout.max_model_len"),  # nobody answers
    ):
        found = length_limit(config, short)
        assert (found.tokens, found.more) == (limit, advice)
        builder = PromptBuilder([tokenizer], [lambda item: text], [found.tokens - 15], more=[found.more])
        with pytest.raises(PromptError) as caught:
            builder.build([{"prompt": "p"}])
        assert advice in str(caught.value) and f"only {limit - 15} leave room" in str(caught.value)
