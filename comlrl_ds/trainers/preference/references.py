"""The anchor of policy learning: every agent as it stood when the trainer was built, frozen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from comlrl_ds.cluster import call
from comlrl_ds.config.marlhf import MARLHFConfig
from comlrl_ds.engines.engine import PolicyEngine
from comlrl_ds.engines.frozen import FrozenEngine
from comlrl_ds.maths.advantages import k3
from comlrl_ds.maths.packing import plan_micro_steps
from comlrl_ds.preference.collection import SampledItem
from comlrl_ds.trainers.preference.session import Session


def reference_role(agent: int) -> str:
    return f"reference.{agent}"


def _anchor_of(role: str) -> Any:
    return FrozenEngine.completion_logprobs if role.startswith("reference") else PolicyEngine.anchor_logprobs


class References:
    """KL of sampled completions to the first policies, loaded when first needed.

    Args:
        sources: model folder of each actor at the start.
    """

    def __init__(self, sources: Sequence[str], args: MARLHFConfig, session: Session) -> None:
        self._sources, self._args, self._session = list(sources), args, session
        # An agent with LoRA is its own reference, without what it has learned.
        self.roles = [
            reference_role(i) if session.adapters[i] is None else session.actors[i] for i in range(args.num_actors)
        ]  # fmt: skip

    def start(self) -> None:
        """Loads them, unless they are."""
        from comlrl_ds.engines.build import build_reference

        session = self._session
        builds = {
            role: call(
                build_reference, source, session.plan(role), attn_implementation=session.settings.attn_implementation,
                chunk=self._args.logprob_chunk,
            )
            for role, source in zip(self.roles, self._sources)
            if role not in (*session.others, *session.actors)
        }  # fmt: skip
        if builds:
            session.start(builds)

    def kl(self, sampled: Sequence[SampledItem]) -> Tensor:
        """[agents, tasks, G]: k3 of each completion, Σ_t exp(d_t) − d_t − 1 with d = log π_ref − log π, in nats.

        Actors and references score the same token-budget batches, one forward each; groups work at the same time.
        """
        self.start()
        session, agents = self._session, range(len(self.roles))
        rows = [[(s.joint.prompts[i].ids, c.ids) for s in sampled for c in s.completions[i]] for i in agents]
        count = len(rows[0])
        lengths = [[len(p) + len(c) for p, c in (rows[i][k] for i in agents)] for k in range(count)]
        ranks = [len(session.cluster.ranks_of(role)) for role in session.actors]
        found = torch.zeros(len(rows), count, dtype=torch.float64)
        for micro in plan_micro_steps(lengths, self._args.max_tokens_per_micro_batch, None, 1, ranks):
            parts = [[rows[i][k] for k in micro] for i in agents]
            own = session.cluster.run({r: call(PolicyEngine.completion_logprobs, p) for r, p in zip(session.actors, parts)})
            other = session.cluster.run({r: call(_anchor_of(r), part) for r, part in zip(self.roles, parts)})
            for i, (actor, anchor) in enumerate(zip(session.actors, self.roles)):
                sums = [float(k3(torch.tensor(p), torch.tensor(q)).sum()) for p, q in zip(own[actor], other[anchor])]
                found[i, micro] = torch.tensor(sums, dtype=torch.float64)
        return found.view(len(rows), len(sampled), -1)
