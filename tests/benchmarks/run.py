"""Both systems on the same work, side by side. See README.md in this folder."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table
from workloads import TITLES, Size, expected_work

HERE = Path(__file__).resolve().parent
THREADS = 2
PEER = ("comlrl==1.4.3", "wandb", "datasets")  # the rest of what it needs is in our environment
# What is compared: compute type of our side, of the peer's. The peer's own default trains bf16 weights without fp32
# masters, which loses small updates; its stable setting is fp32.
PRECISIONS = {"default": ("default", "float32"), "fp32": ("float32", "float32"), "each-default": ("default", "default")}


@dataclass(frozen=True, order=True)
class Side:
    """One kind of process: a system with a workload and a compute type."""

    system: str
    workload: str
    dtype: str


def peer_python(folder: Path) -> Path:
    """Interpreter of an environment that has the peer, and all else (torch, transformers) from ours."""
    python, installed = folder / "bin" / "python", folder / "installed"
    if not installed.exists() or installed.read_text() != str(PEER):
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
        Path(paths["purelib"], "after_ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-warn-conflicts"]
        subprocess.run([*pip, "--no-deps", PEER[0]], check=True)
        subprocess.run([*pip, *PEER[1:]], check=True)
        installed.write_text(str(PEER))
    return python


def measure(side: Side, python: Path, model: Path, passes: int, size: Size) -> dict[str, Any]:
    """Runs one process and returns its measurement."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(THREADS), "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    command = [
        python, HERE / f"{side.system}.py", side.workload, "--model", model, "--dtype", side.dtype, "--passes", str(passes),
        "--size", json.dumps(asdict(size)),
    ]  # fmt: skip
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("MEASUREMENT ")]
    if done.returncode or not lines:
        sys.exit(f"{side} ended with exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(lines[-1].removeprefix("MEASUREMENT "))


def measure_alone(side: Side, python: Path, options: argparse.Namespace, size: Size) -> dict[str, Any]:
    """Measures when the machine is idle, and again, `options.retries` times at most, if others took a tenth of a core."""
    for left in range(options.retries, -1, -1):
        end = time.monotonic() + options.wait
        while psutil.cpu_percent(5) > 10 and time.monotonic() < end:
            pass
        m = measure(side, python, options.model.resolve(), options.passes, size)
        if not left or all(others < 0.1 * wall for others, wall in zip(m["others_cpu_s"], m["wall_s"])):
            break
    return m


def check_work(sides: list[Side], found: dict[Side, list[dict[str, Any]]], size: Size, passes: int) -> None:
    """Ends the run unless all processes so far did the same work."""
    for workload in {side.workload for side in sides}:
        done = {m["work"] for side in sides if side.workload == workload for m in found[side]}
        expected = expected_work(workload, size, passes)
        if len(done | ({expected} if done and expected is not None else set())) > 1:
            sys.exit(f"{workload}: the systems did different work: {done}, expected {expected or 'the same'}")


def medians(measurements: list[dict[str, Any]], k: int) -> dict[str, float]:
    """Of pass k."""
    numbers = {name: [m[name][k] for m in measurements] for name in ("wall_s", "cpu_s")}
    numbers |= {name: [m[name] for m in measurements] for name in ("peak_mb", "trainer_peak_mb", "start_s", "disk_mb")}
    return {name: statistics.median(values) for name, values in numbers.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of a Hugging Face model, for both systems")
    parser.add_argument("--repeat", type=int, default=3, help="processes of each kind; the medians count")
    parser.add_argument(
        "--passes", type=int, default=2, help="passes over the work in each process, rounds of P5; the first is cold"
    )
    parser.add_argument("--workloads", nargs="+", type=str.lower, choices=tuple(TITLES), default=list(TITLES))
    parser.add_argument("--precision", nargs="+", choices=tuple(PRECISIONS), default=["default", "fp32"])
    parser.add_argument("--peer-env", type=Path, default=HERE / "build" / "peer", help="made if it is missing")
    parser.add_argument("--size", type=json.loads, default={}, metavar="JSON", help="smaller workloads, for a trial")
    parser.add_argument("--wait", type=float, default=60, help="longest wait for an idle machine before a process, in s")
    parser.add_argument("--retries", type=int, default=1, help="further tries of a process that others disturbed")
    options = parser.parse_args()
    console, size = Console(width=150, highlight=False), Size(**options.size)
    pythons = {"ours": Path(sys.executable), "peer": peer_python(options.peer_env.absolute())}
    compared = [(w, p) for w in options.workloads for p in options.precision]
    pairs = {(w, p): tuple(Side(s, w, d) for s, d in zip(("ours", "peer"), PRECISIONS[p])) for w, p in compared}
    sides = list(dict.fromkeys(side for pair in pairs.values() for side in pair))  # in turns: ours, the peer, ours …
    found: dict[Side, list[dict[str, Any]]] = {side: [] for side in sides}
    started = time.perf_counter()
    for turn in range(options.repeat):
        for side in sides:
            m = measure_alone(side, pythons[side.system], options, size)
            found[side].append(m)
            walls = ", ".join(f"{wall:.1f}" for wall in m["wall_s"])
            others = sum(m["others_cpu_s"]) / sum(m["wall_s"])
            disturbed = f"; other processes took {others:.0%} of a core meanwhile" if others > 0.1 else ""
            check_work(sides, found, size, options.passes)
            console.print(f"{turn + 1}/{options.repeat} {side.workload} {side.system} {m['dtype']}: {walls} s{disturbed}")

    table = Table(title=f"ours : peer = ratio; medians of {options.repeat}, peak memory of ours = trainer + engines")
    table.add_column("")
    for name in ("pass", "wall s", "CPU s", "peak GB", "start s"):
        table.add_column(name, justify="right", no_wrap=True)
    rows, on_disk = [], []
    for (workload, precision), pair in pairs.items():
        for k in range(options.passes):
            ours, peer = (medians(found[side], k) for side in pair)
            ratios = {name: peer[name] / ours[name] for name in ("wall_s", "cpu_s", "peak_mb", "start_s")}
            rows.append({"workload": workload, "precision": precision, "pass": k, "ours": ours, "peer": peer, "ratio": ratios})
            trainer, engines = (gb / 1024 for gb in (ours["trainer_peak_mb"], ours["peak_mb"] - ours["trainer_peak_mb"]))
            both = {name: (f"{ours[name]:.2f}", f"{peer[name]:.2f}") for name in ratios}
            both["peak_mb"] = (f"{trainer:.2f} + {engines:.2f}", f"{peer['peak_mb'] / 1024:.2f}")
            cells = [f"{a} : {b} = [bold]{ratios[name]:.2f}" for name, (a, b) in both.items()]
            dtypes = ", ".join(found[side][0]["dtype"] for side in pair)
            table.add_row(f"{TITLES[workload]}, {precision} ({dtypes})", "warm" if k else "cold", *cells)
        if ours["disk_mb"]:
            both_mb = f"{ours['disk_mb']:.2f} : {peer['disk_mb']:.2f} = {peer['disk_mb'] / ours['disk_mb']:.2f}"
            on_disk.append(f"{TITLES[workload]}, {precision}: {both_mb} MB on disk after {options.passes} rounds")
    console.print(table, *on_disk, sep="\n")
    whole = {"seconds": time.perf_counter() - started, "threads": THREADS, "size": asdict(size), "rows": rows}
    whole["runs"] = [asdict(side) | {"measurements": found[side]} for side in sides]
    print(json.dumps(whole))


if __name__ == "__main__":
    main()
