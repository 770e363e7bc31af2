"""Placement: groups, roles, devices and engines, and every message about what does not fit."""

from __future__ import annotations

import pytest
import yaml
from run_files import problems

from comlrl_ds.cluster.engine_places import edge_transport, edges, place_engines
from comlrl_ds.cluster.hostfile import slots_of_hosts, slots_of_one_host
from comlrl_ds.cluster.layout import RolePlace, RolloutPlace, Slot
from comlrl_ds.cluster.placement import deepspeed_of, resolve_placement
from comlrl_ds.config import ConfigError
from comlrl_ds.config.placement import PlacementConfig

ACTORS = ["actor.0", "actor.1"]
TWO_HOSTS = slots_of_hosts({"a": 3, "b": 2})


def resolved(text, slots=4, *, roles=ACTORS, agents=2, kind="cuda", **devices):
    """The layout of a placement in YAML; `slots` may be a number of ranks on one host."""
    config = PlacementConfig(**yaml.safe_load(text)) if text else None
    ranks = slots_of_one_host(slots) if isinstance(slots, int) else slots
    return resolve_placement(config, ranks, agents=agents, roles=roles, devices=devices, device_kind=kind)


def wrong(text, slots=4, **others):
    return problems(lambda: resolved(text, slots, **others))


GOOD = """
groups: {left: [0, 1], right: [2], rest: [3]}
roles: {actor.0: left, actor.1: {group: right, deepspeed: z1.json}, rollout: {group: [rest, left]}}
"""


# --- what is accepted
def test_no_placement_is_one_group_of_all_ranks():
    layout = resolved(None, 3, roles=[*ACTORS, "critic"])
    assert layout.groups == {"all": (0, 1, 2)}
    assert layout.roles == dict.fromkeys(["actor.0", "actor.1", "critic"], RolePlace("all"))
    assert layout.rollout == RolloutPlace(("all",), 1) and layout.notes == ()


def test_a_placement():
    layout = resolved(GOOD)
    assert layout.groups == {"left": (0, 1), "right": (2,), "rest": (3,)}
    assert layout.roles == {"actor.0": RolePlace("left"), "actor.1": RolePlace("right", "z1.json")}
    assert layout.rollout == RolloutPlace(("rest", "left"), 1)
    assert layout.group_of(2) == "right" and layout.ranks_of("actor.0") == (0, 1)


def test_rollout_left_out_is_where_actors_are():
    layout = resolved(
        "{groups: {j: [0], b: [1], a: [2, 3]}, roles: {actor.0: a, actor.1: b, critic: j}}", roles=[*ACTORS, "critic"]
    )
    assert layout.rollout == RolloutPlace(("b", "a"), 1)


def test_a_name_alone_speaks_for_all_of_its_kind_and_lends_its_deepspeed_file():
    text = "{groups: {l: [0, 1], r: [2, 3]}, roles: {actor: {group: l, deepspeed: z3.json}, actor.1: r}}"
    layout = resolved(text)
    assert layout.roles == {"actor.0": RolePlace("l", "z3.json"), "actor.1": RolePlace("r", "z3.json")}
    config = PlacementConfig(**yaml.safe_load(text))
    assert deepspeed_of(config, "actor.1") == ("placement.roles.actor", "z3.json")
    assert deepspeed_of(None, "actor.1") is None


def test_hosts_and_slots_under_any_of_a_hosts_names_where_local_ranks_are_permuted():
    slots = [Slot(s.rank, s.host, s.slot, aliases=(f"10.0.0.{s.host}",)) for s in TWO_HOSTS]
    text = "{groups: {x: {a: [2, 0], 10.0.0.b: [0]}, y: {b: [1], 10.0.0.a: [1]}}, roles: {actor: x}}"
    # The launcher gives rank 3 the second device of host b, and rank 4 the first.
    assert resolved(text, slots).groups == {"x": (2, 0, 4), "y": (3, 1)}


