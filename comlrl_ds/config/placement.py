"""The `placement` section: device groups, and which role works on which."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from comlrl_ds.config.errors import Settings
from comlrl_ds.config.madpo import Positive


def _group_alone(value: Any) -> Any:
    """`actor.0: left` is short for `actor.0: {group: left}`."""
    return {"group": value} if isinstance(value, str | list) else value


def _ranks(value: Any) -> Any:
    """A list of ranks or {host: [slots]}, checked here: of a union pydantic would report every branch."""
    listed = list(value.values()) if isinstance(value, dict) else [value]
    for numbers in listed:
        if not isinstance(numbers, list) or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers):
            raise ValueError(f"{value!r} is no group; write ranks such as [0, 1], or {{host: [slots]}}")
    return value


def _some_groups(value: Any) -> Any:
    if not isinstance(value, dict) or not value:
        raise ValueError("names no group; write name: [ranks]")
    if odd := [name for name in value if not isinstance(name, str)]:
        raise ValueError(f"{odd[0]!r} is no name of a group; write a word")
    return value


class RoleSection(Settings):
    """Where one role works."""

    group: str | list[str] = Field(description="Name of a group; rollout alone may have a list of groups.")
    deepspeed: str | dict[str, Any] | None = Field(
        None, description="DeepSpeed file of this role, or its content; None: the run file's own."
    )
    tensor_parallel: Positive | None = Field(None, description="Devices that share one rollout engine; rollout only.")


class PlacementConfig(Settings):
    """Groups are disjoint sets of ranks that together are all ranks; roles that share a group take turns.

    A group is a list of global ranks, or {host: [slots]} with the hostfile's names. Roles are actor.0, actor.1 …,
    reference.i, reward_model, critic or critic.i, comparator and rollout; `actor` alone stands for every actor.
    """

    groups: Annotated[
        dict[str, Annotated[list[int] | dict[str, list[int]], BeforeValidator(_ranks)]], BeforeValidator(_some_groups)
    ] = Field(description="Device groups.")
    roles: dict[str, Annotated[RoleSection, BeforeValidator(_group_alone)]] = Field(
        default_factory=dict, description="Group of each role."
    )
