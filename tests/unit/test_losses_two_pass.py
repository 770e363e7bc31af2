"""The joint step against the textbook way: all margins first, then each agent's own margin with a gradient."""

from __future__ import annotations

import math

import pytest
import tiny_models
import torch
from tiny_models import completion_score, some_ids
from torch.nn.functional import logsigmoid

from comlrl_ds.cluster import Cluster, call
from comlrl_ds.cluster.hostfile import slots_of_one_host
from comlrl_ds.cluster.launch import Launch
from comlrl_ds.cluster.layout import Layout, RolePlace, RolloutPlace
from comlrl_ds.engines.scorer import Scorer, inputs_of
from comlrl_ds.learners.madpo import MadpoLearner
from comlrl_ds.maths.logprobs import sum_by_side
from comlrl_ds.maths.packing import PairTokens, pack

ETA, RATE = 0.7, 0.05


class PlainEngine:
    """What `PolicyEngine` does, in float64 and without DeepSpeed: SGD, so that a step shows the gradient itself."""

    def __init__(self, lm, layout, graphs):
        self.graphs = graphs  # (open now, most at a time) over all engines
        self.scorer, self.layout, self.free = Scorer(lm.double(), chunk=7), layout, 1 << 40
        self.steps = self.discards = self.open = self.most_open = self.forwards = 0
        self.taken: list[torch.Tensor] = []

    def budget(self):
        return {"layout": self.layout, "ranks": 1, "free": self.free, "graph_bytes_per_token": 1000}

    def score_pairs(self, pairs, score_last_token, grad=False):
        batch = pack([p.group(score_last_token) for p in pairs], self.layout)
        self.forwards += 1
        self.open += grad
        self.most_open = max(self.most_open, self.open)
        self.graphs[0] += grad
        self.graphs[1] = max(self.graphs)
        with torch.set_grad_enabled(grad):
            self.scores = sum_by_side(self.scorer(**inputs_of(batch)), batch.side, 2 * len(pairs) + 1)[:-1].view(-1, 2)
        return self.scores.tolist(), batch.padded_tokens

    def backward(self, weights):
        self.open -= 1
        self.graphs[0] -= 1
        (self.scores * torch.tensor(weights, dtype=torch.float64)).sum().backward()

    def learn_pairs(self, pairs, score_last_token, weights):
        _, tokens = self.score_pairs(pairs, score_last_token, grad=True)
        self.backward(weights)
        return tokens

    @property
    def gradients(self):
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in self.scorer.parameters()]

    def gradient_norm(self):
        return math.sqrt(sum(g.square().sum().item() for g in self.gradients))

    def step(self):
        self.steps += 1
        self.taken = [g.clone() for g in self.gradients]
        with torch.no_grad():
            for p, g in zip(self.scorer.parameters(), self.taken):
                p -= RATE * g
        self.scorer.zero_grad()

    def discard(self):
        self.discards += 1
        self.scorer.zero_grad()

    def learning_rate(self):
        return RATE


def learner_of(lms, *, layout="shared", **settings):
    graphs = [0, 0]
    engines = {f"actor.{i}": PlainEngine(lm, layout, graphs) for i, lm in enumerate(lms)}
    cluster = Cluster(Launch())
    places = {role: RolePlace("all") for role in engines}
    cluster.layout = Layout(tuple(slots_of_one_host(1)), {"all": (0,)}, places, RolloutPlace(("all",)))
    cluster.create({role: call(lambda seat, engine: engine, engine) for role, engine in engines.items()})
    return MadpoLearner(cluster, list(engines), ETA, **settings), list(engines.values())


def models(agents):
    return [tiny_models.gpt2(seed, layers=1) for seed in range(agents)]


def batch_of(agents, equal):
    """[pairs][agents]; with unequal lengths one pair has sides without anything to score."""
    shapes = [(3, 6, 6)] * 5 if equal else [(3, 6, 2), (9, 1, 5), (1, 2, 12), (20, 8, 8), (5, 4, 1)]
    return [
        tuple(
            PairTokens(*(some_ids(100 * agent + 10 * k + part, n) for part, n in enumerate(shapes[(k + agent) % 5])))
            for agent in range(agents)
        )
        for k in range(5)
    ]


