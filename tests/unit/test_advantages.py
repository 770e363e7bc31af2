"""Advantages, KL, value and preference losses and importance weights against closed forms and autograd."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from comlrl_ds.maths.advantages import advantages, bradley_terry, importance_weights, k3, kl_sum, normalized, value_loss

MODES = ("mean", "raw", "max", "rloo")
NAN, INF = math.nan, math.inf


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def close(a, b, within=1e-12):
    return torch.allclose(a, b, rtol=0, atol=within)


numbers = st.floats(-100, 100)
groups = st.integers(2, 6).flatmap(lambda g: st.lists(st.lists(numbers, min_size=g, max_size=g), min_size=1, max_size=4))


# --- advantages
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("mean", [[-1.0, -0.5, 1.5], [0.0, 0.0, 0.0]]),
        ("raw", [[0.0, 0.5, 2.5], [-3.0, -3.0, -3.0]]),
        ("max", [[-2.5, -2.0, 0.0], [0.0, 0.0, 0.0]]),
        ("rloo", [[-1.5, -0.75, 2.25], [0.0, 0.0, 0.0]]),
    ],
)
def test_advantages_by_hand(mode, expected):
    assert advantages(torch.tensor([[0.0, 0.5, 2.5], [-3.0, -3.0, -3.0]]), mode).tolist() == expected


@given(groups)
def test_advantages_are_the_table_of_the_page(rows):
    for mode in MODES:
        found = advantages(double(rows), mode)
        assert found.shape == (len(rows), len(rows[0]))
        for row, adv in zip(rows, found.tolist()):
            for g, value in enumerate(row):
                others = row[:g] + row[g + 1 :]
                baseline = {"mean": sum(row) / len(row), "raw": 0.0, "max": max(row), "rloo": sum(others) / len(others)}
                assert adv[g] == pytest.approx(value - baseline[mode], abs=1e-11)


@given(groups)
def test_leave_one_out_is_the_mean_baseline_scaled(rows):
    size = len(rows[0])
    assert close(advantages(double(rows), "rloo"), advantages(double(rows), "mean") * size / (size - 1), 1e-11)


def test_the_input_stays_as_it_is():
    returns = double([[1.0, 2.0]])
    for mode in MODES:
        advantages(returns, mode).zero_()
    normalized(returns).zero_()
    normalized(returns[:, :1]).zero_()
    assert returns.tolist() == [[1.0, 2.0]]


def test_a_single_response_has_no_others():
    returns = double([[2.0], [5.0]])
    assert advantages(returns, "mean").tolist() == advantages(returns, "max").tolist() == [[0.0], [0.0]]
    assert advantages(returns, "raw").tolist() == [[2.0], [5.0]]
    with pytest.raises(ValueError, match=r"rloo.*at least 2"):
        advantages(returns, "rloo")


def test_no_task_has_no_advantage():
    assert [advantages(torch.zeros(0, 3), mode).shape for mode in MODES] == [(0, 3)] * 4


@pytest.mark.parametrize("shape", [(3,), (2, 0), (1, 2, 3)])
@pytest.mark.parametrize("mode", MODES)
def test_returns_need_tasks_and_responses(shape, mode):
    with pytest.raises(ValueError, match=r"\[tasks, G\]"):
        advantages(torch.zeros(shape), mode)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="'median' is not one of mean, raw, max, rloo"):
        advantages(torch.zeros(1, 2), "median")
    with pytest.raises(ValueError, match="'column' is not one of row, all"):
        normalized(torch.zeros(1, 2), "column")
    with pytest.raises(ValueError, match="'clipped' is not one of none, truncated"):
        importance_weights(torch.zeros(1), torch.zeros(1), "clipped", 2.0)


# --- normalisation
def test_normalized_by_hand():
    adv = double([[1.0, 3.0], [10.0, 30.0]])
    assert close(normalized(adv), double([[-1.0, 1.0], [-1.0, 1.0]]))
    deviation = math.sqrt((100 + 64 + 1 + 361) / 4)  # around 11, divided by 4 and not by 3
    assert close(normalized(adv, "all"), (adv - 11) / deviation)


@given(groups, st.sampled_from(["row", "all"]))
def test_normalized_has_mean_zero_and_deviation_one(rows, grouping):
    adv = double(rows)
    found = normalized(adv, grouping)
    assert found.shape == adv.shape
    for before, after in zip(adv, found) if grouping == "row" else [(adv, found)]:
        spread = before.std(correction=0)
        assert abs(after.mean()) < 1e-4
        if spread > 1e-3:
            assert after.std(correction=0) == pytest.approx(1, abs=1e-9)


def test_all_takes_the_samples_of_a_buffer_whatever_their_shape():
    flat = double([1.0, 3.0, 10.0, 30.0, 0.0, 4.0])
    assert close(normalized(flat, "all").view(2, 3), normalized(flat.view(2, 3), "all"))
    with pytest.raises(ValueError, match=r"\[tasks, G\].*\(6,\)"):
        normalized(flat, "row")


def test_equal_returns_teach_nothing():
    # 0.1 is no binary fraction: in fp32 the mean of three is off by 7e-9, which the least deviation would make 7e-3.
    for grouping in ("row", "all"):
        found = normalized(advantages(torch.full((2, 3), 0.1), "mean"), grouping)
        assert found.abs().max() < 1e-9


def test_the_least_deviation_bounds_what_is_divided():
    assert close(normalized(double([[-1e-9, 1e-9]])), double([[-1e-3, 1e-3]]))


def test_a_group_of_one_keeps_its_advantage():
    assert normalized(double([[2.0], [-5.0]])).tolist() == [[2.0], [-5.0]]
    assert normalized(double([2.0]), "all").tolist() == [2.0]
    assert close(normalized(double([[2.0], [-5.0]]), "all"), double([[1.0], [-1.0]]))
    assert normalized(double([]), "all").shape == (0,)


# --- the four backends (W2 of the peer)
def test_the_four_backends_differ():
    returns = double([[0.0, 0.5, 2.5], [1.0, -1.0, 4.0]])
    found = [advantages(returns, mode) for mode in MODES]
    for k, a in enumerate(found):
        assert all((a - b).abs().max() > 0.1 for b in found[:k])


@given(groups)
def test_normalised_they_are_one(rows):
    returns = double(rows)
    assume(returns.std(1, correction=0).min() > 1e-3)
    mean, *others = [normalized(advantages(returns, mode)) for mode in MODES]
    assert all(close(mean, other, 1e-8) for other in others)


# --- KL
def test_k3_by_hand():
    p, ref = double([0.5, 0.25, 0.125]), double([0.25, 0.5, 0.125])
    expected = [0.5 - math.log(0.5) - 1, 2 - math.log(2) - 1, 0.0]
    assert close(k3(p.log(), ref.log()), double(expected))


@given(st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0)), min_size=1, max_size=9))
def test_k3_is_never_negative_and_zero_without_difference(pairs):
    logp, ref = double(pairs).T
    assert k3(logp, ref).min() >= -1e-15
    assert k3(logp, logp).tolist() == [0.0] * len(pairs)


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=6), st.lists(st.floats(-3, 3), min_size=6, max_size=6))
def test_k3_has_the_kl_as_its_expectation(a, b):
    p, q = double(a).log_softmax(0), double(b[: len(a)]).log_softmax(0)
    kl = (p.exp() * (p - q)).sum()  # over the whole vocabulary, so exact
    assert close((p.exp() * k3(p, q)).sum(), kl)


def test_a_small_difference_is_not_lost_to_rounding():
    # d²/2 to second order; exp(d) − 1 − d by itself, even in fp64, would be off by a part in 40.
    for d in (1e-7, -1e-7):
        assert k3(double([-1.0]), double([-1.0 + d])).item() == pytest.approx(d * d / 2, rel=1e-4)
    logp = torch.tensor([-1.0, -20.0])
    nearby = torch.nextafter(logp, torch.zeros(2))
    d = nearby.double() - logp.double()
    assert torch.allclose(k3(logp, nearby), d * d / 2, rtol=1e-4, atol=0)


RAGGED = [[1.0, 2.0, 4.0], [8.0], [], [16.0, 32.0]]


@pytest.mark.parametrize("padding", [0.0, 7.0, NAN, INF])
def test_sums_leave_padding_out(padding):
    lengths = torch.tensor([len(row) for row in RAGGED])
    padded = torch.tensor([row + [padding] * (5 - len(row)) for row in RAGGED], requires_grad=True)
    assert kl_sum(padded, lengths).tolist() == [7.0, 8.0, 0.0, 48.0]
    kl_sum(padded, lengths).sum().backward()
    assert padded.grad.sum(1).tolist() == lengths.tolist()
    flat = torch.tensor([x for row in RAGGED for x in row])
    assert kl_sum(flat, lengths).tolist() == [7.0, 8.0, 0.0, 48.0]


def test_a_sum_of_nothing():
    nothing = torch.zeros(0, dtype=torch.long)
    assert kl_sum(torch.zeros(0, 4), nothing).shape == kl_sum(torch.zeros(0), nothing).shape == (0,)
    assert kl_sum(torch.zeros(0), torch.tensor([0, 0])).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("shape", "lengths"),
    [
        ((5,), [2, 2]), ((3,), [2, 2]), ((4,), [5, -1]),
        ((2, 3), [3]), ((2, 3), [3, 4]), ((2, 3), [3, -1]), ((2, 3), [3.0, 1.0]), ((2, 3), [[3, 1]]), ((2, 3, 1), [1, 1]),
    ],
)  # fmt: skip
def test_lengths_that_do_not_fit(shape, lengths):
    with pytest.raises(ValueError, match=r"lengths|completions"):
        kl_sum(torch.zeros(shape), torch.tensor(lengths))


# --- value loss
def test_value_loss_by_hand():
    v, target, old = double([1.0, 0.0, 3.0]), double([2.0, -2.0, 3.0]), double([0.0, 0.1, 0.0])
    assert value_loss(v, target).item() == pytest.approx((1 + 4 + 0) / 3)
    # Clipped to 0.2, 0.0 (has moved by less), 0.2: the first and the third count as further away.
    assert value_loss(v, target, old, 0.2).item() == pytest.approx((1.8**2 + 4 + 2.8**2) / 3)
    assert value_loss(v, target, old).item() == value_loss(v, target).item()


@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=6), st.floats(0.01, 10))
def test_value_loss_and_its_slope(samples, clip):
    v, target, old = (column.clone() for column in double(samples).T)
    squares, slopes = [], []
    for a, t, o in samples:
        inside = min(max(a, o - clip), o + clip)
        plain, clipped = (t - a) ** 2, (t - inside) ** 2
        assume(abs(plain - clipped) > 1e-6 or abs(a - inside) < 1e-12)
        assume(abs(abs(a - o) - clip) > 1e-6)
        squares.append(max(plain, clipped))
        # A value beyond the range has no slope where its clipped square is the larger.
        slopes.append(0.0 if clipped > plain else 2 * (a - t) / len(samples))
    v.requires_grad_()
    loss = value_loss(v, target, old, clip)
    loss.backward()
    assert loss.item() == pytest.approx(sum(squares) / len(squares), rel=1e-9, abs=1e-9)
    assert close(v.grad, double(slopes), 1e-6)
    v.grad = None
    value_loss(v, target).backward()
    assert close(v.grad, 2 * (v - target).detach() / len(samples))


def test_value_loss_of_what_does_not_fit():
    one, column = torch.zeros(3), torch.zeros(3, 1)
    for call, part in (
        (lambda: value_loss(one, column), "same shape"),
        (lambda: value_loss(one, one, column, 0.2), "same shape"),
        (lambda: value_loss(one, one, None, 0.2), "needs old"),
        (lambda: value_loss(one, one, one, 0.0), "positive"),
        (lambda: value_loss(one, one, one, NAN), "positive"),
        (lambda: value_loss(one[:0], one[:0]), "no samples"),
    ):
        with pytest.raises(ValueError, match=part):
            call()


def test_values_in_half_precision_get_their_gradient_back():
    v = torch.tensor([1.0, 2.0], dtype=torch.bfloat16, requires_grad=True)
    value_loss(v, double([0.0, 4.0])).backward()
    assert v.grad.dtype == torch.bfloat16
    assert v.grad.tolist() == [1.0, -2.0]


# --- Bradley–Terry
@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=9))
def test_bradley_terry_and_its_slopes(pairs):
    winner, loser = (column.clone().requires_grad_() for column in double(pairs).T)
    terms = bradley_terry(winner.detach(), loser.detach())
    # The probability that the winner wins is its share of two exponentials: a softmax, apart from the library's logsigmoid.
    reference = torch.stack([winner, loser]).logsumexp(0) - winner
    reference.sum().backward()
    assert close(terms.loss, reference.detach())
    assert close(terms.mean, reference.detach().mean())
    assert close(terms.winner_slope, winner.grad)
    assert close(terms.loser_slope, loser.grad)
    assert terms.margin.tolist() == [w - x for w, x in pairs]


def test_bradley_terry_by_hand():
    terms = bradley_terry(torch.tensor([2.0, 0.0]), torch.tensor([0.5, 0.0]))
    assert terms.loss.tolist() == pytest.approx([math.log(1 + math.exp(-1.5)), math.log(2)], abs=1e-15)
    assert terms.winner_slope.tolist() == pytest.approx([-1 / (1 + math.exp(1.5)), -0.5], abs=1e-15)
    assert terms.loser_slope.tolist() == pytest.approx([1 / (1 + math.exp(1.5)), 0.5], abs=1e-15)


def test_the_mean_can_be_trained_on():
    winner, loser = double([1.0, 2.0]).requires_grad_(), double([1.5, -2.0]).requires_grad_()
    terms = bradley_terry(winner, loser)
    terms.mean.backward()
    assert close(winner.grad, terms.winner_slope.detach() / 2)
    assert close(loser.grad, terms.loser_slope.detach() / 2)


def test_far_scores_neither_overflow_nor_vanish():
    terms = bradley_terry(double([-1e5, 1e5]), double([1e5, -1e5]))
    assert terms.loss.tolist() == [2e5, 0.0]
    assert terms.winner_slope.tolist() == [-1.0, 0.0]
    assert terms.loser_slope.tolist() == [1.0, 0.0]


@pytest.mark.parametrize(("a", "b"), [((3,), (3, 1)), ((3,), (2,)), ((3, 1), (3, 1)), ((), ())])
def test_scores_need_one_shape(a, b):
    with pytest.raises(ValueError, match="shape"):
        bradley_terry(torch.zeros(a), torch.zeros(b))


# --- importance weights
def test_importance_weights_by_hand():
    trainer = torch.tensor([0.5, 0.2, 0.9, 0.5]).double().log()
    engine = torch.tensor([0.5, 0.4, 0.3, 0.25]).double().log()
    assert importance_weights(trainer, engine, "none", 2.0).tolist() == [1.0] * 4
    assert importance_weights(trainer, engine, "truncated", 2.5).tolist() == pytest.approx([1.0, 0.5, 2.5, 2.0], abs=1e-7)
    assert importance_weights(trainer, engine, "truncated").tolist() == pytest.approx([1.0, 0.5, 2.0, 2.0], abs=1e-7)
    # Shapes are free: tokens of padded rows, or sums of completions.
    assert importance_weights(trainer.view(2, 2), engine.view(2, 2), "truncated", 2.0).shape == (2, 2)


def test_a_weight_is_a_constant_of_the_loss():
    logp = double([-1.0, -2.0]).requires_grad_()
    weights = importance_weights(logp, double([-1.5, -1.0]), "truncated", 2.0)
    assert not weights.requires_grad
    (weights * logp).sum().backward()
    assert close(logp.grad, double([math.exp(0.5), math.exp(-1.0)]))


def test_what_the_engine_thought_impossible_weighs_no_more_than_the_bound():
    logp = double([-1.0, -INF, -1e5])
    assert importance_weights(logp, double([-1e5, -1.0, -1.0]), "truncated", 2.0).tolist() == [2.0, 0.0, 0.0]
    assert importance_weights(double([-1.0]), double([-INF]), "truncated", 3.0).tolist() == [3.0]


@pytest.mark.parametrize("mode", ["none", "truncated"])
def test_weights_of_what_does_not_fit(mode):
    with pytest.raises(ValueError, match="same shape"):
        importance_weights(torch.zeros(3), torch.zeros(3, 1), mode, 2.0)
    for clip in (0.0, -1.0, NAN):
        with pytest.raises(ValueError, match="positive"):
            importance_weights(torch.zeros(3), torch.zeros(3), mode, clip)


def test_shapes_of_log_probs_must_agree():
    with pytest.raises(ValueError, match=r"same shape.*\(3,\).*\(1, 3\)"):
        k3(torch.zeros(3), torch.zeros(1, 3))
