"""Small MARLHF runs in this process, what they sampled, and plain torch to check them with."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tasks_for_tests import items, letters, text
from tiny import save_tiny_model, tiny_tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from comlrl_ds.cluster import Cluster, call, join
from comlrl_ds.cluster.layout import Layout, RolePlace, RolloutPlace
from comlrl_ds.engines.build import build_policy
from comlrl_ds.engines.ds_config import TrainerNumbers, plan_engine
from comlrl_ds.trainers.preference import MARLHFConfig, MARLHFIterConfig, MARLHFIterTrainer, MARLHFTrainer

ARGS = {
    "num_agents": 2, "preference_num_candidates": 4, "preference_pairs_per_sample": None, "max_new_tokens": 8,
    "temperature": 1.0, "top_p": 1.0, "top_k": None, "num_train_epochs": 1, "rollout_buffer_size": 2, "num_generations": 4,
    "agent_learning_rate": 1e-3, "reward_learning_rate": 1e-3, "reward_train_batch_size": 4, "reward_num_train_epochs": 1,
    "reward_eval_fraction": 0.25, "eval_interval": 0, "eval_num_samples": 4,
}  # fmt: skip
STAGE_1 = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 100_000}}


def trainer(folder: Path, model: Path, *, kind: Any = None, rounds: bool = False, args=None, **arguments: Any):
    """A trainer of five tasks; kind: a subclass of what `rounds` says."""
    config = MARLHFIterConfig if rounds else MARLHFConfig
    given = {
        "agent_model": str(model), "train_dataset": items()[:5], "eval_dataset": items(), "reward_func": letters,
        "formatters": text, "run_dir": folder, "seed": 5, "verbose": False, "model_config": {"dtype": "float32"},
        "rollout": {"backend": "transformers", "max_model_len": 128},
    }  # fmt: skip
    kind = kind or (MARLHFIterTrainer if rounds else MARLHFTrainer)
    return kind(args=config(**(ARGS | (args or {}))), **(given | arguments))


def rows(folder: Path, name: str) -> list[dict]:
    """The lines of the metrics that hold a name."""
    found = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in found if name in row]


def sampled(folder: Path, stream: str = "policy.0", round: int = 1) -> dict[tuple[int, int, int], list[int]]:
    """Token ids by (item, agent, candidate), as the journal has them."""
    lines = (folder / f"preference_replay/journal_{round:04d}.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return {(x["item"], x["agent"], x["candidate"]): x["ids"] for x in found if x.get("stream") == stream and "ids" in x}


def save_stopping_model(folder: Path, seed: int) -> Path:
    """A tiny model with so many stop tokens, EOS (also the pad token) among them, that its answers have unlike lengths."""
    save_tiny_model(folder, seed)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, *range(40, 80)]}))
    return folder


def ids_of(content: str) -> list[int]:
    """Token ids of a prompt."""
    return tiny_tokenizer()(content)["input_ids"]


def literal_ids(content: str) -> list[int]:
    """Token ids of a joint text, in which the texts of control tokens are no control tokens."""
    return tiny_tokenizer()(content, split_special_tokens=True)["input_ids"]


def plain(folder: Path) -> Any:
    """A saved policy in transformers alone."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def logprob(lm: Any, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    """Σ log p of a completion: one sequence, one forward."""
    z = lm(torch.tensor([[*prompt, *completion]])).logits[0].double().log_softmax(-1)
    return torch.stack([z[len(prompt) - 1 + k, t] for k, t in enumerate(completion)]).sum()


@torch.no_grad()
def scalar(folder: Path, rows: Sequence[Sequence[int]]) -> list[float]:
    """What a saved reward model or critic says of rows: backbone and head by their files alone, one row at a time."""
    from transformers import AutoModel

    backbone = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    head = load_file(folder / "scalar_head.safetensors")
    layers = sorted({name.split(".")[0] for name in head}, key=int)
    values = []
    for row in rows:
        z = backbone(input_ids=torch.tensor([list(row)]))[0][0, -1]
        for k, layer in enumerate(layers):
            z = head[f"{layer}.weight"] @ z + head[f"{layer}.bias"]
            z = z.tanh() if k < len(layers) - 1 else z
        values.append(float(z))
    return values


def relative(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """L2 distance of two sets of tensors in units of the second."""
    away = sum(((found[n].double() - wanted[n].double()) ** 2).sum() for n in wanted) ** 0.5
    return float(away / sum((wanted[n].double() ** 2).sum() for n in wanted) ** 0.5)


@contextmanager
def actors(folder: Path, models: Sequence[Path], *, dtype: str, optimizer: str, rate: float) -> Iterator[Cluster]:
    """actor.0, actor.1 … under DeepSpeed in this process, without a trainer."""
    cluster = join()
    roles = [f"actor.{i}" for i in range(len(models))]
    places = dict.fromkeys(roles, RolePlace("all"))
    cluster.arrange(Layout(tuple(cluster.slots()), {"all": (0,)}, places, RolloutPlace(("all",))), 1800, folder)
    cluster.join_groups("cpu")
    plan = plan_engine(STAGE_1 | {"optimizer": {"type": optimizer}}, TrainerNumbers(4, 1, rate, None, dtype, dtype))
    settings = {"attn_implementation": "sdpa", "dropout": False, "checkpointing": False, "layout": "auto", "chunk": 64}
    cluster.create({r: call(build_policy, str(m), copy.deepcopy(plan), **settings) for r, m in zip(roles, models)})
    try:
        yield cluster
    finally:
        cluster.drop(roles)


def weights(engine: Any) -> dict[str, Tensor]:
    """What an engine computes with, by name."""
    return {name: tensor.clone() for name, tensor in engine.named_weights()}
