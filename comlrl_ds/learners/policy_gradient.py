"""Policy-gradient steps of all actors: loss = mean over tasks and samples of −A · log π_i(a_i)."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from comlrl_ds.cluster import call
from comlrl_ds.engines.engine import PolicyEngine
from comlrl_ds.learners.actors import ActorsLearner, JointReport
from comlrl_ds.maths.advantages import value_loss
from comlrl_ds.maths.packing import PairTokens, plan_micro_steps, row_length


@dataclass(frozen=True)
class Samples:
    """G joint responses to one task: `prompts` [agents] and `completions` [agents][G] as token ids, stop tokens included, and
    `logprobs` [agents][G] of their tokens in the engine that sampled them, where it said so.
    """

    prompts: Sequence[Sequence[int]]
    completions: Sequence[Sequence[Sequence[int]]]
    logprobs: Sequence[Sequence[Sequence[float]]] = ()


@dataclass(frozen=True)
class ValueTargets:
    """What value heads on the actors learn in the same step: `targets` [agents, tasks, G], and `old`, their values at
    collection, from which a value gains nothing more than `clip` away (None: any distance).
    """

    targets: Tensor
    old: Tensor
    clip: float | None
    coefficient: float


@dataclass(kw_only=True)
class GradientReport(JointReport):
    """One policy-gradient step; a culprit's sample is a task.

    `gaps`: mean |log p_trainer − log p_engine| of a token, NaN where engines said nothing. `value_losses` and `values` (means)
    of value heads, before the step.
    """

    losses: list[float]
    logprobs: list[float]
    gaps: list[float]
    value_losses: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


@dataclass
class PolicyGradientLearner(ActorsLearner):
    """Takes joint policy-gradient steps. Every token of a completion counts, its stop token too.

    Args:
        importance_clip: tokens count min(p_trainer / p_engine, clip) times, a constant of the loss; None: once.
        critic_type: of value heads on the actors: "v" or "q"; None: they have none.
    """

    importance_clip: float | None = field(default=None, kw_only=True)
    critic_type: str | None = field(default=None, kw_only=True)

    def step(
        self, batch: Sequence[Samples], advantages: Sequence[Sequence[Sequence[float]]], values: ValueTargets | None = None
    ) -> GradientReport:
        """One step of every actor, on −mean A · Σ_t w_t log p_t, with value heads + coefficient · value loss.

        Two samples of a task share their prompt's row, as the winner and loser of a pair do.

        Args:
            batch: [tasks]. advantages: [tasks][agents][G]. values: with value heads, what they learn.
        """
        started = time.perf_counter()
        self.cluster.spans.clear()
        samples = len(batch[0].completions[0])
        units = [(k, g) for k in range(len(batch)) for g in range(0, samples, 2)]
        agents = range(len(self.actors))
        pairs = [[_pair(batch[k], i, g) for k, g in units] for i in agents]  # [agents][units]
        # −A/(tasks · G), 0 for the place of a second sample that is not there.
        scale = -1.0 / (len(batch) * samples)
        weights = [[[scale * a for a in _two(advantages[k][i], g)] for k, g in units] for i in agents]
        lengths = [[row_length(pairs[i][u], True) for i in agents] for u in range(len(units))]
        plan = plan_micro_steps(
            lengths, self.max_tokens, self.max_pairs, self.rows_per_pair(), [b["ranks"] for b in self.budgets]
        )
        known = all(samples.logprobs for samples in batch)
        if self.importance_clip is not None and not known:
            raise ValueError("importance_correction needs the engines' log-probs of what they sampled; some are not there")
        sampled = [[_two(batch[k].logprobs[i], g, ()) for k, g in units] if known else [] for i in agents]
        heads = [_Head(values, i, units, samples) for i in agents] if values else []
        scores = torch.zeros(len(self.actors), len(units), 2, dtype=torch.float64)
        tokens, gaps = 0, torch.zeros(len(self.actors), 2, dtype=torch.float64)
        for micro in plan:
            parts = [([pairs[i][u] for u in micro], [sampled[i][u] for u in micro] if sampled[i] else []) for i in agents]
            results = self.all_do(
                [
                    call(PolicyEngine.score_samples, own, i not in self.frozen, theirs, self.importance_clip, self.critic_type)
                    for i, (own, theirs) in enumerate(parts)
                ]
            )
            for i, found in enumerate(results):
                scores[i, micro] = torch.tensor(found["sums"], dtype=torch.float64)
                gaps[i] += torch.tensor(found["gap"], dtype=torch.float64)
                tokens += found["tokens"]
            slopes = [head.learn(micro, found["values"]) for head, found in zip(heads, results)]
            # A value that is not finite makes its slope, and with it the gradient's norm, not finite.
            if not torch.isfinite(scores[:, micro]).all():
                break
            self.learners_do(
                [call(PolicyEngine.backward, [weights[i][u] for u in micro], slopes[i] if heads else []) for i in agents]
            )
        rates = self.all_do([call(PolicyEngine.learning_rate)] * len(self.actors))
        norms, culprit = self.finish(scores)
        if culprit is not None and culprit[1] is not None:
            culprit = (culprit[0], units[culprit[1]][0])
        losses = (torch.tensor(weights, dtype=torch.float64) * scores).sum((1, 2)).tolist()
        means = (scores.sum((1, 2)) / (len(batch) * samples)).tolist()
        spans = [list(self.cluster.spans.get(role, [])) for role in self.actors]
        seconds = time.perf_counter() - started
        return GradientReport(
            losses=losses, logprobs=means, grad_norms=norms, learning_rates=rates, tokens=tokens, micro_steps=len(plan),
            seconds=seconds, spans=spans, culprit=culprit, gaps=(gaps[:, 0] / gaps[:, 1]).tolist(),
            value_losses=[head.loss for head in heads], values=[head.mean for head in heads],
        )  # fmt: skip


class _Head:
    """One agent's value head in a step: its loss, and the slopes that its values learn with."""

    def __init__(self, values: ValueTargets, agent: int, units: Sequence[tuple[int, int]], samples: int) -> None:
        self._values, self._units, self._samples = values, units, samples
        self._targets, self._old = values.targets[agent].double(), values.old[agent].double()
        self._found = torch.full_like(self._targets, math.nan)

    def learn(self, micro: Sequence[int], found: Sequence[Sequence[float]]) -> list[list[float]]:
        """[micro][2] ∂loss/∂value; a second sample that is not there has none."""
        slopes = [[0.0, 0.0] for _ in micro]
        for slope, u, pair in zip(slopes, micro, found):
            k, g = self._units[u]
            for side in range(min(2, self._samples - g)):
                self._found[k, g + side] = pair[side]
                slope[side] = self._slope(k, g + side)
        return slopes

    def _slope(self, k: int, g: int) -> float:
        v = self._found[k, g].clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(self._loss(v[None], self._targets[k, g][None], self._old[k, g][None]), v)
        return float(slope) / self._targets.numel()

    def _loss(self, v: Tensor, target: Tensor, old: Tensor) -> Tensor:
        return self._values.coefficient * value_loss(v, target, old, self._values.clip)

    @property
    def loss(self) -> float:
        return float(self._loss(self._found.flatten(), self._targets.flatten(), self._old.flatten()))

    @property
    def mean(self) -> float:
        return float(self._found.mean())


def _pair(samples: Samples, agent: int, first: int) -> PairTokens:
    one, *other = samples.completions[agent][first : first + 2]
    return PairTokens(samples.prompts[agent], one, other[0] if other else ())


def _two(values: Sequence[Any], first: int, nothing: Any = 0.0) -> list[Any]:
    return [*values[first : first + 2], nothing][:2]
