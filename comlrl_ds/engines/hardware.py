"""What the hardware of this process can do."""

from __future__ import annotations

import ctypes
import ctypes.util


def device_kind() -> str:
    """ "cuda" where a GPU is usable, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def best_dtype(kind: str) -> str:
    """bfloat16 where matrix products run faster in it, else float32."""
    import torch

    if kind == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bfloat16" if fast else "float32"


def free_bytes(kind: str) -> int:
    """Memory that a training step may take: of the GPU, or of the host."""
    if kind == "cuda":
        import torch

        return torch.cuda.mem_get_info()[0]
    import psutil

    return psutil.virtual_memory().available


def keep_freed_memory() -> None:
    """Tells glibc to keep freed memory instead of giving it back to the kernel and faulting it in again.

    A training step on a CPU frees and takes gigabytes of activations; without this a third of its time is page faults.
    """
    name = ctypes.util.find_library("c")
    mallopt = getattr(ctypes.CDLL(name), "mallopt", None) if name else None
    if mallopt is not None:
        trim_threshold, top_pad, mmap_threshold = -1, -2, -3
        mallopt(mmap_threshold, 1 << 30)
        mallopt(trim_threshold, (1 << 31) - 1)
        mallopt(top_pad, 64 << 20)