def two_pass(lms, batch, last):
    """The reference: (loss, margins [agents, pairs], gradients [agent][parameter])."""

    def margin(agent, pair):
        p = pair[agent]
        winner, loser = (completion_score(lms[agent], list(p.prompt), list(ids), last) for ids in (p.winner, p.loser))
        return winner - loser

    with torch.no_grad():
        margins = torch.stack([torch.stack([margin(i, pair) for pair in batch]) for i in range(len(lms))])
    gradients = []
    for i, lm in enumerate(lms):
        own = torch.stack([margin(i, pair) for pair in batch])
        others = margins.sum(0) - margins[i]
        loss = -logsigmoid(ETA * (own + others)).mean()
        gradients.append(torch.autograd.grad(loss, list(lm.parameters())))
    return loss.item(), margins, gradients


@pytest.mark.parametrize("equal", [True, False], ids=["equal", "unequal"])
@pytest.mark.parametrize("max_tokens", [10_000, 45], ids=["one-micro-step", "several"])
@pytest.mark.parametrize("last", [False, True], ids=["page", "last-token"])
@pytest.mark.parametrize("agents", [1, 2, 3])
def test_the_joint_step_equals_the_plain_two_pass_reference(agents, last, max_tokens, equal):
    batch = batch_of(agents, equal)
    references = [lm.double() for lm in models(agents)]
    loss, margins, gradients = two_pass(references, batch, last)
    for layout in ("shared", "rows"):
        learner, engines = learner_of(
            models(agents), layout=layout, score_last_token=last, max_tokens=max_tokens, margin_pass="one_forward"
        )
        report = learner.step(batch)
        assert (report.micro_steps == 1) == (max_tokens == 10_000)
        assert report.loss == pytest.approx(loss, abs=1e-10)
        assert (report.margins - margins).abs().max().item() <= 1e-10
        assert (report.joint_margins - margins.sum(0)).abs().max().item() <= 1e-10
        assert report.culprit is None
        for engine, reference, norm in zip(engines, gradients, report.grad_norms):
            assert engine.steps == 1
            assert max((a - b).abs().max().item() for a, b in zip(engine.taken, reference)) <= 1e-10
            assert norm == pytest.approx(math.sqrt(sum(g.square().sum().item() for g in reference)), rel=1e-9)


@pytest.mark.parametrize("max_tokens", [10_000, 45])
def test_one_forward_and_two_passes_take_the_same_step(max_tokens):
    batch = batch_of(2, False)
    taken = []
    for margin_pass in ("one_forward", "two_pass"):
        learner, engines = learner_of(models(2), max_tokens=max_tokens, margin_pass=margin_pass)
        report = learner.step(batch)
        taken.append((report, engines))
        forwards = report.micro_steps * (2 if margin_pass == "two_pass" else 1)
        assert [e.forwards for e in engines] == [forwards, forwards]
    (one, left), (two, right) = taken
    assert one.loss == pytest.approx(two.loss, abs=1e-12)
    assert (one.margins - two.margins).abs().max().item() <= 1e-12
    for a, b in zip(left, right):
        assert max((x - y).abs().max().item() for x, y in zip(a.taken, b.taken)) <= 1e-12


def test_auto_holds_the_graphs_only_where_they_fit():
    batch = batch_of(2, False)
    for share, passes in ((0.8, 1), (1e-12, 2)):
        learner, engines = learner_of(models(2), margin_pass="auto", graph_share=share)
        report = learner.step(batch)
        assert engines[0].forwards == passes * report.micro_steps


def test_no_engine_ever_has_two_open_forwards():
    # Several open forwards with several backwards give silently wrong gradients at ZeRO-3.
    # One forward keeps the graphs of all agents while margins are exchanged; two passes exist to hold one at a time.
    for margin_pass, graphs in (("one_forward", 2), ("two_pass", 1)):
        learner, engines = learner_of(models(2), max_tokens=45, margin_pass=margin_pass)
        assert learner.step(batch_of(2, False)).micro_steps > 1
        assert [(e.most_open, e.open) for e in engines] == [(1, 0), (1, 0)]
        assert engines[0].graphs == [0, graphs]


