"""A plan and its tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from comlrl_ds.cluster.engine_places import Edge
from comlrl_ds.cluster.hostfile import counted, ranges
from comlrl_ds.cluster.layout import EnginePlace, Layout
from comlrl_ds.planning.estimate import EDGE_RATES, PARTS, USABLE, Learning, Memory
from comlrl_ds.planning.model_shapes import ModelShape, short

# More weight edges than these are one line for each agent, group and transport.
LONGEST_EDGE_LIST = 12


@dataclass(frozen=True)
class RoleRow:
    """What is known of a role: its model, how DeepSpeed holds it, and what of it learns (None: nothing, or unknown)."""

    role: str
    group: str
    stage: int
    dtype: str
    deepspeed: str
    model: ModelShape
    learning: Learning | None = None

    @property
    def parameters(self) -> str:
        """'135M', '135M, LoRA 2.44M', '135M, trained 577'."""
        if self.learning is None or not self.learning.fixed:
            return self.model.text
        own = self.learning.adapter
        return f"{self.model.text}, " + (f"LoRA {short(own)}" if own is not None else f"trained {short(self.learning.trained)}")


@dataclass(frozen=True)
class EdgeRow:
    """A weight edge with its size in bytes and assumed duration in seconds; None: unknown."""

    edge: Edge
    same_host: bool
    size: int | None
    seconds: float | None


@dataclass(frozen=True)
class GroupMemory:
    """Memory of the fullest rank of a group. `fits` is None where the device or a model is not known."""

    group: str
    memory: Memory
    hosts_engines: bool
    fits: bool | None


@dataclass(frozen=True)
class HostMemory:
    """Bytes that a host's processes need outside its GPUs, and has; None: unknown."""

    host: str
    needed: int | None
    has: int | None

    @property
    def fits(self) -> bool | None:
        return None if self.needed is None or self.has is None else self.needed <= USABLE * self.has


@dataclass(frozen=True)
class Plan:
    """Who sits where, and what it costs."""

    layout: Layout
    engines: tuple[EnginePlace, ...]
    device_kind: str
    device_bytes: int | None
    roles: tuple[RoleRow, ...]
    edges: tuple[EdgeRow, ...]
    memory: tuple[GroupMemory, ...]
    hosts: tuple[HostMemory, ...]
    notes: tuple[str, ...] = ()

    def render(self, console: Console) -> None:
        """Prints the tables and the notes."""
        for table in (self._groups(), self._roles(), self._edges(), self._memory(), self._hosts()):
            console.print(table)
        for note in self.notes:
            console.print(f"note: {note}", markup=False, highlight=False)

    def _groups(self) -> Table:
        table = _table("device groups", "group", "hosts", "ranks", "roles")
        for name, ranks in self.layout.groups.items():
            roles = [r.role for r in self.roles if r.group == name]
            if count := sum(e.group == name for e in self.engines):
                size = self.layout.rollout.tensor_parallel
                roles.append(f"rollout ({count} engine{'s' * (count > 1)}{f' of {size} devices' if size > 1 else ''})")
            hosts = list(dict.fromkeys(self.layout.host(r) for r in ranks))
            table.add_row(name, _few(hosts), ranges(ranks), ", ".join(roles) or "–")
        return table

    def _roles(self) -> Table:
        table = _table("roles", "role", "group", "ZeRO", "type", "DeepSpeed", "parameters", right=("ZeRO", "parameters"))
        for r in self.roles:
            table.add_row(r.role, r.group, str(r.stage), r.dtype, r.deepspeed, r.parameters)
        return table

    def _edges(self) -> Table:
        table = _table("weight edges", "from", "to", "transport", "GB", "seconds", right=("GB", "seconds"))
        used = {r.edge.transport if r.edge.transport != "host" or r.same_host else "host between machines" for r in self.edges}
        rates = ", ".join(f"{name} {rate / 1e9:g}" for name, rate in EDGE_RATES.items() if name in used)
        table.caption = f"seconds of each edge by itself, at assumed rates in GB/s: {rates}"
        bundles: dict[tuple[object, ...], list[EdgeRow]] = {}
        for k, row in enumerate(self.edges):
            e = row.edge
            alone = len(self.edges) <= LONGEST_EDGE_LIST
            bundles.setdefault((k,) if alone else (e.agent, e.engine.group, e.transport, row.same_host), []).append(row)
        for rows in bundles.values():
            first, engine = rows[0], rows[0].edge.engine
            to = f"{len(rows)} engines of {engine.group}"
            if len(rows) == 1:
                to = f"engine {engine.index} of {engine.group} ({counted(engine.ranks)})"
            way = first.edge.transport + ("" if first.same_host or first.edge.transport != "host" else " between machines")
            table.add_row(f"actor.{first.edge.agent}", to, way, _gb(first.size), _seconds(first.seconds))
        return table

    def _memory(self) -> Table:
        device = "a rank" if self.device_kind == "cpu" else "a device"
        has = "" if self.device_bytes is None else f", of {_gb(self.device_bytes)} GB"
        table = _table(f"estimated GB of {device}{has}", "group", *PARTS, "at a time", "fits", right=(*PARTS, "at a time"))
        for row in self.memory:
            memory = row.memory
            cells = [_gb(memory.device[p]) if memory.known else "?" for p in PARTS]
            total = _gb(memory.peak) if memory.known else "?"
            if row.hosts_engines and "KV cache" not in memory.device:
                cells[PARTS.index("KV cache")] = "?"
            table.add_row(row.group, *cells, total, "see host" if self.device_kind == "cpu" else _answer(row.fits))
        return table

    def _hosts(self) -> Table:
        table = _table("estimated GB of each host", "host", "needs", "has", "fits", right=("needs", "has"))
        bundles: dict[tuple[int | None, int | None], list[HostMemory]] = {}
        for host in self.hosts:
            bundles.setdefault((host.needed, host.has), []).append(host)
        for (needed, has), alike in bundles.items():
            table.add_row(_few([h.host for h in alike]), _gb(needed), _gb(has), _answer(alike[0].fits))
        return table


def _table(title: str, *columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def _few(hosts: Sequence[str]) -> str:
    return ", ".join(hosts) if len(hosts) <= 3 else f"{hosts[0]} … {hosts[-1]} ({len(hosts)})"


def _gb(size: int | None) -> str:
    if size is None:
        return "?"
    if size == 0:
        return "–"
    return f"{size / 1e9:.1f}" if size >= 5e7 else "<0.1"


def _seconds(value: float | None) -> str:
    if value is None:
        return "?"
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 0.05 else "<0.1"


def _answer(fits: bool | None) -> str:
    return {True: "yes", False: "NO", None: "?"}[fits]
