"""What a trainer holds while it runs: the world, the actors, the rollout engines. Started once, when first needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comlrl_ds.config.madpo import MADPOConfig
from comlrl_ds.config.run_file import RolloutConfig
from comlrl_ds.preference.collection import agent_name
from comlrl_ds.rollout.base import PolicyWeights, SyncReport
from comlrl_ds.rollout.start import Engines

if TYPE_CHECKING:
    from comlrl_ds.cluster import Cluster
    from comlrl_ds.engines.ds_config import EnginePlan
    from comlrl_ds.engines.engine import PolicyEngine
    from comlrl_ds.rollout.pool import RolloutPool


@dataclass(frozen=True)
class EngineSettings:
    """How the actors are built."""

    deepspeed: dict[str, Any]
    dtype: str
    attn_implementation: str | None
    device: str


def plan_actors(settings: EngineSettings, args: MADPOConfig, world_size: int = 1) -> EnginePlan:
    """The DeepSpeed configuration of every actor; raises ConfigError with all contradictions."""
    from comlrl_ds.engines.ds_config import TrainerNumbers, plan_engine
    from comlrl_ds.engines.hardware import best_dtype

    numbers = TrainerNumbers(
        args.batch_size,
        world_size,
        args.agent_learning_rate,
        args.max_grad_norm,
        settings.dtype,
        best_dtype(settings.device),
    )
    return plan_engine(settings.deepspeed, numbers)


class Session:
    """The running parts. Engine children start in the constructor, so that their start-up overlaps with `actors`."""

    def __init__(
        self,
        sources: Sequence[str],
        settings: EngineSettings,
        args: MADPOConfig,
        rollout: RolloutConfig,
        log: Path | None,
    ) -> None:
        self._sources, self._settings, self._args = list(sources), settings, args
        self.plan = plan_actors(settings, args)
        self.rollout_dtype = self.plan.dtype if rollout.dtype == "auto" else rollout.dtype
        self.syncs: list[SyncReport] = []
        self._engines = Engines(rollout, sources, device=settings.device, dtype=self.rollout_dtype, log=log)
        self._actors: dict[str, PolicyEngine] = {}
        self._cluster: Cluster | None = None

    @property
    def cluster(self) -> Cluster:
        if self._cluster is None:
            from comlrl_ds.cluster import start_world
            from comlrl_ds.engines.hardware import keep_freed_memory

            if self._settings.device == "cpu":
                keep_freed_memory()
            self._cluster = start_world(self._settings.device)
        return self._cluster

    def actors(self) -> dict[str, PolicyEngine]:
        """The actors' DeepSpeed engines, by role, in agent order; loaded on the first call."""
        if not self._actors:
            self._actors = self.cluster.run({f"actor.{i}": partial(self._load, i) for i in range(len(self._sources))})
        return self._actors

    def _load(self, agent: int) -> PolicyEngine:
        import copy

        from comlrl_ds.engines.engine import PolicyEngine
        from comlrl_ds.engines.loading import load_causal_lm

        args, source = self._args, self._sources[agent]
        lm = load_causal_lm(
            source,
            dtype=self.plan.dtype,
            attn_implementation=self._settings.attn_implementation,
            dropout=not args.disable_dropout,
        )
        if args.gradient_checkpointing:
            lm.gradient_checkpointing_enable({"use_reentrant": False})
        return PolicyEngine(
            f"actor.{agent}",
            lm,
            copy.deepcopy(self.plan),
            layout=args.row_layout,
            chunk=args.logprob_chunk,
        )

    def pool(self) -> RolloutPool:
        """The rollout engines, ready."""
        return self._engines.pool(lambda policy, engine, report: self.syncs.append(report))

    def policies(self) -> dict[str, PolicyWeights]:
        """Every agent's current weights: an actor's once it has learned, those on disk before."""
        policies = {}
        for i, source in enumerate(self._sources):
            actor, name = self._actors.get(f"actor.{i}"), agent_name(i)
            if actor is None or not actor.version:
                policies[name] = PolicyWeights(name, source, source)
            else:
                policies[name] = PolicyWeights(name, f"{name}@{actor.version}", source, partial(self._weights_of, actor))
        return policies

    def _weights_of(self, actor: PolicyEngine) -> Any:
        import torch

        return actor.named_weights(getattr(torch, self.rollout_dtype))

    def usage(self) -> list[dict[str, float]]:
        return self._engines.usage()

    def close(self) -> None:
        self._engines.shutdown()
