"""Model folders that are written after the pattern of another one, their base: its files, its names, its shapes."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comlrl_ds.config.errors import ConfigError, Problem
from comlrl_ds.rollout.disk import INDEX, weight_files

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class OnDisk:
    """A tensor of an opened safetensors file: its shape, and the rest when it is asked for."""

    def __init__(self, opened: Any, name: str) -> None:
        self._opened, self._name = opened, name
        self.shape = tuple(opened.get_slice(name).get_shape())

    def contiguous(self) -> Tensor:
        return self._opened.get_tensor(self._name)


@dataclass(frozen=True)
class Entry:
    """Where a tensor stands in a folder: its file, and its shape."""

    file: str
    shape: tuple[int, ...]


def layout_of(base: Path) -> dict[str, Entry]:
    """The tensors of a folder by name, from the heads of its files."""
    from safetensors import safe_open

    layout: dict[str, Entry] = {}
    for file in weight_files(base):
        with safe_open(file, framework="pt") as opened:
            layout |= {n: Entry(file.name, tuple(opened.get_slice(n).get_shape())) for n in opened.keys()}  # noqa: SIM118
    return layout


def place_of(name: str, shape: Iterable[int], layout: Mapping[str, Entry], base: Path) -> str:
    """The name that a tensor has in the base: its own, or that without the first part where the base was saved without a head.

    Raises:
        ConfigError: the base has none of this shape.
    """
    wanted = tuple(shape)
    place = next((n for n in (name, name.partition(".")[2]) if n in layout), None)
    if place is None or layout[place].shape != wanted:
        has = "no such tensor" if place is None else f"one of shape {list(layout[place].shape)}"
        raise ConfigError(
            Problem(str(base), f"has {has}: {name} {list(wanted)}; the run's base must be what it was when the run started")
        )
    return place


def in_dtype(tensor: Any, dtype: torch.dtype) -> Tensor:
    """A tensor in memory, its numbers in a type; what holds no fractions stays as it is."""
    whole = tensor.contiguous()
    return whole.to(dtype) if whole.is_floating_point() else whole


def write_weights(folder: Path, layout: Mapping[str, Entry], tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Writes tensors into the files that they have in the base, one file in memory at a time, and reads each again.

    Args:
        layout: of the base. tensors: those of one file after another.

    Returns:
        how many there were.
    """
    from safetensors.torch import save_file

    places: dict[str, str] = {}
    size = 0
    for file, group in itertools.groupby(tensors, key=lambda pair: layout[pair[0]].file):
        meant = {name: tensor.contiguous() for name, tensor in group}
        if file in places.values():
            raise ConfigError(Problem(file, "stands beside another file of the base with tensors of the same names"))
        save_file(meant, folder / file, metadata={"format": "pt"})
        compare(folder / file, meant)
        places |= dict.fromkeys(meant, file)
        size += sum(t.numel() * t.element_size() for t in meant.values())
    if set(places.values()) != {"model.safetensors"}:
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return len(places)


def compare(file: Path, meant: Mapping[str, Tensor]) -> None:
    """Reads a file again.

    Raises:
        RuntimeError: it does not hold what was meant, bit for bit.
    """
    import torch
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        names = set(opened.keys())
        if names != meant.keys():
            raise RuntimeError(f"{file} does not hold {min(names ^ meant.keys())} as it was written")
        for name, tensor in meant.items():
            read = opened.get_tensor(name)
            same = read.dtype == tensor.dtype and read.shape == tensor.shape
            # As bytes: no number equals NaN, and 0 equals −0.
            if not same or not torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (read, tensor))):
                raise RuntimeError(f"{name} in {file} is not what was written; is the disk sound?")


def write_configs(source: Path, folder: Path, dtype: torch.dtype) -> None:
    """The files that say what a model is, as they stand beside another, with the type of the weights in them."""
    content = json.loads((source / "config.json").read_text())
    for part in (content, *(v for v in content.values() if isinstance(v, dict))):
        if part is content or part.keys() & {"dtype", "torch_dtype"}:
            part.pop("torch_dtype", None)
            part["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
    if (source / "generation_config.json").is_file():
        shutil.copyfile(source / "generation_config.json", folder / "generation_config.json")


def check_loads(folder: Path) -> None:
    """Has transformers say what it makes of a folder; nothing is loaded.

    Raises:
        ConfigError: it misses a tensor, or has one that the model does not know.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    _, said = AutoModelForCausalLM.from_pretrained(folder, device_map="meta", output_loading_info=True)
    odd = [*said["missing_keys"], *said["unexpected_keys"], *said["mismatched_keys"]]
    if odd:
        raise ConfigError(Problem("", f"transformers cannot load what would be written: {min(map(str, odd))} does not fit"))
