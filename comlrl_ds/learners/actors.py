"""What learners of several actors share: calls to all of them, and the end of a joint step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from comlrl_ds.cluster import call
from comlrl_ds.engines.engine import PolicyEngine
from comlrl_ds.learners.spans import Span, overlap

if TYPE_CHECKING:
    from comlrl_ds.cluster import Cluster


@dataclass(kw_only=True)
class JointReport:
    """One optimizer step of all actors. Lists are per agent.

    `culprit` is None for a step that was taken, else (agent, sample of the batch or None) of the first non-finite number.
    `spans` are the times (start, end) of each agent's work in the step, in seconds since the epoch.
    """

    grad_norms: list[float]
    learning_rates: list[float]
    tokens: int
    micro_steps: int
    seconds: float
    spans: list[list[Span]]
    culprit: tuple[int, int | None] | None = None

    @property
    def skipped(self) -> bool:
        return self.culprit is not None

    @property
    def overlap(self) -> float:
        """Share of the least busy agent's time in which all agents were at work."""
        return overlap(self.spans)


@dataclass
class ActorsLearner:
    """Takes joint steps of all actors.

    Args:
        cluster: executes roles. actors: role of each agent, in agent order; their engines are built.
        max_tokens: padded tokens of one rank's forward, for the worst agent. max_pairs: bound on a micro-step's pairs.
        frozen: agents (by index) that score and never learn.
    """

    cluster: Cluster
    actors: Sequence[str]
    max_tokens: int = field(default=2048, kw_only=True)
    max_pairs: int | None = field(default=None, kw_only=True)
    frozen: frozenset[int] = field(default=frozenset(), kw_only=True)
    budgets: list[dict[str, Any]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        # Asked once, before training: later the allocators hold what they have freed, and it looks taken.
        found = self.cluster.run({role: call(PolicyEngine.budget) for role in self.actors})
        self.budgets = [found[role] for role in self.actors]

    def all_do(self, calls: Sequence[Any]) -> list[Any]:
        """One call per actor; groups work at the same time."""
        results = self.cluster.run(dict(zip(self.actors, calls)))
        return [results[role] for role in self.actors]

    def learners_do(self, calls: Sequence[Any]) -> dict[int, Any]:
        """The same for those that learn; results by agent."""
        agents = {role: i for i, role in enumerate(self.actors) if i not in self.frozen}
        results = self.cluster.run({role: calls[i] for role, i in agents.items()})
        return {i: results[role] for role, i in agents.items()}

    def rows_per_pair(self) -> int:
        return 1 if all(b["layout"] == "shared" for b in self.budgets) else 2

    def finish(self, scores: Tensor) -> tuple[list[float], tuple[int, int | None] | None]:
        """Steps every actor, or none: a number that is not finite anywhere drops the step everywhere.

        Args:
            scores: [agents, samples, …] log-probs of the batch.

        Returns:
            gradient norms, and (agent, sample or None) of the first number that is not finite.
        """
        bad = (~torch.isfinite(scores)).flatten(2).any(-1).nonzero()
        culprit: tuple[int, int | None] | None = (int(bad[0][0]), int(bad[0][1])) if len(bad) else None
        norms = [math.inf] * len(self.actors)
        if culprit is None:
            found = self.learners_do([call(PolicyEngine.gradient_norm)] * len(self.actors))
            norms = [found.get(i, 0.0) for i in range(len(self.actors))]
            broken = [i for i, norm in enumerate(norms) if not math.isfinite(norm)]
            culprit = (broken[0], None) if broken else None
        self.learners_do([call(PolicyEngine.step if culprit is None else PolicyEngine.discard)] * len(self.actors))
        return norms, culprit
