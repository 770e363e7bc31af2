"""Whether a run's engines hold its base once and adapters beside it, or weights that the adapters are in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from comlrl_ds.config.errors import ConfigError, Problem
from comlrl_ds.config.lora import LoraSettings
from comlrl_ds.config.lora_layers import lora_layers
from comlrl_ds.config.run_file import RolloutConfig
from comlrl_ds.rollout.adapters import WEIGHTS_FILE
from comlrl_ds.rollout.engine_settings import VLLM_RANKS, AdapterRoom
from comlrl_ds.rollout.vllm_models import WITHOUT_ADAPTERS, architecture_of


def adapter_room(
    config: RolloutConfig, device: str, sources: Sequence[str], lora: Sequence[LoraSettings | None], comparators: bool
) -> AdapterRoom | None:
    """The room for adapters that vLLM engines shall have; None where they take whole weights.

    `rollout.lora: auto` is adapter on a GPU, where that is possible, else merge: on a CPU merged weights sample faster.

    Args:
        sources: model folder of each agent. lora: of each agent. comparators: whether some have models of their own.

    Raises:
        ConfigError: adapter is asked for and impossible.
    """
    if config.lora == "merge" or (config.lora == "auto" and device == "cpu"):
        return None
    room, why = _room(config, sources, lora, comparators)
    if config.lora == "adapter" and room is None:
        raise ConfigError(Problem("rollout.lora", f"'adapter' is impossible: {why}; write auto or merge"))
    return room


def _room(
    config: RolloutConfig, sources: Sequence[str], lora: Sequence[LoraSettings | None], comparators: bool
) -> tuple[AdapterRoom | None, str]:
    if config.backend != "vllm" or config.urls:
        return None, "only vLLM engines of the run's own hold adapters"
    for i, source in enumerate(sources):
        if (kind := architecture_of(source)) in WITHOUT_ADAPTERS:
            return None, f"vLLM holds no adapters beside a {kind}, which agent {i} is"
    if config.sleep_level == 2:
        return None, "at rollout.sleep_level 2 engines that sleep lose their base"
    if len(set(sources)) > 1:
        return None, f"the agents start from {len(set(sources))} models, and an engine holds one base"
    if comparators:
        return None, "comparators have models of their own"
    ranks, endings = [0], set()
    for i, own in enumerate(lora):
        if own is None:
            return None, f"agent {i} has no lora"
        layers = _of_adapter(Path(own.adapter)) if own.adapter else _of_settings(Path(sources[i]), own)
        if not layers:
            return None, f"which layers agent {i}'s adapter has cannot be told from the files of its model"
        ranks += layers.values()
        endings |= {name.rpartition(".")[2] for name in layers}
    if max(ranks) > VLLM_RANKS[-1]:
        return None, f"rank {max(ranks)} is more than vLLM's {VLLM_RANKS[-1]}"
    # Each agent's policy, and its comparator's.
    return AdapterRoom(max(ranks), tuple(sorted(endings)), 2 * len(sources)), ""


def _of_settings(folder: Path, settings: LoraSettings) -> dict[str, int]:
    return {name: rank for name, (rank, _, _) in lora_layers(folder, settings).items()}


def _of_adapter(folder: Path) -> dict[str, int]:
    """Rank by layer, from the head of a PEFT folder's file."""
    from safetensors import safe_open

    with safe_open(folder / WEIGHTS_FILE, framework="pt") as opened:
        return {
            name.removesuffix(".lora_A.weight"): opened.get_slice(name).get_shape()[0]
            for name in opened.keys()  # noqa: SIM118
            if name.endswith(".lora_A.weight")
        }
