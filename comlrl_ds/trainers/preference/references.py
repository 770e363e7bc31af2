"""The anchor of policy learning: every agent as it stood when the trainer was built, frozen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from comlrl_ds.cluster import call
from comlrl_ds.config.marlhf import MARLHFConfig
from comlrl_ds.engines.engine import PolicyEngine
from comlrl_ds.engines.frozen import FrozenEngine
from comlrl_ds.maths.advantages import k3
from comlrl_ds.maths.packing import Completions, plan_micro_steps, row_length, runs
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
                layout=self._args.row_layout, chunk=self._args.logprob_chunk,
            )
            for role, source in zip(self.roles, self._sources)
            if role not in (*session.others, *session.actors)
        }  # fmt: skip
        if builds:
            session.start(builds)

    def kl(self, sampled: Sequence[SampledItem]) -> Tensor:
        """[agents, tasks, G]: k3 of each completion, Σ_t exp(d_t) − d_t − 1 with d = log π_ref − log π, in nats.

        Actors and references score the same token-budget batches, one forward each; groups work at the same time. The
        completions of a task share their prompt's row, as far as the budget goes.
        """
        self.start()
        session, agents, budget = self._session, range(len(self.roles)), self._args.max_tokens_per_micro_batch
        found = session.cluster.run({role: call(_rows_of) for role in dict.fromkeys([*session.actors, *self.roles])})
        together = all(layout == "shared" for layout, _ in found.values())
        widths = [found[role][1] for role in session.actors]
        ranks = [len(session.cluster.ranks_of(role)) for role in session.actors]
        units: list[list[Completions]] = []  # [units][agents]
        for s in sampled:
            prompts, completions = [p.ids for p in s.joint.prompts], [[c.ids for c in own] for own in s.completions]
            least = math.ceil(max(ranks) / len(sampled))
            spans = runs(prompts, completions, widths, budget, least=least, most=None if together else 1)
            units += [[(prompts[i], completions[i][a:b]) for i in agents] for a, b in spans]
        lengths = [[row_length(group) for group in unit] for unit in units]
        kl: list[list[list[float]]] = [[[] for _ in units] for _ in agents]
        for micro in plan_micro_steps(lengths, budget, None, 1, ranks):
            parts = [[units[u][i] for u in micro] for i in agents]
            own = session.cluster.run({r: call(PolicyEngine.completion_logprobs, p) for r, p in zip(session.actors, parts)})
            other = session.cluster.run({r: call(_anchor_of(r), part) for r, part in zip(self.roles, parts)})
            for i, (actor, anchor) in enumerate(zip(session.actors, self.roles)):
                for u, policy, reference in zip(micro, own[actor], other[anchor]):
                    kl[i][u] = [float(k3(torch.tensor(p), torch.tensor(q)).sum()) for p, q in zip(policy, reference)]
        whole = [[value for unit in of_agent for value in unit] for of_agent in kl]
        return torch.tensor(whole, dtype=torch.float64).view(len(self.roles), len(sampled), -1)


def _rows_of(engine: PolicyEngine | FrozenEngine) -> list[Any]:
    """How it lays rows out, and the model's width."""
    return [engine.layout, engine.scorer.lm.config.get_text_config().hidden_size]
