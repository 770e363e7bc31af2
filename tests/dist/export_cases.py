"""Checkpoints of actors on two ranks, for `comlrl-ds export` in one process: a case of group_worker.py."""

from __future__ import annotations

import copy
from pathlib import Path

import yaml
from reference import ETA, random_pairs
from tiny import save_tiny_model

from comlrl_ds.cluster import call
from comlrl_ds.config.lora import LoraSettings
from comlrl_ds.engines.build import build_policy
from comlrl_ds.engines.engine import PolicyEngine
from comlrl_ds.engines.state import save_state
from comlrl_ds.learners.madpo import MadpoLearner
from comlrl_ds.rollout.disk import mark_of
from comlrl_ds.runs.checkpoints import CheckpointStore

LORA = LoraSettings(r=3, lora_alpha=6)  # an odd rank: parts of equal size need padding


def export_case(bench, folder: Path) -> list[str]:
    """Run folders with a checkpoint each, of two actors that share two ranks, the second with an adapter; beside it, in `live`,
    what the engines themselves write.
    """
    base, runs = save_tiny_model(folder / "export-base", 90, tied=False, layers=1), []
    for stage, dtype in ((3, "float32"), (3, "bfloat16"), (1, "float32"), (1, "bfloat16")):
        run = folder / f"export-{stage}-{dtype}"
        plan = bench.plan("actor.0", stage, dtype=dtype, optimizer="AdamW", rate=1e-2)
        settings = {"attn_implementation": "sdpa", "dropout": False, "checkpointing": False, "layout": "auto", "chunk": 16}
        loras = {"actor.0": None, "actor.2": LORA}
        bench.cluster.create({
            role: call(build_policy, str(base), copy.deepcopy(plan), **settings, lora=lora, lora_seed=1)
            for role, lora in loras.items()
        })  # fmt: skip
        learner = MadpoLearner(bench.cluster, list(loras), ETA)
        for _ in range(2):  # A has no gradient before B has left 0
            learner.step(random_pairs(2, 3, False, 5))
        agents = [{"model": str(base)}, {"model": "of no interest"}, {"model": str(base), "lora": LORA.peft_fields}]
        (run / "live").mkdir(parents=True)
        (run / "config.yaml").write_text(yaml.safe_dump({"agents": agents, "args": {"disable_dropout": True}}))
        store = CheckpointStore(run / "checkpoints")
        begun = store.begin(2)
        parts = bench.cluster.run({role: call(save_state, str(begun)) for role in loras})
        files = {name: (int(size), str(digest)) for part in parts.values() for name, (size, digest) in part.items()}
        store.seal(begun, {"roles": list(loras), "bases": {"actor.2": mark_of(str(base))}}, files)
        bench.cluster.run({role: call(PolicyEngine.save_pretrained, run / "live" / role) for role in loras})
        runs.append(str(run))
    return runs