def test_idle_groups_and_roles_of_other_trainers_are_noted():
    layout = resolved("{groups: {l: [0, 1, 2], r: [3]}, roles: {actor: l, reward_model: r, critic.1: l}}")
    assert layout.notes == (
        "placement.roles.reward_model: this trainer has no such role; ignored",
        "placement.roles.critic.1: this trainer has no such role; ignored",
        "group 'r' has no role: its rank 3 will idle",
    )
    assert set(layout.roles) == set(ACTORS)


# --- what is refused
@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("{l: [0, 1], r: [1, 2, 3]}", {"groups.r": "rank 1 is in 'l' too"}),
        ("{l: [0, 1, 2, 3], r: [1, 2]}", {"groups.r": "ranks 1 and 2 are in 'l' too"}),
        ("{l: [0, 1, 2, 3], r: [3, 2, 1, 0]}", {"groups.r": "has the same ranks as 'l'; keep one group"}),
        ("{l: [0, 1], r: [3]}", {"groups": "rank 2 is in no group"}),
        ("{l: [0], r: [2]}", {"groups": "ranks 1 and 3 are in no group"}),
        ("{l: [0, 1, 1], r: [2, 3]}", {"groups.l": "rank 1 stands there twice"}),
        ("{l: [0, 1, 7, 5], r: [2, 3]}", {"groups.l": "ranks 5 and 7: the launch has 4 ranks, 0 to 3; write one of those, or"}),
        ("{l: [0, 1, 7], r: [2, 3]}", {"groups.l": "or start more: deepspeed --num_gpus 8"}),
        ("{l: [0, 1, 2, 3], r: []}", {"groups.r": "a group without device"}),
        ("{l: [0, 1, 2, 3], r: {}}", {"groups.r": "a group without device"}),
        ("{l: [0, 1], r: {node: [0]}}", {"groups.r.node": "no host list is known; give --hostfile"}),
        ("{l: [0, 1], r: {localhost: [2, 9]}}", {"groups.r.localhost": "slot 9: this host has slots 0–3"}),
    ],
)
def test_groups_that_cannot_be(groups, expected):
    found = wrong(f"{{groups: {groups}, roles: {{actor: l}}}}")
    assert found.keys() == {f"placement.{path}" for path in expected}
    assert all(part in found[f"placement.{path}"] for path, part in expected.items()), found


def test_hosts_that_cannot_be():
    found = wrong("{groups: {l: {a: [0, 1, 2], nowhere: [0]}, r: {b: [0, 2], a: []}}, roles: {actor: l}}", TWO_HOSTS)
    assert found == {
        "placement.groups.l.nowhere": "unknown host; valid: a, b",
        "placement.groups.r.b": "slot 2: this host has slots 0 and 1",
        "placement.groups.r.a": "no slot; list some, e.g. [0, 1], or leave the host out",
    }
    assert wrong("{groups: {l: {a: []}, r: {a: [0, 1, 2], b: [0, 1]}}, roles: {actor: r}}", TWO_HOSTS) == {
        "placement.groups.l": "a group without device; list its ranks, e.g. [0, 1], or leave the group out"
    }


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ("{actor.0: l}", {"actor.1": "no group; write actor.1: {group: …} with one of left, l"}),
        ("{actor: l, akter.1: l}", {"akter.1": "unknown role; did you mean 'actor.1'?"}),
        ("{actor: l, judge: l}", {"judge": "unknown role; valid: actor.0, actor.1, rollout"}),
        ("{actor: l, actor.2: l}", {"actor.2": "unknown role; the agents are 0 to 1"}),
        ("{actor: lft}", {"actor.group": "no group 'lft'; did you mean 'left'?"}),
        ("{actor: [l, left]}", {"actor.group": "only rollout takes several groups; write group: l"}),
        ("{actor: {group: l, tensor_parallel: 2}}", {"actor.tensor_parallel": "is for rollout alone"}),
        ("{actor: l, rollout: {group: l, deepspeed: z.json}}", {"rollout.deepspeed": "leave it out"}),
        ("{actor: l, rollout: rihgt}", {"rollout.group": "no group 'rihgt'; valid: left, l"}),
        ("{actor: l, rollout: []}", {"rollout.group": "no group; write one or more of left, l"}),
        ("{actor: l, rollout: [l, left, l]}", {"rollout.group": "'l' stands there twice"}),
        (
            "{actor: l, rollout: {group: [left, l], tensor_parallel: 2}}",
            {"rollout.tensor_parallel": "2 does not divide the 3 ranks of the group 'l'; write one of 1, 3"},
        ),
    ],
)
def test_roles_that_cannot_be(roles, expected):
    found = wrong(f"{{groups: {{left: [0, 1], l: [2, 3, 4]}}, roles: {roles}}}", 5)
    assert found.keys() == {f"placement.roles.{path}" for path in expected}
    assert all(part in found[f"placement.roles.{path}"] for path, part in expected.items()), found


