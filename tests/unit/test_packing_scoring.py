"""Token ids to summed log-probs: what counts, in both layouts, against a model's own unpadded forward."""

from __future__ import annotations

import math

import pytest
import tiny_models
import torch
from tiny_models import VOCAB, completion_score, some_ids, token_scores
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from comlrl_ds.engines.scorer import Scorer, fit_to_model, inputs_of
from comlrl_ds.maths.logprobs import sum_by_side, token_logprobs
from comlrl_ds.maths.packing import MicroBatch, PairTokens, pack, pack_sequences
from comlrl_ds.preference.prompts import PromptBuilder, PromptError, default_formatter
from comlrl_ds.preference.records import PreferencePair

LAYOUTS = ["shared", "rows"]


def scores_of(lm, pairs, *, layout="shared", last=False, chunk=512):
    """[pairs, 2] sums as a learner gets them."""
    batch = packed(pairs, layout, last)
    with torch.no_grad():
        return sum_by_side(Scorer(lm, chunk)(**inputs_of(batch)), batch.side, 2 * len(pairs)).view(-1, 2)


def packed(pairs, layout="shared", last=False):
    return pack([pair.group(last) for pair in pairs], layout)


def pair_of(prompt, winner, loser):
    return PreferencePair(
        ["p"], ["w"], ["l"], 1.0, 0.0, 0.5, [], None, None, (PairTokens(prompt, winner, loser),), 0, 0, 1
    )  # fmt: skip


