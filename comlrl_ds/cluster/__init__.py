"""Processes: which world this one belongs to, and how work reaches the ranks that host a role."""

from comlrl_ds.cluster.world import Cluster, start_world

__all__ = ["Cluster", "start_world"]
