"""Learning of models with a scalar head: reward models from preferences, critics from returns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from comlrl_ds.cluster import call
from comlrl_ds.engines.engine import PolicyEngine
from comlrl_ds.engines.scalar import ScalarEngine
from comlrl_ds.maths.advantages import bradley_terry, value_loss
from comlrl_ds.maths.packing import plan_micro_steps

if TYPE_CHECKING:
    from comlrl_ds.cluster import Cluster

Rows = tuple[Sequence[int], Sequence[int]]  # token ids of winner and loser


@dataclass(frozen=True)
class ScalarStep:
    """One optimizer step. `values` are, before it, R_w − R_l of the batch's pairs, or the critic's values of its rows."""

    loss: float
    values: list[float]
    grad_norm: float
    learning_rate: float
    seconds: float
    skipped: bool


@dataclass(frozen=True)
class FitScore:
    """How a reward model orders pairs that it may not have seen. `accuracy` counts equal scores half."""

    loss: float
    accuracy: float
    margin: float
    pairs: int


@dataclass
class ScalarLearner:
    """Values texts, and takes steps.

    Args:
        cluster: executes the role. role: of the engine. max_tokens: padded tokens of one rank's forward.
        engine: its class; an actor with a value head gives values, too.
    """

    cluster: Cluster
    role: str
    max_tokens: int = 2048
    engine: type[ScalarEngine | PolicyEngine] = ScalarEngine

    def values(self, rows: Sequence[Sequence[int]], progress: Callable[[int], None] | None = None) -> list[float]:
        """A value for each row of token ids, in token-budget batches without gradients."""
        found = [0.0] * len(rows)
        for micro in self._micro_steps([len(row) for row in rows]):
            for k, value in zip(micro, self._run(call(self.engine.values, [rows[k] for k in micro]))):
                found[k] = value
            if progress:
                progress(len(micro))
        return found

    def _step(
        self, units: Sequence[Sequence[Sequence[int]]], loss: Callable[[Tensor, list[int]], tuple[Tensor, Tensor]],
        total: Callable[[Tensor], Tensor],
    ) -> ScalarStep:  # fmt: skip
        """One step; each micro-step is one forward and one backward.

        Args:
            units: rows that go together, e.g. a pair's two.
            loss: ([micro, rows per unit] values, units) → ([micro] numbers to keep, ∂loss/∂value over the whole batch).
            total: [units] numbers → the batch's loss.
        """
        started = time.perf_counter()
        kept = torch.zeros(len(units), dtype=torch.float64)
        for micro in self._micro_steps([max(map(len, unit)) for unit in units], len(units[0])):
            rows = [row for k in micro for row in units[k]]
            values = torch.tensor(self._run(call(ScalarEngine.values, rows, True)), dtype=torch.float64)
            kept[micro], slopes = loss(values.view(len(micro), -1), micro)
            if not torch.isfinite(kept).all():
                break
            self._run(call(ScalarEngine.backward, slopes.flatten().tolist()))
        norm = self._run(call(ScalarEngine.gradient_norm)) if torch.isfinite(kept).all() else math.inf
        rate = self._run(call(ScalarEngine.learning_rate))
        skipped = not math.isfinite(norm)
        self._run(call(ScalarEngine.discard if skipped else ScalarEngine.step))
        return ScalarStep(total(kept).item(), kept.tolist(), norm, rate, time.perf_counter() - started, skipped)

    def _micro_steps(self, lengths: Sequence[int], rows_per_unit: int = 1) -> list[list[int]]:
        ranks = [len(self.cluster.ranks_of(self.role))]
        return plan_micro_steps([[n] for n in lengths], self.max_tokens, None, rows_per_unit, ranks)

    def _run(self, work: Any) -> Any:
        return self.cluster.run({self.role: work})[self.role]


class RewardFit(ScalarLearner):
    """Fits a reward model to preference pairs: Bradley–Terry, loss = −mean log σ(R_w − R_l)."""

    def step(self, batch: Sequence[Rows]) -> ScalarStep:
        """One step on a batch of pairs; winners and losers of a micro-step are one forward."""

        def loss(values: Tensor, micro: list[int]) -> tuple[Tensor, Tensor]:
            terms = bradley_terry(values[:, 0], values[:, 1])
            return terms.margin, torch.stack([terms.winner_slope, terms.loser_slope], 1) / len(batch)

        return self._step(batch, loss, lambda margins: bradley_terry(margins, torch.zeros_like(margins)).mean)

    def check(self, pairs: Sequence[Rows]) -> FitScore:
        """Loss and accuracy on pairs; NaN without any."""
        if not pairs:
            return FitScore(math.nan, math.nan, math.nan, 0)
        scores = torch.tensor(self.values([row for pair in pairs for row in pair]), dtype=torch.float64).view(-1, 2)
        terms = bradley_terry(scores[:, 0], scores[:, 1])
        right = (terms.margin > 0).double() + 0.5 * (terms.margin == 0).double()
        return FitScore(terms.mean.item(), right.mean().item(), terms.margin.mean().item(), len(pairs))


class ValueFit(ScalarLearner):
    """Fits a critic to returns: loss = coefficient · mean (target − V)²."""

    def step(self, rows: Sequence[Sequence[int]], targets: Sequence[float], coefficient: float) -> ScalarStep:
        """One step on a batch of rows."""
        wanted = torch.tensor(targets, dtype=torch.float64)

        def loss(values: Tensor, micro: list[int]) -> tuple[Tensor, Tensor]:
            return values[:, 0], 2 * coefficient * (values - wanted[micro, None]) / len(rows)

        return self._step([(row,) for row in rows], loss, lambda values: coefficient * value_loss(values, wanted))
