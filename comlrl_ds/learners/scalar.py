"""Learning of models with a scalar head: reward models from preferences, critics from returns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
    """How a reward model orders pairs. `accuracy` counts equal scores half; `by_gap` is that of the third of the pairs whose
    task rewards differ least, of the middle one and of the one that differs most. NaN without any.
    """

    loss: float
    accuracy: float
    margin: float
    pairs: int
    by_gap: tuple[float, float, float]


def fit_score(margins: Sequence[float], gaps: Sequence[float]) -> FitScore:
    """Of R_w − R_l of some pairs, and the task rewards' own r_w − r_l."""
    margin = torch.tensor(margins, dtype=torch.float64)
    right = (margin > 0).double() + 0.5 * (margin == 0).double()
    order = torch.tensor(gaps, dtype=torch.float64).argsort(stable=True)
    small, middle, large = (right[third].mean().item() for third in order.tensor_split(3))
    loss = bradley_terry(margin, torch.zeros_like(margin)).mean.item() if len(margin) else math.nan
    return FitScore(loss, right.mean().item(), margin.mean().item(), len(margin), (small, middle, large))


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

    def margins(self, pairs: Sequence[Rows]) -> list[float]:
        """R_w − R_l of pairs, as the model stands."""
        scores = self.values([row for pair in pairs for row in pair])
        return [w - lo for w, lo in zip(scores[::2], scores[1::2])]


class ValueFit(ScalarLearner):
    """Fits a critic to returns: loss = coefficient · mean (target − V)²."""

    def step(self, rows: Sequence[Sequence[int]], targets: Sequence[float], coefficient: float) -> ScalarStep:
        """One step on a batch of rows. Equal rows are read once: a critic of prompts has one value for all their responses."""
        wanted = torch.tensor(targets, dtype=torch.float64)
        distinct: dict[tuple[int, ...], int] = {}
        which = torch.tensor([distinct.setdefault(tuple(row), len(distinct)) for row in rows])

        def loss(values: Tensor, micro: list[int]) -> tuple[Tensor, Tensor]:
            own = values[:, 0]
            members = [which == u for u in micro]
            slopes = torch.stack([(value - wanted[m]).sum() for value, m in zip(own, members)])
            return own, 2 * coefficient * slopes[:, None] / len(rows)

        step = self._step([(row,) for row in distinct], loss, lambda v: coefficient * value_loss(v[which], wanted))
        return replace(step, values=[step.values[u] for u in which.tolist()])
