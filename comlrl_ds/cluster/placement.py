"""From the `placement` section and the ranks of a launch to a checked `Layout`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from comlrl_ds.cluster.devices import (
    UNSET,
    Values,
    Wish,
    base_of,
    check_one_rank,
    groups_of_devices,
    index_of,
    is_device,
    rank_of_device,
    read_devices,
)
from comlrl_ds.cluster.hostfile import LOCAL, counted
from comlrl_ds.cluster.layout import Layout, RolePlace, RolloutPlace, Slot
from comlrl_ds.config.errors import Findings, nearest
from comlrl_ds.config.placement import PlacementConfig, RoleSection

Groups = dict[str, tuple[int, ...]]

PER_AGENT = ("actor", "reference", "critic", "comparator")
ROLLOUT = "rollout"


def resolve_placement(
    config: PlacementConfig | None,
    slots: Sequence[Slot],
    *,
    agents: int,
    roles: Sequence[str],
    devices: Values,
    device_kind: str,
) -> Layout:
    """Who sits where.

    Args:
        config: the run file's placement; None: one group "all", or a group per device that `devices` names.
        slots: every rank of the launch, in order.
        agents: size of the team.
        roles: what the trainer needs besides rollout: actor.0, actor.1, reward_model, critic …
        devices: the trainer's fields `agent_devices`, `critic_devices` …; None and 'auto' are unset.
        device_kind: "cuda" or "cpu".

    Raises:
        ConfigError: with every problem, each with its place in the run file.
    """
    found, notes = Findings(), list[str]()
    wishes = read_devices(devices, roles, agents, found, notes)
    if config is None:
        groups, places, rollout = _without_placement(wishes, slots, roles, devices, device_kind, found)
    else:
        groups = _read_groups(config, slots, found)
        _check_names(config, roles, agents, found, notes)
        places = _read_roles(config, groups, roles, found)
        missing = [r for r in roles if section_of(config, r) is None]
        _apply_wishes(wishes, places, set(missing), groups, slots, device_kind, found)
        named = {w.role for w in wishes}
        for role in missing:
            if role not in places and role not in named:
                found.add(f"placement.roles.{role}", f"no group; write {role}: {{group: …}} with one of {', '.join(groups)}")
        rollout = _read_rollout(config, groups, places, slots, found)
        idle = [g for g in groups if g not in rollout.groups and g not in {p.group for p in places.values()}]
        notes += [f"group {g!r} has no role: its {counted(groups[g])} will idle" for g in idle if groups[g]]
    found.raise_any()
    return Layout(tuple(slots), groups, {r: places[r] for r in roles}, rollout, tuple(notes))


def section_of(config: PlacementConfig, role: str) -> tuple[str, RoleSection] | None:
    """(name under which it stands, what is written) of a role; `actor` alone speaks for every actor."""
    for name in (role, base_of(role)):
        if name in config.roles:
            return name, config.roles[name]
    return None


def comparator_roles(config: PlacementConfig | None, devices: object, agents: int) -> list[str]:
    """Names of the comparators that a placement or `comparator_devices` gives a place of their own; else none."""
    if config and (placed := [name for name in config.roles if base_of(name) == "comparator"]):
        return placed
    listed = devices if isinstance(devices, list) else [devices]
    if all(value in UNSET for value in listed):
        return []
    return [f"comparator.{i}" for i in range(agents)] if len(set(map(str, listed))) > 1 else ["comparator"]


def deepspeed_of(config: PlacementConfig | None, role: str) -> tuple[str, object] | None:
    """(path of the section, file or content) of a role's own DeepSpeed configuration; None: it has the run's."""
    for name in dict.fromkeys((role, base_of(role))):
        if config and name in config.roles and config.roles[name].deepspeed is not None:
            return f"placement.roles.{name}", config.roles[name].deepspeed
    return None


def _without_placement(
    wishes: Sequence[Wish],
    slots: Sequence[Slot],
    roles: Sequence[str],
    devices: Values,
    device_kind: str,
    found: Findings,
) -> tuple[Groups, dict[str, RolePlace], RolloutPlace]:
    """One group, or one for each device that a field names; every group hosts rollout engines."""
    groups: Groups
    chosen: dict[str, str]
    if len(slots) == 1:
        check_one_rank(devices, found)
        several = {p.path for p in found.problems}
        single = [w for w in wishes if not any(w.path == p or w.path.startswith(f"{p}.") for p in several)]
        groups_of_devices(single, slots, device_kind, found)
        groups, chosen = {"all": (slots[0].rank,)}, {}
    else:
        groups, chosen = groups_of_devices(wishes, slots, device_kind, found)
    default = next((g for g in ("all", "rest") if g in groups), next(iter(groups)))
    return groups, {r: RolePlace(chosen.get(r, default)) for r in roles}, RolloutPlace(tuple(groups))


# --- groups
def _read_groups(config: PlacementConfig, slots: Sequence[Slot], found: Findings) -> Groups:
    """Ranks of every group; what is wrong with one does not hide what is wrong with another."""
    groups: Groups = {}
    unresolved = False
    for name, value in config.groups.items():
        path = f"placement.groups.{name}"
        if isinstance(value, dict):
            before = len(found.problems)
            ranks = _ranks_on_hosts(value, slots, path, found)
            unresolved |= len(found.problems) > before
        else:
            ranks = list(value)
            if outside := sorted({r for r in ranks if r >= len(slots)}):
                there = f"{len(slots)} ranks, 0 to {len(slots) - 1}" if len(slots) > 1 else "1 rank, 0"
                more = f"start more: deepspeed --num_gpus {max(outside) + 1}"
                found.add(path, f"{counted(outside)}: the launch has {there}; write one of those, or {more}")
        if not value or (isinstance(value, dict) and not any(value.values())):
            found.add(path, "a group without device; list its ranks, e.g. [0, 1], or leave the group out")
        if twice := sorted({r for r in ranks if ranks.count(r) > 1}):
            found.add(path, f"{counted(twice)} stands there twice; once is enough")
        groups[name] = tuple(dict.fromkeys(ranks))
    _check_overlap(groups, found)
    held = {r for ranks in groups.values() for r in ranks}
    gap = [s.rank for s in slots if s.rank not in held]
    # A host that is not understood leaves ranks over, which are no second mistake.
    if gap and not unresolved:
        verb = "is" if len(gap) == 1 else "are"
        found.add("placement.groups", f"{counted(gap)} {verb} in no group; add to a group, or start fewer ranks")
    return groups


def _ranks_on_hosts(value: Mapping[str, list[int]], slots: Sequence[Slot], path: str, found: Findings) -> list[int]:
    hosts = list(dict.fromkeys(s.host for s in slots))
    ranks: list[int] = []
    for host, wanted in value.items():
        there = {s.slot: s.rank for s in slots if host == s.host or host in s.aliases}
        if not there and hosts == [LOCAL]:
            found.add(f"{path}.{host}", "names a host, but no host list is known; give --hostfile, or write global ranks")
        elif not there:
            found.add(f"{path}.{host}", f"unknown host{nearest(host, hosts)}")
        elif outside := sorted(set(wanted) - there.keys()):
            found.add(f"{path}.{host}", f"{counted(outside, 'slot')}: this host has {counted(list(there), 'slot')}")
        if there and not wanted and any(value.values()):
            found.add(f"{path}.{host}", "no slot; list some, e.g. [0, 1], or leave the host out")
        ranks += [there[w] for w in wanted if w in there]
    return ranks


def _check_overlap(groups: Groups, found: Findings) -> None:
    names = list(groups)
    for k, name in enumerate(names):
        for other in names[:k]:
            common = sorted(set(groups[name]) & set(groups[other]))
            if not common:
                continue
            if set(groups[name]) == set(groups[other]):
                message = f"has the same ranks as {other!r}; keep one group and give it to the roles of both: they take turns"
            else:
                verb, them = ("is", "it") if len(common) == 1 else ("are", "them")
                message = f"{counted(common)} {verb} in {other!r} too; groups must not overlap: leave {them} to one of the two"
            found.add(f"placement.groups.{name}", message)


# --- roles
def _check_names(config: PlacementConfig, needed: Sequence[str], agents: int, found: Findings, notes: list[str]) -> None:
    valid = [f"{base}.{i}" for base in PER_AGENT for i in range(agents)] + [*PER_AGENT, "reward_model", ROLLOUT]
    for name in config.roles:
        if name not in valid:
            near = nearest(name, valid)
            if index_of(name) is not None and base_of(name) in PER_AGENT:
                near = f"; the agents are 0 to {agents - 1}"
            elif "did you mean" not in near:
                # All names are a long list; what this trainer needs is what can be meant.
                near = f"; valid: {', '.join([*needed, ROLLOUT])}"
            found.add(f"placement.roles.{name}", f"unknown role{near}")
        elif name != ROLLOUT and name not in needed and name not in {base_of(r) for r in needed}:
            notes.append(f"placement.roles.{name}: this trainer has no such role; ignored")


def _read_roles(config: PlacementConfig, groups: Groups, needed: Sequence[str], found: Findings) -> dict[str, RolePlace]:
    places: dict[str, RolePlace] = {}
    for name, section in config.roles.items():
        path = f"placement.roles.{name}"
        if name == ROLLOUT:
            continue
        if section.tensor_parallel is not None:
            found.add(f"{path}.tensor_parallel", "is for rollout alone; the ranks of a group share a role by ZeRO")
        if isinstance(section.group, list):
            one = next(iter(section.group), next(iter(groups)))
            found.add(f"{path}.group", f"{section.group}: only rollout takes several groups; write group: {one}")
        elif section.group not in groups:
            found.add(f"{path}.group", f"no group {section.group!r}{nearest(section.group, list(groups))}")
    for role in needed:
        if (written := section_of(config, role)) and isinstance(written[1].group, str) and written[1].group in groups:
            own = deepspeed_of(config, role)
            places[role] = RolePlace(written[1].group, own[1] if own else None)  # type: ignore[arg-type]
    return places


def _apply_wishes(
    wishes: Sequence[Wish],
    places: dict[str, RolePlace],
    missing: set[str],
    groups: Groups,
    slots: Sequence[Slot],
    device_kind: str,
    found: Findings,
) -> None:
    """The trainer's fields beside a placement: they fill gaps; a contradiction is an error that names both sides."""
    for wish in wishes:
        group, said = wish.value, repr(wish.value)
        if group not in groups:
            if not is_device(group):
                found.add(wish.path, f"{said} is no group and no device{nearest(group, list(groups))}")
                continue
            before = len(found.problems)
            rank = found.of(partial(rank_of_device, wish, slots, device_kind))
            if rank is None:
                if len(found.problems) == before and wish.role in missing:
                    found.add(f"placement.roles.{wish.role}", f"no group, and {wish.path} = {said} names none; write one")
                continue
            holder = next((g for g, ranks in groups.items() if rank in ranks), None)
            if holder is None:
                continue  # a gap, which is reported
            if len(groups[holder]) > 1:
                found.add(wish.path, f"{said} is one device of the group {holder!r}; write {holder}, or leave it out")
                continue
            group = holder
        if wish.role in missing:
            places[wish.role] = RolePlace(group)
        elif wish.role in places and places[wish.role].group != group:
            there = places[wish.role].group
            found.add(wish.path, f"{said} contradicts placement.roles, where {wish.role} has the group {there!r}; keep one")