def test_an_engine_does_not_cross_hosts():
    text = "{groups: {l: [0], s: [%s]}, roles: {actor: l, rollout: {group: s, tensor_parallel: 2}}}"
    found = wrong(text % "1, 3, 2, 4", TWO_HOSTS)
    assert found.keys() == {"placement.roles.rollout.tensor_parallel"}
    layout = resolved(text % "1, 2, 3, 4", TWO_HOSTS)
    assert [e.ranks for e in place_engines(layout, engines=None, agents=2, device_kind="cuda")] == [(1, 2), (3, 4)]


# --- the trainer's device fields
def test_a_group_or_device_named_twice_alike_is_fine_and_a_gap_is_filled():
    assert resolved(GOOD, agent_devices=["left", "right"]).roles == resolved(GOOD).roles
    assert resolved(GOOD, agent_devices=["auto", "cuda:2"]).roles == resolved(GOOD).roles
    assert resolved(GOOD, agent_devices="cuda").roles == resolved(GOOD).roles
    text = "{groups: {l: [0, 1, 2], r: [3]}, roles: {actor.0: l}}"
    assert resolved(text, agent_devices=["auto", "r"]).roles["actor.1"] == RolePlace("r")
    assert resolved(text, agent_devices=["auto", "cuda:3"]).roles["actor.1"] == RolePlace("r")
    layout = resolved(text, roles=[*ACTORS, "critic"], agent_devices=["l", "l"], critic_devices="r")
    assert [layout.roles[r].group for r in ("actor.1", "critic")] == ["l", "r"]


@pytest.mark.parametrize(
    ("value", "path", "part"),
    [
        ("right", "", "'right' contradicts placement.roles, where actor.0 has the group 'left'; keep one"),
        (["left", "rest"], ".1", "'rest' contradicts placement.roles, where actor.1 has the group 'right'"),
        (["cuda:3", "auto"], ".0", "'cuda:3' contradicts placement.roles, where actor.0 has the group 'left'"),
        (["cuda:0", "auto"], ".0", "'cuda:0' is one device of the group 'left'; write left, or leave it out"),
        (["lefft", "auto"], ".0", "'lefft' is no group and no device; did you mean 'left'?"),
        (["cuda:9", "auto"], ".0", "'cuda:9' is not in this launch: localhost has devices 0–3"),
        ("cpu", "", "'cpu' is not in this launch, which computes on 'cuda'"),
        (["left"] * 3, "", "a list of 3 for 2 agents; write one value or 2"),
    ],
)
def test_device_fields_that_contradict_a_placement(value, path, part):
    found = wrong(GOOD, agent_devices=value)
    assert found.keys() == {f"args.agent_devices{path}"}
    assert part in found[f"args.agent_devices{path}"]


def test_a_field_that_leaves_a_role_without_group():
    text = "{groups: {l: [0, 1, 2, 3]}, roles: {actor.0: l}}"
    assert wrong(text, agent_devices=["auto", "cuda"]).keys() == {"placement.roles.actor.1"}
    assert wrong(text, roles=[*ACTORS, "critic"], agent_devices="l", critic_devices=["l", "cuda:1"]) == {
        "args.critic_devices": "['l', 'cuda:1']: there is one critic for all agents; name one",
        "placement.roles.critic": "no group; write critic: {group: …} with one of l",
    }
    layout = resolved(text, agent_devices=["auto", "l"], reference_devices="cuda:7")
    assert layout.notes == ("args.reference_devices: this trainer has no reference; ignored",)


