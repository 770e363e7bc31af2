"""Runs a worker file through the real deepspeed launcher and reads the JSON that it writes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_worker(file: str, folder: Path, *, ranks: int = 1, timeout: float = 400) -> Any:
    """What the worker wrote to `folder`/result.json. Every run has its own port and its own folder for built extensions."""
    environment = dict(os.environ) | {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TORCH_EXTENSIONS_DIR": str(folder / "ext"),
        "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    port = str(free_port())
    launcher = ["deepspeed", "--num_gpus", str(ranks), "--no_local_rank", "--master_port", port, str(HERE / file), str(folder)]
    # A process group of its own: what a time-out leaves behind is ended by its id.
    process = subprocess.Popen(
        launcher, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
    assert process.returncode == 0, output[-4000:]
    return json.loads((folder / "result.json").read_text())
