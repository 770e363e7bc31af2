"""The MADPO update: one joint step of all actors on a batch of preference pairs.

loss = −mean log σ(η Δ), Δ = Σ_i m_i over agents, m_i = log π_i(winner) − log π_i(loser). Agents exchange numbers only:
every actor needs ∂loss/∂m_i = −η σ(−η Δ) / |batch|, which depends on the others through the joint margin.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from comlrl_ds.cluster import call
from comlrl_ds.engines.engine import PolicyEngine
from comlrl_ds.learners.actors import ActorsLearner, JointReport
from comlrl_ds.maths.losses import MadpoTerms, madpo_terms
from comlrl_ds.maths.packing import PairTokens, plan_micro_steps, row_length, worst_forward

Batch = Sequence[Sequence[PairTokens]]  # [pairs][agents]


class NonFiniteError(RuntimeError):
    """Too many steps in which a loss or a gradient was NaN or infinite."""


@dataclass(kw_only=True)
class StepReport(JointReport):
    """One MADPO step; [pairs] tensors are in the batch's order."""

    loss: float
    joint_margins: Tensor
    margins: Tensor
    winner_logprobs: list[float]
    loser_logprobs: list[float]


@dataclass
class MadpoLearner(ActorsLearner):
    """Takes joint steps.

    Args:
        eta: η of the loss. score_last_token: whether a completion's last token counts.
        margin_pass: "auto" | "one_forward" | "two_pass".
        graph_share: share of the free memory that open graphs may take under "auto".
    """

    eta: float
    score_last_token: bool = False
    margin_pass: str = "auto"
    graph_share: float = 0.8

    def step(self, batch: Batch) -> StepReport:
        """One step of every actor on a batch.

        Args:
            batch: [pairs][agents] token ids.
        """
        started = time.perf_counter()
        self.cluster.spans.clear()
        lengths = [[row_length(t.group(self.score_last_token)) for t in pair] for pair in batch]
        ranks = [b["ranks"] for b in self.budgets]
        plan = plan_micro_steps(lengths, self.max_tokens, self.max_pairs, self.rows_per_pair(), ranks)
        scores = torch.zeros(len(self.actors), len(batch), 2, dtype=torch.float64)
        if self._two_pass(lengths, plan):
            tokens = sum(self._score(batch, micro, scores, grad=False) for micro in plan)
            if torch.isfinite(scores).all():
                tokens += sum(self._learn(batch, micro, scores) for micro in plan)
        else:
            tokens = 0
            for micro in plan:
                tokens += self._score(batch, micro, scores, grad=True)
                if not torch.isfinite(scores[:, micro]).all():
                    break
                weights = self._weights(micro, scores)
                self.learners_do([call(PolicyEngine.backward, weights)] * len(self.actors))
        terms = self._terms(scores)
        rates = self.all_do([call(PolicyEngine.learning_rate)] * len(self.actors))
        norms, culprit = self.finish(scores)
        return StepReport(
            loss=terms.loss.mean().item(), joint_margins=terms.joint_margin, margins=scores[..., 0] - scores[..., 1],
            winner_logprobs=scores[..., 0].mean(1).tolist(), loser_logprobs=scores[..., 1].mean(1).tolist(), grad_norms=norms,
            learning_rates=rates, tokens=tokens, micro_steps=len(plan), seconds=time.perf_counter() - started,
            spans=[list(self.cluster.spans.get(role, [])) for role in self.actors], culprit=culprit,
        )  # fmt: skip

    def _terms(self, scores: Tensor) -> MadpoTerms:
        return madpo_terms(scores[..., 0] - scores[..., 1], self.eta)

    def _weights(self, micro: list[int], scores: Tensor) -> list[list[float]]:
        """[micro][2]: ∂loss/∂log π of winners and losers, the same for every agent."""
        slope = self._terms(scores[:, micro]).slope / scores.shape[1]
        return torch.stack([slope, -slope], 1).tolist()

    def _score(self, batch: Batch, micro: list[int], scores: Tensor, *, grad: bool) -> int:
        """All actors score the micro-step's pairs, and the numbers are exchanged. Returns the tokens of the forwards.

        With `grad` every actor's graph stays open for its backward.
        """
        parts = [[batch[k][agent] for k in micro] for agent in range(len(self.actors))]
        open_graphs = [grad and agent not in self.frozen for agent in range(len(self.actors))]
        results = self.all_do(
            [call(PolicyEngine.score_pairs, part, self.score_last_token, g) for part, g in zip(parts, open_graphs)]
        )
        for agent, (numbers, _) in enumerate(results):
            scores[agent, micro] = torch.tensor(numbers, dtype=torch.float64)
        return sum(tokens for _, tokens in results)

    def _learn(self, batch: Batch, micro: list[int], scores: Tensor) -> int:
        """Second pass: the margins are known, so each actor scores and learns in one go, one graph at a time."""
        weights = self._weights(micro, scores)
        parts = [[batch[k][agent] for k in micro] for agent in range(len(self.actors))]
        calls = [call(PolicyEngine.learn_pairs, part, self.score_last_token, weights) for part in parts]
        return sum(self.learners_do(calls).values())

    def _two_pass(self, lengths: list[list[int]], plan: list[list[int]]) -> bool:
        """Whether the graphs that one rank would hold at the same time are too large for it."""
        if self.margin_pass != "auto":
            return self.margin_pass == "two_pass"
        needed: dict[tuple[int, ...], float] = {}
        free: dict[tuple[int, ...], float] = {}
        for agent, (role, b) in enumerate(zip(self.actors, self.budgets)):
            sizes = [[pair[agent]] for pair in lengths]
            worst = max(worst_forward([sizes[k] for k in micro], [b["ranks"]]) for micro in plan) * self.rows_per_pair()
            group = self.cluster.ranks_of(role)
            needed[group] = needed.get(group, 0.0) + worst * b["graph_bytes_per_token"]
            free[group] = min(free.get(group, math.inf), b["free"])
        return any(needed[group] > self.graph_share * free[group] for group in needed)
