"""Starts a run's engines from its settings."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from comlrl_ds.config.run_file import RolloutConfig
from comlrl_ds.rollout.base import PolicyWeights, RolloutEngine, SyncReport
from comlrl_ds.rollout.disk import shape_of
from comlrl_ds.rollout.environment import engine_environment
from comlrl_ds.rollout.pool import RolloutPool
from comlrl_ds.rollout.vllm_rollout import VLLMRollout, engine_settings, probe_rows

LONGEST_BY_DEFAULT = 4096


def model_limits(source: str) -> tuple[int, int]:
    """(longest sequence, vocabulary size) that a model folder's config states."""
    config = json.loads((Path(source) / "config.json").read_text())
    config = config.get("text_config", config)
    longest = next((int(config[k]) for k in ("max_position_embeddings", "n_positions") if config.get(k)), LONGEST_BY_DEFAULT)
    return longest, int(config["vocab_size"])


def max_model_len(config: RolloutConfig, source: str) -> int:
    """Longest prompt + completion of an engine for this model."""
    longest, _ = model_limits(source)
    return min(longest, config.max_model_len or LONGEST_BY_DEFAULT)


def vllm_is_installed() -> bool:
    # By module, not by distribution: the CPU build is another distribution with the same module.
    return importlib.util.find_spec("vllm") is not None


class Engines:
    """The engines of a run while they start: children at once, `pool()` when they are needed.

    Args:
        config: the rollout section.
        sources: model folder of each agent.
        device: "cpu" or "cuda".
        dtype: compute type of the engines, "bfloat16", "float16" or "float32".
        log: file for what the children print; None is the trainer's own output.
    """

    def __init__(
        self, config: RolloutConfig, sources: Sequence[str], *, device: str, dtype: str, log: Path | None = None
    ) -> None:
        self._config = config
        shapes: dict[str, list[str]] = {}
        for source in sources:
            known = shapes.setdefault(shape_of(source), [])
            if source not in known:
                known.append(source)
        count = engine_count(config, device, len(shapes))
        self._engines: list[RolloutEngine] = []
        self._pool: RolloutPool | None = None
        # Architectures take turns, and within one the agents' folders: each engine starts with weights that are needed.
        turns = [folders[k % len(folders)] for k in range(count) for folders in shapes.values()][:count]
        if config.backend == "transformers":
            import torch

            from comlrl_ds.rollout.transformers_rollout import TransformersRollout

            self._engines = [TransformersRollout(s, dtype=getattr(torch, dtype), device=device) for s in turns]
            return
        threads = threads_per_engine(config, count) if device == "cpu" else None
        output = open(log, "ab") if log else None  # noqa: SIM115
        for k, source in enumerate(turns):
            settings = engine_settings(
                source, device=device, dtype=dtype, max_model_len=max_model_len(config, source),
                max_num_seqs=config.max_num_seqs, kv_cache_bytes=config.kv_cache_bytes,
                gpu_memory_utilization=config.gpu_memory_utilization,
            )  # fmt: skip
            devices = [_visible_devices()[k % len(_visible_devices())]] if device != "cpu" else []
            self._engines.append(
                VLLMRollout(
                    settings, engine_environment(os.environ, threads=threads, devices=devices),
                    probe=probe_rows(model_limits(source)[1]) if config.verify_sync else (),
                    start_timeout_s=config.start_timeout_s, timeout_s=config.timeout_s, log=output,
                )
            )  # fmt: skip
        if output:
            output.close()

    def pool(self, on_sync: Callable[[PolicyWeights, int, SyncReport], None] | None = None) -> RolloutPool:
        """The engines, ready."""
        if self._pool is None:
            for engine in self._engines:
                if isinstance(engine, VLLMRollout):
                    engine.wait_ready()
            self._pool = RolloutPool(self._engines, shape_of, self._config.timeout_s, on_sync)
        return self._pool

    def usage(self) -> list[dict[str, float]]:
        """CPU seconds and peak memory of each engine process."""
        return [e.usage() for e in self._engines if isinstance(e, VLLMRollout)]

    def shutdown(self) -> None:
        for engine in self._engines:
            engine.shutdown()


def engine_count(config: RolloutConfig, device: str, architectures: int) -> int:
    """Engines to start: several one-thread engines sample faster on a CPU than one with several threads."""
    if config.engines is not None:
        return max(config.engines, architectures)
    if config.backend == "transformers" or device != "cpu":
        return architectures
    per_engine = config.threads or 1
    return max(architectures, min(8, math.floor(cores() / per_engine), cores()), 1)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _visible_devices() -> list[str]:
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(k) for k in range(torch.cuda.device_count())]


def describe(config: RolloutConfig, sources: Sequence[str], device: str) -> str:
    """What `plan` says about rollouts."""
    count = engine_count(config, device, len({shape_of(s) for s in sources}))
    each = f" of {threads_per_engine(config, count)} threads" if device == "cpu" and config.backend == "vllm" else ""
    longest = min(max_model_len(config, s) for s in sources)
    return f"{config.backend}, {count} engines{each}, sequences of up to {longest} tokens"


def threads_per_engine(config: RolloutConfig, engines: int) -> int:
    """OpenMP threads of each CPU engine."""
    return config.threads or max(1, cores() // engines)
