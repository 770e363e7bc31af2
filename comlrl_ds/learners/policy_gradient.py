"""Policy-gradient steps of all actors: loss = mean over tasks and samples of −A · log π_i(a_i)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from comlrl_ds.cluster import call
from comlrl_ds.engines.engine import PolicyEngine
from comlrl_ds.learners.actors import ActorsLearner, JointReport
from comlrl_ds.maths.packing import PairTokens, plan_micro_steps, row_length


@dataclass(frozen=True)
class Samples:
    """G joint responses to one task: `prompts` [agents] and `completions` [agents][G] as token ids, stop tokens included."""

    prompts: Sequence[Sequence[int]]
    completions: Sequence[Sequence[Sequence[int]]]


@dataclass(kw_only=True)
class GradientReport(JointReport):
    """One policy-gradient step; a culprit's sample is a task."""

    losses: list[float]
    logprobs: list[float]


class PolicyGradientLearner(ActorsLearner):
    """Takes joint policy-gradient steps. Every token of a completion counts, its stop token too."""

    def step(self, batch: Sequence[Samples], advantages: Sequence[Sequence[Sequence[float]]]) -> GradientReport:
        """One step of every actor.

        Two samples of a task share their prompt's row, as the winner and loser of a pair do.

        Args:
            batch: [tasks]. advantages: [tasks][agents][G].
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
        scores = torch.zeros(len(self.actors), len(units), 2, dtype=torch.float64)
        tokens = 0
        for micro in plan:
            grads = [i not in self.frozen for i in agents]
            parts = [[pairs[i][u] for u in micro] for i in agents]
            results = self.all_do([call(PolicyEngine.score_pairs, part, True, g) for part, g in zip(parts, grads)])
            for i, (numbers, count) in enumerate(results):
                scores[i, micro] = torch.tensor(numbers, dtype=torch.float64)
                tokens += count
            if not torch.isfinite(scores[:, micro]).all():
                break
            self.learners_do([call(PolicyEngine.backward, [weights[i][u] for u in micro]) for i in agents])
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
            seconds=seconds, spans=spans, culprit=culprit,
        )  # fmt: skip


def _pair(samples: Samples, agent: int, first: int) -> PairTokens:
    one, *other = samples.completions[agent][first : first + 2]
    return PairTokens(samples.prompts[agent], one, other[0] if other else ())


def _two(values: Sequence[float], first: int) -> list[float]:
    return [*values[first : first + 2], 0.0][:2]
