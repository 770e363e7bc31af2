"""The world of a run. Here: one process that hosts every role.

Loops talk to `Cluster` only in terms of roles, so that they do not know how many processes there are.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from comlrl_ds.config.errors import ConfigError, Problem

T = TypeVar("T")


@dataclass(frozen=True)
class Cluster:
    """The ranks of a run. `rank` 0 is the brain: it alone runs the user's code and writes the run's files."""

    rank: int
    size: int
    device: str

    def run(self, calls: Mapping[str, Callable[[], T]]) -> dict[str, T]:
        """Executes each role's call on the ranks that host the role; every rank gets every role's result.

        Roles of one group take turns, in the order given.
        """
        return {role: call() for role, call in calls.items()}


def check_launch(environment: Mapping[str, str]) -> None:
    """Refuses a launch that this version cannot serve, before anything is loaded."""
    size = environment.get("WORLD_SIZE", "1")
    if size != "1":
        raise ConfigError(Problem("WORLD_SIZE", f"started with {size} ranks, but all roles run in one process; start one rank"))


def start_world(device: str, timeout_s: float = 1800) -> Cluster:
    """Makes this process's torch.distributed world, which DeepSpeed then adopts. Asks for no port: the store is in memory."""
    check_launch(os.environ)
    import torch.distributed as dist

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK=os.environ.get("LOCAL_RANK", "0"))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    if device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    backend = "gloo" if device == "cpu" else "nccl"
    if not dist.is_initialized():
        timeout = datetime.timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    _adopt(backend)
    if device != "cpu":
        import torch

        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    return Cluster(0, 1, device)


def _adopt(backend: str) -> None:
    import deepspeed
    import deepspeed.ops
    from deepspeed.utils import logger

    logger.setLevel("ERROR")
    # One C++ build less: shared-memory collectives, which a group of one does not use.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
