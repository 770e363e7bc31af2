"""The torch.distributed world of one device group: its default group holds exactly that group's ranks.

DeepSpeed's hidden barriers, broadcasts and process-wide state then touch nobody else, so groups may have different ZeRO
stages and take different numbers of steps.
"""

from __future__ import annotations

import datetime
import os
import warnings
from typing import Any

from comlrl_ds.cluster.launch import Launch
from comlrl_ds.cluster.layout import Layout

# Long: the watch, which knows who hangs, comes first.
COLLECTIVE_TIMEOUT = datetime.timedelta(hours=24)


def serve_store() -> Any:
    """The store that the groups of a launch meet at, in the main rank's process; `.port` says where."""
    import torch.distributed as dist

    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=COLLECTIVE_TIMEOUT)


def join_group(launch: Launch, layout: Layout, kind: str, store: Any, interface: str) -> str:
    """Makes this process a rank of its device group, and DeepSpeed adopt that; returns the device to compute on.

    Args:
        kind: "cpu" or "cuda". store: from `serve_store`, its port elsewhere, or None in a launch of one.
        interface: network device that reaches the other ranks.
    """
    import torch
    import torch.distributed as dist

    name = layout.group_of(launch.rank)
    ranks = layout.groups[name]
    if kind == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        if "OMP_NUM_THREADS" not in os.environ and hasattr(os, "sched_getaffinity"):
            here = sum(layout.host(r) == layout.host(launch.rank) for r in range(launch.size))
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // here))
    if launch.size > 1:
        # Gloo's own choice is the address of the hostname, which is loopback on many machines.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if isinstance(store, int):
            store = dist.TCPStore(
                launch.master_addr, store, is_master=False, wait_for_workers=False, timeout=COLLECTIVE_TIMEOUT
            )
        place: Any = dist.PrefixStore(f"group/{name}", store)
    else:
        place = dist.HashStore()
    # DeepSpeed reads these in several places. LOCAL_SIZE stays that of the host.
    os.environ.update(RANK=str(ranks.index(launch.rank)), WORLD_SIZE=str(len(ranks)), LOCAL_RANK=str(launch.local_rank))
    os.environ.setdefault("MASTER_ADDR", launch.master_addr)
    os.environ.setdefault("MASTER_PORT", str(launch.master_port))
    backend = "gloo" if kind == "cpu" else "nccl"
    if not dist.is_initialized():
        dist.init_process_group(
            backend, store=place, rank=ranks.index(launch.rank), world_size=len(ranks), timeout=COLLECTIVE_TIMEOUT
        )
    _adopt(backend)
    if kind == "cpu":
        return "cpu"
    torch.cuda.set_device(launch.local_rank)
    return f"cuda:{launch.local_rank}"


def _adopt(backend: str) -> None:
    import deepspeed
    import deepspeed.ops
    from deepspeed.runtime import bf16_optimizer
    from deepspeed.utils import logger

    logger.setLevel("ERROR")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # of DeepSpeed's calls
    bf16_optimizer.see_memory_usage = lambda *_, **__: None  # prints, whatever the logger's level
    # One C++ build less: shared-memory collectives for ranks of one host.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=backend, verbose=False)


def leave_group() -> None:
    """Destroys the process's torch.distributed world, if it has one."""
    import sys

    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()
