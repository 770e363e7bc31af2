"""What an actor of a checkpoint had learned, read by one process alone, whatever number of ranks wrote it at whatever stage."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comlrl_ds.engines.lora import ADAPTER
from comlrl_ds.runs.checkpoints import Checkpoint, CheckpointError, check_hashes

MODEL, VALUE_HEAD = "lm.", "value_head."  # before the names of an actor's parameters: those of `engines.scorer.Scorer`


@dataclass(frozen=True)
class SavedPolicy:
    """What an actor had learned.

    Attributes:
        tensors: by Hugging Face name, of an adapter by peft's (without the adapter's own); each has a `shape`, and is in memory
            when `contiguous()` is called. A tied head is left out.
        buffers: likewise, what the model keeps beside its parameters.
        head: of a value head, by name. dtype: what it computed in.
    """

    tensors: dict[str, Any]
    buffers: dict[str, Any]
    head: dict[str, Tensor]
    dtype: str


def read_policy(checkpoint: Checkpoint, role: str) -> SavedPolicy:
    """The fp32 masters of an actor.

    Raises:
        CheckpointError: a file's content is not what was written, or holds no such engine.
    """
    check_hashes(checkpoint, role)
    # One of these per rank at ZeRO-3, else one; all say the same of what is read here.
    model = min(checkpoint.folder.glob(f"{role}/*_model_states.pt"), default=None)
    shards = sorted(checkpoint.folder.glob(f"{role}/*_optim_states.pt"), key=_rank)
    if model is None or not shards:
        raise CheckpointError(f"{checkpoint.folder} has no state of {role}")
    said = _read(model)
    try:
        # DeepSpeed's own reader does not know the optimizer that it takes for bf16 with fp32 gradients at ZeRO-1.
        if "zero_stage" in _read(shards[0])["optimizer_state_dict"]:
            found = _by_deepspeed(checkpoint.folder, role)
        else:
            found = _of_bf16_optimizer(shards, said["param_shapes"])
            found |= {name: tensor for name, tensor in said["module"].items() if name in said["buffer_names"]}
    except (ValueError, KeyError, OSError) as error:
        raise CheckpointError(f"{checkpoint.folder}: the state of {role} cannot be put together: {error}") from None
    for tied in said["shared_params"]:
        found.pop(tied, None)
    own = re.compile(rf"(\.lora_[AB])\.{ADAPTER}\b")
    named = {name: own.sub(r"\1", name.removeprefix(MODEL)) for name in found if name.startswith(MODEL)}
    kept = set(said["buffer_names"])
    tensors = {plain: found[name] for name, plain in named.items() if name not in kept}
    buffers = {plain: found[name] for name, plain in named.items() if name in kept}
    head = {name.removeprefix(VALUE_HEAD): t.contiguous() for name, t in found.items() if name.startswith(VALUE_HEAD)}
    enabled = [dtype for key, dtype in (("bf16", "bfloat16"), ("fp16", "float16")) if _on(said["ds_config"], key)]
    return SavedPolicy(tensors, buffers, head, enabled[0] if enabled else "float32")


def _rank(file: Path) -> int:
    found = re.search(r"zero_pp_rank_(\d+)_", file.name)
    return int(found[1]) if found else 0


def _on(config: dict[str, Any], section: str) -> bool:
    return (config.get(section) or {}).get("enabled") is True


def _read(file: Path) -> dict[str, Any]:
    """Tensors stay on disk until they are looked at."""
    return torch.load(file, map_location="cpu", mmap=True, weights_only=False)


def _by_deepspeed(folder: Path, role: str) -> dict[str, Any]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    # It prints what it does, and draws bars.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return dict(
            get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=role, exclude_frozen_parameters=True, lazy_mode=True)
        )


def _of_bf16_optimizer(shards: Sequence[Path], shapes: Sequence[dict[str, torch.Size]]) -> dict[str, Any]:
    """Each group's parameters stand one after the other in one vector, of which every rank has an equal part; at its end are
    less than two numbers per rank that mean nothing.
    """
    parts = [_read(file)["optimizer_state_dict"]["single_partition_of_fp32_groups"] for file in shards]
    found: dict[str, Any] = {}
    for k, group in enumerate(shapes):
        vector = torch.cat([part[k].detach() for part in parts])
        sizes = [shape.numel() for shape in group.values()]
        padding = len(vector) - sum(sizes)
        if not 0 <= padding < 2 * len(parts):
            raise ValueError(f"{len(vector)} numbers for {sum(sizes)} parameters")
        for (name, shape), values in zip(group.items(), vector[: sum(sizes)].split(sizes)):
            found[name] = values.view(shape)
    return found
