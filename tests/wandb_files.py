"""Reads what W&B keeps of an offline run."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 32768


def records(file: Path) -> Iterator[Any]:
    """The records of a .wandb file: LevelDB's log format, of which the file's own head of 7 bytes is in the first block."""
    from wandb.proto import wandb_internal_pb2

    data, place, whole = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if BLOCK - place % BLOCK < 7:
            place += BLOCK - place % BLOCK
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # full, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


class Offline:
    """One offline run that has been finished.

    Attributes:
        run: project, entity, id, display_name, tags … config: what it shows as settings. rows: of metrics.
    """

    def __init__(self, folder: Path) -> None:
        (file,) = folder.glob("*.wandb")
        self.config: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        deadline = time.monotonic() + 20  # W&B's own process may still write when its run has been finished
        while not any(record.HasField("exit") for record in records(file)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{file} has no end")
            time.sleep(0.05)
        for record in records(file):
            if record.HasField("run"):
                self.run = record.run
                self.config |= {i.key: json.loads(i.value_json) for i in record.run.config.update}
            elif record.HasField("history"):
                row = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
                self.rows.append({k: v for k, v in row.items() if not k.startswith("_")})


def offline_runs(folder: Path) -> list[Offline]:
    """The offline runs in a folder, in order."""
    return [Offline(f) for f in sorted((folder / "wandb").glob("offline-run-*"))]
