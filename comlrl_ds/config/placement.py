"""The `placement` section: device groups, and which role works on which."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from comlrl_ds.config.errors import Settings
from comlrl_ds.config.madpo import NonNegative, Positive


def _group_alone(value: Any) -> Any:
    """`actor.0: left` is short for `actor.0: {group: left}`."""
    return {"group": value} if isinstance(value, str | list) else value


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

    groups: dict[str, list[NonNegative] | dict[str, list[NonNegative]]] = Field(min_length=1, description="Device groups.")
    roles: dict[str, Annotated[RoleSection, BeforeValidator(_group_alone)]] = Field(
        default_factory=dict, description="Group of each role."
    )
