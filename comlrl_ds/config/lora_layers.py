"""Which layers an adapter changes, by peft's rules, from a model folder's headers alone: no weight and no peft is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comlrl_ds.config.errors import ConfigError, Problem
from comlrl_ds.config.lora import LoraSettings
from comlrl_ds.config.model_files import UNREADABLE, config_of, tensor_shapes

# The vocabulary's head, under the names that transformers gives it.
HEADS = ("lm_head", "embed_out")
# Before the names of a causal LM's body, where files were written without it; elsewhere "model".
BODY_PREFIX = {"gpt2": "transformer", "gptj": "transformer", "gpt_neo": "transformer", "bloom": "transformer",
               "falcon": "transformer", "gpt_neox": "gpt_neox"}  # fmt: skip
# Their layers, but for the head, hold weights as [in, out].
TRANSPOSED = ("gpt2", "openai-gpt", "imagegpt")
ALL = "all-linear"
# Endings that a message lists at most.
MOST_ENDINGS = 12


@dataclass(frozen=True)
class Layers:
    """Modules of a model.

    Attributes:
        linear: (out, in) of each linear layer, by name, the head among them. head: its name; None without one.
        others: names of every other module that the files tell of: blocks, embeddings, norms.
        certain: whether these are the model's own names. transformers renames what it fuses: experts, and parts of models of
            several kinds of input.
    """

    linear: dict[str, tuple[int, int]]
    head: str | None
    others: frozenset[str]
    certain: bool


def lora_layers(folder: Path, settings: LoraSettings, *, backbone: bool = False) -> dict[str, tuple[int, int, int]]:
    """(rank, out, in) of every layer that gets an adapter, by its name in the model; {} where the files are not here.

    Args:
        backbone: the model without the vocabulary's head, as reward models and critics have it.
    """
    layers = layers_of(folder, backbone=backbone)
    return {} if layers is None else chosen(layers, settings)


def trained_parameters(layers: Iterable[tuple[int, int, int]]) -> int:
    """Σ r · (in + out): A is [r, in] and B is [out, r]."""
    return sum(rank * (a + b) for rank, a, b in layers)


def layers_of(folder: Path, *, backbone: bool = False) -> Layers | None:
    """The modules of a model in a folder; None where its files are not here, or cannot be read."""
    try:
        config, shapes = config_of(folder), tensor_shapes(folder)
        return None if shapes is None else _layers(config, shapes, backbone)
    except UNREADABLE:
        return None


def chosen(layers: Layers, settings: LoraSettings) -> dict[str, tuple[int, int, int]]:
    """The layers that `target_modules` names, that `exclude_modules` leaves, and that `layers_to_transform` counts."""
    names = [n for n in layers.linear if not _excluded(n, settings) and _targeted(n, settings, layers.head)]
    return {name: (_rank(name, settings), *layers.linear[name]) for name in names}


def check_lora(source: str, folder: Path, settings: LoraSettings | None, path: str, *, backbone: bool = False) -> None:
    """Checks `target_modules` against a model's files, where they are here. An adapter that is started from is not checked.

    Args:
        source: the model as the user wrote it. path: of the settings, e.g. agents.0.lora.

    Raises:
        ConfigError: a part of it that names no linear layer, which peft would pass over; or something that is none, which peft
            refuses once the weights are loaded; or nothing is left.
    """
    if settings is None or settings.adapter is not None:
        return
    layers = layers_of(folder, backbone=backbone)
    if layers is None or not layers.certain:
        return
    where, target = f"{path}.target_modules", settings.target_modules
    if isinstance(target, str) and target.lower() != ALL:
        try:
            re.compile(target)
        except re.error as error:
            raise ConfigError(Problem(where, f"{target!r} is no regular expression: {error}")) from None
    if isinstance(target, str):
        lost = [] if any(_targeted(name, settings, layers.head) for name in layers.linear) else [target]
    else:
        lost = [entry for entry in target if not any(_is_named(name, [entry]) for name in layers.linear)]
    endings = list(dict.fromkeys(name.rpartition(".")[2] for name in layers.linear))
    shown = ", ".join(endings[:MOST_ENDINGS]) + (", …" if len(endings) > MOST_ENDINGS else "")
    if lost or not target:
        listed = ", ".join(map(repr, lost)) or "[]"
        one = "name" if len(lost) > 1 else "names"
        raise ConfigError(Problem(where, f"{listed} {one} no layer of {source}; layers end in {shown}"))
    odd = [n for n in sorted(layers.others) if not _excluded(n, settings) and _targeted(n, settings, None)]
    if odd and not (isinstance(target, str) and target.lower() == ALL):
        message = f"{target!r} also names {odd[0]!r} of {source}, which is no linear layer; layers end in {shown}"
        raise ConfigError(Problem(where, message))
    if not chosen(layers, settings):
        rest = [n for n in ("exclude_modules", "layers_to_transform") if getattr(settings, n) not in (None, [])]
        raise ConfigError(Problem(where, f"{' and '.join(rest)} leave{'s' * (len(rest) < 2)} no layer of {source}"))


# --- peft's rules (peft.tuners.tuners_utils.check_target_module_exists, peft.utils.other.get_pattern_key)
def _is_named(name: str, entries: Sequence[str]) -> bool:
    return name in entries or name.endswith(tuple(f".{entry}" for entry in entries))


def _targeted(name: str, settings: LoraSettings, head: str | None) -> bool:
    target = settings.target_modules
    if isinstance(target, str):
        return name != head if target.lower() == ALL else re.fullmatch(target, name) is not None
    if name in target:
        return True
    if not _is_named(name, target):
        return False
    numbers = settings.layers_to_transform
    if numbers is None or numbers == []:
        return True
    number = re.match(r".*?\.[^.]*\.(?P<number>\d+)\.", name)
    return number is not None and int(number["number"]) in ([numbers] if isinstance(numbers, int) else numbers)


def _excluded(name: str, settings: LoraSettings) -> bool:
    excluded = settings.exclude_modules
    if not excluded:
        return False
    if isinstance(excluded, str):
        return re.fullmatch(excluded, name) is not None
    return _is_named(name, excluded)


def _rank(name: str, settings: LoraSettings) -> int:
    ranks = settings.rank_pattern
    key = next((key for key in ranks if re.match(rf"(.*\.)?({key})$", name)), name)
    return ranks.get(key, settings.r)


# --- a model's modules
def _layers(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], backbone: bool) -> Layers:
    inner = config.get("text_config") or config
    kind = str(config.get("model_type", ""))
    experts = any(inner.get(n) for n in ("num_local_experts", "num_experts", "n_routed_experts"))
    renamed = _renamed(shapes, kind, backbone)
    linear: dict[str, tuple[int, int]] = {}
    embedding: tuple[int, int] | None = None
    for name, shape in renamed.items():
        module, _, tensor = name.rpartition(".")
        if tensor != "weight" or len(shape) != 2:
            continue
        if module in HEADS:
            continue
        if _is_embedding(module):
            if shape[0] == inner.get("vocab_size"):  # others are of positions
                embedding = (shape[0], shape[1])
        else:
            linear[module] = (shape[1], shape[0]) if kind in TRANSPOSED else (shape[0], shape[1])
    head = None
    if not backbone:
        # A tied head has no tensor of its own: it is the embedding's.
        head = next((h for h in HEADS if f"{h}.weight" in shapes), "embed_out" if kind == "gpt_neox" else HEADS[0])
        found = shapes.get(f"{head}.weight", embedding)
        if found:
            linear[head] = (found[0], found[1])
    parents = {name[:k] for name in renamed for k, c in enumerate(name) if c == "."}
    return Layers(linear, head, frozenset(parents - linear.keys()), not (experts or "text_config" in config))


def _renamed(shapes: Mapping[str, tuple[int, ...]], kind: str, backbone: bool) -> dict[str, tuple[int, ...]]:
    """Tensors by their names in the model: those of a causal LM's body have a prefix, which backbones and some files lack."""
    body = {n: s for n, s in shapes.items() if n.rpartition(".")[0] not in HEADS}
    first = {n.partition(".")[0] for n in body}
    prefix = f"{first.pop()}." if len(first) == 1 else ""
    bare = {n.removeprefix(prefix): s for n, s in body.items()}
    if backbone:
        return bare
    prefix = prefix or BODY_PREFIX.get(kind, "model") + "."
    return {prefix + n: s for n, s in bare.items()}


def _is_embedding(module: str) -> bool:
    last = module.rpartition(".")[2]
    return "emb" in last or last in ("wte", "wpe")