# --- which tokens count
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_completion_tokens_but_the_last_count(layout):
    lm = tiny_models.gpt2()
    prompt, winner, loser = some_ids(1, 3), some_ids(2, 5), some_ids(3, 5)
    with torch.no_grad():
        per_token = token_scores(lm, prompt, winner)
    scored = scores_of(lm, [PairTokens(prompt, winner, loser)], layout=layout)[0, 0].item()
    assert scored == pytest.approx(sum(per_token[t].item() for t in (0, 1, 2, 3)), abs=1e-5)
    scored = scores_of(lm, [PairTokens(prompt, winner, loser)], layout=layout, last=True)[0, 0].item()
    assert scored == pytest.approx(sum(per_token[t].item() for t in (0, 1, 2, 3, 4)), abs=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_one_token_completion_scores_exactly_zero(layout):
    lm = tiny_models.gpt2()
    pairs = [PairTokens([5, 6, 7], [8], [9, 10, 11]), PairTokens([5], [8], []), PairTokens([5], [8, 9], [7])]
    scores = scores_of(lm, pairs, layout=layout)
    assert scores[0, 0].item() == 0.0
    assert scores[1].tolist() == [0.0, 0.0]
    assert scores[2, 1].item() == 0.0
    assert scores[0, 1].item() != 0.0
    assert scores[2, 0].item() != 0.0
    assert scores_of(lm, pairs, layout=layout, last=True)[0, 0].item() == pytest.approx(
        token_scores(lm, [5, 6, 7], [8])[0].item(), abs=1e-5
    )


def test_empty_sides_counts_completions_of_at_most_one_token():
    assert pair_of([3], [4, 5], [6, 7]).empty_sides == 0
    assert pair_of([3], [4], [6, 7]).empty_sides == 1
    assert pair_of([3], [4], []).empty_sides == 2


def test_uniform_logits_give_lengths_times_log_vocabulary():
    # A mean over tokens instead of a sum would make this margin zero (public report: trl#789).
    lm = tiny_models.llama()
    lm.lm_head.weight.data.zero_()
    pairs = [PairTokens(some_ids(1, 3), some_ids(2, 4), some_ids(3, 12))]
    scores = scores_of(lm, pairs)[0]
    assert scores.tolist() == pytest.approx([-3 * math.log(VOCAB), -11 * math.log(VOCAB)], rel=1e-6)
    assert (scores[0] - scores[1]).item() == pytest.approx((12 - 4) * math.log(VOCAB), rel=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_eos_that_is_also_the_pad_counts_like_any_token(layout):
    # Lengths say where a completion ends; a search for the pad id would cut the EOS away.
    tokenizer = tiny_models.word_tokenizer(pad=True)
    eos = tokenizer.eos_token_id
    assert tokenizer.pad_token_id == eos
    pair = PairTokens([5, eos, 6], [7, 8, eos], [7, 8])
    assert (len(pair.winner), len(pair.loser)) == (3, 2)
    for last, kept in ((False, (2, 1)), (True, (3, 2))):
        batch = packed([pair], layout, last)
        assert tuple((batch.side == side).sum().item() for side in (0, 1)) == kept
        expected = [completion_score(tiny_models.gpt2(), [5, eos, 6], ids, last).item() for ids in ([7, 8, eos], [7, 8])]
        assert scores_of(tiny_models.gpt2(), [pair], layout=layout, last=last)[0].tolist() == pytest.approx(expected, abs=1e-5)


# --- the layouts
@pytest.mark.parametrize("make", [tiny_models.gpt2, tiny_models.llama], ids=["gpt2", "llama"])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("last", [False, True])
def test_both_layouts_equal_plain_sequences_in_float64(make, attn, last):
    lm = make(attn=attn).double()
    assert lm.config._attn_implementation == attn
    pairs = [
        PairTokens(some_ids(10, 3), some_ids(11, 5), some_ids(12, 5)),
        PairTokens(some_ids(20, 17), some_ids(21, 1), some_ids(22, 9)),
        PairTokens(some_ids(30, 1), some_ids(31, 23), some_ids(32, 2)),
        PairTokens(some_ids(40, 6), [], some_ids(42, 4)),
        PairTokens(some_ids(50, 6), some_ids(51, 4), some_ids(51, 4)),
    ]
    with torch.no_grad():
        expected = torch.stack(
            [torch.stack([completion_score(lm, p.prompt, side, last) for side in (p.winner, p.loser)]) for p in pairs]
        )
    # Llama's norms and rotations compute in float32 in any type, so its own two ways differ by more than GPT-2's.
    tolerance = 1e-10 if make is tiny_models.gpt2 else 1e-6
    for layout in LAYOUTS:
        for chunk in (4, 512):
            scores = scores_of(lm, pairs, layout=layout, last=last, chunk=chunk)
            assert scores.dtype == torch.float64
            assert (scores - expected).abs().max().item() <= tolerance


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_equal_those_of_plain_sequences(layout):
    lm = tiny_models.gpt2(layers=1).double()
    pairs = [
        PairTokens(some_ids(1, 4), some_ids(2, 6), some_ids(3, 3)),
        PairTokens(some_ids(4, 9), some_ids(5, 2), some_ids(6, 7)),
    ]
    weights = torch.tensor([[0.3, -1.0], [2.0, 0.7]], dtype=torch.float64)
    batch = packed(pairs, layout)
    sums = sum_by_side(Scorer(lm, chunk=3)(**inputs_of(batch)), batch.side, 4).view(-1, 2)
    ours = torch.autograd.grad((sums * weights).sum(), list(lm.parameters()))
    plain = torch.stack(
        [torch.stack([completion_score(lm, p.prompt, ids, False) for ids in (p.winner, p.loser)]) for p in pairs]
    )
    reference = torch.autograd.grad((plain * weights).sum(), list(lm.parameters()))
    assert max((a - b).abs().max().item() for a, b in zip(ours, reference)) <= 1e-10
    assert max(b.abs().max().item() for b in reference) > 0.1


def test_a_batch_without_anything_to_score_still_makes_one_forward_with_a_zero_gradient():
    # Every rank of a group must run the same number of forwards and backwards.
    lm = tiny_models.gpt2(layers=1)
    for pairs in ([], [PairTokens([5, 6], [7], [8])]):
        for layout in LAYOUTS:
            batch = packed(pairs, layout)
            assert len(batch.ids) == 1
            sums = sum_by_side(Scorer(lm)(**inputs_of(batch)), batch.side, 2 * len(pairs) + 1)
            assert sums[:-1].tolist() == [0.0, 0.0] * len(pairs)  # padding is behind the pairs
            # The padding reaches every parameter, the head included: a sharded engine waits for a gradient of each.
            grads = torch.autograd.grad(sums.sum() * 0, list(lm.parameters()))
            assert not any(g.any() for g in grads)


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        packed([PairTokens([1], [2, 3], [4, 5]), PairTokens([], [2, 3], [4, 5])])


def test_a_row_may_be_wider_than_the_model_is_long():
    # A shared row holds both completions, whose positions restart; padding beside it must not need positions
    # that a model with a learned position table does not have.
    lm = tiny_models.gpt2(positions=24)
    pairs = [PairTokens(some_ids(1, 6), some_ids(2, 15), some_ids(3, 16)), PairTokens(some_ids(4, 3), [5, 6], [7, 8])]
    with torch.no_grad():
        expected = [[completion_score(lm, p.prompt, s, False).item() for s in (p.winner, p.loser)] for p in pairs]
    for got, wanted in zip(scores_of(lm, pairs, layout="rows").tolist(), expected):
        assert got == pytest.approx(wanted, abs=1e-4)
    for got, wanted in zip(scores_of(lm, pairs, layout="shared").tolist(), expected):
        assert got == pytest.approx(wanted, abs=1e-4)


def test_where_a_sequence_stands_in_its_row_changes_nothing():
    """Unpadded, padded by 7 on the left and by 7 on the right, with a model of absolute positions (trl#469)."""
    lm = tiny_models.gpt2()
    prompt, completion = some_ids(1, 4), some_ids(2, 6)
    row = [*prompt, *completion[:-1]]
    n = len(row)
    causal = torch.ones(n, n, dtype=torch.bool).tril()

    def padded(left: int, right: int) -> MicroBatch:
        width = left + n + right
        ids, positions = torch.zeros(1, width, dtype=torch.long), torch.zeros(1, width, dtype=torch.long)
        visible = torch.eye(width, dtype=torch.bool)[None].clone()
        ids[0, left : left + n] = torch.tensor(row)
        positions[0, left : left + n] = torch.arange(n)
        visible[0, left : left + n, left : left + n] = causal
        at = torch.arange(left + len(prompt) - 1, left + n)
        return MicroBatch(ids, positions, visible, at, torch.tensor(completion), torch.zeros(len(completion), dtype=torch.long))

    with torch.no_grad():
        expected = token_scores(lm, prompt, completion)
        for batch in (padded(0, 0), padded(7, 0), padded(0, 7)):
            got = Scorer(lm)(**inputs_of(batch))
            assert (got - expected).abs().max().item() <= 1e-4
        plain = padded(0, 7)
        plain.visible = None
        plain.positions = torch.arange(n + 7)[None]
        assert (Scorer(lm)(**inputs_of(plain)) - expected).abs().max().item() <= 1e-4


def test_a_probe_scores_every_token_but_the_first_of_each_row():
    lm = tiny_models.llama()
    rows = [some_ids(1, 9), some_ids(2, 2), some_ids(3, 5)]
    batch = pack_sequences(rows)
    with torch.no_grad():
        scores = Scorer(lm)(**inputs_of(batch))
        for k, row in enumerate(rows):
            expected = token_scores(lm, row[:1], row[1:])
            assert (scores[batch.side == k] - expected).abs().max().item() <= 1e-4


# --- over-long prompts
def long_prompts(overlong: str) -> PromptBuilder:
    tokenizer = tiny_models.word_tokenizer()
    return PromptBuilder([tokenizer], [default_formatter], [8], overlong)


ITEMS = [
    {"prompt": "w3 w4"},
    {"prompt": " ".join(f"w{k}" for k in range(10, 40))},
    {"prompt": " ".join(f"w{k}" for k in range(3, 10))},
]


def test_an_overlong_prompt_ends_the_run_naming_its_task():
    with pytest.raises(PromptError, match=r"task 1, agent 0: the prompt has 31 tokens, but only 8"):
        long_prompts("error").build(ITEMS)


def test_an_overlong_prompt_is_dropped_and_counted():
    builder = long_prompts("drop")
    assert [joint.index for joint in builder.build(ITEMS)] == [0, 2]
    assert (builder.dropped, builder.truncated) == (["task 1, agent 0"], [])


def test_a_run_whose_every_task_is_dropped_ends_and_names_the_first():
    with pytest.raises(PromptError, match=r"none of the 1 tasks is left: .*\(task 1, agent 0\).*overlong_prompt is drop"):
        long_prompts("drop").build_some(ITEMS, [1])
    assert long_prompts("drop").build_some([]) == []


def test_the_writer_whose_prompt_is_too_long_is_named():
    tokenizer = tiny_models.word_tokenizer()
    other = PromptBuilder([tokenizer] * 2, [default_formatter] * 2, [99, 8], "drop", writers=["comparator 0", "comparator 1"])
    assert len(other.build(ITEMS)) == 2 and other.dropped == ["task 1, comparator 1"]
    other.build(ITEMS[:1])
    assert other.dropped == []


def test_an_overlong_prompt_keeps_its_end_and_its_bos():
    builder = long_prompts("truncate_left")
    built = builder.build(ITEMS)
    assert [joint.index for joint in built] == [0, 1, 2]
    assert (builder.dropped, builder.truncated) == ([], ["task 1, agent 0"])
    assert built[1].prompts[0].ids == (1, 33, 34, 35, 36, 37, 38, 39)
    assert built[1].prompts[0].text.split() == ["<s>", "w33", "w34", "w35", "w36", "w37", "w38", "w39"]
    assert built[2].prompts[0].ids == (1, 3, 4, 5, 6, 7, 8, 9)
    batch = packed([PairTokens(joint.prompts[0].ids, [4, 5, 6], [7]) for joint in built])
    assert batch.visible.any(-1).all()
    with torch.no_grad():
        assert Scorer(tiny_models.gpt2())(**inputs_of(batch)).isfinite().all()


@pytest.mark.parametrize(("limit", "kept"), [(1, (9,)), (2, (1, 9))])
def test_the_shortest_truncations_leave_a_prompt(limit, kept):
    builder = PromptBuilder([tiny_models.word_tokenizer()], [default_formatter], [limit], "truncate_left")
    assert builder.build([{"prompt": "w7 w8 w9"}])[0].prompts[0].ids == kept


# --- the vocabulary in chunks
def test_chunked_log_probs_keep_a_fraction_of_the_memory():
    """Saved bytes, counted once per storage; a kept chunk of logits would show (public report: slime#1951)."""
    vocab, tokens, width = 50_000, 2_000, 64
    generator = torch.Generator().manual_seed(0)
    weight = (0.05 * torch.randn(vocab, width, generator=generator)).requires_grad_()
    hidden = torch.randn(tokens, width, generator=generator).requires_grad_()
    target = torch.randint(0, vocab, (tokens,), generator=generator)
    upstream = torch.randn(tokens, generator=generator)

    def saved_by(chunk: int):
        saved: dict[int, int] = {}

        def keep(tensor):
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            value = token_logprobs(hidden, target, lambda h: h @ weight.T, chunk)
        return sum(saved.values()), value

    full_bytes, full = saved_by(tokens)
    full = full.detach()
    assert full_bytes > 4 * vocab * tokens  # this way does hold the logits
    chunk_bytes, chunked = saved_by(128)
    assert chunk_bytes < 0.25 * full_bytes
    assert (full - chunked).abs().max().item() <= 1e-5
    ours = torch.autograd.grad(chunked, (hidden, weight), upstream)
    # ∂ log p(t) / ∂z = onehot(t) − softmax(z), through z = W h; a part at a time, as memory is dear here too.
    reference = [torch.zeros(tokens, width), torch.zeros(vocab, width)]
    with torch.no_grad():
        for rows in torch.arange(tokens).split(250):
            slope = (hidden[rows] @ weight.T).softmax(-1).neg_()
            slope[torch.arange(len(rows)), target[rows]] += 1
            slope *= upstream[rows, None]
            reference[0][rows] = slope @ weight
            reference[1] += slope.T @ hidden[rows]
    for a, b in zip(ours, reference):
        assert (a - b).abs().max().item() <= 1e-5
        assert b.abs().max().item() > 0.01


def test_token_log_probs_are_a_log_softmax_computed_in_fp32_or_wider():
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(VOCAB, 8, generator=generator, dtype=torch.float64)
    hidden = torch.randn(11, 8, generator=generator, dtype=torch.float64)
    target = torch.randint(0, VOCAB, (11,), generator=generator)
    reference = (hidden @ weight.T).log_softmax(-1)[torch.arange(11), target]
    for chunk in (1, 4, 11, 100):
        assert torch.allclose(token_logprobs(hidden, target, lambda h: h @ weight.T, chunk), reference, rtol=0, atol=1e-12)
    low = token_logprobs(hidden.bfloat16(), target, lambda h: h @ weight.T.bfloat16(), 4)
    logits = (hidden.bfloat16() @ weight.T.bfloat16()).float()
    assert low.dtype == torch.float32
    assert torch.allclose(low, logits.log_softmax(-1)[torch.arange(11), target], rtol=0, atol=1e-5)


# --- what a model's forward takes
SMALL = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def made(model, config):
    torch.manual_seed(0)
    return model(config).eval()


def fitted(lm, layout="auto"):
    scorer = Scorer(lm)
    return scorer, fit_to_model(scorer, lambda batch: scorer(**inputs_of(batch)), layout, 1e-3, "cpu")


@pytest.mark.parametrize(
    "make",
    [
        lambda: made(Gemma2ForCausalLM, Gemma2Config(**SMALL, head_dim=16, final_logit_softcapping=2.0)),
        lambda: made(GraniteForCausalLM, GraniteConfig(**SMALL, logits_scaling=7.0)),
        lambda: made(CohereForCausalLM, CohereConfig(**SMALL, logit_scale=0.3)),
        tiny_models.llama,
        tiny_models.gpt2,
    ],
    ids=["gemma2", "granite", "cohere", "llama", "gpt2"],
)
def test_the_head_gives_the_models_own_logits(make):
    lm = make()
    ids = torch.tensor([some_ids(1, 9)])
    with torch.no_grad():
        own = lm(input_ids=ids).logits
        hidden = lm.base_model(input_ids=ids)[0]
        assert (Scorer(lm)._head(hidden) - own).abs().max().item() <= 1e-5
        plain = lm.get_output_embeddings()(hidden)
    changed = (plain - own).abs().max().item()
    assert (changed > 0.01) == (type(lm).__name__[:5] in ("Gemma", "Grani", "Coher"))
    scorer, _ = fitted(lm)
    assert scorer.whole_logits is False


def test_a_model_with_logits_of_its_own_is_scored_through_its_whole_forward():
    lm = made(tiny_models.HalvedLogits, tiny_models.llama_config())
    scorer, layout = fitted(lm)
    assert (scorer.whole_logits, layout) == (True, "shared")
    pair = PairTokens(some_ids(1, 4), some_ids(2, 5), some_ids(3, 3))
    batch = packed([pair])
    with torch.no_grad():
        sums = sum_by_side(scorer(**inputs_of(batch)), batch.side, 2)
        expected = [completion_score(lm, pair.prompt, ids, False).item() for ids in (pair.winner, pair.loser)]
    assert sums.tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_models_that_take_our_mask_share_the_prompt(attn):
    assert fitted(tiny_models.gpt2(attn=attn))[1] == "shared"
    assert fitted(tiny_models.llama(attn=attn))[1] == "shared"
    assert fitted(tiny_models.llama(attn=attn), "rows")[1] == "rows"


def test_sliding_windows_get_plain_rows():
    assert fitted(made(MistralForCausalLM, MistralConfig(**SMALL, sliding_window=4096)))[1] == "rows"
    assert fitted(made(MistralForCausalLM, MistralConfig(**SMALL, sliding_window=None)))[1] == "shared"
    window_off = Qwen2Config(**SMALL, use_sliding_window=False, sliding_window=32)
    assert fitted(made(Qwen2ForCausalLM, window_off))[1] == "shared"


def test_a_shared_layout_that_gives_wrong_numbers_is_refused():
    lm = made(MistralForCausalLM, MistralConfig(**SMALL, sliding_window=4))
    with pytest.raises(ValueError, match=r"row_layout.*write auto or rows"):
        fitted(lm, "shared")


def test_a_window_longer_than_the_probe_is_refused_for_the_shared_layout_too():
    # Refused, or right for rows longer than the window as well; nothing between the two.
    lm = made(MistralForCausalLM, MistralConfig(**SMALL, sliding_window=32))
    pair = PairTokens(some_ids(1, 40), some_ids(2, 12), some_ids(3, 12))
    try:
        scorer, layout = fitted(lm, "shared")
    except ValueError:
        return
    batch = packed([pair], layout)
    with torch.no_grad():
        sums = sum_by_side(scorer(**inputs_of(batch)), batch.side, 2)
        expected = [completion_score(lm, pair.prompt, ids, False).item() for ids in (pair.winner, pair.loser)]
    assert sums.tolist() == pytest.approx(expected, abs=1e-3)
