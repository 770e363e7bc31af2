"""Who sits where: ranks, device groups, and the roles on them. Plain data that everybody reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Slot:
    """One process of the launch.

    Attributes:
        rank: its global rank. host: the machine, as the hostfile or the machine itself names it.
        slot: index of its device on the host (LOCAL_RANK).
        aliases: other names and addresses of the host, by which a placement may call it.
    """

    rank: int
    host: str
    slot: int
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class RolePlace:
    """A role's device group and its DeepSpeed configuration; None is the run's own."""

    group: str
    deepspeed: str | dict[str, Any] | None = None


@dataclass(frozen=True)
class RolloutPlace:
    """The groups whose ranks host rollout engines, and the devices of each engine."""

    groups: tuple[str, ...]
    tensor_parallel: int = 1


@dataclass(frozen=True)
class EnginePlace:
    """One rollout engine.

    Attributes:
        index: its number. ranks: those whose devices it computes on; the first starts it.
        group: their group. serves: agents whose weights it takes; None: any.
        comparator: it serves comparators alone.
    """

    index: int
    ranks: tuple[int, ...]
    group: str
    serves: tuple[int, ...] | None = None
    comparator: bool = False


@dataclass(frozen=True)
class Layout:
    """A checked placement.

    Attributes:
        slots: every rank, in order. groups: ranks of each group, disjoint and complete.
        roles: place of every role but rollout. notes: what the user should know, a line each.
    """

    slots: tuple[Slot, ...]
    groups: Mapping[str, tuple[int, ...]]
    roles: Mapping[str, RolePlace]
    rollout: RolloutPlace
    notes: tuple[str, ...] = field(default=())

    def group_of(self, rank: int) -> str:
        """The device group of a rank."""
        return next(name for name, ranks in self.groups.items() if rank in ranks)

    def ranks_of(self, role: str) -> tuple[int, ...]:
        """The ranks that host a role, its lead first."""
        return self.groups[self.roles[role].group]

    @property
    def comparator_groups(self) -> tuple[str, ...]:
        """The groups that the comparators have been given; none: they sample where the agents do."""
        return tuple(dict.fromkeys(p.group for role, p in self.roles.items() if role.partition(".")[0] == "comparator"))

    def host(self, rank: int) -> str:
        return self.slots[rank].host

    def lines(self) -> list[str]:
        """The placement as a text."""
        told = [
            f"group {name}: " + ", ".join(f"rank {r} on {self.slots[r].host} slot {self.slots[r].slot}" for r in ranks)
            for name, ranks in self.groups.items()
        ]
        told += [f"{role}: group {place.group}" for role, place in self.roles.items()]
        return [*told, f"rollout: {', '.join(self.rollout.groups)}, {self.rollout.tensor_parallel} ranks an engine"]

    @property
    def hosts(self) -> list[str]:
        return list(dict.fromkeys(s.host for s in self.slots))
