"""A DeepSpeed configuration from the user's JSON and the trainer's own numbers.

Any DeepSpeed file is accepted. What the trainer decides (batch sizes, learning rate, clipping, compute type) may be left
out, be "auto", or agree; a contradiction is an error that names both sides.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comlrl_ds.config.errors import ConfigError, Problem

DTYPES = ("bfloat16", "float16", "float32")
FILLED_BY_WIDTH = {
    "zero_optimization.reduce_bucket_size": lambda width: width * width,
    "zero_optimization.stage3_prefetch_bucket_size": lambda width: int(0.9 * width * width),
    "zero_optimization.stage3_param_persistence_threshold": lambda width: 10 * width,
}
DEFAULT = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 50_000_000}}


@dataclass(frozen=True)
class TrainerNumbers:
    """What the trainer knows: pairs per step, ranks of the engine's group, learning rate, clipping, compute type."""

    batch_size: int
    world_size: int
    learning_rate: float
    max_grad_norm: float | None
    dtype: str  # "auto" or one of DTYPES
    default_dtype: str  # what auto means on this hardware
    name: str = ""  # of the group and role, which no other engine has


@dataclass(frozen=True)
class EnginePlan:
    """A checked configuration. `config` goes to DeepSpeed, less its optimizer and scheduler, which are built here."""

    config: dict[str, Any]
    stage: int
    dtype: str
    optimizer: dict[str, Any]
    scheduler: dict[str, Any] | None
    max_pairs: int | None
    notes: tuple[str, ...] = ()


