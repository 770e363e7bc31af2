"""An engine's whole state on disk: weights, masters, optimizer, schedule; with LoRA without the base. Written and read by all
ranks of its group.
"""

from __future__ import annotations

from pathlib import Path

import torch

from comlrl_ds.cluster.progress import tick
from comlrl_ds.engines.base import ZeroEngine
from comlrl_ds.runs.checkpoints import Checkpoint, check_hashes, hashed
from comlrl_ds.runs.failure import writing


def save_state(engine: ZeroEngine, folder: str) -> dict[str, tuple[int, str]]:
    """Writes folder/<name of the engine>/…; a collective.

    Returns:
        size and hash of every file, by path relative to `folder`, for the lead; on disk when this returns.
    """
    # Own entries under one key: DeepSpeed puts a dozen of its own beside them.
    with writing(Path(folder) / engine.name):
        engine.deepspeed.save_checkpoint(
            folder, tag=engine.name, client_state={"comlrl_ds": {"version": engine.version}}, save_latest=False,
            exclude_frozen_parameters=engine.learns_adapter,
        )  # fmt: skip
    tick()
    torch.distributed.barrier()
    files = hashed(Path(folder), engine.name) if engine.rank == 0 else {}
    torch.distributed.barrier()
    return files


def load_state(engine: ZeroEngine, checkpoint: Checkpoint) -> None:
    """Restores what `save_state` wrote; the schedule has been started, the group has as many ranks. A collective.

    Raises:
        CheckpointError: a file's content is not what was written.
    """
    if engine.rank == 0:
        check_hashes(checkpoint, engine.name)
    torch.distributed.barrier()
    path, client = engine.deepspeed.load_checkpoint(
        str(checkpoint.folder), tag=engine.name, load_module_strict=not engine.learns_adapter
    )
    if path is None:
        raise FileNotFoundError(f"{checkpoint.folder} has no state of {engine.name}")
    engine.version = client["comlrl_ds"]["version"]
    tick()
