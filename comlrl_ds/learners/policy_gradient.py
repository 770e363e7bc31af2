"""Policy-gradient steps of all actors: loss = mean over tasks and samples of −A · log π_i(a_i)."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from comlrl_ds.cluster import call
from comlrl_ds.engines.engine import PolicyEngine
from comlrl_ds.learners.actors import ActorsLearner, JointReport
from comlrl_ds.maths.advantages import value_loss
from comlrl_ds.maths.packing import Completions, plan_micro_steps, row_length, runs

Unit = list[tuple[int, int]]  # samples of one prompt that are scored together: each the place in the batch, and which of its G


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

        Samples of a prompt share its row, as the winner and loser of a pair do (`runs`).

        Args:
            batch: [tasks]. advantages: [tasks][agents][G]. values: with value heads, what they learn.
        """
        started = time.perf_counter()
        self.cluster.spans.clear()
        samples = len(batch[0].completions[0])
        units = self._units(batch)
        agents = range(len(self.actors))
        groups = [[_group(batch, i, unit) for unit in units] for i in agents]  # [agents][units]
        # ∂loss/∂log-prob of a completion: −A/(tasks · G).
        weights = torch.tensor(advantages, dtype=torch.float64).transpose(0, 1) * (-1.0 / (len(batch) * samples))
        slopes = [[weights[i, *_at(unit)].tolist() for unit in units] for i in agents]
        lengths = [[row_length(groups[i][u]) for i in agents] for u in range(len(units))]
        most = None if self.max_pairs is None else max(1, 2 * self.max_pairs // max(map(len, units)))
        plan = plan_micro_steps(lengths, self.max_tokens, most, 1, [b["ranks"] for b in self.budgets])
        known = all(samples.logprobs for samples in batch)
        if self.importance_clip is not None and not known:
            raise ValueError("importance_correction needs the engines' log-probs of what they sampled; some are not there")
        sampled = [[[batch[k].logprobs[i][g] for k, g in unit] for unit in units] if known else [] for i in agents]
        heads = [_Head(values, i, units) for i in agents] if values else []
        scores = torch.zeros_like(weights)  # [agents, tasks, G]
        tokens, gaps = 0, torch.zeros(len(self.actors), 2, dtype=torch.float64)
        for micro in plan:
            parts = [([groups[i][u] for u in micro], [sampled[i][u] for u in micro] if sampled[i] else []) for i in agents]
            results = self.all_do(
                [
                    call(PolicyEngine.score_samples, own, i not in self.frozen, theirs, self.importance_clip, self.critic_type)
                    for i, (own, theirs) in enumerate(parts)
                ]
            )
            for i, found in enumerate(results):
                for u, sums in zip(micro, found["sums"]):
                    scores[i, *_at(units[u])] = torch.tensor(sums, dtype=torch.float64)
                gaps[i] += torch.tensor(found["gap"], dtype=torch.float64)
                tokens += found["tokens"]
            value_slopes = [head.learn(micro, found["values"]) for head, found in zip(heads, results)]
            # A value that is not finite makes its slope, and with it the gradient's norm, not finite.
            if not torch.isfinite(scores).all():
                break
            self.learners_do(
                [call(PolicyEngine.backward, [slopes[i][u] for u in micro], value_slopes[i] if heads else []) for i in agents]
            )
        rates = self.all_do([call(PolicyEngine.learning_rate)] * len(self.actors))
        norms, culprit = self.finish(scores)
        losses = (weights * scores).sum((1, 2)).tolist()
        means = (scores.sum((1, 2)) / (len(batch) * samples)).tolist()
        spans = [list(self.cluster.spans.get(role, [])) for role in self.actors]
        seconds = time.perf_counter() - started
        return GradientReport(
            losses=losses, logprobs=means, grad_norms=norms, learning_rates=rates, tokens=tokens, micro_steps=len(plan),
            seconds=seconds, spans=spans, culprit=culprit, gaps=(gaps[:, 0] / gaps[:, 1]).tolist(),
            value_losses=[head.loss for head in heads], values=[head.mean for head in heads],
        )  # fmt: skip

    def _units(self, batch: Sequence[Samples]) -> list[Unit]:
        """What is scored together: at least as many units as the largest group has ranks, as far as there are samples, none
        with more completions than `max_pairs` pairs have.
        """
        of_prompt: dict[tuple[tuple[int, ...], ...], Unit] = {}
        for k, own in enumerate(batch):
            prompt = tuple(map(tuple, own.prompts))
            of_prompt.setdefault(prompt, []).extend((k, g) for g in range(len(own.completions[0])))
        ranks = max(b["ranks"] for b in self.budgets)
        most = 1 if any(b["layout"] == "rows" for b in self.budgets) else self.max_pairs and 2 * self.max_pairs
        widths, least = [b["width"] for b in self.budgets], math.ceil(ranks / len(of_prompt))
        units = []
        for prompts, members in of_prompt.items():
            completions = [_group(batch, i, members)[1] for i in range(len(prompts))]
            spans = runs(prompts, completions, widths, self.max_tokens, least=least, most=most)
            units += [members[a:b] for a, b in spans]
        return units


def _group(batch: Sequence[Samples], agent: int, unit: Unit) -> Completions:
    return batch[unit[0][0]].prompts[agent], [batch[k].completions[agent][g] for k, g in unit]


def _at(unit: Unit) -> tuple[list[int], list[int]]:
    """For indexing [tasks, G]."""
    places, which = zip(*unit)
    return list(places), list(which)


class _Head:
    """One agent's value head in a step: its loss, and the slopes that its values learn with."""

    def __init__(self, values: ValueTargets, agent: int, units: Sequence[Unit]) -> None:
        self._values, self._units = values, units
        self._targets, self._old = values.targets[agent].double(), values.old[agent].double()
        self._found = torch.full_like(self._targets, math.nan)

    def learn(self, micro: Sequence[int], found: Sequence[Sequence[float]]) -> list[list[float]]:
        """[micro][completions] ∂loss/∂value."""
        slopes = []
        for u, own in zip(micro, found):
            self._found[_at(self._units[u])] = torch.tensor(own, dtype=torch.float64)
            slopes.append([self._slope(k, g) for k, g in self._units[u]])
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
