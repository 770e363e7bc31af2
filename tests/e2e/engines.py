"""Real vLLM engine children for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from comlrl_ds.rollout.base import PolicyWeights
from comlrl_ds.rollout.engine_client import VLLMRollout
from comlrl_ds.rollout.engine_process import EngineProcess
from comlrl_ds.rollout.engine_settings import AdapterRoom, engine_settings, probe_rows
from comlrl_ds.rollout.environment import engine_environment
from comlrl_ds.rollout.plugin import SWITCH


def start_engine(folder: Path, dtype: str, *, probe: bool = True, adapters: AdapterRoom | None = None) -> VLLMRollout:
    """A one-thread engine; `wait_ready` is the caller's, so that several start at the same time."""
    settings = engine_settings(
        str(folder), device="cpu", dtype=dtype, max_model_len=256, max_num_seqs=32, kv_cache_bytes=64 << 20,
        gpu_memory_utilization=0.5, adapters=adapters,
    )  # fmt: skip
    environment = engine_environment(os.environ, threads=1, devices=[]) | ({SWITCH: "1"} if adapters else {})
    child = EngineProcess(settings, environment, probe=probe_rows(320) if probe else (), start_timeout_s=240)
    return VLLMRollout(child, timeout_s=120, verify=probe)


def policy_of(lm, name: str, version: int, source: Path, dtype=None) -> PolicyWeights:
    """A live model as a policy, in Hugging Face names, a tied head once."""
    tensors = [(n, p.detach() if dtype is None else p.detach().to(dtype)) for n, p in lm.named_parameters()]
    return PolicyWeights(name, f"{name}@{version}", str(source), lambda: iter(tensors))


def fresh_logprobs(models: list[tuple[Path, str]], rows: list[list[int]]) -> list[list[list[float]]]:
    """Prompt log-probs of fresh engines, one per (folder, dtype)."""
    program = Path(__file__).with_name("fresh_engines.py")
    work = json.dumps({"models": [[str(folder), dtype] for folder, dtype in models], "rows": rows})
    environment = engine_environment(os.environ, threads=2, devices=[]) | {"VLLM_PLUGINS": ""}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(program)], input=work + "\n", env=environment, capture_output=True, text=True,
        timeout=400, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("RESULT "))
