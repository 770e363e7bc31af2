"""Processes: the ranks of a launch, their device groups, and how work reaches the ranks that host a role."""

from comlrl_ds.cluster.world import Call, Cluster, Seat, call, join

__all__ = ["Call", "Cluster", "Seat", "call", "join"]
