"""What `plan` estimates for two actors of a tiny model, and what they allocate: counted tensor by tensor, in a process of its
own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import save_tiny_model

pytestmark = pytest.mark.slow
CASES = [f"{stage} {dtype} {kind}" for stage in (1, 3) for dtype in ("float32", "bfloat16") for kind in ("full", "lora")]
CASES += ["2 bfloat16 full"]
STATES = ("weights", "optimizer", "gradients")


@pytest.fixture(scope="module")
def rows(tmp_path_factory, root) -> dict[str, dict[str, dict[str, int]]]:
    folder = save_tiny_model(tmp_path_factory.mktemp("memory") / "tiny", 0)
    script = Path(root) / "tests" / "benchmarks" / "memory_estimate.py"
    command = [sys.executable, str(script), "--model", str(folder), *(a for c in CASES for a in ("--case", c))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    return {row["case"]: row for row in found}


@pytest.mark.parametrize("case", CASES)
def test_the_estimate_is_what_is_allocated(rows, case):
    real, ours = rows[case]["allocated"], rows[case]["estimated"]
    for part in ("weights", "optimizer"):
        assert ours[part] == pytest.approx(real[part], rel=0.02), part
    # DeepSpeed's small tensors, norms and flags, count among these.
    assert ours["gradients"] == pytest.approx(real["gradients"], rel=0.08)
    assert sum(ours[p] for p in STATES) == pytest.approx(sum(real[p] for p in STATES), rel=0.02)
    assert ours["activations"] == pytest.approx(real["activations"], rel=0.1)
    assert sum(ours.values()) == pytest.approx(sum(real.values()), rel=0.05)


def test_adapters_hold_the_base_once_but_where_they_shard_it(rows):
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        base, own = (rows[f"1 {dtype} {kind}"]["allocated"]["weights"] for kind in ("full", "lora"))
        assert base == 2 * size * 94_528 and own == size * (94_528 + 2 * 16_384)
        assert rows[f"3 {dtype} lora"]["allocated"]["weights"] == pytest.approx(2 * size * (94_528 + 16_384), rel=0.02)
