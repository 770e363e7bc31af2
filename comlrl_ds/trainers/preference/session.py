"""What a trainer holds while it runs: the arranged launch, the actors, the rollout engines. Started when first needed."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comlrl_ds.cluster import Call, Cluster, call
from comlrl_ds.cluster.layout import Layout
from comlrl_ds.cluster.watch import ClusterFailure
from comlrl_ds.config.errors import Findings
from comlrl_ds.config.lora import LoraSettings
from comlrl_ds.config.madpo import MADPOConfig
from comlrl_ds.config.run_file import RolloutConfig
from comlrl_ds.maths.seeds import seed_of
from comlrl_ds.preference.teams import agent_name
from comlrl_ds.rollout.adapter_room import adapter_room
from comlrl_ds.rollout.adapters import adapter_on_disk, is_adapter
from comlrl_ds.rollout.base import PolicyWeights, SyncReport
from comlrl_ds.rollout.disk import mark_of, tensors_on_disk
from comlrl_ds.rollout.start import Engines
from comlrl_ds.trainers.preference.policy_state import PolicyState

if TYPE_CHECKING:
    from comlrl_ds.engines.ds_config import EnginePlan
    from comlrl_ds.engines.heads import ValueHead
    from comlrl_ds.rollout.pool import RolloutPool
    from comlrl_ds.trainers.preference.lifetime import EngineOwner


@dataclass(frozen=True)
class EngineSettings:
    """How the actors are built, where their placement says nothing else."""

    deepspeed: dict[str, Any]
    dtype: str
    attn_implementation: str | None
    device: str


def actor_role(agent: int) -> str:
    return f"actor.{agent}"


@dataclass(frozen=True)
class Adapter:
    """LoRA of one actor: the settings, and the seed of A."""

    settings: LoraSettings
    seed: int


def policy_on_disk(name: str, folder: str, source: str) -> PolicyWeights:
    """A policy whose weights are a folder's: a model's of the architecture of `source`, or an adapter of that."""
    if is_adapter(folder):
        return PolicyWeights(name, folder, source, partial(adapter_on_disk, folder), base=source)
    own = partial(tensors_on_disk, folder) if folder != source else None
    return PolicyWeights(name, folder, source, own)


Rates = Mapping[str, tuple[int, float]]  # by role: (units per optimizer step, learning rate)


def plan_actors(
    settings: EngineSettings, args: MADPOConfig, layout: Layout, others: Rates | None = None
) -> dict[str, EnginePlan]:
    """The DeepSpeed configuration of every actor, and of `others`, by role.

    Raises:
        ConfigError: every contradiction; of a role's own file under placement.roles.
    """
    from comlrl_ds.engines.ds_config import TrainerNumbers, plan_engine, read_deepspeed
    from comlrl_ds.engines.hardware import best_dtype

    found, plans = Findings(), {}
    rates = dict.fromkeys(map(actor_role, range(args.num_actors)), (args.batch_size, args.agent_learning_rate))
    for role, (batch, rate) in (rates | dict(others or {})).items():
        own = layout.roles[role].deepspeed
        numbers = TrainerNumbers(
            batch, len(layout.ranks_of(role)), rate, args.max_grad_norm, settings.dtype, best_dtype(settings.device),
            f"{layout.roles[role].group}-{role}",
        )  # fmt: skip
        where = "" if own is None else f"placement.roles.{role}"
        plans[role] = found.under(where, partial(_plan_one, own, settings, numbers, plan_engine, read_deepspeed))
    found.raise_any()
    return {role: plan for role, plan in plans.items() if plan is not None}


def _plan_one(own: Any, settings: EngineSettings, numbers: Any, plan_engine: Any, read_deepspeed: Any) -> EnginePlan:
    return plan_engine(settings.deepspeed if own is None else read_deepspeed(own), numbers)


class Session:
    """The running parts. Engine children start in the constructor, so that their start-up overlaps with `start_actors`.

    Args:
        sources: model folder of each actor. comparators: of each comparator with a model of its own.
        swaps: whether engines will be given weights from disk. value_heads, adapters: of each actor;
            empty: they have none. seed: the run's.
        state: the version of the policies. Its folder, where it has one, is what actors, critics and the reward model are
            loaded from in place of their sources.

    Attributes:
        owner: the trainer that this is of, as a weak reference. scheduled: whether learning-rate schedules have been started.
    """

    def __init__(
        self, cluster: Cluster, sources: Sequence[str], settings: EngineSettings, plans: Mapping[str, EnginePlan],
        args: MADPOConfig, rollout: RolloutConfig, log: Path | None, comparators: Sequence[str] = (), swaps: bool = False,
        value_heads: Sequence[ValueHead] = (), adapters: Sequence[Adapter | None] = (), seed: int = 0,
        state: PolicyState | None = None,
    ) -> None:  # fmt: skip
        self.cluster = cluster
        self.owner: weakref.ref[EngineOwner] | None = None
        self.state = state or PolicyState()
        self._kept, self._moved, self.scheduled = self.state.folder, False, False
        self._sources, self._settings, self._plans, self._args = list(sources), settings, dict(plans), args
        types = {plans[actor_role(i)].dtype for i in range(len(sources))}
        compute = "bfloat16" if len(types) > 1 and "float32" in types else next(iter(types))
        self.rollout_dtype = compute if rollout.dtype == "auto" else rollout.dtype
        self.syncs: list[SyncReport] = []
        lora = [a.settings if a else None for a in adapters]
        self._new_engines = partial(
            Engines, rollout, sources, cluster=cluster, device=settings.device, dtype=self.rollout_dtype, log=log,
            comparators=comparators, swaps=swaps or any(adapters) or self._kept is not None,
            adapters=adapter_room(rollout, settings.device, sources, lora, bool(comparators)),
        )  # fmt: skip
        self._engines = self._new_engines()
        cluster.tenant = self
        self._renews_engines = False
        self._value_heads = list(value_heads)
        self.adapters: list[Adapter | None] = list(adapters) or [None] * len(sources)
        self._loading = self._started = False
        self._away: set[str] = set()  # engines whose optimizer states are on the host
        self._resting: set[str] = set()
        self._seed = seed
        self.learner: Any = None
        self._others: list[str] = []

    @property
    def actors(self) -> list[str]:
        """Role of each agent's actor; their engines are loaded when first asked for."""
        if not self._started:
            self._start_actors()
        return [actor_role(i) for i in range(len(self._sources))]

    @property
    def max_pairs(self) -> int | None:
        """Bound on the pairs of a micro-step that the actors' DeepSpeed files ask for."""
        plans = [self._plans[role] for role in map(actor_role, range(len(self._sources)))]
        return min((p.max_pairs for p in plans if p.max_pairs is not None), default=None)

    def world(self) -> dict[str, list[int]]:
        """[ranks, ZeRO stage] of every actor: what its saved state depends on."""
        return {role: [len(self.cluster.ranks_of(role)), plan.stage] for role, plan in self._plans.items()}

    def bases(self) -> dict[str, str]:
        """A hash of the base of every actor that learns an adapter: its saved state is worth nothing on another."""
        return {actor_role(i): mark_of(s) for i, s in enumerate(self._sources) if self.adapters[i]}

    @property
    def engines(self) -> list[str]:
        """Roles whose engines are loaded and learn: what a checkpoint holds."""
        return [*self.actors, *(role for role in self._others if role in self._plans and not role.startswith("reference"))]

    def start(self, builds: Mapping[str, Call]) -> None:
        """Loads the engines of further roles, in place of those that they have; groups load at the same time."""
        self.stop([role for role in builds if role in self._others])
        _ = self.actors  # first: it joins the groups
        self.cluster.create(dict(builds))
        self._others += builds

    def stop(self, roles: Sequence[str]) -> None:
        """Frees the engines of roles, where they are loaded."""
        loaded = [role for role in roles if role in self._others]
        if loaded:
            self.cluster.drop(loaded)
            self._others = [role for role in self._others if role not in loaded]
            self._away -= set(loaded)
            self._resting -= set(loaded)

    @property
    def others(self) -> tuple[str, ...]:
        """Roles besides the actors whose engines are loaded."""
        return tuple(self._others)

    def dropout_seed(self, role: str) -> int:
        """What the masks of a role's engine follow from, where its dropout is on."""
        return seed_of(self._seed, "dropout", role)

    def plan(self, role: str) -> EnginePlan:
        return self._plans[role]

    @property
    def settings(self) -> EngineSettings:
        return self._settings

    def _start_actors(self) -> None:
        from comlrl_ds.engines.build import build_policy

        args, builds = self._args, {}
        for i, source in enumerate(self._sources):
            adapter = self.adapters[i]
            builds[actor_role(i)] = call(
                build_policy, source, self._plans[actor_role(i)], attn_implementation=self._settings.attn_implementation,
                dropout=not args.disable_dropout, checkpointing=args.gradient_checkpointing, layout=args.row_layout,
                chunk=args.logprob_chunk, value_head=self._value_heads[i] if self._value_heads else None,
                lora=adapter.settings if adapter else None, lora_seed=adapter.seed if adapter else 0,
                dropout_seed=self.dropout_seed(actor_role(i)), current=self.kept_of(agent_name(i)),
            )  # fmt: skip
        self.cluster.join_groups(self._settings.device)
        self._loading = True
        self.cluster.create(builds)
        self._started = True

    def pool(self) -> RolloutPool:
        """The rollout engines, ready to generate."""
        if self._renews_engines:
            self._engines.shutdown()
            self._engines, self._renews_engines = self._new_engines(), False
        pool = self._engines.pool(lambda policy, engine, report: self.syncs.append(report))
        if self._engines.share_devices and self._started:
            self._put_away(self.engines)
        self._engines.wake()
        return pool

    def to_training(self) -> None:
        """Makes room for what learns where it shares devices with rollout engines."""
        from comlrl_ds.engines.base import ZeroEngine

        self._engines.sleep()
        back = [role for role in self.engines if role in self._away - self._resting] if self._away else []
        if back:
            self.cluster.run({role: call(ZeroEngine.take_back) for role in back})
            self._away -= set(back)

    def rest(self, role: str) -> None:
        """This role's engine has learned what it had to: on a GPU its optimizer states wait on the host from now on."""
        self._resting.add(role)
        if self._settings.device != "cpu":
            self._put_away([role])

    def _put_away(self, roles: Sequence[str]) -> None:
        from comlrl_ds.engines.base import ZeroEngine

        if going := [role for role in roles if role not in self._away]:
            self.cluster.run({role: call(ZeroEngine.put_away) for role in going})
            self._away |= set(going)

    def renew_interrupted_engines(self) -> None:
        """Where an error left engines in the middle of a generation, others take their place when they are next needed."""
        self._renews_engines = self._engines.interrupted

    def discard_open_step(self) -> None:
        """Drops the gradient of a step that an error interrupted."""
        from comlrl_ds.engines.base import ZeroEngine

        if self._started:
            self.cluster.run({role: call(ZeroEngine.discard) for role in self.engines})

    @property
    def steps(self) -> int:
        """Optimizer steps behind the policies: their version."""
        return self.state.steps

    def stepped(self, taken: bool) -> None:
        """A joint step of the actors has ended. Args: taken: whether they took it, or dropped it."""
        self.state.stepped(taken)
        self._moved |= taken

    def restored(self, steps: int) -> None:
        """Engines hold what a checkpoint held, after so many steps."""
        self.state.steps = steps
        self.state.changed()
        self._moved = True

    @property
    def learned(self) -> bool:
        """Whether the actors hold other weights than those that they were loaded with."""
        return self._moved

    def start_of(self, agent: int) -> str:
        """Folder that an agent started from: a model's, or an adapter's of it."""
        adapter = self.adapters[agent]
        return (adapter.settings.adapter if adapter else None) or self._sources[agent]

    def current_of(self, agent: int) -> str:
        """Folder that an agent's actor is loaded from: `start_of` before it has learned, else what was kept of it."""
        kept = self.kept_of(agent_name(agent)) if self._args.learns(agent) else None
        return kept or self.start_of(agent)

    def kept_of(self, model: str) -> str | None:
        """Folder that a model, by its name in a saved run, is loaded from in place of its source; None: the source."""
        folder = self._kept / model if self._kept is not None else None
        return str(folder) if folder is not None and folder.is_dir() else None

    def policies(self) -> dict[str, PolicyWeights]:
        """Every agent's current weights: an actor's once it has learned, those on disk before."""
        policies = {}
        for i, source in enumerate(self._sources):
            name = agent_name(i)
            if not self.steps or not self._args.learns(i):
                policies[name] = policy_on_disk(name, self.start_of(i), source)
                continue
            if not self._moved:
                # Named as the actor's would be: these are the same weights, and their folder may hold others later.
                policies[name] = replace(policy_on_disk(name, self.current_of(i), source), key=f"{name}@{self.steps}")
                continue
            role = actor_role(i)
            here = self.cluster.local(role)  # an engine in this process, too, takes the weights from it
            tensors = partial(_weights_of, here, self.rollout_dtype) if here and self.cluster.launch.size == 1 else None
            base = source if self.adapters[i] else None
            policies[name] = PolicyWeights(name, f"{name}@{self.steps}", source, tensors, role, base)
        return policies

    def usage(self) -> list[dict[str, float]]:
        return self._engines.usage()

    def close(self) -> None:
        self._engines.shutdown()
        if self.cluster.tenant is not self:
            return
        self.cluster.tenant = None
        if self._loading and self.cluster.reaches_all:
            actors = [actor_role(i) for i in range(len(self._sources))]
            with contextlib.suppress(ClusterFailure):  # then they are gone with their ranks
                self.cluster.drop([*actors, *self._others])


def _weights_of(actor: Any, dtype: str) -> Any:
    import torch

    return actor.named_weights(getattr(torch, dtype))
