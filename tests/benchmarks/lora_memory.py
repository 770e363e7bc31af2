"""What LoRA saves: peak memory of the trainer and bytes of a sync, beside full weights. See README.md here.

Two rounds of MARLHF for two agents, with reference KL and the policies of the round before as comparator, on a few tasks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "args.num_iterations=2", "args.comparator_policy=history", "args.comparator_history_k=1", "args.reference_kl_enabled=true",
    "args.reference_kl_coef=0.05", "task.train_limit=4", "args.preference_num_candidates=4", "args.comparator_num_candidates=4",
    "args.max_new_tokens=[24,48]", "args.num_train_epochs=1", "args.eval_interval=0", "run.checkpoint_interval=1",
]  # fmt: skip
LORA = "{r: 8, lora_alpha: 16}"
KINDS = {
    "full": [],
    "lora": [f"agents.0.lora={LORA}", f"agents.1.lora={LORA}", f"args.reward_lora={LORA}"],
}  # fmt: skip


def measure(model: Path, more: list[str], place: Path) -> dict[str, float]:
    """One run in a process of its own: peak resident GB of the trainer, and of its metrics what a sync and the gap were."""
    words = [f"agents.{i}.model={model.resolve()}" for i in range(2)]
    command = [sys.executable, "-m", "comlrl_ds", "train", "launch/examples/marlhf_iter.yaml", f"run.dir={place}"]
    process = subprocess.Popen([*command, *words, *SMALL, *more], cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"the run in {place} failed; its lines are above")
    rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    syncs = [row["rollout/sync_bytes"] for row in rows if "rollout/sync_bytes" in row]
    gaps = [row["rl/logprob_gap/agent_0"] for row in rows if "rl/logprob_gap/agent_0" in row]
    disk = sum(f.stat().st_size for f in (place / "checkpoints").rglob("*") if f.is_file())
    # The last gap is that of weights that were sent: the first buffer is sampled with those that the engine read itself.
    return {
        "peak_gb": used.ru_maxrss * 1024 / 1e9, "sync_mb": max(syncs) / 1e6, "logprob_gap": gaps[-1],
        "checkpoints_gb": disk / 1e9,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {kind: measure(options.model, more, Path(folder) / kind) for kind, more in KINDS.items()}
    for name in found["full"]:
        full, lora = found["full"][name], found["lora"][name]
        print(f"{name:15} full {full:8.3f}   lora {lora:8.3f}   {lora / full:.1%}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
