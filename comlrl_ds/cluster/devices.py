"""The page's `*_devices` fields: which role they speak of, and which rank a device string means."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from comlrl_ds.cluster.hostfile import counted
from comlrl_ds.cluster.layout import Slot
from comlrl_ds.config.errors import ConfigError, Findings, Problem, nearest

Values = Mapping[str, str | list[str] | None]

FIELDS = {
    "agent_devices": "actor",
    "critic_devices": "critic",
    "reference_devices": "reference",
    "reward_model_device": "reward_model",
    "comparator_devices": "comparator",
}
UNSET = (None, "", "auto")
_DEVICE = re.compile(r"(?:(?P<host>.+):)?(?P<kind>cuda|cpu)(?::(?P<index>\d+))?")


@dataclass(frozen=True)
class Wish:
    """What a field says of one role, and where it stands in the run file."""

    role: str
    path: str
    value: str


def base_of(role: str) -> str:
    """'actor' of 'actor.0'."""
    return role.partition(".")[0]


def index_of(role: str) -> int | None:
    """0 of 'actor.0'; None of a role without number."""
    number = role.partition(".")[2]
    return int(number) if number.isdigit() else None


def read_devices(devices: Values, roles: Sequence[str], agents: int, found: Findings, notes: list[str]) -> list[Wish]:
    """One wish for each role that a field names a group or device for."""
    wishes: list[Wish] = []
    for name, value in devices.items():
        path, written = f"args.{name}", value if isinstance(value, list) else [value]
        if all(v in UNSET for v in written):
            continue
        mine = [r for r in roles if base_of(r) == FIELDS[name]]
        if not mine:
            notes.append(f"{path}: this trainer has no {FIELDS[name]}; ignored")
            continue
        if len(written) not in (1, agents):
            found.add(path, f"a list of {len(written)} for {agents} agents; write one value or {agents}")
            continue
        for role in mine:
            index = index_of(role)
            if index is None and len(set(written)) > 1:
                found.add(path, f"{written}: there is one {role} for all agents; name one")
                continue
            k = index if index is not None and len(written) > 1 else 0
            if written[k] not in UNSET:
                wishes.append(Wish(role, f"{path}.{k}" if len(written) > 1 else path, str(written[k])))
    return wishes


def is_device(text: str) -> bool:
    return _DEVICE.fullmatch(text) is not None


def rank_of_device(wish: Wish, slots: Sequence[Slot], device_kind: str) -> int | None:
    """The rank that computes on a device; None for 'cpu' or 'cuda' alone, which leave the choice open.

    Raises:
        ConfigError: where this launch has no such device, or several.
    """
    match = _DEVICE.fullmatch(wish.value)
    assert match
    host, kind, index = match["host"], match["kind"], match["index"]

    def wrong(message: str) -> ConfigError:
        return ConfigError(Problem(wish.path, f"{wish.value!r} {message}"))

    if kind != device_kind:
        raise wrong(f"is not in this launch, which computes on {device_kind!r}; write a {device_kind} device, or auto")
    hosts = list(dict.fromkeys(s.host for s in slots))
    if index is None and host is None:
        return None
    if index is None:
        raise wrong(f"names a host without a device; write '{wish.value}:0'")
    if host is None and len(hosts) > 1:
        raise wrong(f"could be on any of {len(hosts)} hosts; write {hosts[0]}:{kind}:{index}")
    there = [s for s in slots if host is None or host == s.host or host in s.aliases]
    if not there:
        raise wrong(f"names an unknown host{nearest(str(host), hosts)}")
    for slot in there:
        if slot.slot == int(index):
            return slot.rank
    local = counted([s.slot for s in there], "device")
    if len(slots) == 1:
        raise wrong(f"is not in this launch of one rank, which sees {local}; write auto, and choose by CUDA_VISIBLE_DEVICES")
    raise wrong(f"is not in this launch: {there[0].host} has {local}")


def groups_of_devices(
    wishes: Sequence[Wish], slots: Sequence[Slot], device_kind: str, found: Findings
) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Without a placement: (a group per named device, and 'rest'; the group of each role that names one)."""
    ranks: dict[str, int] = {}
    for wish in wishes:
        if not is_device(wish.value):
            found.add(wish.path, f"{wish.value!r} is no device, and without a placement there are no groups; write auto")
            continue
        rank = found.of(partial(rank_of_device, wish, slots, device_kind))
        if rank is not None:
            ranks[wish.role] = rank
    several = len({s.host for s in slots}) > 1
    names = {}
    for rank in sorted(set(ranks.values())):
        slot = slots[rank]
        names[rank] = f"{slot.host}:{device_kind}:{slot.slot}" if several else f"{device_kind}:{slot.slot}"
    groups: dict[str, tuple[int, ...]] = {name: (rank,) for rank, name in names.items()}
    if rest := tuple(s.rank for s in slots if s.rank not in names):
        groups["rest" if groups else "all"] = rest
    return groups, {role: names[rank] for role, rank in ranks.items()}


def check_one_rank(devices: Values, found: Findings) -> None:
    """In one process every role is on one device; several cannot be meant."""
    for name, value in devices.items():
        values = list(dict.fromkeys(v for v in (value if isinstance(value, list) else [value]) if v not in UNSET))
        if len(values) > 1:
            start = f"start a rank per device: deepspeed --num_gpus {len(values)}"
            found.add(f"args.{name}", f"{values}: one process uses one device; name one, or {start}")