def test_devices_without_placement_make_groups():
    layout = resolved(None, 4, roles=[*ACTORS, "critic"], agent_devices=["cuda:2", "cuda:0"])
    assert layout.groups == {"cuda:0": (0,), "cuda:2": (2,), "rest": (1, 3)}
    assert {r: p.group for r, p in layout.roles.items()} == {"actor.0": "cuda:2", "actor.1": "cuda:0", "critic": "rest"}
    assert layout.rollout == RolloutPlace(("cuda:0", "cuda:2", "rest"))
    full = resolved(None, 2, roles=[*ACTORS, "critic"], agent_devices=["localhost:cuda:1", "cuda:0"])
    assert full.groups == {"cuda:0": (0,), "cuda:1": (1,)} and full.roles["critic"].group == "cuda:0"
    assert resolved(None, 2, agent_devices=["cuda", "auto"]).groups == {"all": (0, 1)}


def test_devices_of_a_cluster_need_their_host():
    layout = resolved(None, TWO_HOSTS, agent_devices=["a:cuda:2", "b:cuda:0"])
    assert layout.groups == {"a:cuda:2": (2,), "b:cuda:0": (4,), "rest": (0, 1, 3)}
    assert wrong(None, TWO_HOSTS, agent_devices=["cuda:1", "c:cuda:0"]) == {
        "args.agent_devices.0": "'cuda:1' could be on any of 2 hosts; write a:cuda:1",
        "args.agent_devices.1": "'c:cuda:0' names an unknown host; valid: a, b",
    }
    assert wrong(None, TWO_HOSTS, agent_devices=["b:cuda:2", "a:cuda"]) == {
        "args.agent_devices.0": "'b:cuda:2' is not in this launch: b has devices 0 and 1",
        "args.agent_devices.1": "'a:cuda' names a host without a device; write 'a:cuda:0'",
    }
    assert "without a placement there are no groups" in wrong(None, agent_devices="left")["args.agent_devices"]


def test_one_process_has_one_device():
    for kind, value in [("cpu", None), ("cpu", "cpu"), ("cpu", ["auto", "cpu"]), ("cuda", "cuda:0"), ("cuda", ["cuda"] * 2)]:
        assert resolved(None, 1, kind=kind, agent_devices=value).groups == {"all": (0,)}
    assert wrong(None, 1, kind="cpu", agent_devices="cuda:0").keys() == {"args.agent_devices"}
    assert wrong(None, 1, agent_devices=["cuda:0", "cuda:1"]) == {
        "args.agent_devices": "['cuda:0', 'cuda:1']: one process uses one device; name one, or start a rank per device:"
        " deepspeed --num_gpus 2"
    }
    found = wrong(None, 1, roles=[*ACTORS, "critic"], agent_devices="cuda:0", critic_devices="cuda:1")
    assert found.keys() == {"args.critic_devices"} and "launch of one rank" in found["args.critic_devices"]


# --- engines and weight edges
def engines_of(layout, agents=2, kind="cuda", engines=None, transport="auto"):
    places = place_engines(layout, engines=engines, agents=agents, device_kind=kind, transport=transport)
    return [(e.ranks, e.group, e.serves) for e in places], [
        (e.agent, e.engine.index, e.transport) for e in edges(layout, places, agents, kind)
    ]


OWN = "{groups: {l: [0, 1], r: [2], s: [3, 4, 5, 6]}, roles: {actor.0: l, actor.1: r, rollout: %s}}"


def test_engines_on_their_own_devices_take_turns_over_the_agents():
    layout = resolved(OWN % "{group: s, tensor_parallel: 2}", 7)
    assert engines_of(layout) == (
        [((3, 4), "s", (0,)), ((5, 6), "s", (1,))],
        [(0, 0, "nccl"), (1, 1, "nccl")],
    )
    shared = [(0, 0, "host"), (0, 1, "host"), (1, 0, "host"), (1, 1, "host")]
    assert engines_of(layout, kind="cpu") == ([((3, 4), "s", None), ((5, 6), "s", None)], shared)
    assert engines_of(layout, transport="host")[1] == shared
    # Three engines on two sets, one engine for two agents.
    assert engines_of(layout, engines=3)[0] == [((3, 4), "s", (0,)), ((5, 6), "s", (1,)), ((3, 4), "s", (0,))]
    assert engines_of(layout, engines=1) == ([((3, 4), "s", None)], [(0, 0, "host"), (1, 0, "host")])