# --- rollout
def _read_rollout(
    config: PlacementConfig, groups: Groups, places: Mapping[str, RolePlace], slots: Sequence[Slot], found: Findings
) -> RolloutPlace:
    path = f"placement.roles.{ROLLOUT}"
    section = config.roles.get(ROLLOUT)
    if section is None:
        hosting = {p.group for r, p in places.items() if base_of(r) == "actor"}
        return RolloutPlace(tuple(g for g in groups if g in hosting))
    if section.deepspeed is not None:
        found.add(f"{path}.deepspeed", "rollout engines are vLLM's; leave it out")
    names = section.group if isinstance(section.group, list) else [section.group]
    if not names:
        found.add(f"{path}.group", f"no group; write one or more of {', '.join(groups)}")
    for name in names:
        if name not in groups:
            found.add(f"{path}.group", f"no group {name!r}{nearest(name, list(groups))}")
        elif names.count(name) > 1:
            found.add(f"{path}.group", f"{name!r} stands there twice; once is enough")
            break
    size = section.tensor_parallel or 1
    for name in dict.fromkeys(n for n in names if n in groups):
        _check_engines(name, groups[name], size, slots, f"{path}.tensor_parallel", found)
    return RolloutPlace(tuple(dict.fromkeys(names)), size)


def _check_engines(name: str, ranks: Sequence[int], size: int, slots: Sequence[Slot], path: str, found: Findings) -> None:
    if len(ranks) % size:
        fits = ", ".join(str(n) for n in range(1, len(ranks) + 1) if len(ranks) % n == 0)
        many = f"{len(ranks)} rank{'s' * (len(ranks) > 1)}"
        found.add(path, f"{size} does not divide the {many} of the group {name!r}; write one of {fits}")
        return
    for first in range(0, len(ranks), size):
        one = ranks[first : first + size]
        hosts = list(dict.fromkeys(slots[r].host for r in one if r < len(slots)))
        if len(hosts) > 1:
            where = f"{counted(one)} of the group {name!r} would share an engine across {' and '.join(hosts)}"
            found.add(path, f"{where}; an engine is on one host: write fewer, or order the ranks by host")
