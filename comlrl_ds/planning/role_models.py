"""Which model each role has, and what of it learns, as a run file says and as folders on this disk show."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

from comlrl_ds.cluster.devices import base_of, index_of
from comlrl_ds.config.errors import Findings
from comlrl_ds.config.lora import LoraSettings
from comlrl_ds.config.lora_layers import Layers, check_lora, chosen, layers_of, trained_parameters
from comlrl_ds.config.model_files import UNREADABLE, model_folder, shapes_in
from comlrl_ds.config.references import beside
from comlrl_ds.config.run_file import RunFile
from comlrl_ds.planning.estimate import USUAL_INNER, Learning
from comlrl_ds.planning.model_shapes import ModelShape
from comlrl_ds.rollout.adapters import WEIGHTS_FILE, is_adapter
from comlrl_ds.rollout.adapters import base_of as base_model

# Share of a hidden state that keys and values have, of a model that is not on this disk.
USUAL_KEYS = 4


def agent_models(run_file: RunFile, base: Path) -> list[tuple[str, LoraSettings | None]]:
    """(model, LoRA) of each agent: one whose model is a PEFT folder goes on from that adapter, on the adapter's base."""
    found: list[tuple[str, LoraSettings | None]] = []
    for agent in run_file.agents:
        source, lora = beside(agent.model, base), agent.lora
        adapter = beside(lora.adapter, base) if lora and lora.adapter else None
        if adapter is None and is_adapter(Path(source).expanduser()):
            adapter = source
            source = _base(source)
        found.append((source, LoraSettings(adapter=adapter) if adapter else lora))
    return found


def model_of(role: str, run_file: RunFile, base: Path) -> tuple[str, LoraSettings | None, str]:
    """(model, LoRA, its place in the run file) of a role: those of its agent, but for reward models and critics."""
    args: Any = run_file.trainer_config
    agents = agent_models(run_file, base)
    agent = min(index_of(role) or 0, len(agents) - 1)
    source, lora = agents[agent]
    for kind, name, field in (
        ("reward_model", "reward_model_name", "reward_lora"),
        ("critic", "critic_model_name", "critic_lora"),
    ):
        if base_of(role) == kind:
            own = getattr(args, name, None)
            return (beside(own, base) if own else source), getattr(args, field, None), f"args.{field}"
    return source, None if base_of(role) == "reference" else lora, f"agents.{agent}.lora"


def check_adapters(roles: list[str], run_file: RunFile, base: Path) -> None:
    """Checks that adapters to start from are there, and which layers others name, where their models are on this disk.

    Raises:
        ConfigError: with every problem.
    """
    found = Findings()
    for role in roles:
        source, lora, path = model_of(role, run_file, base)
        folder = model_folder(source)
        if lora and lora.adapter and not is_adapter(Path(beside(lora.adapter, base)).expanduser()):
            found.add(f"{path}.adapter", f"{lora.adapter!r} is no PEFT folder")
        elif folder is not None:
            found.of(partial(check_lora, source, folder, lora, path, backbone=is_scalar(role)))
    found.problems = list(dict.fromkeys(found.problems))  # two critics have one setting
    found.raise_any()


def is_scalar(role: str) -> bool:
    """Whether a role has a scalar head in place of the vocabulary's."""
    return base_of(role) in ("reward_model", "critic")


def learning_of(role: str, run_file: RunFile, base: Path, shape: ModelShape) -> Learning | None:
    """What of a role's model learns; None where its size is not known."""
    if shape.parameters is None:
        return None
    args: Any = run_file.trainer_config
    source, lora, _ = model_of(role, run_file, base)
    head, whole = _head(role, args, shape), shape.parameters
    if is_scalar(role):
        whole -= shape.head
    if role == "reward_model" and args.reward_freeze_backbone:
        return Learning(head, whole)
    if lora is None:
        return Learning(whole + head)
    own = _adapter_parameters(source, lora, shape, is_scalar(role))
    # An adapter that is started from stays beside the one that learns, to be the anchor of a KL.
    fixed = whole + (own if lora.adapter else 0)
    return Learning(own + head, fixed, own, None if is_scalar(role) else source)


def _head(role: str, args: Any, shape: ModelShape) -> int:
    """Parameters of a scalar head: a layer of d units to 1, or one of d to h and one of h to 1, with biases."""
    if is_scalar(role):
        width = args.critic_value_head_hidden_dim if base_of(role) == "critic" else None
    elif base_of(role) == "actor" and getattr(args, "value_heads", False):
        width = args.value_head_hidden_dim
    else:
        return 0
    return (shape.hidden + 1) * width + width + 1 if width else shape.hidden + 1


def _adapter_parameters(source: str, lora: LoraSettings, shape: ModelShape, backbone: bool) -> int:
    if lora.adapter is not None:
        try:
            return sum(map(math.prod, shapes_in(Path(lora.adapter).expanduser() / WEIGHTS_FILE).values()))
        except UNREADABLE:
            return 0  # the trainer says what is wrong with it
    folder = model_folder(source)
    layers = layers_of(folder, backbone=backbone) if folder else None
    if layers is None:
        layers = usual_layers(shape)
        # Names that are not Llama's say nothing of a model that is not here: then as if they were all.
        return trained_parameters((chosen(layers, lora) or chosen(layers, LoraSettings(r=lora.r))).values())
    return trained_parameters(chosen(layers, lora).values())


def usual_layers(shape: ModelShape) -> Layers:
    """The linear layers of a Llama of such a size, for a model that is not on this disk."""
    hidden, inner = shape.hidden, shape.inner or int(USUAL_INNER * shape.hidden)
    keys = hidden // USUAL_KEYS
    block = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
             "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
             "mlp.down_proj": (hidden, inner)}  # fmt: skip
    linear = {f"model.layers.{k}.{name}": size for k in range(shape.layers) for name, size in block.items()}
    head = "lm_head"
    return Layers(linear | {head: (shape.vocabulary, hidden)}, head, frozenset(), False)


def _base(folder: str) -> str:
    try:
        return base_model(Path(folder).expanduser()) or folder
    except (OSError, json.JSONDecodeError):
        return folder
