"""Builds an actor's engine on each rank of its device group."""

from __future__ import annotations

import copy
from typing import Any

from comlrl_ds.cluster import Seat
from comlrl_ds.config.errors import ConfigError, Problem
from comlrl_ds.engines.ds_config import EnginePlan
from comlrl_ds.engines.engine import PolicyEngine
from comlrl_ds.engines.loading import load_causal_lm, local_folder


def build_policy(
    seat: Seat, source: str, plan: EnginePlan, *, attn_implementation: str | None, dropout: bool, checkpointing: bool,
    layout: str, chunk: int,
) -> PolicyEngine:  # fmt: skip
    """A policy's engine, for `Cluster.create`. At ZeRO-3 on several ranks no rank ever holds the whole model.

    Args:
        source: model folder, or a repository that this machine fetches for itself.
        plan: from `plan_engine`, for the group's number of ranks.
        checkpointing: recompute activations in backward. layout, chunk: see `PolicyEngine`.
    """
    if seat.device == "cpu":
        from comlrl_ds.engines.hardware import keep_freed_memory

        keep_freed_memory()
    try:
        source = local_folder(source, "model")
    except ConfigError as error:
        raise ConfigError(Problem(f"{seat.role} on rank {seat.rank}", p.message) for p in error.problems) from None
    config = copy.deepcopy(plan.config) if plan.stage == 3 and seat.group_size > 1 else None
    lm: Any = load_causal_lm(
        source, dtype=plan.dtype, attn_implementation=attn_implementation, dropout=dropout, zero3_config=config
    )
    if checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    return PolicyEngine(seat.role, lm, copy.deepcopy(plan), layout=layout, chunk=chunk, host_ranks=seat.host_ranks)
