"""The MADPO update: one joint step of all actors on a batch of preference pairs.

loss = −mean log σ(η Δ), Δ = Σ_i m_i over agents, m_i = log π_i(winner) − log π_i(loser). Agents exchange numbers only:
every actor needs ∂loss/∂m_i = −η σ(−η Δ) / |batch|, which depends on the others through the joint margin.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from comlrl_ds.maths.losses import MadpoTerms, madpo_terms
from comlrl_ds.maths.packing import PairTokens, pack, plan_micro_steps, row_length

if TYPE_CHECKING:
    from comlrl_ds.cluster import Cluster
    from comlrl_ds.engines.engine import PolicyEngine


Batch = Sequence[Sequence[PairTokens]]  # [pairs][agents]


class NonFiniteError(RuntimeError):
    """Too many steps in which a loss or a gradient was NaN or infinite."""


@dataclass
class StepReport:
    """One optimizer step. Lists are per agent; [pairs] tensors are in the batch's order.

    `culprit` is None for a step that was taken, else (agent, pair of the batch or None) of the first non-finite number.
    """

    loss: float
    joint_margins: Tensor
    margins: Tensor
    winner_logprobs: list[float]
    loser_logprobs: list[float]
    grad_norms: list[float]
    learning_rates: list[float]
    tokens: int
    micro_steps: int
    seconds: float
    culprit: tuple[int, int | None] | None = None

    @property
    def skipped(self) -> bool:
        return self.culprit is not None


@dataclass
class MadpoLearner:
    """Takes joint steps.

    Args:
        cluster: executes roles. actors: engine of each agent, by role name, in agent order.
        eta: η of the loss. score_last_token: whether a completion's last token counts.
        max_tokens: padded tokens of one forward, for the worst agent. max_pairs: bound on its pairs.
        margin_pass: "auto" | "one_forward" | "two_pass".
        graph_budget: bytes that the open graphs may take under "auto".
    """

    cluster: Cluster
    actors: Mapping[str, PolicyEngine]
    eta: float
    score_last_token: bool = False
    max_tokens: int = 2048
    max_pairs: int | None = None
    margin_pass: str = "auto"
    graph_budget: float = math.inf
    _open: dict[str, Tensor] = field(default_factory=dict)

    def step(self, batch: Batch) -> StepReport:
        """One step of every actor on a batch.

        Args:
            batch: [pairs][agents] token ids.
        """
        started = time.perf_counter()
        lengths = [[row_length(t, self.score_last_token) for t in pair] for pair in batch]
        plan = plan_micro_steps(lengths, self.max_tokens, self.max_pairs, self._rows_per_pair())
        scores = torch.zeros(len(self.actors), len(batch), 2, dtype=torch.float64)
        if self._two_pass(lengths, plan):
            tokens = sum(self._score(batch, micro, scores, grad=False) for micro in plan)
            if torch.isfinite(scores).all():
                tokens += sum(self._score_and_backward(batch, micro, scores) for micro in plan)
        else:
            tokens = 0
            for micro in plan:
                tokens += self._score(batch, micro, scores, grad=True)
                if not torch.isfinite(scores[:, micro]).all():
                    break
                self._backward(micro, scores)
        terms = self._terms(scores)
        rates = list(self.cluster.run({role: e.learning_rate for role, e in self.actors.items()}).values())
        norms, culprit = self._finish(scores)
        return StepReport(
            loss=terms.loss.mean().item(), joint_margins=terms.joint_margin, margins=scores[..., 0] - scores[..., 1],
            winner_logprobs=scores[..., 0].mean(1).tolist(), loser_logprobs=scores[..., 1].mean(1).tolist(), grad_norms=norms,
            learning_rates=rates, tokens=tokens, micro_steps=len(plan), seconds=time.perf_counter() - started,
            culprit=culprit,
        )  # fmt: skip

    def _terms(self, scores: Tensor) -> MadpoTerms:
        return madpo_terms(scores[..., 0] - scores[..., 1], self.eta)

    def _weights(self, micro: list[int], scores: Tensor) -> Tensor:
        """[micro, 2]: ∂loss/∂log π of winners and losers, the same for every agent."""
        slope = self._terms(scores[:, micro]).slope / scores.shape[1]
        return torch.stack([slope, -slope], 1)

    def _score(self, batch: Batch, micro: list[int], scores: Tensor, *, grad: bool) -> int:
        """All actors score the micro-step's pairs, and the numbers are exchanged. Returns the tokens of the forwards.

        With `grad` every actor's graph stays open for `_backward`.
        """
        results = self.cluster.run(
            {role: partial(self._score_one, role, i, batch, micro, grad) for i, role in enumerate(self.actors)}
        )
        for i, (numbers, _) in enumerate(results.values()):
            scores[i, micro] = torch.tensor(numbers, dtype=torch.float64)
        return sum(tokens for _, tokens in results.values())

    def _score_one(self, role: str, agent: int, batch: Batch, micro: list[int], grad: bool) -> tuple[list[list[float]], int]:
        engine = self.actors[role]
        packed = pack([batch[k][agent] for k in micro], layout=engine.layout, score_last_token=self.score_last_token)
        result = engine.score(packed, len(micro), grad=grad)
        if grad:
            self._open[role] = result
        return result.detach().double().tolist(), packed.padded_tokens

    def _backward(self, micro: list[int], scores: Tensor) -> None:
        weights = self._weights(micro, scores)
        self.cluster.run({role: partial(self._backward_one, role, weights) for role in self.actors})

    def _backward_one(self, role: str, weights: Tensor) -> None:
        self.actors[role].backward(self._open.pop(role), weights)

    def _score_and_backward(self, batch: Batch, micro: list[int], scores: Tensor) -> int:
        """Second pass: the margins are known, so each actor scores and learns in one go, one graph at a time."""
        weights = self._weights(micro, scores)

        def learn(role: str, agent: int) -> int:
            _, tokens = self._score_one(role, agent, batch, micro, True)
            self._backward_one(role, weights)
            return tokens

        return sum(self.cluster.run({role: partial(learn, role, i) for i, role in enumerate(self.actors)}).values())

    def _finish(self, scores: Tensor) -> tuple[list[float], tuple[int, int | None] | None]:
        """Steps every actor, or none: a number that is not finite anywhere drops the step everywhere."""
        self._open.clear()
        bad = (~torch.isfinite(scores)).any(-1).nonzero()
        culprit: tuple[int, int | None] | None = (int(bad[0][0]), int(bad[0][1])) if len(bad) else None
        norms = [math.inf] * len(self.actors)
        if culprit is None:
            norms = list(self.cluster.run({role: e.gradient_norm for role, e in self.actors.items()}).values())
            broken = [i for i, norm in enumerate(norms) if not math.isfinite(norm)]
            culprit = (broken[0], None) if broken else None
        finish = {role: e.step if culprit is None else e.discard for role, e in self.actors.items()}
        self.cluster.run(finish)
        return norms, culprit

    def _rows_per_pair(self) -> int:
        return 1 if all(e.layout == "shared" for e in self.actors.values()) else 2

    def _two_pass(self, lengths: list[list[int]], plan: list[list[int]]) -> bool:
        if self.margin_pass != "auto":
            return self.margin_pass == "two_pass"
        worst = max(max(max(lengths[k]) for k in micro) * len(micro) for micro in plan) * self._rows_per_pair()
        return sum(graph_bytes(e, worst) for e in self.actors.values()) > self.graph_budget


def graph_bytes(engine: PolicyEngine, tokens: int) -> int:
    """Rough size of one forward's graph: about 34 values per token, layer and hidden unit (Korthikanti et al., 2022)."""
    config = engine.scorer.lm.config.get_text_config()
    return 34 * tokens * config.num_hidden_layers * config.hidden_size * (4 if engine.plan.dtype == "float32" else 2)
