"""What ranks do for group_worker.py: functions that the main rank has them call."""

from __future__ import annotations

import json
import os
import threading
import time
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny import tiny_lm

from comlrl_ds.engines import base as engine_module
from comlrl_ds.engines.ds_config import EnginePlan
from comlrl_ds.engines.engine import PolicyEngine
from comlrl_ds.engines.heads import make_head
from comlrl_ds.engines.scalar import ScalarEngine, ScalarModel
from comlrl_ds.rollout import host_sender
from comlrl_ds.rollout.chunks import opened, view


def build_tiny(
    seat, seed: int, plan: EnginePlan, *, layout: str = "auto", checkpointing: bool = False, tied: bool = True, layers: int = 2,
    value_head: int | None = None,
):  # fmt: skip
    """A tiny model's engine, the same on every rank; `value_head` is the width of its head's hidden layer."""
    lm = tiny_lm(seed, scale=2.0, tied=tied, layers=layers).to(getattr(torch, plan.dtype))
    if checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    head = make_head(64, seed, value_head).to(getattr(torch, plan.dtype)) if value_head else None
    return PolicyEngine(seat.role, lm, plan, layout=layout, chunk=16, value_head=head)


def build_tiny_scalar(seat, seed: int, plan: EnginePlan, hidden_dim: int | None = 8):
    """The same with a scalar head of its own seed."""
    return ScalarEngine(seat.role, tiny_scalar(seed, plan.dtype, hidden_dim), plan)


def tiny_scalar(seed: int, dtype: str = "float32", hidden_dim: int | None = 8) -> ScalarModel:
    backbone = tiny_lm(seed, scale=2.0).model.to(getattr(torch, dtype))
    return ScalarModel(backbone, head_seed=seed, hidden_dim=hidden_dim)


def head_weights(engine: PolicyEngine) -> list[list]:
    """[name, values] of the value head's tensors."""
    named = engine_module.gathered(list(engine.scorer.value_head.named_parameters()))
    return [[name, tensor.tolist()] for name, tensor in named]


def write_weights(engine: PolicyEngine, file: str) -> None:
    """Every whole weight, by the lead."""
    state = {name: t.clone() for name, t in engine.named_weights()}
    if engine.rank == 0:
        save_file(state, file)


def spoil(engine: PolicyEngine, rank: int, undo: bool = False) -> None:
    """Makes one rank's share of a backward infinite, or ends that."""
    if undo:
        del engine.backward
    elif engine.rank == rank:
        real = engine.backward
        engine.backward = lambda weights, *rest: real([[x * float("inf") for x in row] for row in weights], *rest)
    else:
        engine.backward = engine.backward


def shards(engine: PolicyEngine) -> list[list[int]]:
    """[parameter elements that a rank holds, elements of the whole model] of each rank."""
    parameters = list(engine.scorer.parameters())
    own = torch.tensor([sum(p.ds_tensor.numel() for p in parameters), sum(p.ds_numel for p in parameters)])
    found = [torch.zeros_like(own) for _ in range(engine.world_size)]
    torch.distributed.all_gather(found, own)
    return [t.tolist() for t in found]


def peak_during_load(seat, source: str, plan: EnginePlan):
    """Loads a model as `build_policy` does, noting what is whole when transformers is done with it."""
    from comlrl_ds.engines import build

    real = build.load_causal_lm

    def noted(*args: Any, **kwargs: Any):
        lm = real(*args, **kwargs)
        PARTS[seat.role] = [sum(p.numel() for p in lm.parameters()), all(hasattr(p, "ds_id") for p in lm.parameters())]
        return lm

    build.load_causal_lm = noted
    try:
        return build.build_policy(
            seat, source, plan, attn_implementation="sdpa", dropout=False, checkpointing=False, layout="auto", chunk=16
        )
    finally:
        build.load_causal_lm = real


PARTS: dict[str, list[Any]] = {}


def parts(engine: PolicyEngine) -> list[Any]:
    return PARTS[engine.name]


def gather_by(engine: PolicyEngine, size: int) -> None:
    """Bytes of a gathered group, for every rank alike."""
    engine_module.GATHER_BYTES = size


LOG: list[tuple[str, str, float]] = []


def instrument(engine: PolicyEngine) -> None:
    """Notes when gathers open and close, and when chunks are sent."""
    import deepspeed.runtime.zero as zero

    if getattr(zero, "noted", False):
        return
    zero.noted = True
    real_enter, real_exit = zero.GatheredParameters.__enter__, zero.GatheredParameters.__exit__
    real_fill = host_sender.Outbox.fill

    def enter(self):
        LOG.append(("gather", "open", time.monotonic()))
        return real_enter(self)

    def leave(self, *exc):
        result = real_exit(self, *exc)
        LOG.append(("gather", "close", time.monotonic()))
        return result

    def fill(self, tensors):
        LOG.append(("send", "start", time.monotonic()))
        return real_fill(self, tensors)

    zero.GatheredParameters.__enter__, zero.GatheredParameters.__exit__ = enter, leave
    host_sender.Outbox.fill = fill


def noted(engine: PolicyEngine) -> list[tuple[str, str, float]]:
    found = list(LOG)
    LOG.clear()
    return found


class SlowEngine:
    """An engine child's half of a sync, in a thread: it takes 0.2 s for every chunk, and keeps the tensors."""

    def __init__(self, name: str, delay: float = 0.2) -> None:
        self.local, self.key, self.delay = f"\0slow-{os.getpid()}-{name}", os.urandom(16).hex(), delay
        self.tensors: dict[str, torch.Tensor] = {}
        self.chunks = 0
        self._listener = Listener(self.local, authkey=bytes.fromhex(self.key))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        peer = self._listener.accept()
        while True:
            name, arguments = json.loads(peer.recv_bytes())
            answer: Any = None
            if name == "update_weights":
                time.sleep(self.delay)
                self.chunks += 1
                with opened(arguments["update_info"]) as buffer:
                    for tensor, *rest in arguments["update_info"]["tensors"]:
                        self.tensors[tensor] = view(buffer, *rest).clone()
                    del buffer
            elif name == "finish_weight_update":
                answer = {"version": arguments["version"], "probe": []}
            peer.send_bytes(json.dumps(["ok", answer]).encode())


def state_of(file: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(file)