def test_engines_beside_an_actor_serve_that_actor():
    assert engines_of(resolved(OWN % "[l, r]", 7)) == (
        [((0,), "l", (0,)), ((2,), "r", (1,)), ((1,), "l", (0,))],  # groups take turns
        [(0, 0, "ipc"), (0, 2, "ipc"), (1, 1, "ipc")],
    )
    # An engine that is free takes the agent that has none; where none is, all engines serve all.
    assert engines_of(resolved(OWN % "[r, s]", 7), engines=2)[1] == [(0, 1, "nccl"), (1, 0, "ipc")]
    assert engines_of(resolved(OWN % "l", 7)) == (
        [((0,), "l", None), ((1,), "l", None)],
        [(0, 0, "host"), (0, 1, "host"), (1, 0, "host"), (1, 1, "host")],
    )
    assert engines_of(resolved(None, 2))[1] == [(0, 0, "host"), (0, 1, "host"), (1, 0, "host"), (1, 1, "host")]


def test_the_transport_of_one_edge():
    layout = resolved(OWN % "[r, s]", 7)
    beside, free = place_engines(layout, engines=2, agents=2, device_kind="cuda")
    assert edge_transport(layout, beside, 1, "cuda") == "ipc"
    assert edge_transport(layout, beside, 0, "cuda") == "host"
    assert edge_transport(layout, free, 0, "cuda") == "nccl"
    assert edge_transport(layout, free, 0, "cpu") == "host"


@pytest.mark.parametrize(
    ("rollout", "engines", "kind", "transport", "part"),
    [
        ("s", None, "cpu", "nccl", "'nccl' is between GPUs, and this launch computes on CPUs; write auto or host"),
        ("s", None, "cpu", "ipc", "'ipc' is between GPUs"),
        ("s", 1, "cuda", "nccl", "one full-weight actor per engine, but there is 1 engine for 2 agents"),
        ("s", None, "cuda", "ipc", "the group 's' hosts engines and no actor; write nccl or auto"),
        ("[l, r]", None, "cuda", "nccl", "the group 'l' hosts actor.0 and engines; write ipc or auto"),
        ("l", None, "cuda", "ipc", "one full-weight actor per engine"),
    ],
)
def test_a_transport_that_cannot_be(rollout, engines, kind, transport, part):
    layout = resolved(OWN % rollout, 7)
    with pytest.raises(ConfigError) as caught:
        place_engines(layout, engines=engines, agents=2, device_kind=kind, transport=transport)
    assert {p.path for p in caught.value.problems} == {"rollout.transport"} and part in str(caught.value)


def test_a_transport_that_several_actors_of_a_group_rule_out_or_that_can_be():
    one = resolved(None, 2)
    for transport in ("nccl", "ipc"):
        found = problems(lambda t=transport: place_engines(one, engines=None, agents=2, device_kind="cuda", transport=t))
        assert "actor.0, actor.1 share the group 'all' with engines" in found["rollout.transport"]
    assert engines_of(resolved(OWN % "s", 7), transport="nccl")[1] == [
        (0, 0, "nccl"),
        (0, 2, "nccl"),
        (1, 1, "nccl"),
        (1, 3, "nccl"),
    ]
    assert {e[2] for e in engines_of(resolved(OWN % "[l, r]", 7), transport="ipc")[1]} == {"ipc"}


@pytest.mark.parametrize(
    ("groups", "path", "says"),
    [
        ({"left": [-1]}, "groups.left", "[-1] is no group; write ranks such as [0, 1], or {host: [slots]}"),
        ({"left": 3}, "groups.left", "3 is no group"),
        ({"left": {"node": [True]}}, "groups.left", "is no group"),
        ({5: [0]}, "groups", "5 is no name of a group"),
        ({}, "groups", "names no group"),
    ],
)
def test_a_group_that_is_none_is_one_line(groups, path, says):
    found = problems(lambda: PlacementConfig(groups=groups))
    assert list(found) == [path] and says in found[path]
