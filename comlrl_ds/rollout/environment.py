"""The environment of an engine child: the parent's, less what belongs to the trainer alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

# What a launcher tells a trainer process; an engine that sees it would join the wrong world.
_LAUNCHER = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_SIZE|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK|GROUP_WORLD_SIZE|CROSS_RANK|CROSS_SIZE"
    r"|ROLE_.*|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*|TORCH_NCCL_.*|OMPI_.*|PMI_.*|PMIX_.*|SLURM_.*|DS_ACCELERATOR|GLOO_SOCKET_IFNAME)"
)
# Credentials of services that only the trainer's rank 0 talks to. The hub's token stays: the engine loads models.
_SECRET = re.compile(r"(.*_)?(KEY|APIKEY|SECRET|PASSWORD|CREDENTIALS|TOKEN)|WANDB_.*", re.IGNORECASE)
_HUB = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


def engine_environment(parent: Mapping[str, str], *, threads: int | None, devices: Sequence[str]) -> dict[str, str]:
    """Environment of one engine.

    Args:
        parent: usually `os.environ`.
        threads: OpenMP threads of a CPU engine; None leaves the parent's.
        devices: the engine's GPUs, as the parent names them; empty for the CPU.
    """
    kept = {
        name: value
        for name, value in parent.items()
        if not _LAUNCHER.fullmatch(name) and (name in _HUB or not _SECRET.fullmatch(name))
    }
    kept["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    if threads is not None:
        kept["OMP_NUM_THREADS"] = str(threads)
    # Passive: spinning OpenMP threads of two processes on the same cores slow both tenfold. nobind: the trainer and
    # the engines take turns on the same cores.
    fixed = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_PLUGINS": "comlrl_ds",
        "VLLM_NO_USAGE_STATS": "1",
        "TQDM_DISABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return kept | fixed | {"VLLM_LOGGING_LEVEL": parent.get("VLLM_LOGGING_LEVEL", "ERROR")}
