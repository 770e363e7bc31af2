"""Builds the engines of actors, reward models and critics on each rank of their device group."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path
from typing import Any

import torch

from comlrl_ds.cluster import Seat
from comlrl_ds.config.errors import ConfigError, Problem
from comlrl_ds.config.lora import LoraSettings
from comlrl_ds.engines.ds_config import EnginePlan
from comlrl_ds.engines.engine import PolicyEngine
from comlrl_ds.engines.frozen import FrozenEngine
from comlrl_ds.engines.heads import VALUE_HEAD, ValueHead, load_head, make_head
from comlrl_ds.engines.loading import load_backbone, load_causal_lm, local_folder
from comlrl_ds.engines.lora import add_lora
from comlrl_ds.engines.scalar import ScalarEngine, ScalarModel


def build_scalar(
    seat: Seat, source: str, plan: EnginePlan, *, attn_implementation: str | None, dropout: bool, checkpointing: bool,
    head_seed: int, hidden_dim: int | None = None, freeze_backbone: bool = False, lora: LoraSettings | None = None,
    dropout_seed: int = 0, current: str | None = None,
) -> ScalarEngine:  # fmt: skip
    """The engine of a reward model or critic, for `Cluster.create`; the head starts from its seed.

    Args:
        source, plan, dropout, dropout_seed, checkpointing, lora: see `build_policy`. head_seed, hidden_dim, freeze_backbone:
            see `ScalarModel`. current: folder of this very model, head included, that was saved after it had learned.
    """
    folder = source if lora else current or source
    backbone = _loaded(seat, load_backbone, folder, plan, attn_implementation, dropout, checkpointing)
    if lora:
        add_lora(backbone, lora, source=source, seed=head_seed, dropout=dropout, current=current)
    model = ScalarModel(backbone, head_seed=head_seed, hidden_dim=hidden_dim, freeze_backbone=freeze_backbone)
    if current:
        load_head(Path(current), model.head)
    return ScalarEngine(seat.role, model, copy.deepcopy(plan), dropout_seed if dropout else None)


def build_reference(
    seat: Seat, source: str, plan: EnginePlan, *, attn_implementation: str | None, layout: str, chunk: int
) -> FrozenEngine:
    """A frozen policy's engine, for `Cluster.create`."""
    lm = _loaded(seat, load_causal_lm, source, plan, attn_implementation, False, False)
    return FrozenEngine(seat.role, lm, plan, layout=layout, chunk=chunk, device=seat.device)


def build_policy(
    seat: Seat, source: str, plan: EnginePlan, *, attn_implementation: str | None, dropout: bool, checkpointing: bool,
    layout: str, chunk: int, value_head: ValueHead | None = None, lora: LoraSettings | None = None, lora_seed: int = 0,
    dropout_seed: int = 0, current: str | None = None,
) -> PolicyEngine:  # fmt: skip
    """A policy's engine, for `Cluster.create`. At ZeRO-3 on several ranks no rank ever holds the whole model.

    Args:
        source: model folder, or a repository that this machine fetches for itself.
        plan: from `plan_engine`, for the group's number of ranks.
        dropout: the model's own stays on in steps, its masks from `dropout_seed`; otherwise it is off.
        checkpointing: recompute activations in backward. layout, chunk: see `PolicyEngine`.
        value_head: beside the vocabulary's, of an actor that is its own critic.
        lora: an adapter learns, its A from `lora_seed`, in place of the weights. Engines of this rank with the same base hold
            that once, where they do not shard it.
        current: folder of this very policy that was saved after it had learned: its weights, with LoRA its adapter, and its
            value head. None: it begins as `source`, the settings and the seeds say.
    """
    folder = source if lora else current or source
    lm = _loaded(seat, load_causal_lm, folder, plan, attn_implementation, dropout, checkpointing, shared=lora is not None)
    if lora:
        add_lora(lm, lora, source=source, seed=lora_seed, dropout=dropout, current=current)
    head = None
    if value_head:
        width = lm.config.get_text_config().hidden_size
        head = make_head(width, value_head.seed, value_head.hidden_dim).to(getattr(torch, plan.dtype))
        if current:
            load_head(Path(current) / VALUE_HEAD, head)
    return PolicyEngine(
        seat.role, lm, copy.deepcopy(plan), layout=layout, chunk=chunk, host_ranks=seat.host_ranks, value_head=head,
        dropout_seed=dropout_seed if dropout else None,
    )  # fmt: skip


def _loaded(
    seat: Seat, load: Any, source: str, plan: EnginePlan, attention: str | None, dropout: bool, checkpointing: bool,
    shared: bool = False,
) -> Any:  # fmt: skip
    """A transformers model, sharded from the first tensor on where the plan shards it over several ranks.

    Args:
        shared: its weights are never changed, so that they may be those of a model that was loaded before.
    """
    if seat.device == "cpu":
        from comlrl_ds.engines.hardware import keep_freed_memory

        keep_freed_memory()
    try:
        source = local_folder(source, "model")
    except ConfigError as error:
        raise ConfigError(Problem(f"{seat.role} on rank {seat.rank}", p.message) for p in error.problems) from None
    config = copy.deepcopy(plan.config) if plan.stage == 3 and seat.group_size > 1 else None
    kind = (source, plan.dtype, attention, dropout, checkpointing)
    if shared and plan.stage < 3 and kind in _BASES:
        return _on(_BASES[kind])
    model = load(source, dtype=plan.dtype, attn_implementation=attention, dropout=dropout, zero3_config=config)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if shared and plan.stage < 3:
        _BASES[kind] = model
        model = _on(model)
    return model


# Bases of adapters that this process holds, for as long as some model is on them.
_BASES: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()


def _on(base: Any) -> Any:
    """A model of its own with the very parameters of another."""
    model = copy.deepcopy(base, {id(p): p for p in base.parameters()})
    model.__dict__["base"] = base  # not as a module: it is no part of this one
    return model
