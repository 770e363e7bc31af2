"""One process as a launch: what the environment says of it, calls on roles, and what cannot change any more."""

from __future__ import annotations

import pytest

from comlrl_ds.cluster import Cluster, call
from comlrl_ds.cluster.hostfile import slots_of_one_host
from comlrl_ds.cluster.launch import Launch, own_address, read_launch, this_host
from comlrl_ds.cluster.layout import Layout, RolePlace, RolloutPlace
from comlrl_ds.config import ConfigError
from comlrl_ds.learners.spans import busy, common, overlap


def layout_of(groups, roles) -> Layout:
    places = {role: RolePlace(group) for role, group in roles.items()}
    slots = tuple(slots_of_one_host(sum(map(len, groups.values()))))
    return Layout(slots, groups, places, RolloutPlace(tuple(groups)[:1]))


# --- the environment
DEEPSPEED = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29700"}


def test_launchers_are_understood():
    assert read_launch({}) == Launch()
    assert read_launch(DEEPSPEED) == Launch(3, 8, 1, "10.0.0.1", 29700)
    mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    assert read_launch(mpi | {"MASTER_ADDR": "a"}) == Launch(1, 2, 0, "a", 29500)
    # A shell inside a SLURM job has these too, and is no rank of anything.
    slurm = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "5"}
    assert read_launch(slurm) == Launch()
    assert read_launch(slurm | {"MASTER_ADDR": "a"}) == Launch(5, 16, 5, "a", 29500)


@pytest.mark.parametrize(
    ("changed", "path"),
    [
        ({"RANK": "8"}, "RANK"),
        ({"RANK": "x"}, "RANK"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR"),
        ({"RANK": None}, "WORLD_SIZE"),
    ],
)
def test_what_a_launcher_would_not_say_is_named(changed, path):
    environment = {k: v for k, v in (DEEPSPEED | changed).items() if v is not None}
    with pytest.raises(ConfigError) as caught:
        read_launch(environment)
    assert [p.path for p in caught.value.problems] == [path]


def test_the_own_address_is_the_one_that_leads_to_the_other():
    assert own_address("127.0.0.1") == "127.0.0.1"
    host = this_host("127.0.0.1", 29500)
    assert host.interface == "lo" and host.name and not any(a.startswith("127.") for a in host.aliases)


# --- roles
class Counter:
    def __init__(self, start: int) -> None:
        self.value = start

    def add(self, number: int) -> int:
        self.value += number
        return self.value


class Doubling(Counter):
    def add(self, number: int) -> int:
        return super().add(2 * number)


def build(seat, kind, start):
    assert (seat.rank, seat.group, seat.group_rank, seat.group_size, seat.host_ranks) == (0, "all", 0, 1, 1)
    return kind(start)


def value_of(counter, factor=1):
    return factor * counter.value


def test_calls_reach_the_objects_of_roles(tmp_path):
    cluster = Cluster(Launch())
    cluster.arrange(layout_of({"all": (0,)}, {"a": "all", "b": "all"}), 60, tmp_path)
    cluster.create({"a": call(build, Counter, 1), "b": call(build, Doubling, 10), "c": call(build, Counter, 5)}, {"c": (0,)})
    # A method is the object's own; a function takes the object first.
    assert cluster.run({"a": call(Counter.add, 3), "b": call(Counter.add, 3)}) == {"a": 4, "b": 16}
    assert cluster.run({"b": call(value_of, factor=2), "c": call(value_of)}) == {"b": 32, "c": 5}
    assert [len(cluster.spans[role]) for role in "abc"] == [2, 3, 2]
    assert cluster.placed == {"c"}
    cluster.drop(["a", "c"])
    assert cluster.local("a") is None and cluster.local("b").value == 16 and cluster.placed == set()
    with pytest.raises(KeyError):
        cluster.run({"a": call(Counter.add, 1)})


def test_what_a_method_of_a_trainer_gives_is_given_on(tmp_path):
    cluster = Cluster(Launch())
    assert cluster.reaches_all and cluster.conduct(lambda: cluster.conduct(lambda: 5) + 1) == 6
    with pytest.raises(ZeroDivisionError):
        cluster.conduct(lambda: 1 / 0)


def test_groups_stay_as_they_are_in_a_process(tmp_path):
    cluster = Cluster(Launch())
    first = layout_of({"left": (0,), "right": (1,)}, {"a": "left"})
    cluster.arrange(first, 60, tmp_path)
    cluster.arrange(layout_of({"left": (0,), "right": (1,)}, {"a": "right"}), 60, tmp_path)  # nothing is joined yet
    cluster.arrange(first, 60, tmp_path)
    cluster.device = "cpu"  # the groups are joined, those with roles
    cluster.arrange(layout_of({"left": (0,), "right": (1,)}, {"b": "left"}), 60, tmp_path)
    for groups, roles in (({"left": (0, 1)}, {"a": "left"}), ({"left": (0,), "right": (1,)}, {"a": "right"})):
        with pytest.raises(ConfigError, match=r"placement.groups: other device groups than an earlier trainer"):
            cluster.arrange(layout_of(groups, roles), 60, tmp_path)


def test_a_run_folder_that_this_machine_does_not_see_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"run.dir: .*storage that all machines share"):
        Cluster(Launch()).arrange(layout_of({"all": (0,)}, {}), 60, tmp_path / "elsewhere")


# --- intervals of work
def test_overlap_is_what_all_share_of_the_least_busy():
    assert busy([(0, 2), (5, 6)]) == 3
    assert common([(0, 2), (5, 9)], [(1, 6)]) == [(1, 2), (5, 6)]
    assert overlap([[(0, 4)], [(2, 6)]]) == 0.5
    assert overlap([[(0, 10)], [(2, 4), (6, 8)]]) == 1.0
    assert overlap([[(0, 4)], [(4, 8)]]) == overlap([[], [(0, 1)]]) == 0.0
    assert overlap([[(0, 4)], [(1, 5)], [(2, 6)]]) == 0.5
