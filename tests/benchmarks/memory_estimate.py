"""`plan`'s estimate beside what two actors allocate: bytes of tensors of one process, by part, on a CPU.

    memory_estimate.py --model models/smollm2-135m --case "1 float32 full" --case "3 bfloat16 lora" --tokens 512

A case is a ZeRO stage, a compute type, and full or lora. Both actors take two steps of two micro-batches each. Counted are
storages that tensors of the process hold and that were not there before, each once: of the engines' parameters (weights), of
their optimizers and masters (optimizer), and all others after a backward (gradients); and how far the most that is there during
a step exceeds these (activations).
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import yaml
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from comlrl_ds.cluster import Cluster, call, join
from comlrl_ds.cluster.layout import Layout, RolePlace, RolloutPlace
from comlrl_ds.config import load_run_file
from comlrl_ds.engines.build import build_policy
from comlrl_ds.engines.ds_config import TrainerNumbers, plan_engine
from comlrl_ds.engines.engine import PolicyEngine
from comlrl_ds.maths.packing import PairTokens
from comlrl_ds.planning.plan import plan_run

PARTS = ("weights", "optimizer", "gradients", "activations")
ACTORS, PAIRS, CHUNK = ("actor.0", "actor.1"), 4, 64


class Live(TorchDispatchMode):
    """Bytes of the storages that operations touched and that are still there; `peak` of them since it was last set."""

    def __init__(self, known: Iterator[Any]) -> None:
        super().__init__()
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}
        self._add(known)
        self.peak = self.now()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self._add(tree_iter((args, kwargs, result)))
        self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        self._held = {k: (ref, size) for k, (ref, size) in self._held.items() if not ref.expired()}
        return sum(size for _, size in self._held.values())

    def _add(self, values: Iterator[Any]) -> None:
        for value in values:
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                ref = StorageWeakRef(value.untyped_storage())
                self._held[ref.cdata] = (ref, value.untyped_storage().nbytes())


def tensors() -> Iterator[Any]:
    """Every tensor of this process, with the gradients, which Python may not know of."""
    gc.collect()
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor) and found.device.type == "cpu":
            yield found
            if found.is_leaf and found.grad is not None:
                yield found.grad


def storages(found: Iterator[Any]) -> dict[int, int]:
    """Bytes of each storage, by address."""
    held = (t.untyped_storage() for t in found)
    return {s.data_ptr(): s.nbytes() for s in held if s.nbytes()}


def weights_of(engine: PolicyEngine) -> list[Any]:
    return [getattr(p, "ds_tensor", p) for p in engine.scorer.parameters()]


def optimizer_of(engine: PolicyEngine) -> list[Any]:
    zero = engine.deepspeed.optimizer
    inner = zero.optimizer
    # At ZeRO-3 the inner optimizer is shown its parts one after another.
    masters = getattr(zero, "fp32_partitioned_groups_flat", None) or [p for g in inner.param_groups for p in g["params"]]
    return [*masters, *(t for s in inner.state.values() for t in s.values() if isinstance(t, torch.Tensor))]


def learn(engine: PolicyEngine, pairs: list[PairTokens]) -> int:
    """One micro-batch; its padded tokens."""
    tokens = engine.score_pairs(pairs, True, grad=True)[1]
    engine.backward([[0.1, -0.1]] * len(pairs))
    return tokens


def step(engine: PolicyEngine) -> None:
    engine.gradient_norm()
    engine.step()


def allocated(cluster: Cluster, model: Path, deepspeed: dict, dtype: str, lora: Any, tokens: int) -> tuple[dict[str, int], int]:
    """Bytes by part, and the tokens of a micro-batch."""
    # Weakly: what an earlier case left may go, and its addresses be taken again.
    before = [(t.data_ptr(), StorageWeakRef(t)) for t in (x.untyped_storage() for x in tensors())]
    plan = plan_engine(deepspeed, TrainerNumbers(PAIRS, 1, 1e-4, 1.0, dtype, dtype))
    settings = {"attn_implementation": "sdpa", "dropout": False, "checkpointing": False, "layout": "auto", "chunk": CHUNK}
    build = [call(build_policy, str(model), copy.deepcopy(plan), **settings, lora=lora) for _ in ACTORS]
    cluster.create(dict(zip(ACTORS, build)))
    third = tokens // PAIRS // 3
    pairs = [PairTokens(*(tuple(range(40 + s, 40 + s + third)) for s in range(3)))] * PAIRS
    for role in ACTORS:
        cluster.run({role: call(learn, pairs)})
        cluster.run({role: call(step)})
    live = Live(tensors())
    with live:
        for role in ACTORS:
            for _ in range(2):
                live.peak = 0
                used = cluster.run({role: call(learn, pairs)})[role]
    # The last actor's second micro-batch came when every gradient was there.
    old = {address for address, ref in before if not ref.expired()}
    found = {k: size for k, size in storages(tensors()).items() if k not in old}
    parts = {}
    for part, of in (("weights", weights_of), ("optimizer", optimizer_of)):
        own = {k for role in ACTORS for k in storages(iter(cluster.run({role: call(of)})[role]))}
        parts[part] = sum(found.pop(k, 0) for k in own)
    parts["gradients"] = sum(found.values())
    parts["activations"] = live.peak - live.now()
    for role in ACTORS:
        cluster.run({role: call(step)})
    cluster.drop(list(ACTORS))
    return parts, used


def estimated(folder: Path, model: Path, deepspeed: dict, dtype: str, lora: Any, tokens: int) -> dict[str, int]:
    """What `comlrl-ds plan` shows of the same."""
    agent = {"model": str(model)} | ({"lora": lora.model_dump(exclude_unset=True)} if lora else {})
    content = {
        "trainer": "madpo", "agents": [agent] * len(ACTORS), "deepspeed": deepspeed, "dtype": dtype,
        "task": {"dataset": "comlrl_ds.tasks.explain:train_items", "reward_func": "comlrl_ds.tasks.explain:reward"},
        "args": {"max_tokens_per_micro_batch": tokens, "logprob_chunk": CHUNK, "margin_pass": "two_pass"},
    }  # fmt: skip
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(content))
    (group,) = plan_run(load_run_file(file), folder).memory
    return {part: group.memory.device[part] for part in PARTS}


def main() -> None:
    from comlrl_ds.config.lora import LoraSettings

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--case", action="append", required=True, help='e.g. "3 bfloat16 lora"')
    parser.add_argument("--tokens", type=int, default=240, help="of a micro-batch")
    parser.add_argument("--bucket", type=int, default=1000, help="DeepSpeed's reduce_bucket_size")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cluster, rows = join(), []
    with TemporaryDirectory() as name:
        folder = Path(name)
        places = dict.fromkeys(ACTORS, RolePlace("all"))
        cluster.arrange(Layout(tuple(cluster.slots()), {"all": (0,)}, places, RolloutPlace(("all",))), 1800, folder)
        cluster.join_groups("cpu")
        for case in options.case:
            stage, dtype, kind = case.split()
            deepspeed = {"zero_optimization": {"stage": int(stage), "reduce_bucket_size": options.bucket}}
            own = LoraSettings(r=8) if kind == "lora" else None
            real, tokens = allocated(cluster, options.model, deepspeed, dtype, own, options.tokens)
            rows.append({
                "case": case, "tokens": tokens, "allocated": real,
                "estimated": estimated(folder, options.model.absolute(), deepspeed, dtype, own, tokens),
            })  # fmt: skip
    for row in rows:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
