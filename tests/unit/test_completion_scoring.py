"""Log-probs of any number of completions of a prompt, as the KL to a reference takes them, against plain forwards."""

from __future__ import annotations

import pytest
import tiny_models
import torch
import torch.distributed
from tiny_models import HalvedLogits, some_ids, token_scores

from comlrl_ds.engines.ds_config import EnginePlan
from comlrl_ds.engines.frozen import FrozenEngine
from comlrl_ds.engines.scorer import Scorer, completion_logprobs
from comlrl_ds.maths.packing import pack, row_length, runs

GROUPS = [
    (some_ids(1, 6), [some_ids(k, n) for k, n in ((2, 4), (3, 7), (4, 1))]),
    (some_ids(5, 3), [some_ids(6, 5)]),
    (some_ids(7, 9), [(), some_ids(8, 2)]),
]


def halved():
    torch.manual_seed(0)
    return HalvedLogits(tiny_models.llama_config()).eval()


@torch.no_grad()
def expected(lm):
    return [[token_scores(lm, p, c).tolist() if len(c) else [] for c in completions] for p, completions in GROUPS]


def assert_close(found, wanted):
    assert [[len(c) for c in group] for group in found] == [[len(c) for c in group] for group in wanted]
    flat = [[x for group in side for c in group for x in c] for side in (found, wanted)]
    assert flat[0] == pytest.approx(flat[1], abs=2e-5)


@pytest.mark.parametrize("chunk", [512, 3])
@pytest.mark.parametrize("layout", ["shared", "rows"])
@pytest.mark.parametrize("make", [tiny_models.llama, tiny_models.gpt2], ids=["llama", "gpt2"])
def test_completions_of_a_shared_prompt_have_the_models_own_logprobs(make, layout, chunk):
    lm = make()
    found = completion_logprobs(Scorer(lm, chunk), chunk, GROUPS, layout, 0, 1, "cpu")
    assert_close(found, expected(lm))


def test_a_prompt_is_one_row_and_its_completions_leave_out_their_last_tokens():
    shared, rows = (pack(GROUPS, layout) for layout in ("shared", "rows"))
    assert [row_length(g) for g in GROUPS] == [6 + 3 + 6 + 0, 3 + 4, 9 + 1]
    assert shared.ids.shape == (3, 15)
    assert rows.ids.shape == (5, 12)
    assert shared.side.tolist() == rows.side.tolist() == [0] * 4 + [1] * 7 + [2] + [3] * 5 + [5] * 2
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        pack([((), [(3, 4)])], "shared")


# --- how many completions share a row
ONE, WIDE = [100], [1 << 40]  # model widths: with a wide one attention costs nothing, so that tokens alone count


def of_lengths(prompt, *completions):
    return [some_ids(1, prompt)], [[some_ids(k, n) for k, n in enumerate(completions)]]


def test_responses_share_a_row_as_far_as_tokens_and_ranks_allow():
    responses = of_lengths(100, 11, 11, 11, 11)  # with n of them a row has 100 + 10 n tokens
    assert runs(*responses, WIDE, 1000) == [(0, 4)]
    assert runs(*responses, WIDE, 140) == [(0, 4)]
    assert runs(*responses, WIDE, 139) == [(0, 2), (2, 4)]  # 3 + 1 has as many rows, and a longer one
    assert runs(*responses, WIDE, 50) == [(0, 1), (1, 2), (2, 3), (3, 4)]  # one alone has no choice
    assert runs(*responses, WIDE, 1000, least=2) == [(0, 2), (2, 4)]
    assert runs(*responses, WIDE, 1000, least=9) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert runs(*responses, WIDE, 1000, most=1) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert runs(*of_lengths(5, 3), WIDE, 1000, least=2) == [(0, 1)]


def test_the_worst_agent_bounds_a_row():
    prompts, completions = zip(*(of_lengths(*n) for n in ((10, 5, 5), (90, 21, 21))))
    assert runs([p[0] for p in prompts], [c[0] for c in completions], WIDE * 2, 130) == [(0, 2)]
    assert runs([p[0] for p in prompts], [c[0] for c in completions], WIDE * 2, 129) == [(0, 1), (1, 2)]


@pytest.mark.parametrize("size", [2, 20, 200, 2000])
def test_long_completions_of_a_narrow_model_stand_apart(size):
    # One row of p + 2n tokens against two of p + n, W (6 d + W) each.
    prompt, d = 100, ONE[0]
    cost = lambda w: w * (6 * d + w)  # noqa: E731
    together = cost(prompt + 2 * size) < 2 * cost(prompt + size)
    assert together == (size < 200)
    assert runs(*of_lengths(prompt, size + 1, size + 1), ONE, 10_000) == ([(0, 2)] if together else [(0, 1), (1, 2)])


@pytest.fixture
def alone(tmp_path):
    """A process group of this process only."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("make", [tiny_models.llama, halved], ids=["llama", "logits of its own"])
def test_a_reference_scores_as_the_model_itself_would(alone, make):
    lm = make()
    plan = EnginePlan({}, stage=1, dtype="float32", optimizer={}, scheduler=None, max_pairs=None)
    engine = FrozenEngine("reference.0", lm, plan, chunk=512, device="cpu")
    assert engine.layout == "shared"
    assert_close(engine.completion_logprobs(GROUPS), expected(lm))