def read_deepspeed(value: str | Path | Mapping[str, Any] | None, base: Path | None = None) -> dict[str, Any]:
    """The user's configuration as a dict, from a file, a dict, or the default."""
    if value is None:
        return copy.deepcopy(DEFAULT)
    if isinstance(value, Mapping):
        return copy.deepcopy(dict(value))
    file = Path(value)
    candidates = [file] if file.is_absolute() or base is None else [file, base / file]
    found = next((f for f in candidates if f.is_file()), None)
    if found is None:
        raise ConfigError(Problem("deepspeed", f"no file {str(value)!r}"))
    try:
        content = json.loads(found.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(Problem("deepspeed", f"{str(value)!r} is not JSON: {error}")) from None
    if not isinstance(content, dict):
        raise ConfigError(Problem("deepspeed", f"{str(value)!r} must hold a JSON object"))
    return content


def plan_engine(user: Mapping[str, Any], numbers: TrainerNumbers) -> EnginePlan:
    """Checks the user's configuration against the trainer's numbers and fills it in.

    Raises:
        ConfigError: with every contradiction.
    """
    config = copy.deepcopy(dict(user))
    problems: list[Problem] = []
    notes: list[str] = []

    _check_kinds(config, problems)
    if problems:
        raise ConfigError(problems)
    dtype = _dtype(config, numbers, problems)
    stage = _stage(config, problems, notes)
    max_pairs = _batch(config, numbers, problems)
    optimizer = _optimizer(config, numbers, problems)
    scheduler = _section(config.pop("scheduler", None), "scheduler", problems)
    clip = config.get("gradient_clipping", "auto")
    if clip in ("auto", None):
        config["gradient_clipping"] = numbers.max_grad_norm or 0.0
    elif numbers.max_grad_norm is not None and clip != numbers.max_grad_norm:
        problems.append(
            Problem("deepspeed.gradient_clipping", f"{clip} contradicts args.max_grad_norm = {numbers.max_grad_norm}")
        )
    if config.get("managed_gradient_accumulation", False):
        problems.append(Problem("deepspeed.managed_gradient_accumulation", "must be false: the trainer ends the steps"))
    config["managed_gradient_accumulation"] = False
    config["zero_allow_untested_optimizer"] = True
    _own_swap_folders(config, numbers.name, problems)
    config.setdefault("steps_per_print", 10**9)
    for path in _autos(config):
        problems.append(Problem(f"deepspeed.{path}", "'auto' is not known here; write a value or leave it out"))
    if problems:
        raise ConfigError(problems)
    return EnginePlan(config, stage, dtype, optimizer, scheduler, max_pairs, tuple(notes))


def _check_kinds(config: Mapping[str, Any], problems: list[Problem]) -> None:
    kinds = dict.fromkeys(("bf16", "fp16", "zero_optimization", "data_types"), "an object")
    kinds |= dict.fromkeys(("optimizer", "scheduler"), "{'type': name, 'params': {…}}")
    for name, kind in kinds.items():
        if name in config and not isinstance(config[name], dict):
            problems.append(Problem(f"deepspeed.{name}", f"must be {kind}, got {config[name]!r}"))
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        value = config.get(name, "auto")
        if value not in (None, "auto") and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            problems.append(Problem(f"deepspeed.{name}", f"must be a positive integer or 'auto', got {value!r}"))


def _own_swap_folders(config: dict[str, Any], name: str, problems: list[Problem]) -> None:
    """DeepSpeed names swap files by rank and wipes them at its start: engines that share a folder wipe each other's."""
    for key in ("offload_optimizer", "offload_param"):
        section = config.get("zero_optimization", {}).get(key)
        if not isinstance(section, dict) or section.get("device") != "nvme":
            continue
        if not section.get("nvme_path"):
            problems.append(Problem(f"deepspeed.zero_optimization.{key}.nvme_path", "required with device nvme"))
        elif name:
            section["nvme_path"] = str(Path(section["nvme_path"]) / name)


def _section(value: Any, name: str, problems: list[Problem]) -> dict[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value.get("type"), str) or not isinstance(value.get("params") or {}, dict):
        problems.append(Problem(f"deepspeed.{name}", "must be {'type': name, 'params': {…}}"))
        return None
    return {"type": value["type"], "params": dict(value.get("params") or {})}


def _dtype(config: dict[str, Any], numbers: TrainerNumbers, problems: list[Problem]) -> str:
    enabled = {}
    for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        enabled[dtype] = config.get(name, {}).get("enabled", "auto")
    if numbers.dtype != "auto" and True not in enabled.values():
        enabled = {d: numbers.dtype == d if value == "auto" else value for d, value in enabled.items()}
    chosen = [d for d, on in enabled.items() if on is True]
    if len(chosen) == 2:
        problems.append(Problem("deepspeed.fp16", "bf16 and fp16 are both enabled; keep one"))
    if chosen:
        dtype = chosen[0]
    elif numbers.dtype == "auto" and enabled["bfloat16"] == "auto":
        dtype = numbers.default_dtype
    else:
        dtype = "float32"
    if numbers.dtype not in ("auto", dtype):
        problems.append(Problem("deepspeed.bf16", f"the file computes in {dtype}, but dtype is {numbers.dtype}"))
    for name, value in (("bf16", "bfloat16"), ("fp16", "float16")):
        if dtype == value or name in config:
            config[name] = {**(config.get(name) or {}), "enabled": dtype == value}
    # Gradients are summed in fp32 over micro-batches, whatever the compute type.
    types = config.setdefault("data_types", {})
    types.setdefault("grad_accum_dtype", "fp32")
    return dtype


def _stage(config: dict[str, Any], problems: list[Problem], notes: list[str]) -> int:
    zero = config.setdefault("zero_optimization", {})
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        problems.append(Problem("deepspeed.zero_optimization.stage", f"{stage!r} is not 0, 1, 2 or 3"))
        return 1
    if stage == 0:
        # The same mathematics, but with fp32 masters, a gradient norm and the skipping of non-finite steps.
        zero["stage"] = stage = 1
        notes.append("ZeRO stage 0 runs as stage 1: equal maths, with fp32 masters and gradient norms")
    # Steps that the trainer ends itself go together with overlapped communication at stage 2 only.
    if zero.setdefault("overlap_comm", False) and stage != 2:
        problems.append(Problem("deepspeed.zero_optimization.overlap_comm", f"must be false at stage {stage}"))
    return stage


def _batch(config: dict[str, Any], numbers: TrainerNumbers, problems: list[Problem]) -> int | None:
    """Fills the batch fields; returns the bound on pairs per micro-step that a micro-batch size asks for."""
    total, micro, steps = (
        None if config.get(name) in (None, "auto") else config[name]
        for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    world, wanted = numbers.world_size, numbers.batch_size
    if total is not None and total != wanted:
        problems.append(
            Problem("deepspeed.train_batch_size", f"{total} contradicts args.train_batch_size = {wanted} pairs per step")
        )
    if steps is not None and micro is None:
        micro = wanted // (steps * world) if wanted % (steps * world) == 0 else None
        if micro is None:
            problems.append(
                Problem(
                    "deepspeed.gradient_accumulation_steps",
                    f"{steps} on {world} ranks does not divide {wanted} pairs per step",
                )
            )
    elif steps is not None and micro is not None and micro * steps * world != wanted:
        problems.append(
            Problem(
                "deepspeed.train_micro_batch_size_per_gpu",
                f"{micro} × {steps} accumulation steps × {world} ranks is not args.train_batch_size = {wanted} pairs per step",
            )
        )
    # DeepSpeed sees single calls: micro-batches are built by tokens, and the trainer says where a step ends.
    config |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "train_batch_size": world}
    return None if micro is None else micro * world


def _optimizer(config: dict[str, Any], numbers: TrainerNumbers, problems: list[Problem]) -> dict[str, Any]:
    optimizer = _section(config.pop("optimizer", None), "optimizer", problems) or {"type": "AdamW", "params": {}}
    params = optimizer["params"]
    rate = params.get("lr", "auto")
    if rate not in ("auto", numbers.learning_rate):
        problems.append(
            Problem(
                "deepspeed.optimizer.params.lr",
                f"{rate} contradicts args.agent_learning_rate = {numbers.learning_rate}",
            )
        )
    params["lr"] = numbers.learning_rate
    defaults = {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
    for name in [n for n, v in params.items() if v == "auto"]:
        if name in defaults:
            params[name] = defaults[name]
        else:
            problems.append(Problem(f"deepspeed.optimizer.params.{name}", "'auto' is not known here; write a value"))
    return optimizer


def _autos(config: Mapping[str, Any], prefix: str = "") -> list[str]:
    found = []
    for name, value in config.items():
        if value == "auto" and prefix + name not in FILLED_BY_WIDTH:
            found.append(prefix + name)
        elif isinstance(value, dict):
            found += _autos(value, f"{prefix}{name}.")
    return found


def fill_hidden_size(config: dict[str, Any], hidden_size: int) -> None:
    """ZeRO's "auto" buckets follow from the model's width, as in transformers' integration."""
    zero = config["zero_optimization"]
    for path, rule in FILLED_BY_WIDTH.items():
        name = path.removeprefix("zero_optimization.")
        if zero.get(name) == "auto":
            zero[name] = rule(hidden_size)