def test_all_margins_are_taken_at_the_same_parameters():
    # Agent 1's gradient must not see agent 0's step of the same batch: the second step differs from the first.
    batch = batch_of(2, True)
    learner, engines = learner_of(models(2))
    first = learner.step(batch)
    second = learner.step(batch)
    assert second.loss < first.loss
    references = [e.scorer.lm for e in engines]
    loss, margins, gradients = two_pass(references, batch, False)
    third = learner.step(batch)
    assert third.loss == pytest.approx(loss, abs=1e-10)
    assert max((a - b).abs().max().item() for a, b in zip(engines[1].taken, gradients[1])) <= 1e-10
    assert (third.margins - margins).abs().max().item() <= 1e-10


def test_log_probs_of_both_sides_are_reported():
    batch = batch_of(2, True)
    learner, engines = learner_of(models(2))
    with torch.no_grad():
        expected = [
            [
                sum(completion_score(e.scorer.lm, p[i].prompt, getattr(p[i], side), False).item() for p in batch) / len(batch)
                for i, e in enumerate(engines)
            ]
            for side in ("winner", "loser")
        ]
    report = learner.step(batch)
    assert report.winner_logprobs == pytest.approx(expected[0], abs=1e-9)
    assert report.loser_logprobs == pytest.approx(expected[1], abs=1e-9)
    assert report.learning_rates == [RATE, RATE]


# --- numbers that are not finite
def untouched(engines, before):
    for engine, old in zip(engines, before):
        assert (engine.steps, engine.discards) == (0, 1)
        assert all(torch.allclose(p, q, rtol=0, atol=0, equal_nan=True) for p, q in zip(engine.scorer.parameters(), old))
        assert not any(g.any() for g in engine.gradients)


@pytest.mark.parametrize("margin_pass", ["one_forward", "two_pass"])
@pytest.mark.parametrize("max_tokens", [10_000, 45])
def test_a_score_that_is_not_finite_drops_the_step_on_every_agent(margin_pass, max_tokens):
    learner, engines = learner_of(models(3), max_tokens=max_tokens, margin_pass=margin_pass)
    batch = batch_of(3, False)
    # A token that only agent 1's part of pair 3 holds, with an embedding that is NaN.
    lm = engines[1].scorer.lm
    lm.lm_head.weight = torch.nn.Parameter(lm.lm_head.weight.detach().clone())
    lm.transformer.wte.weight.data[2] = torch.nan
    pair = batch[3][1]
    batch[3] = (batch[3][0], PairTokens(pair.prompt, [2, *pair.winner], pair.loser), batch[3][2])
    before = [[p.detach().clone() for p in e.scorer.parameters()] for e in engines]
    report = learner.step(batch)
    assert report.skipped
    assert report.culprit == (1, 3)
    untouched(engines, before)


def test_an_infinite_gradient_norm_of_one_agent_drops_the_step_on_every_agent():
    learner, engines = learner_of(models(3))

    class Overflowing(PlainEngine):
        def gradient_norm(self):
            return math.inf

    engines[2].__class__ = Overflowing
    before = [[p.detach().clone() for p in e.scorer.parameters()] for e in engines]
    report = learner.step(batch_of(3, True))
    assert report.culprit == (2, None)
    assert report.grad_norms[2] == math.inf
    assert all(math.isfinite(norm) for norm in report.grad_norms[:2])
    untouched(engines, before)


def test_a_dropped_step_leaves_nothing_behind_for_the_next():
    batch = batch_of(2, True)
    learner, engines = learner_of(models(2), max_tokens=45)
    weight = engines[0].scorer.lm.transformer.wte.weight
    kept = weight.detach().clone()
    weight.data.fill_(torch.nan)
    assert learner.step(batch).skipped
    weight.data.copy_(kept)
    report = learner.step(batch)
    fresh, others = learner_of(models(2), max_tokens=45)
    expected = fresh.step(batch)
    assert report.loss == expected.loss
    assert all(torch.equal(x, y) for a, b in zip(engines, others) for x, y in zip(a.taken, b.taken))
