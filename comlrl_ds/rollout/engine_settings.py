"""What a vLLM engine is started with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Ranks that vLLM has room for.
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True)
class AdapterRoom:
    """What adapters may take of an engine: their largest rank, the ends of their layers' names, and how many there are."""

    rank: int
    endings: tuple[str, ...]
    policies: int


def probe_rows(vocabulary: int) -> list[list[int]]:
    """Token rows spread over the vocabulary, whose log-probs show whether an engine's weights changed."""
    return [[(7 + 31 * k + 1013 * row) * (vocabulary // 61 + 1) % vocabulary for k in range(24)] for row in range(2)]


def engine_settings(
    source: str, *, device: str, dtype: str, max_model_len: int, max_num_seqs: int, kv_cache_bytes: int | None,
    gpu_memory_utilization: float, tensor_parallel: int = 1, transport: str = "host", sleeps: bool = False,
    backend: str = "vllm", adapters: AdapterRoom | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Back-end and arguments of an engine on this kind of device: for vLLM those of `vllm.LLM`.

    Args:
        transport: how weights reach it. sleeps: whether it gives its memory back while its devices train.
        adapters: room for adapters, of which it takes its policies' in place of whole weights.
    """
    if backend == "transformers":
        return {"backend": backend, "llm": {"model": source, "dtype": dtype, "device": device}}
    settings: dict[str, Any] = {
        "model": source, "dtype": dtype, "seed": 0, "skip_tokenizer_init": True, "generation_config": "vllm",
        "max_model_len": max_model_len, "max_num_seqs": max_num_seqs, "weight_transfer_config": {"backend": transport},
        "disable_log_stats": True,
    }  # fmt: skip
    if adapters:
        settings |= {
            "enable_lora": True, "max_loras": adapters.policies, "max_cpu_loras": adapters.policies,
            "max_lora_rank": next((r for r in VLLM_RANKS if r >= adapters.rank), adapters.rank),
            # Unless it is told which, vLLM wraps the head as well, which costs a gather for every step.
            "lora_target_modules": list(adapters.endings),
            "worker_extension_cls": "comlrl_ds.rollout.adapter_server.BoundLayers",
        }  # fmt: skip
    if tensor_parallel > 1:
        settings |= {"tensor_parallel_size": tensor_parallel, "distributed_executor_backend": "mp"}
    if device == "cpu":
        # Eager: compiling takes minutes. Blocks of 32: candidates share prompts shorter than the default block of 128.
        # No chunked prefill: a seeded request that is prefilled in parts crashes the CPU sampler.
        settings |= {
            "enforce_eager": True, "block_size": 32, "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(max_model_len, 8192), "kv_cache_memory_bytes": kv_cache_bytes or 1 << 30,
        }  # fmt: skip
    else:
        settings |= {"gpu_memory_utilization": gpu_memory_utilization, "enable_sleep_mode": sleeps}
    return {"backend": backend, "llm": settings}
