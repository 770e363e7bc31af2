"""What a single GPU can show: steps against the CPU, and a run whose engine shares the GPU with its actor.

    launch/setup.sh && .venv/bin/python tests/gpu/run.py

Prints a table, and ends with 1 if a row fails. Without a GPU it says so and ends with 0; `--device cpu` runs the same checks
on the CPU, to try the script itself.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "dist"), str(HERE.parent / "e2e")]

import torch  # noqa: E402
from reference import ETA, random_pairs, reference, relative  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from tiny import save_tiny_model, tiny_lm  # noqa: E402

from comlrl_ds.cluster import call, join  # noqa: E402
from comlrl_ds.cluster.hostfile import slots_of_one_host  # noqa: E402
from comlrl_ds.cluster.layout import Layout, RolePlace, RolloutPlace  # noqa: E402
from comlrl_ds.engines.ds_config import TrainerNumbers, plan_engine  # noqa: E402
from comlrl_ds.engines.engine import PolicyEngine  # noqa: E402
from comlrl_ds.learners.madpo import MadpoLearner  # noqa: E402
from comlrl_ds.trainers.preference import MADPOConfig, MADPOTrainer  # noqa: E402

RATE = 2.0**12


def build(seat, seed: int, plan) -> PolicyEngine:
    lm = tiny_lm(seed, scale=2.0).to(getattr(torch, plan.dtype))
    return PolicyEngine(seat.role, lm, plan, chunk=64)


def step(device: str, folder: Path, stage: int, dtype: str, tolerance: float) -> str:
    """One SGD step of two actors on the device against the textbook's two passes in fp32 on the CPU."""
    cluster = join()
    roles = ["actor.0", "actor.1"]
    places = {role: RolePlace("all") for role in roles}
    cluster.arrange(Layout(tuple(slots_of_one_host(1)), {"all": (0,)}, places, RolloutPlace(("all",))), 600, folder)
    cluster.join_groups(device)
    batch = random_pairs(2, 5, True, 3)
    loss, gradients = reference([tiny_lm(10 + i, scale=2.0) for i in range(2)], batch, False)
    config = {"zero_optimization": {"stage": stage}, "optimizer": {"type": "SGD"}}
    plan = plan_engine(config, TrainerNumbers(4, 1, RATE, None, dtype, dtype))
    cluster.create({role: call(build, 10 + i, plan) for i, role in enumerate(roles)})
    # Masters are fp32: the compute weights, rounded to bf16, would hide the step.
    before = [masters(cluster.local(role)) for role in roles]
    report = MadpoLearner(cluster, roles, ETA, max_tokens=60).step(batch)
    after = [masters(cluster.local(role)) for role in roles]
    errors = [relative({n: (b[n] - a[n]) / RATE for n in a}, g) for b, a, g in zip(before, after, gradients)]
    cluster.drop(roles)
    assert max(errors) < tolerance, f"gradient off by {max(errors):.1e}"
    assert abs(report.loss - loss) < tolerance * max(1.0, abs(loss)), f"loss {report.loss} against {loss}"
    return f"relative gradient error {max(errors):.1e}, loss {report.loss:.5f} against {loss:.5f}"


def masters(engine: PolicyEngine) -> dict[str, torch.Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param

    named = engine.scorer.named_parameters()
    return {name.removeprefix("lm."): safe_get_full_fp32_param(p).detach().float().cpu().clone() for name, p in named}


def shared_run(device: str, folder: Path) -> str:
    """One agent whose engine is on the same GPU: sleep, wake, `ipc` sync; then an engine from the saved weights agrees."""
    from tasks_for_tests import items, letters, text

    model = save_tiny_model(folder / "model", 1, dtype="bfloat16")
    arguments = {
        "num_agents": 1, "preference_num_candidates": 4, "preference_pairs_per_sample": 1, "max_new_tokens": 8,
        "temperature": 1.0, "top_p": 1.0, "top_k": None, "num_train_epochs": 2, "train_batch_size": 4, "eval_interval": 2,
        "eval_num_samples": 4, "agent_learning_rate": 1e-3,
    }  # fmt: skip
    with MADPOTrainer(
        agents=[str(model)], train_dataset=items(), eval_dataset=items(), reward_func=lambda a: letters(a, a)[0],
        formatters=text, args=MADPOConfig(**arguments), run_dir=folder / "run", seed=5, verbose=False,
        rollout={"max_model_len": 128, "gpu_memory_utilization": 0.3, "engines": 1},
    ) as trainer:  # fmt: skip
        trainer.train()
        rows = [[5, 6, 7, 8, 9, 10], [300, 2, 17, 40]]
        policies = trainer.session.policies()
        live = trainer.session.pool().prompt_logprobs(policies["agent_0"], rows)
        transport = trainer.session.pool().engines[0].address.transport
    assert transport == ("ipc" if device == "cuda" else "host"), transport
    metrics = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    gap = next(m["rollout/logprob_gap"] for m in metrics if "rollout/logprob_gap" in m)
    syncs = [m["rollout/sync_s"] for m in metrics if "rollout/sync_s" in m]
    with MADPOTrainer(
        agents=[str(folder / "run" / "final" / "agent_0")], train_dataset=items(), reward_func=lambda a: 0.0, formatters=text,
        args=MADPOConfig(**arguments), run_dir=folder / "again", verbose=False,
        rollout={"max_model_len": 128, "gpu_memory_utilization": 0.3, "engines": 1},
    ) as fresh:  # fmt: skip
        fresh.train_dataset = None  # its engine alone
        source = fresh.session.policies()["agent_0"]
        saved = fresh.session.pool().prompt_logprobs(source, rows)
    assert live == saved, "the synced engine is not the same as one loaded from the saved weights"
    assert len(syncs) >= 2 and gap < 0.3, (len(syncs), gap)
    return f"{transport}: {len(syncs)} syncs, {max(syncs):.2f} s at most, log-prob gap {gap:.3f}; equals a fresh engine"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    device = parser.parse_args().device
    if device == "cuda" and not torch.cuda.is_available():
        print("skipped: no GPU here")
        return 0
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    table = Table("check", "result", "seconds", "what it showed")
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checks: list[tuple[str, Callable[[], str]]] = [
            (
                f"{dtype} step at ZeRO-{stage} against the CPU",
                lambda s=stage, d=dtype, t=tolerance: step(device, folder, s, d, t),
            )
            for stage in (2, 3)
            for dtype, tolerance in (("float32", 1e-3), ("bfloat16", 5e-2))
        ]
        checks.append(("run whose engine shares the device", partial(shared_run, device, folder)))
        for title, check in checks:
            started = time.monotonic()
            try:
                result, shown = "ok", check()
            except Exception as error:
                traceback.print_exc()
                failed += 1
                result, shown = "FAILED", f"{type(error).__name__}: {error}"
            table.add_row(title, result, f"{time.monotonic() - started:.1f}", shown)
    Console(width=140).print(table)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
