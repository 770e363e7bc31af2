"""Which devices each rollout engine computes on, whose weights it takes, and by which transport they come.

- host: through host memory, to any engine, also one that serves several agents.
- nccl: between GPUs; stock NCCL transfer keeps one communicator per engine, so such an engine serves one agent.
- ipc: on the actor's own GPUs; the memory handles are one actor's, so such an engine serves that one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from comlrl_ds.cluster.layout import EnginePlace, Layout
from comlrl_ds.config.errors import ConfigError, Problem

Transport = Literal["host", "nccl", "ipc"]
PATH = "rollout.transport"


@dataclass(frozen=True)
class Edge:
    """Weights of one agent on their way to one engine."""

    agent: int
    engine: EnginePlace
    transport: Transport


def place_engines(
    layout: Layout, *, engines: int | None, agents: int, device_kind: str, transport: str = "auto"
) -> list[EnginePlace]:
    """Every rollout engine, in order.

    Args:
        layout: a checked placement.
        engines: how many, spread over the rollout groups' sets of tensor_parallel consecutive ranks; None: one per set.
        agents: size of the team.
        device_kind: "cuda" or "cpu".
        transport: "auto", or the one that every weight edge must use.

    Raises:
        ConfigError: where that transport is impossible.
    """
    size = layout.rollout.tensor_parallel
    # Groups take turns, so that fewer engines than sets of ranks are on as many groups as possible.
    sets = [
        (group, layout.groups[group][k : k + size])
        for k in range(0, max(len(layout.groups[group]) for group in layout.rollout.groups), size)
        for group in layout.rollout.groups
        if k < len(layout.groups[group])
    ]
    count = len(sets) if engines is None else engines
    places = [EnginePlace(k, sets[k % len(sets)][1], sets[k % len(sets)][0]) for k in range(count)]
    if transport == "host" or (device_kind == "cpu" and transport == "auto"):
        return places
    if device_kind == "cpu":
        raise ConfigError(Problem(PATH, f"{transport!r} is between GPUs, and this launch computes on CPUs; write auto or host"))
    chosen = _one_agent_each(layout, places, agents)
    if transport in ("nccl", "ipc"):
        _check_forced(layout, places, chosen, agents, transport)
    # An agent that no engine would serve: all engines serve all, through host memory.
    return places if chosen is None else chosen


def edge_transport(layout: Layout, engine: EnginePlace, agent: int, device_kind: str) -> Transport:
    """How an agent's weights reach an engine."""
    if device_kind == "cpu" or engine.serves != (agent,):
        return "host"
    return "ipc" if set(engine.ranks) <= set(layout.ranks_of(f"actor.{agent}")) else "nccl"


def edges(layout: Layout, places: Sequence[EnginePlace], agents: int, device_kind: str) -> list[Edge]:
    """Every weight edge, by agent, then engine."""
    return [
        Edge(agent, engine, edge_transport(layout, engine, agent, device_kind))
        for agent in range(agents)
        for engine in places
        if engine.serves is None or agent in engine.serves
    ]


def _actors_on(layout: Layout, group: str, agents: int) -> list[int]:
    return [i for i in range(agents) if layout.roles[f"actor.{i}"].group == group]


def _one_agent_each(layout: Layout, places: Sequence[EnginePlace], agents: int) -> list[EnginePlace] | None:
    """Engines that serve one agent each, where they can; None where that leaves an agent without engine.

    An engine beside one actor serves that; one beside several serves all, by host; one on devices of its own takes the agent
    that has the fewest engines so far.
    """
    beside = {e.index: _actors_on(layout, e.group, agents) for e in places}
    own = {k: actors[0] for k, actors in beside.items() if len(actors) == 1}
    served = Counter(own.values())
    for engine in places:
        if not beside[engine.index]:
            agent = min(range(agents), key=lambda i: (served[i], i))
            own[engine.index] = agent
            served[agent] += 1
    if len(own) == len(places) and len(served) < agents:
        return None
    return [replace(e, serves=(own[e.index],)) if e.index in own else e for e in places]


def _check_forced(
    layout: Layout, places: Sequence[EnginePlace], chosen: Sequence[EnginePlace] | None, agents: int, transport: str
) -> None:
    problems = []
    beside = {e.group: _actors_on(layout, e.group, agents) for e in places}
    for group, actors in beside.items():
        if len(actors) > 1:
            names = ", ".join(f"actor.{i}" for i in actors)
            problems.append(
                f"{transport!r} serves one full-weight actor per engine, but {names} share the group {group!r} with engines;"
                " write host or auto, or give each actor a group"
            )
        elif transport == "nccl" and actors:
            problems.append(
                f"'nccl' needs other devices than the actor's, but the group {group!r} hosts actor.{actors[0]} and engines;"
                " write ipc or auto, or give rollout a group of its own"
            )
        elif transport == "ipc" and not actors:
            problems.append(
                f"'ipc' needs the actor's own devices, but the group {group!r} hosts engines and no actor; write nccl or auto"
            )
    if chosen is None and not problems:
        there = f"are {len(places)} engines" if len(places) > 1 else "is 1 engine"
        problems.append(
            f"{transport!r} serves one full-weight actor per engine, but there {there} for {agents} agents;"
            " write host or auto, or place more engines"
        )
    if problems:
        raise ConfigError(Problem(PATH, text) for text in problems)
